"""The API server's process: vLLM's OpenAI server with adapters checked before they reach the engine.

Started by `rollout.service`, as `python -m rollout.api_server ARGUMENTS` with vLLM's own arguments; the engine core is
a child of this process. Not here: choosing arguments, waiting for health, ending the group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from inkling_rl.checkpoint.reader import Checkpoint
from rollout.launcher import watch_launcher


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until a signal. `arguments` are vLLM's command line, with `--model DIR`."""
    # Before the imports below, which take longer than a launcher may live.
    watch_launcher()
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(parsed)
    check_adapters(Checkpoint.open(parsed.model))
    uvloop.run(run_server(parsed))


def check_adapters(checkpoint: Checkpoint) -> None:
    """From now on a request to load an adapter that does not fit this base is refused with status 400.

    The engine checks again; it cannot see which base an adapter was trained on, and its refusals are errors 500.
    """
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve import create_error_response

    from lora.base import fingerprint
    from lora.files import read_adapter
    from lora.schema import AdapterError

    base = fingerprint(checkpoint)
    original = OpenAIServingModels._check_load_lora_adapter_request

    async def check(self: Any, request: Any) -> Any:
        refusal = await original(self, request)
        if refusal is not None:
            return refusal
        try:
            await asyncio.to_thread(read_adapter, request.lora_path, checkpoint.config, fingerprint=base)
        except AdapterError as error:
            return create_error_response(
                message=str(error), err_type="InvalidUserInput", status_code=HTTPStatus.BAD_REQUEST
            )
        return None

    OpenAIServingModels._check_load_lora_adapter_request = check


if __name__ == "__main__":
    main()
