"""Everything that runs inside or around vLLM: the plugin, kernels, the service, environments."""
