"""The rules of the architecture: who may import whom, one home per vendor, slim imports, small files."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("inkling_rl", "lora", "rollout", "trainer", "recipes")
MAY_IMPORT = {
    "inkling_rl": set(),
    "lora": {"inkling_rl"},
    "rollout": {"inkling_rl", "lora"},
    "trainer": {"inkling_rl", "lora"},
    "recipes": set(),
}
# The command line and only it reaches up, inside its commands.
UPWARD = {"inkling_rl/cli.py": {"trainer", "rollout"}}
HOMES = {
    "vllm": ("rollout",),
    "skyrl": ("trainer",),
    "ray": ("trainer",),
    "deepspeed": ("trainer",),
    "skyrl_gym": ("rollout/envs",),
    "peft": ("lora",),
    "transformers": ("trainer", "lora", "rollout"),
    "datasets": ("trainer",),
    "wandb": ("inkling_rl/metrics.py",),
}
HEAVY = ("torch", "ray", "vllm", "skyrl", "deepspeed", "peft", "transformers", "wandb", "rich", "numpy")
MAX_LINES = 400
MAX_STATEMENTS = 40


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Top-level names of all imports of a file: those inside functions and by `import_module("...")` included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module.split(".")[0], node.lineno
        elif isinstance(node, ast.Call) and (name := _imported_by_call(node)):
            yield name, node.lineno


def _imported_by_call(call: ast.Call) -> str | None:
    if not ast.unparse(call.func).endswith("import_module") or not call.args:
        return None
    argument = call.args[0]
    return (
        argument.value.split(".")[0] if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else None
    )


def test_packages_import_only_what_lies_below_them() -> None:
    faults = []
    for path in sources():
        relative = path.relative_to(ROOT).as_posix()
        package = relative.split("/")[0]
        allowed = MAY_IMPORT[package] | {package} | UPWARD.get(relative, set())
        faults += [
            f"{relative}:{line} imports {name}"
            for name, line in imports(path)
            if name in PACKAGES and name not in allowed
        ]
    assert not faults, "\n".join(faults)


def test_every_vendor_has_one_home() -> None:
    faults = []
    for path in sources():
        relative = path.relative_to(ROOT).as_posix()
        for name, line in imports(path):
            if name in HOMES and not relative.startswith(HOMES[name]):
                faults.append(f"{relative}:{line} imports {name}, whose home is {' or '.join(HOMES[name])}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "modules", ["inkling_rl.recipe, inkling_rl.cli", "inkling_rl.engine_args", "inkling_rl.arithmetic"]
)
def test_the_core_imports_nothing_heavy(modules: str) -> None:
    program = f"import sys, {modules}; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.split() == []


def test_the_driver_can_be_imported_without_vllm() -> None:
    program = (
        "import sys; from trainer.vendor import prepare; prepare(); import trainer.run, trainer.experiment; "
        "print('vllm' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split()[-1] == "False"


def test_files_fit_a_sitting_and_functions_a_screen() -> None:
    faults = []
    for path in sources():
        text = path.read_text(encoding="utf-8")
        relative = path.relative_to(ROOT).as_posix()
        if (lines := len(text.splitlines())) > MAX_LINES:
            faults.append(f"{relative}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                statements = sum(isinstance(child, ast.stmt) for child in ast.walk(node)) - 1
                if statements > MAX_STATEMENTS:
                    faults.append(f"{relative}:{node.lineno} {node.name}: {statements} statements")
    assert not faults, "\n".join(faults)


def test_every_module_says_what_it_is() -> None:
    faults = [
        str(p.relative_to(ROOT)) for p in sources() if not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))
    ]
    assert not faults, "\n".join(faults)
