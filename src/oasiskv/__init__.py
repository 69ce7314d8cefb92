"""OasisKV: decode with the KV cache outside fast memory, blocks predicted one step ahead."""

__version__ = "0.1.0"
