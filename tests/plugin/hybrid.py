"""A random Gemma 3: two layers with full attention among four with a sliding window."""

SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA = {
    "family": "gemma3_text",
    "head_dim": 32,
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING],
    "sliding_window": 40,
    "query_pre_attn_scalar": 32,
    # With larger weights it would look at the last token alone.
    "initializer_range": 0.05,
}
FILL = 1e4
"""Of blocks that nobody owns: vLLM's own kernel multiplies what it masks by 0, so no NaN."""
