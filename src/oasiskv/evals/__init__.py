"""Accuracy, as commands and as a library."""
