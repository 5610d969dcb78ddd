"""The vLLM plugin (`vllm.general_plugins`): Inkling 2 in every process of an engine."""


def register() -> None:
    """Called by vLLM in each of its processes; idempotent and light."""
    from rollout.plugin.registration import apply

    apply()
