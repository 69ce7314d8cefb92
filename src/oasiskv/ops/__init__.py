"""The five operations of sparse decoding, one folder each.

`reference.py` is the definition, `triton.py`, where there is one, the form for GPUs.
"""
