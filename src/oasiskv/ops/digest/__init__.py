"""Digest: what stands for the keys of a block when it is scored."""
