"""``oasiskv top``: a server's metrics at a terminal."""
