"""Models that pool, as for embeddings, stay dense: with the plugin's flags they are vLLM's own."""

import pytest
import torch
from transformers import AutoConfig, AutoModel

import oasiskv.vllm
from oasiskv.vllm.runtime import installed_runtime
from plugin.engines import engine
from plugin.probe import EXACT
from tiny import prompt_of
from tiny_folder import ALPHABET, save_tokenizer

PROMPTS = [{"prompt_token_ids": prompt_of(length)} for length in (7, 100, 300)]
POOLING = {"runner": "pooling", "max_model_len": 512}


def vectors(llm):
    outputs = llm.embed(PROMPTS, use_tqdm=False)
    return torch.tensor([output.outputs.embedding for output in outputs])


@pytest.fixture(scope="module", params=["llama", "bert"])
def folder(request, tiny_folder, tmp_path_factory):
    """One that decodes by its shape, and an encoder, which has no KV cache at all."""
    if request.param == "llama":
        return tiny_folder
    config = AutoConfig.for_model(
        "bert",
        vocab_size=len(ALPHABET),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.25,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model") / "bert"
    AutoModel.from_config(config).save_pretrained(folder)
    return save_tokenizer(folder)


def test_vectors_are_those_of_stock_vllm(folder):
    with engine(folder, **POOLING) as llm:
        stock = vectors(llm)
    assert stock.shape == (3, 64)
    assert stock.std() > 0.01
    # Our attention takes blocks of 16; vLLM's on the CPU, from 0.32 on, multiples of 32.
    flags = oasiskv.vllm.engine_args(**EXACT) | {"block_size": 32}
    with engine(folder, **(POOLING | flags)) as llm:
        # The second time from the prefix cache, where the model has one.
        assert torch.allclose(vectors(llm), stock, atol=1e-5)
        assert torch.allclose(vectors(llm), stock, atol=1e-5)
        assert installed_runtime() is None
