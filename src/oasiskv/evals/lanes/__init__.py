"""Many methods decoding the same prompts in one batch."""
