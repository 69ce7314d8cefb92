"""How many of a draft model's drafts are accepted: stock vLLM, then OasisKV by size of the hot set.

With OasisKV the draft's own layers go sparse beside the target's, so that both may differ from what
full attention would have given: what is accepted says how much they still agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oasiskv.bench.in_process import (
    BATCHED_TOKENS,
    STOCK_BLOCK_TOKENS,
    closed_engine,
    greedy_sampling,
    vllm_in_process,
)
from oasiskv.config import BLOCK_TOKENS, OasisConfig
from oasiskv.data import data_path
from oasiskv.drafts.lookahead import LookaheadMode
from oasiskv.errors import ConfigError
from oasiskv.hf.tokens import encode, load_tokenizer


@dataclass(frozen=True)
class AcceptanceReport:
    """One engine's run over all passages.

    Args:
        hot_tokens: S; None for stock vLLM.
        forwards: of the target with drafts, over all requests.
        drafts: fed.
        accepted: of these.
    """

    hot_tokens: int | None
    forwards: int
    drafts: int
    accepted: int

    @property
    def share(self) -> float:
        """Accepted drafts of those fed."""
        return self.accepted / self.drafts

    @property
    def tokens_per_forward(self) -> float:
        """Tokens that one forward of the target gains a request."""
        return 1 + self.accepted / self.forwards


@dataclass(frozen=True)
class Passages:
    """Passages of the bundled novel, decoded greedily.

    Args:
        texts: how many.
        prompt_tokens: of each.
        new_tokens: decoded of each.
        draft_tokens: drafts a step.
    """

    texts: int = 4
    prompt_tokens: int = 2000
    new_tokens: int = 128
    draft_tokens: int = 3

    def prompts(self, model: Path | str) -> list[list[int]]:
        """Token ids of each, evenly spread over the novel.

        Raises:
            ConfigError: the novel is too short.
        """
        text = data_path("texts/persuasion.txt").read_text(encoding="utf-8")
        ids = encode(load_tokenizer(model), text, chat=False)
        stride = len(ids) // self.texts
        if stride < self.prompt_tokens:
            raise ConfigError(
                f"texts={self.texts} passages of prompt_tokens={self.prompt_tokens} are more than "
                f"the {len(ids)} tokens of the novel: lower one of them"
            )
        return [list(ids[i * stride : i * stride + self.prompt_tokens]) for i in range(self.texts)]


def measure_acceptance(
    passages: Passages,
    model: Path | str,
    draft: Path | str,
    budget_tokens: int,
    hot_tokens: Sequence[int],
) -> list[AcceptanceReport]:
    """Stock vLLM, then OasisKV with each hot set; all drafts may be accepted (``last_accepted``).

    Args:
        passages: what is decoded.
        model: folder or hub id of the target.
        draft: folder or hub id of the draft model.
        budget_tokens: K.
        hot_tokens: sizes of the hot set, S.

    Raises:
        ConfigError: vLLM is not installed, OasisKV is switched off, or a size is not legal.
    """
    prompts = passages.prompts(model)
    length = passages.prompt_tokens + passages.new_tokens + passages.draft_tokens + 1
    configs = [
        OasisConfig(
            budget_tokens=budget_tokens,
            hot_tokens=size,
            lookahead=LookaheadMode.LAST_ACCEPTED,
            host_gib=2.0,
        )
        for size in hot_tokens
    ]
    blocks = -(-length // STOCK_BLOCK_TOKENS) * passages.texts + 1
    engine: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "async_scheduling": False,
        "disable_log_stats": False,
        "max_model_len": length,
        "max_num_seqs": passages.texts,
        # The pool is given in blocks; vLLM wants the memory that it is part of named.
        "kv_cache_memory_bytes": 2**30,
        "max_num_batched_tokens": BATCHED_TOKENS,
        "speculative_config": {
            "method": "draft_model",
            "model": str(draft),
            "num_speculative_tokens": passages.draft_tokens,
        },
    }
    with vllm_in_process() as plugin_args:
        reports = [
            _run(
                prompts,
                passages.new_tokens,
                None,
                engine | {"block_size": STOCK_BLOCK_TOKENS, "num_gpu_blocks_override": blocks},
            )
        ]
        for config in configs:
            more = 2 * blocks + passages.texts * config.hot_blocks
            own = {"block_size": BLOCK_TOKENS, "num_gpu_blocks_override": more}
            plugin = plugin_args(config)
            reports.append(
                _run(prompts, passages.new_tokens, config.hot_tokens, engine | own | plugin)
            )
    return reports


def _run(
    prompts: list[list[int]], new_tokens: int, hot_tokens: int | None, engine: dict[str, Any]
) -> AcceptanceReport:
    """All passages at once on one engine, which is closed at the end."""
    with closed_engine(engine) as llm:
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        llm.generate(inputs, greedy_sampling(new_tokens), use_tqdm=False)
        counts = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return AcceptanceReport(
        hot_tokens,
        forwards=counts["vllm:spec_decode_num_drafts"],
        drafts=counts["vllm:spec_decode_num_draft_tokens"],
        accepted=counts["vllm:spec_decode_num_accepted_tokens"],
    )
