"""Errors that users see: each says what was found, what is needed and which setting changes it."""


class OasisError(Exception):
    """Base of every error that OasisKV raises on purpose."""


class ConfigError(OasisError):
    """A setting is unknown or impossible."""


class ModelError(OasisError):
    """A model folder is missing, damaged, or of a kind that cannot be served."""


class PromptError(OasisError):
    """A prompt is empty, too long, or not made of the model's tokens."""


class StoreFullError(OasisError):
    """The store has no room for another block; carries how much was asked and had."""


class TransferError(OasisError):
    """A transfer or a write to the store did not complete, so the tiles cannot be read."""


class TraceError(OasisError):
    """A trace is missing, damaged, too large, or cannot take the shape that was asked for."""


class StateError(OasisError):
    """A call came in a state that does not allow it; a bug in the caller, not in the input."""
