"""LoRA adapters on sparse requests: the tokens of stock vLLM, and no block shared between two."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from oasiskv.vllm import runtime
from plugin.driver import Driver
from plugin.engines import engine
from plugin.probe import NGRAM, probed
from tiny import prompt_of

NEW, RANK = 20, 8
ADAPTERS = (None, "one", "two")
PROMPTS = [prompt_of(length) for length in (100, 131)]
# One place more than there are adapters: vLLM's CPU build gives the last one's to requests without
# an adapter, and must find nothing there (vllm-project/vllm#48421).
ARGS = {"enable_lora": True, "max_loras": 3, "max_lora_rank": RANK, "max_model_len": 512}


def save_adapter(folder, base, seed, scale=1.0):
    """A random adapter of the attention's projections, as PEFT saves it.

    With ``scale`` 1 it adds far more than there was: attention is so sharp that rounding shows.
    """
    config = AutoConfig.from_pretrained(base)
    width, generator = config.hidden_size, torch.Generator().manual_seed(seed)
    outputs = {
        "q_proj": config.num_attention_heads * config.head_dim,
        "k_proj": config.num_key_value_heads * config.head_dim,
        "v_proj": config.num_key_value_heads * config.head_dim,
    }
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for name, output in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (RANK, width)), ("B", (output, RANK))):
                noise = torch.randn(shape, generator=generator)
                tensors[f"{prefix}.lora_{part}.weight"] = scale**0.5 * noise
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"r": RANK, "lora_alpha": RANK, "target_modules": list(outputs), "bias": "none"}
    text = json.dumps(settings | {"peft_type": "LORA", "task_type": "CAUSAL_LM"})
    (folder / "adapter_config.json").write_text(text)
    return folder


@pytest.fixture(scope="module")
def adapters(tiny_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    requests = {
        name: LoRARequest(name, number, str(save_adapter(folder / name, tiny_folder, number)))
        for number, name in enumerate(ADAPTERS)
        if name
    }
    return [requests.get(name) for name in ADAPTERS]


def tokens_of(llm, adapters):
    """Greedy tokens of each prompt with each adapter, all in one batch."""
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    pairs = [(ids, adapter) for ids in PROMPTS for adapter in adapters]
    requests = [{"prompt_token_ids": ids} for ids, _ in pairs]
    outputs = llm.generate(
        requests, sampling, lora_request=[adapter for _, adapter in pairs], use_tqdm=False
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def stock(tiny_folder, adapters):
    with engine(tiny_folder, **ARGS) as llm:
        tokens = tokens_of(llm, adapters)
    # Each adapter says something else.
    assert len({tuple(one) for one in tokens}) == len(tokens)
    return tokens


@pytest.mark.parametrize(
    ("tiered", "drafts"),
    [("one by one", None), ("at once", NGRAM)],
    ids=["one by one", "at once, drafts"],
)
def test_two_adapters_and_none_in_one_batch(
    tiny_folder, adapters, stock, monkeypatch, tiered, drafts
):
    monkeypatch.setattr(runtime, "BATCHED_ON", {"cpu"} if tiered == "at once" else set())
    args = ARGS | {"num_gpu_blocks_override": 600, "speculative_config": drafts}
    with probed(tiny_folder, **args) as probe:
        assert tokens_of(probe.llm, adapters) == stock
        assert len(probe.sparse) == len(stock)
        assert probe.refetch.fetched_bytes > 0
        probe.assert_all_back()


def test_a_prefix_in_the_store_is_of_one_adapter(tiny_folder, adapters, stock):
    with probed(tiny_folder, num_gpu_blocks_override=600, **ARGS) as probe:
        driver = Driver(probe)
        prompt = PROMPTS[-1]
        for index, name in enumerate(("one", "two", None, "one", "two", None)):
            # HBM forgets, so that only the store may know the prompt.
            assert probe.llm.reset_prefix_cache()
            adapter = adapters[ADAPTERS.index(name)]
            driver.add(str(index), prompt, 4, lora_request=adapter)
            driver.finish()
            assert driver.found[str(index)] == (128 if index > 2 else 0)
            expected = stock[len(ADAPTERS) + ADAPTERS.index(name)]
            assert driver.done[str(index)] == expected[:4]
        probe.assert_all_back()
