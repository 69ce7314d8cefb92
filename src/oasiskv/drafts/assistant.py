"""Drafts from a smaller model of the same vocabulary."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache, PreTrainedModel

from oasiskv.errors import ModelError

PREFILL_TOKENS = 512


@dataclass
class _State:
    """One request's cache, and the tokens whose keys and values it holds.

    Without a config the cache keeps every token of every layer; windows are then a matter of the
    mask alone, and rejected drafts can be cropped at any length.
    """

    cache: DynamicCache = field(default_factory=DynamicCache)
    tokens: list[int] = field(default_factory=list)


class AssistantDrafts:
    """Greedy continuation by a smaller causal LM with a KV cache of its own, dense and in HBM.

    The prompt is computed at the first call, in pieces of at most 512 tokens. Later calls drop
    what was rejected from the cache and compute only what is new.

    Args:
        model: the assistant, on its device; it is switched to evaluation.
        vocab_size: rows of the target model's logits.

    Raises:
        ModelError: the vocabularies differ in size, or the model's state cannot be rolled back.
    """

    def __init__(self, model: PreTrainedModel, vocab_size: int) -> None:
        config = model.config.get_text_config()
        if config.vocab_size != vocab_size:
            raise ModelError(
                f"the assistant's vocabulary has {config.vocab_size} tokens, the target's "
                f"{vocab_size}: needed is an assistant of the same vocabulary. "
                "Choose another assistant, or n-gram drafts"
            )
        # transformers' own mark for recurrent state, see its assisted generation.
        if model._is_stateful:
            raise ModelError(
                f"{type(model).__name__} keeps recurrent state, from which rejected drafts cannot "
                "be removed: needed is an assistant with attention layers only"
            )
        self._model = model.eval()
        self._position_limit: int | None = getattr(config, "max_position_embeddings", None)
        arguments = inspect.signature(model.forward).parameters
        # transformers renamed the argument after 5.5; the old name warns where the new one exists.
        self._cache_argument = "cache" if "cache" in arguments else "past_key_values"
        self._last_row = {"logits_to_keep": 1} if "logits_to_keep" in arguments else {}
        self._states: dict[str, _State] = {}

    def propose(self, request_id: str, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """Propose the assistant's greedy continuation; see `DraftSource.propose`.

        Fewer than ``max_drafts`` come where the assistant's positions end.
        """
        if self._position_limit is not None:
            max_drafts = min(max_drafts, self._position_limit - len(tokens) + 1)
        if max_drafts < 1 or not tokens:
            return []
        state = self._states.setdefault(request_id, _State())
        known = self._crop_to_prefix(state, tokens)
        drafts = [self._feed(state, list(tokens[known:]))]
        while len(drafts) < max_drafts:
            drafts.append(self._feed(state, drafts[-1:]))
        return drafts

    def finish(self, request_id: str) -> None:
        """Free the request's cache."""
        self._states.pop(request_id, None)

    def _crop_to_prefix(self, state: _State, tokens: Sequence[int]) -> int:
        """Crop the cache to what it shares with ``tokens``, less the last; return that length."""
        pairs = enumerate(zip(state.tokens, tokens[:-1], strict=False))
        at_most = min(len(state.tokens), len(tokens) - 1)
        shared = next((i for i, (cached, token) in pairs if cached != token), at_most)
        surplus = len(state.tokens) - shared
        if surplus:
            # Tokens to remove, as a negative number: 5.24 no longer takes the length to keep.
            state.cache.crop(-surplus)
            del state.tokens[shared:]
        return shared

    @torch.inference_mode()
    def _feed(self, state: _State, tokens: list[int]) -> int:
        """Append ``tokens`` to the cache and return the token with the largest logit after them."""
        for start in range(0, len(tokens), PREFILL_TOKENS):
            piece = tokens[start : start + PREFILL_TOKENS]
            output = self._model(
                input_ids=torch.tensor([piece], device=self._model.device),
                use_cache=True,
                **{self._cache_argument: state.cache},
                **self._last_row,
            )
            state.tokens.extend(piece)
        return int(output.logits[0, -1].argmax())
