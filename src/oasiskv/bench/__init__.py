"""Capacity and speed, as commands and as a library."""
