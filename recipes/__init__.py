"""YAML files that a user copies, one per job; each opens with what it needs and what it gives."""
