"""inkling-rl: reinforcement-learning post-training for Inkling 2 Small.

Reading order: `recipes/` -> `trainer.run` -> `trainer.worker` -> `rollout.plugin.model` -> `trainer.publish`.
"""

__version__ = "0.1.0"
