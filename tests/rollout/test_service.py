"""The service as a user starts it: one real server on the shipped base, and every way in which it must not start."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoTokenizer

from inkling_rl.arithmetic import rows
from inkling_rl.chat import MESSAGE_MODEL, Renderer
from inkling_rl.checkpoint.reader import Checkpoint, resolve
from inkling_rl.checkpoint.tiny import write_tiny
from inkling_rl.cli import main
from lora.base import fingerprint
from lora.files import write_adapter
from lora.schema import plan, tensor_shapes
from rollout.service import CHAT_ARGUMENTS, HINTS, ServiceError, free_port, root_cause, service_arguments

MODEL = "tiny-arithmetic"
TARGETS = ("q", "v", "r", "gate", "o")


def random_adapter(path: Path, base: Path, seed: int, rank: int = 4, scale: float = 0.2) -> Path:
    checkpoint = Checkpoint.open(base)
    generator = torch.Generator().manual_seed(seed)
    shapes = tensor_shapes(plan(checkpoint.config, TARGETS), rank)
    state = {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    mark = fingerprint(checkpoint)
    return write_adapter(path, state, rank=rank, alpha=8, targets=TARGETS, base_model=str(base), fingerprint=mark)


class Service(NamedTuple):
    process: subprocess.Popen[str]
    url: str
    base: Path
    folder: Path

    def post(self, route: str, **body: Any) -> tuple[int, Any]:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{route}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        return status, json.loads(text) if text.startswith("{") else text

    def logprobs(self, model: str) -> list[float]:
        """Log-probabilities of a fixed prompt's tokens under a served model."""
        prompt = list(range(40, 72))
        _, body = self.post("/v1/completions", model=model, prompt=prompt, max_tokens=1, prompt_logprobs=0)
        rows = body["choices"][0]["prompt_logprobs"][1:]
        return [row[str(token)]["logprob"] for row, token in zip(rows, prompt[1:], strict=True)]


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "inkling_rl.cli", "serve", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def alive(pids: list[int]) -> list[int]:
    """Those that run; one that has ended and waits for its new parent to notice does not."""
    running = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        running += [pid] if state != "Z" else []
    return running


def processes_of(pid: int) -> list[int]:
    """Live processes that `pid` has started: its children, and whatever runs in the sessions that they lead."""
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent, _, session = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:4]
            except OSError:
                continue
            if state != "Z":
                table[int(entry.name)] = (int(parent), int(session))
    children = {child for child, (parent, _) in table.items() if parent == pid}
    return sorted(child for child, (_, session) in table.items() if child in children or session in children)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    base = resolve("builtin:tiny-arithmetic")
    static = random_adapter(folder / "static", base, seed=1)
    settings = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 27}
    process = start(
        "builtin:tiny-arithmetic", "--port", "0", "--adapter", f"static={static}", "--vllm-args", json.dumps(settings),
        "--log", str(folder / "log"),
    )  # fmt: skip
    assert process.stderr
    lines = [process.stderr.readline(), process.stderr.readline()]
    assert "starting the engine" in lines[0]
    assert f"serving {MODEL}, static at http://127.0.0.1:" in lines[1], lines[1] + (folder / "log").read_text()[-4000:]
    url = lines[1].split(" at ")[1].split("/v1")[0]
    yield Service(process, url, base, folder)
    process.send_signal(signal.SIGINT)
    process.wait(30)


def test_completions_return_token_ids_and_logprobs(service: Service) -> None:
    status, body = service.post(
        "/v1/completions", model=MODEL, prompt=[72, 101, 108], max_tokens=6, temperature=0, logprobs=2,
        return_token_ids=True, ignore_eos=True,
    )  # fmt: skip
    choice = body["choices"][0]
    assert status == 200 and choice["prompt_token_ids"] == [72, 101, 108]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 6
    assert all(value < 0 for value in choice["logprobs"]["token_logprobs"])


