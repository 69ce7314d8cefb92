"""OasisKV as an attention implementation of transformers.

A forward is one packed row of tokens, ``[1, tokens]``: the segments of all requests one after the
other, prefill and decode mixed, each with its own positions. The engine passes the batch as the
keyword ``oasis_batch``, which every layer hands to its attention function.
"""

from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from oasiskv.errors import ModelError, StateError

ATTENTION_NAME = "oasiskv"


class AttentionBatch(Protocol):
    """What the engine lends to a forward."""

    def attend(
        self, layer: int, query: torch.Tensor, kv: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Write new KV and attend.

        Args:
            layer: model layer.
            query: ``[tokens, query heads, head_dim]``.
            kv: ``[tokens, heads, 2 * head_dim]``, K then V.
            scale: softmax scale.

        Returns:
            ``[tokens, query heads, head_dim]``.
        """
        ...


def oasis_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    oasis_batch: AttentionBatch | None = None,
    **features: Any,  # noqa: ANN401 - whatever a model's attention passes
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls, shapes ``[1, heads, tokens, head_dim]``."""
    if oasis_batch is None:
        raise StateError("attention implementation 'oasiskv' runs inside oasiskv.hf.Engine only")
    for feature in ("softcap", "s_aux"):
        if features.get(feature) is not None:
            raise ModelError(
                f"attention of {type(module).__name__} uses {feature}, which is not supported"
            )
    kv = torch.cat((key, value), dim=-1)[0].transpose(0, 1)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    out = oasis_batch.attend(layer, query[0].transpose(0, 1), kv, scaling)
    return out[None], None


def _no_mask(*_args: Any, **_kwargs: Any) -> None:  # noqa: ANN401 - transformers' own signature
    """The batch knows who may see whom."""


def register() -> None:
    """Make the implementation known to transformers; may be called again."""
    AttentionInterface.register(ATTENTION_NAME, oasis_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
