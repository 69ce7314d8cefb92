"""What a request must be to be taken in, and its state at the start."""

from collections.abc import Sequence

import torch

from oasiskv.config import OasisConfig
from oasiskv.drafts.verify import Sampling
from oasiskv.errors import ConfigError, PromptError, StoreFullError
from oasiskv.hf.loading import LoadedModel
from oasiskv.hf.memory import RequestKV
from oasiskv.hf.request import Request
from oasiskv.stores.base import Store
from oasiskv.stores.machine import available_bytes


def check_prompt(
    loaded: LoadedModel, prompt: Sequence[int], max_new_tokens: int, forced: Sequence[int]
) -> None:
    """Refuse what the model cannot decode.

    Raises:
        PromptError: the prompt is empty, too long, or not made of the model's tokens; no new token
            is asked for, or fewer than are forced.
    """
    if not prompt:
        raise PromptError("the prompt is empty: at least one token is needed")
    if len(prompt) >= loaded.max_tokens:
        raise PromptError(
            f"the prompt has {len(prompt)} tokens and the model allows {loaded.max_tokens} in all; "
            f"shorten the prompt to at most {loaded.max_tokens - 1}"
        )
    if max_new_tokens < 1:
        raise PromptError(f"max_new_tokens={max_new_tokens} is not legal: at least 1 is needed")
    if len(forced) > max_new_tokens:
        raise PromptError(f"{len(forced)} forced tokens, but max_new_tokens={max_new_tokens}")
    stranger = next((t for t in (*prompt, *forced) if not 0 <= t < loaded.vocab_size), None)
    if stranger is not None:
        raise PromptError(
            f"token id {stranger} is not below the vocabulary of {loaded.vocab_size} tokens"
        )


def check_store(loaded: LoadedModel, store: Store, request_id: str, tokens: int) -> None:
    """Refuse a request that the store could not hold even alone.

    Raises:
        StoreFullError: with what it would need.
    """
    blocks = min(tokens, loaded.max_tokens) // loaded.geometry.block_tokens
    if blocks > store.capacity_blocks:
        raise StoreFullError(
            f"request {request_id} closes up to {blocks} blocks and the store holds "
            f"{store.capacity_blocks}; raise host_gib or ask for fewer new tokens"
        )


def check_sparse_size(loaded: LoadedModel, config: OasisConfig, tokens: int) -> None:
    """Refuse a request that will go sparse into more than there is of the fast tier.

    Args:
        loaded: the model.
        config: settings.
        tokens: most that the request will have.

    Raises:
        ConfigError: sink, hot set and window alone are larger.
    """
    longest = min(tokens, loaded.max_tokens)
    if config.mode == "dense" or longest <= config.resolved_threshold_tokens:
        return
    kept = config.sink_blocks + config.hot_blocks + config.window_blocks
    needed = kept * loaded.geometry.block_bytes
    on_gpu = loaded.device.type == "cuda"
    has = torch.cuda.mem_get_info(loaded.device)[0] if on_gpu else available_bytes()
    if needed > has:
        raise ConfigError(
            f"hot_tokens={config.hot_tokens}, sink_tokens={config.sink_tokens} and "
            f"window_tokens={config.window_tokens} take {needed} bytes of a sparse request, and "
            f"{has} are available on {loaded.device}: lower the largest of them"
        )


def make_request(
    loaded: LoadedModel,
    config: OasisConfig,
    request_id: str,
    generation: int,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    forced: Sequence[int],
) -> Request:
    """A request before its first step, with the fast-tier memory for its dense phase."""
    total = min(len(prompt) + max_new_tokens, loaded.max_tokens)
    dense_tokens = total
    if config.mode != "dense":
        dense_tokens = max(len(prompt), min(total, config.resolved_threshold_tokens))
    rows = 1 + config.draft_tokens
    return Request(
        request_id=request_id,
        generation=generation,
        prompt=list(prompt),
        forced=list(forced),
        max_new_tokens=total - len(prompt),
        sampling=sampling,
        generator=sampling.generator(),
        kv=RequestKV(
            loaded.geometry,
            loaded.sliding_windows,
            config,
            dense_tokens + rows,
            max(rows, min(len(prompt), config.prefill_tokens)),
            loaded.device,
        ),
    )
