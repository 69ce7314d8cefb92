"""What OasisKV counts in vLLM, under which names, and what to make of it."""
