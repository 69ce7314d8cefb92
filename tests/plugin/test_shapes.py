"""Kinds of models, random and tiny, against transformers: on the sparse path, blocks refetched."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from oasiskv.vllm import runtime
from plugin.engines import greedy
from plugin.hybrid import FILL, GEMMA
from plugin.probe import NGRAM, is_greedy, probed
from tiny import prompt_of
from tiny_folder import save_tiny

NEW = 24
PROMPTS = [prompt_of(length) for length in (7, 100, 131)]
MODELS = {
    # With small weights it would repeat one token.
    "llama, tied, heads of 96": {
        "head_dim": 96,
        "tie_word_embeddings": True,
        "initializer_range": 0.5,
    },
    "qwen3, heads of 64": {"family": "qwen3", "head_dim": 64},
    "mistral, heads of 128": {"family": "mistral", "head_dim": 128, "sliding_window": None},
    "gemma3, heads of 32, windows": GEMMA,
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("shape") / "tiny", **MODELS[request.param])


@pytest.mark.parametrize(
    ("tiered", "drafts"),
    [("one by one", None), ("at once", NGRAM)],
    ids=["one by one", "at once, drafts"],
)
def test_tokens_are_those_of_transformers(folder, monkeypatch, tiered, drafts):
    monkeypatch.setattr(runtime, "BATCHED_ON", {"cpu"} if tiered == "at once" else set())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = {"lookahead": "held_back"}
    args = {"num_gpu_blocks_override": 600, "speculative_config": drafts}
    with probed(folder, settings=settings, **args) as probe:
        if model.config.model_type == GEMMA["family"]:
            probe.fill = FILL
        outputs = greedy(probe.llm, PROMPTS, NEW)
        for prompt, tokens in zip(PROMPTS, outputs, strict=True):
            assert len(set(tokens)) > 4
            assert is_greedy(model, prompt, tokens), len(prompt)
        assert len(probe.sparse) == 3
        assert probe.refetch.fetched_bytes > 0
        probe.assert_all_back()
