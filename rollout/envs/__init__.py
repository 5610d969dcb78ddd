"""Environments on skyrl_gym, imported by name inside the process of the generator."""