@pytest.mark.parametrize("effort", [None, "low", "none"])
def test_chat_is_rendered_as_our_renderer_does(service: Service, effort: str | None) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "347+586"}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    status, body = service.post(
        "/v1/chat/completions", model=MODEL, messages=messages, tools=tools, max_tokens=4, return_token_ids=True,
        **({"reasoning_effort": effort} if effort else {}),
    )  # fmt: skip
    renderer = Renderer(AutoTokenizer.from_pretrained(service.base))
    assert status == 200
    assert body["prompt_token_ids"] == renderer.render(messages, tools=tools, effort=effort or "high")


def test_thinking_and_answer_come_apart(service: Service) -> None:
    # The shipped base shows its working in a thinking block and then answers with a number.
    problem = rows("heldout", 1)[0]["prompt"]
    _, body = service.post(
        "/v1/chat/completions", model=MODEL, messages=[{"role": "user", "content": problem}], max_tokens=64,
        temperature=0, reasoning_effort="low",
    )  # fmt: skip
    choice = body["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"].isdigit()
    assert "=" in choice["message"]["reasoning"] and not choice["message"].get("tool_calls")


def test_tool_calls_of_the_format_are_parsed() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager

    tokenizer = AutoTokenizer.from_pretrained(resolve("builtin:tiny-arithmetic"))
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    request = ChatCompletionRequest(model=MODEL, messages=[{"role": "user", "content": "?"}], tools=[tool])
    names = {"tool_parser_name": CHAT_ARGUMENTS["tool_call_parser"], "reasoning_parser_name": "inkling"}
    parser = ParserManager.get_parser(**names, enable_auto_tools=True, model_name=MODEL)(tokenizer, request.tools)
    call = [{"id": "1", "function": {"name": "add", "arguments": {"a": 1}}}]
    turn = {"role": "assistant", "reasoning": "hm", "content": "so:", "tool_calls": call}
    renderer = Renderer(tokenizer)
    ids = renderer.render([turn], effort=0.2, add_generation_prompt=False)
    ids = ids[ids.index(renderer.special(MESSAGE_MODEL)) + 1 :]
    reasoning, content, calls = parser.parse(
        tokenizer.decode(ids), request, enable_auto_tools=True, model_output_token_ids=ids
    )
    assert (reasoning, content, [(c.name, json.loads(c.arguments)) for c in calls]) == (
        "hm",
        "so:",
        [("add", {"a": 1})],
    )


def test_the_end_of_a_turn_ends_the_completion(service: Service) -> None:
    stop = Renderer(AutoTokenizer.from_pretrained(service.base)).stop_token_ids[0]
    messages = [{"role": "user", "content": "hi"}]
    _, body = service.post(
        "/v1/chat/completions", model=MODEL, messages=messages, max_tokens=8, return_token_ids=True,
        logit_bias={str(stop): 100},
    )  # fmt: skip
    choice = body["choices"][0]
    assert (choice["finish_reason"], choice["token_ids"]) == ("stop", [stop])


def test_adapters_are_served_under_their_names(service: Service) -> None:
    base, static = service.logprobs(MODEL), service.logprobs("static")
    path = random_adapter(service.folder / "late", service.base, seed=2)
    assert service.post("/v1/load_lora_adapter", lora_name="late", lora_path=str(path))[0] == 200
    late = service.logprobs("late")
    assert max(abs(a - b) for a, b in zip(base, static, strict=True)) > 0.05
    assert max(abs(a - b) for a, b in zip(static, late, strict=True)) > 0.05
    assert service.logprobs(MODEL) == pytest.approx(base, abs=1e-5)
    assert service.logprobs("static") == pytest.approx(static, abs=1e-5)
    assert service.post("/v1/unload_lora_adapter", lora_name="late")[0] == 200
    status, body = service.post("/v1/completions", model="late", prompt=[1], max_tokens=1)
    assert status == 404 and "late" in body["error"]["message"]


