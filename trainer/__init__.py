"""Everything that runs inside SkyRL and DeepSpeed: the experiment, the worker, losses, publication, resume."""
