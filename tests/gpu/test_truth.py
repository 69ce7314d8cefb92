"""On CUDA the plugin wants what the reference engine wants, and gives its distribution."""

import pytest
import torch

from tiny import prompt_of
from tiny_folder import save_tiny

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("vllm")

from plugin.noise import measure_noise
from plugin.probe import NGRAM
from plugin.truth import NOVEL, novel_prompts

pytestmark = pytest.mark.gpu
ARGS = {
    "block_size": 16,
    "num_gpu_blocks_override": 1200,
    "max_model_len": 2304,
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.3,
}


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Not here: vLLM compiles, and the compiler's tuning refuses deterministic algorithms."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model with the heads of Llama-3.1-8B and few layers.

    Its weights are larger than usual, which makes attention less uniform, and small enough for
    16 bits to tell scores apart: logits of attention have a standard deviation of about two.
    """
    with torch.device("cuda"):
        return save_tiny(
            tmp_path_factory.mktemp("model") / "heads",
            hidden_size=4096,
            intermediate_size=4096,
            num_hidden_layers=4,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            initializer_range=1.5 / 4096**0.5,
        )


@pytest.mark.parametrize(
    ("lookahead", "speculative"), [("last_accepted", None), ("held_back", NGRAM)]
)
def test_heads_of_an_8b_model(folder, lookahead, speculative):
    prompts = [prompt_of(length) for length in (600, 913, 1204, 1500)]
    settings = NOVEL | {"lookahead": lookahead}
    args = ARGS | {"speculative_config": speculative}
    found = measure_noise(folder, prompts, 32, settings, "bfloat16", "cuda", 90, **args)
    found.check()
    # Layers, KV heads, wanted blocks.
    assert found.compared > 10 * 4 * 4 * 8 * 16


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_real_model_and_text(dtype):
    """Four passages of 2,000 and more tokens of a novel, drafts accepted and held back."""
    folder, prompts = novel_prompts()
    args = ARGS | {"speculative_config": NGRAM}
    found = measure_noise(folder, prompts, 64, NOVEL, dtype, "cuda", 1000, **args)
    found.check()
    assert found.accepted > 0
    assert found.compared > 4 * 30 * 30 * 3 * 16
