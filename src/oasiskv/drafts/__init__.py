"""Where lookahead tokens come from, and how they are verified."""
