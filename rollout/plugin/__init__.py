"""Entry point of the vLLM plugin (`vllm.general_plugins`): registers Inkling 2 in every process of an engine."""


def register() -> None:
    """Called by vLLM in each of its processes; idempotent."""
