"""The release checkpoint on disk: names and shapes, reading, writing, the tiny model."""
