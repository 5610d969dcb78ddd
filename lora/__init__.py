"""Adapters: which modules they touch and in which shapes, PEFT wrapping, import and export."""
