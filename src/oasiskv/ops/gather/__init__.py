"""Gather: carry out a swap plan, tile by tile."""
