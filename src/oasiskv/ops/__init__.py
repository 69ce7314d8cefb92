"""The five operations of sparse decoding, one folder each; `reference.py` is the definition."""
