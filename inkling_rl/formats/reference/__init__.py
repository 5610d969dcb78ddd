"""The number formats in plain torch: slow, obvious, the definition that every fast implementation must equal."""
