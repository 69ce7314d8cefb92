"""vLLM engines in this process, one after another."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from oasiskv.vllm.compat import let_engines_follow

# Stock vLLM's CPU kernels want blocks of a multiple of 32 tokens.
DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "disable_log_stats": True,
    "async_scheduling": False,
    "block_size": 32,
    "num_gpu_blocks_override": 256,
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
}


def make_llm(folder: Path, **engine_args: Any) -> LLM:
    """An engine on the model in ``folder``; ``engine_args`` go over ``DEFAULTS``. Close it."""
    let_engines_follow()
    return LLM(model=str(folder), **(DEFAULTS | engine_args))


def close(llm: LLM) -> None:
    """Give back the engine's memory, process groups and connector, so that another can start."""
    llm.llm_engine.engine_core.shutdown()


@contextmanager
def engine(folder: Path, **engine_args: Any) -> Iterator[LLM]:
    """``make_llm``, closed at the end also when the test fails."""
    llm = make_llm(folder, **engine_args)
    try:
        yield llm
    finally:
        close(llm)


def greedy(llm: LLM, prompts_token_ids: list[list[int]], max_tokens: int) -> list[list[int]]:
    """The tokens of each prompt's greedy continuation, ``max_tokens`` of them."""
    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in prompts_token_ids]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