def test_adapters_that_do_not_fit_are_refused(service: Service) -> None:
    other = write_tiny(service.folder / "other", seed=7)
    foreign = random_adapter(service.folder / "foreign", other, seed=3)
    broken = random_adapter(service.folder / "broken", service.base, seed=4)
    settings = json.loads((broken / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps(settings | {"use_dora": True}))
    for path, message in (
        (foreign, "base_model_fingerprint must be that of the base model"),
        (broken, "use_dora must be False"),
        (service.folder / "nowhere", "must hold adapter_config.json"),
    ):
        status, body = service.post("/v1/load_lora_adapter", lora_name="bad", lora_path=str(path))
        assert status == 400 and message in body["error"]["message"]
    assert service.post("/v1/completions", model="bad", prompt=[1], max_tokens=1)[0] == 404


def test_a_draft_cannot_be_published_to_a_service_without_one(service: Service) -> None:
    status, body = service.post("/v1/draft/stage", directory=str(service.base), version=1)
    assert status == 400 and "rollout.draft must be given where a draft is to be replaced" in body["error"]["message"]


def test_interrupting_leaves_no_process(service: Service) -> None:
    engine = processes_of(service.process.pid)
    assert any("EngineCor" in Path(f"/proc/{pid}/comm").read_text() for pid in engine) and len(engine) >= 2
    service.process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    service.process.send_signal(signal.SIGINT)  # of somebody impatient
    assert service.process.wait(30) == 0
    end = time.monotonic() + 5
    while alive(engine) and time.monotonic() < end:
        time.sleep(0.1)
    assert alive(engine) == []


@pytest.mark.slow
def test_a_cache_that_holds_no_request_is_one_clear_error(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "tiny", seed=0)
    settings = {"kv_cache_memory_bytes": 4096, "max_model_len": 512}
    process = start(str(base), "--port", "0", "--vllm-args", json.dumps(settings), "--log", str(tmp_path / "log"))
    _, text = process.communicate(timeout=120)
    assert process.returncode == 2
    error = text.splitlines()[-1]
    assert error.startswith("error: the engine must start") and HINTS["cache blocks"] in error, text
    assert "Traceback" not in text and processes_of(process.pid) == []


def test_what_cannot_be_served_is_refused_before_anything_starts(tmp_path: Path, capsys: Any) -> None:
    base = write_tiny(tmp_path / "tiny", seed=0)
    (tmp_path / "empty").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments, message in (
            ([str(tmp_path / "missing")], "must be a checkpoint directory"),
            ([str(base), "--port", port], f"port must be free on 127.0.0.1; got {port}"),
            ([str(base), "--port", "0", "--adapter", f"x={tmp_path / 'empty'}"], "must hold adapter_config.json"),
            (
                [str(base), "--vllm-args", '{"kv_cache_memory_bytes": 1000000000000000}'],
                "rollout.kv_cache_gib must be below",
            ),
        ):
            with pytest.raises(SystemExit) as exit_:
                main(["serve", *arguments])
            assert exit_.value.code == 2
            text = capsys.readouterr().err
            assert text.startswith("error: ") and message in text and len(text.splitlines()) == 1
        with pytest.raises(ServiceError, match="Take another one"):
            free_port("127.0.0.1", int(port))
    assert free_port("127.0.0.1", 0) > 0


def test_arguments_follow_checkpoint_and_adapters(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "tiny", seed=0)
    adapters = {name: random_adapter(tmp_path / name, base, seed=0, rank=100) for name in ("a", "b", "c")}
    arguments = service_arguments(Checkpoint.open(base), adapters=adapters, extra={"seed": 9})
    assert (arguments["max_lora_rank"], arguments["max_loras"], arguments["seed"]) == (128, 3, 9)
    assert arguments["lora_modules"][0] == f"a={tmp_path / 'a'}" and "chat_template" not in arguments
    os.remove(base / "chat_template.jinja")
    assert Path(service_arguments(Checkpoint.open(base))["chat_template"]).is_file()


def test_the_root_cause_is_the_first_exception_that_is_no_consequence(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "(EngineCore pid=7) ERROR 11-29 18:09:20 [core.py:1366] Traceback (most recent call last):\n"
        "(EngineCore pid=7) ERROR 11-29 18:09:20 [core.py:1366] ValueError: the real one.\n"
        "(EngineCore pid=7) ValueError: the real one.\n"
        "(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert root_cause(log) == f"Root cause: ValueError: the real one. The log is {log}"
    log.write_text("killed\n")
    assert root_cause(log) == "The end of its log:\nkilled"
