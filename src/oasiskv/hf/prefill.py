"""Prefill once, decode many times: what comparisons of settings on the same prompt start from."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oasiskv.config import OasisConfig
from oasiskv.core.tiering import LATEST_QUERIES
from oasiskv.errors import ModelError
from oasiskv.hf.engine import Engine
from oasiskv.hf.loading import LoadedModel


@dataclass(frozen=True)
class Prefilled:
    """Dense KV of the first tokens of a prompt; never written to.

    Args:
        tokens: the tokens.
        layers: per model layer ``[blocks, heads, block_tokens, 2 * head_dim]``.
    """

    tokens: list[int]
    layers: list[torch.Tensor]


def prefill(loaded: LoadedModel, prompt: Sequence[int], prefill_tokens: int = 512) -> Prefilled:
    """Compute all of a prompt but the tokens whose queries choose the first hot set.

    Args:
        loaded: a model without sliding-window layers.
        prompt: token ids, more than ``LATEST_QUERIES``.
        prefill_tokens: tokens computed in one step.

    Raises:
        ModelError: a layer has a sliding window, so its KV is not all there to share.
    """
    if any(window is not None for window in loaded.sliding_windows):
        raise ModelError("a prefill can be shared only where every layer has full attention")
    engine = Engine(loaded, OasisConfig(mode="dense", prefill_tokens=prefill_tokens))
    tokens = list(prompt[:-LATEST_QUERIES])
    request = engine.submit("prefill", tokens, max_new_tokens=2)
    while request.computed < len(tokens):
        engine.step()
    layers = list(request.kv.layers)
    engine.abort("prefill")
    return Prefilled(tokens, layers)
