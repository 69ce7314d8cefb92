"""What a user chooses by name for the reference engine, beside its settings: dtype and drafts."""

from enum import StrEnum

import torch

from oasiskv.drafts.assistant import AssistantDrafts
from oasiskv.drafts.base import DraftSource, NoDrafts
from oasiskv.drafts.ngram import NgramDrafts
from oasiskv.errors import ConfigError
from oasiskv.hf.loading import LoadedModel, read_model
from oasiskv.models.resolve import resolve_model


class Dtype(StrEnum):
    """Dtype of weights and KV."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def torch_dtype(self) -> torch.dtype:
        """PyTorch's own."""
        dtype: torch.dtype = getattr(torch, self.value)
        return dtype


class DraftKind(StrEnum):
    """Where lookahead tokens come from."""

    NONE = "none"
    NGRAM = "ngram"
    ASSISTANT = "assistant"


def draft_source(kind: DraftKind, assistant: str | None, loaded: LoadedModel) -> DraftSource:
    """Make the source of drafts for a model.

    Args:
        kind: which.
        assistant: built-in name, folder or hub id of the smaller model, for kind ``assistant``.
        loaded: the model that is drafted for.

    Raises:
        ConfigError: kind ``assistant`` without an assistant.
        ModelError: the assistant cannot be loaded or has another vocabulary.
    """
    if kind is DraftKind.NONE:
        return NoDrafts()
    if kind is DraftKind.NGRAM:
        return NgramDrafts()
    if assistant is None:
        raise ConfigError(
            "--draft assistant needs --assistant MODEL, a smaller model to draft (in model_args: "
            "draft=assistant,assistant=MODEL)"
        )
    model = read_model(resolve_model(assistant), loaded.model.dtype).to(loaded.device)
    return AssistantDrafts(model, loaded.vocab_size)
