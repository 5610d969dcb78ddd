"""Reading and writing recipes: YAML, overrides from the command line, complete error messages.

`load` turns a file and `-s a.b=c` overrides into a `Recipe`, or into one `RecipeError` that names every fault with its
dotted path. `dump` writes the resolved recipe beside a run; loading that file gives the same recipe again.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from inkling_rl.recipe.schema import Recipe, RecipeError

FLOAT, INT, BOOL, NULL = (f"tag:yaml.org,2002:{kind}" for kind in ("float", "int", "bool", "null"))
# The scalars of YAML 1.2. PyYAML follows 1.1: 1e-3 would be text, off false, 010 eight, 2026-11-29 a date.
SCALARS = {
    BOOL: (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    INT: (r"[-+]?[0-9]+", "-+0123456789"),
    FLOAT: (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    NULL: (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
}


class _Loader(yaml.SafeLoader):
    """Safe YAML 1.2 that refuses a key given twice, which plain YAML resolves silently to the last one."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]


class _Dumper(yaml.SafeDumper):
    """Quotes text that either version of YAML would read as something else."""


for _tag, (_pattern, _first) in SCALARS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern})$"), list(_first))
    _Dumper.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern})$"), list(_first))
_Loader.add_constructor(INT, lambda _, node: int(node.value))


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if key in seen:
            raise RecipeError(
                f"{key} must be given once; got it again in line {key_node.start_mark.line + 1}. Delete one."
            )
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe file and applies overrides in order.

    Args:
        path: a YAML file, or the name of a recipe that ships with the package (`quickstart.yaml`).
        overrides: `a.b=value`, the value as YAML (`trainer.num_steps=20`, `lora.targets=[q, v]`).

    Raises:
        RecipeError: the file cannot be read, or the recipe is not valid; the message names every fault.
    """
    file = find(path)
    try:
        tree = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{file} must be YAML; {' '.join(str(error).split())}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{file} must be a readable file of UTF-8 text; got: {error}. Give a recipe.") from None
    if not isinstance(tree, dict):
        raise RecipeError(f"{file} must hold a mapping of sections ({', '.join(Recipe.model_fields)}); got {tree!r}.")
    for override in overrides:
        _apply(tree, override)
    return parse(tree, str(file))


def find(path: str | Path) -> Path:
    """The recipe file of a path or of a shipped name. Raises RecipeError if there is none."""
    shipped = Path(__file__).parents[2] / "recipes"
    for candidate in (Path(path), shipped / Path(path).name) if Path(path).name == str(path) else (Path(path),):
        if candidate.is_file():
            return candidate
    names = ", ".join(sorted(p.name for p in shipped.glob("*.yaml")))
    raise RecipeError(f"recipe must be a YAML file; {path} is none. Give a path, or one that ships: {names}.")


def parse(tree: Mapping[str, Any], source: str) -> Recipe:
    """Validates a tree of plain values. Raises RecipeError with one line per fault."""
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        faults = [_describe(detail) for detail in error.errors()]
    raise RecipeError(
        "\n".join([f"{source}: {len(faults)} fault{'s' * (len(faults) > 1)}", *(f"  {f}" for f in faults)])
    )


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML, every field present."""
    return yaml.dump(recipe.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _apply(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise RecipeError(
            f"-s {override} must have the form section.field=value. Write for example trainer.num_steps=20."
        )
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        raise RecipeError(f"-s {override}: the value must be YAML; got {text!r}. Quote it.") from None
    # Below an escape hatch the rest of the path is one key of the vendor's own dotted form.
    if len(keys) > 3 and keys[1].endswith("_args"):
        keys = [*keys[:2], ".".join(keys[2:])]
    node = tree
    for depth, key in enumerate(keys[:-1]):
        child = node.setdefault(key, {})
        if child is None:
            child = node[key] = {}
        if not isinstance(child, dict):
            raise RecipeError(f"-s {override}: {'.'.join(keys[: depth + 1])} must be a section; it is a value.")
        node = child
    node[keys[-1]] = value


def _describe(detail: ErrorDetails) -> str:
    path = ".".join(str(part) for part in detail["loc"])
    got = detail["input"]
    match detail["type"]:
        case "extra_forbidden":
            return f"{path} is no key of the recipe.{_nearest(path)}"
        case "missing":
            return f"{path} must be given; it is missing. {_documentation(path)}"
        case "value_error":
            message = str(detail["ctx"]["error"]).rstrip(".")
            return f"{path} {message}." if path else f"{message}."
        case "literal_error":
            return f"{path} must be one of {detail['ctx']['expected']}; got {got!r}.{_close(str(got), detail['ctx'])}"
        case "model_type":
            return f"{path} must be a section of fields; got {got!r}. Write them below it."
        case "path_type":
            return f"{path} must be a path; got {got!r}. {_documentation(path)}"
    requirement = detail["msg"].removeprefix("Input should be ").replace("a valid tuple", "a list")
    requirement = requirement.replace("a valid integer", "an integer").replace("a valid ", "a ")
    return f"{path} must be {requirement}; got {got!r}. {_documentation(path)}"


def _close(got: str, context: Mapping[str, Any]) -> str:
    options = [option.strip(" '") for option in str(context["expected"]).replace(" or ", ",").split(",")]
    match = difflib.get_close_matches(got, options, n=1)
    return f" Did you mean {match[0]!r}?" if match else ""


def _nearest(path: str) -> str:
    known = list(fields())
    name = path.rsplit(".", 1)[-1]
    by_path = difflib.get_close_matches(path, known, n=1, cutoff=0.75)
    by_name = [k for k in known if k.rsplit(".", 1)[-1] == name]
    match = by_name or by_path or difflib.get_close_matches(path, known, n=1, cutoff=0.4)
    return f" Did you mean {match[0]}?" if match else f" Known sections: {', '.join(Recipe.model_fields)}."


def fields(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all sections and fields, in order."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        if section := _section(field.annotation):
            yield from fields(section, f"{prefix}{name}.")


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, optional ones included."""
    kinds = (kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type))
    return next((kind for kind in kinds if issubclass(kind, BaseModel)), None)


def _documentation(path: str) -> str:
    model: type[BaseModel] = Recipe
    description = ""
    for part in path.split("."):
        field = model.model_fields.get(part)
        if field is None:
            break
        description = " ".join((field.description or "").split())
        model = _section(field.annotation) or model
    return description
