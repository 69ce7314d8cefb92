"""Built-in models: found by name, fetched from a package index once, converted into a cache."""

from oasiskv.models.resolve import resolve_model

__all__ = ["resolve_model"]
