"""Generate from one prompt with the reference engine, and report what it took."""

from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerBase

from oasiskv.config import OasisConfig
from oasiskv.drafts.base import DraftSource
from oasiskv.drafts.verify import Sampling
from oasiskv.hf.engine import Engine
from oasiskv.hf.loading import LoadedModel
from oasiskv.hf.request import Request
from oasiskv.report import GenerationReport
from oasiskv.stores.host import HostStore

AGREEMENT_EVERY = 4
"""Sparse steps between two measurements of prediction agreement; each scores once more."""


def generate(
    loaded: LoadedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: OasisConfig,
    prompt: list[int],
    max_new_tokens: int,
    drafts: DraftSource,
    sampling: Sampling,
    on_text: Callable[[str], None],
) -> GenerationReport:
    """Decode one prompt.

    Args:
        loaded: the model.
        tokenizer: turns tokens into text.
        config: settings.
        prompt: token ids.
        max_new_tokens: most tokens to decode.
        drafts: where lookahead tokens come from.
        sampling: how tokens are chosen.
        on_text: called with each new piece of text.

    Raises:
        OasisError: the prompt is not legal, or the request failed.
    """
    engine = Engine(
        loaded,
        config,
        store=_store(loaded, config, len(prompt) + max_new_tokens),
        drafts=drafts,
        agreement_every=AGREEMENT_EVERY,
    )
    request = engine.submit("generate", prompt, max_new_tokens, sampling)
    written = ""
    try:
        for output in engine.stream():
            if output.error is not None:
                raise output.error
            text = tokenizer.decode(request.output, skip_special_tokens=True)
            # An unfinished character decodes to the replacement sign: wait for the rest of it.
            if not text.endswith("\ufffd") or output.finished:
                on_text(text[len(written) :])
                written = text
    finally:
        engine.abort("generate")
    return _report(engine, request, written)


def _store(loaded: LoadedModel, config: OasisConfig, tokens: int) -> HostStore | None:
    if config.mode == "dense" or config.host_gib is not None:
        return None
    blocks = min(tokens, loaded.max_tokens) // loaded.geometry.block_tokens
    return HostStore(loaded.geometry, max(1, blocks), config.checksums)


def _report(engine: Engine, request: Request, text: str) -> GenerationReport:
    geometry, config, tiering = engine.loaded.geometry, engine.config, engine.tiering
    stats = request.stats
    wanted = sum(step.wanted for step in stats.traffic)
    by_layer: list[float] = []
    if wanted:
        misses = torch.stack([step.misses for step in stats.traffic]).sum(dim=0)
        by_layer = [1.0 - float(m) * geometry.num_layers / wanted for m in misses]
    tokens = len(request.prompt) + len(request.output)
    return GenerationReport(
        text=text,
        token_ids=request.output,
        prompt_tokens=len(request.prompt),
        dense_kv_bytes=geometry.blocks_for(tokens) * geometry.block_bytes,
        fast_tier_kv_bytes=stats.final_kv_bytes,
        digest_bytes=tiering.digests.nbytes if tiering else 0,
        store_bytes=tiering.store.nbytes if tiering else 0,
        fetched_bytes_per_step=[step.fetched_bytes for step in stats.traffic],
        cap_bytes_per_step=geometry.num_layers
        * geometry.num_kv_heads
        * config.cap_blocks
        * geometry.tile_bytes,
        hit_rate=sum(by_layer) / len(by_layer) if by_layer else None,
        agreement=sum(stats.agreement) / len(stats.agreement) if stats.agreement else None,
        tokens_per_step=sum(stats.accepted) / len(stats.accepted) if stats.accepted else 1.0,
        hit_rate_by_layer=by_layer,
    )
