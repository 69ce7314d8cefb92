"""Score: how much of the attention each block would get from the lookahead queries."""
