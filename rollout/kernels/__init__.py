"""Kernels of the engine, each with a slow torch reference of the same name."""
