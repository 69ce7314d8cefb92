"""Layers with a sliding window beside those with full attention, on CUDA: stock vLLM's output."""

import pytest
import torch

from tiny import prompt_of
from tiny_folder import save_tiny

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("vllm")

from gpu.test_plugin import ARGS, NOISE, decode, largest_difference
from plugin.engines import engine
from plugin.hybrid import FILL, GEMMA
from plugin.probe import NGRAM, probed

pytestmark = pytest.mark.gpu
PROMPTS = [prompt_of(length) for length in (7, 96, 103, 131, 250)]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Not here: vLLM compiles, and the compiler's tuning refuses deterministic algorithms."""


@pytest.mark.parametrize(
    "args",
    [
        {"enforce_eager": True},
        {"enforce_eager": False},
        {"enforce_eager": False, "speculative_config": NGRAM},
    ],
    ids=["eager", "full graphs", "full graphs, drafts"],
)
def test_only_full_attention_goes_sparse(tmp_path, args):
    folder = save_tiny(tmp_path / "tiny", **(GEMMA | {"head_dim": 64}))
    args = ARGS | args
    with engine(folder, **(args | {"speculative_config": None})) as llm:
        stock = decode(llm, PROMPTS)
    with probed(folder, **args) as probe:
        probe.fill = FILL
        assert largest_difference(decode(probe.llm, PROMPTS), stock) < NOISE
        assert len(probe.sparse) == len(PROMPTS)
        assert probe.refetch.fetched_bytes > 0
        # Each layer's blocks lie in memory that it shares with layers of the other kind.
        layers = probe.llm.llm_engine.vllm_config.compilation_config.static_forward_context
        assert probe.runtime.batched._memory_of.keys() == layers.keys()
        probe.assert_all_back()
