"""Faults that users reported, of shapes and of drafts, each under the name of its report.

l: LMCache/LMCache, s: sgl-project/sglang, v: vllm-project/vllm, fa: Dao-AILab/flash-attention.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.v1.spec_decode.ngram_proposer import NgramProposer

from oasiskv.errors import ConfigError
from oasiskv.vllm import runtime
from plugin.engines import greedy
from plugin.probe import NGRAM, is_greedy, probed
from tiny import prompt_of
from tiny_folder import save_tiny

PROMPTS = [prompt_of(length) for length in (7, 100, 131)]


@pytest.fixture(scope="module", params=["one by one", "at once"], autouse=True)
def tiered(request):
    """On the CPU in both ways."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "BATCHED_ON", {"cpu"} if request.param == "at once" else set())
        yield


def assert_right(folder, **args):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with probed(folder, num_gpu_blocks_override=300, **args) as probe:
        outputs = greedy(probe.llm, PROMPTS, 24)
        for prompt, tokens in zip(PROMPTS, outputs, strict=True):
            assert len(tokens) == 24
            assert is_greedy(model, prompt, tokens), len(prompt)
        assert len(probe.sparse) == 3
        assert probe.refetch.fetched_bytes > 0
        probe.assert_all_back()


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "head_dim"), [(12, 2, 60), (28, 4, 80), (8, 1, 96), (4, 2, 192)]
)
def test_l3092_s1159_fa2374_heads(tmp_path, query_heads, kv_heads, head_dim):
    """Several query heads of one KV head; heads of odd sizes; NaN in tails and in free blocks.

    The probe fills what is free with NaN before each forward, so that tails are of NaN.
    """
    shape = {
        "hidden_size": 8 * query_heads,
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    assert_right(save_tiny(tmp_path / "tiny", **shape))


def test_v41758_drafts_that_are_all_rejected_change_nothing(tiny_folder, monkeypatch):
    propose, wrong = NgramProposer.propose, []

    def never_right(*args, **settings):
        drafts = propose(*args, **settings)
        # The vocabulary has 100 tokens, and what is drafted is never what was seen.
        for index, tokens in enumerate(drafts):
            drafts[index] = [(token + 1) % 100 for token in tokens] or [0, 0, 0]
            wrong.extend(drafts[index])
        return drafts

    monkeypatch.setattr(NgramProposer, "propose", never_right)
    assert_right(tiny_folder, speculative_config=NGRAM, settings={"lookahead": "last_accepted"})
    assert len(wrong) > 100


def test_v48919_blocks_of_another_size_are_refused(tiny_folder):
    """Target and draft share one table, of blocks of 16 tokens."""
    with (
        pytest.raises((ConfigError, RuntimeError), match="block_size=32"),
        probed(tiny_folder, block_size=32),
    ):
        pass
