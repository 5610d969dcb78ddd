"""Kernels of the rollout engine: a torch reference for every device and C++ operators for the CPU.

Import the functions from `rollout.kernels.ops`; it takes the fast twin where there is one.
"""
