"""Small random models whose attention is not uniform and whose output does not repeat."""

from functools import cache

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from oasiskv.hf import LoadedModel, wrap_model

VOCAB = 97
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}


def make_model(
    family: str = "llama", heads: int = 4, kv_heads: int = 2, head_dim: int = 16, **settings
):
    """A two-layer model of ``family`` with untied weights, the same at every call."""
    config_class, model_class = FAMILIES[family]
    settings.setdefault("num_hidden_layers", 2)
    if family == "mistral":
        settings.setdefault("sliding_window", None)
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=16 * heads,
        intermediate_size=96,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=2048,
        initializer_range=2.0 / (16 * heads) ** 0.5,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        **settings,
    )
    torch.manual_seed(0)
    return model_class(config).float().eval()


@cache
def tiny_llama() -> LoadedModel:
    """The model that most tests share."""
    return wrap_model(make_model())


@cache
def stock_llama():
    """The same weights under transformers' own attention: the engine without us."""
    return make_model()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random tokens; the first quarter comes again at the end, for n-gram drafts to find."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    tokens = torch.randint(VOCAB, (length,), generator=generator).tolist()
    quarter = length // 4
    tokens[3 * quarter : 4 * quarter] = tokens[:quarter]
    return tokens


@torch.inference_mode()
def stock_greedy(model, prompt: list[int], new: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and their logits ``[new, vocabulary]``, each step a forward from scratch."""
    tokens, rows = list(prompt), []
    for _ in range(new):
        rows.append(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].float())
        tokens.append(int(rows[-1].argmax()))
    return tokens[len(prompt) :], torch.stack(rows)


def same_up_to_ties(tokens: list[int], expected: list[int], logits: torch.Tensor) -> bool:
    """Whether greedy tokens agree, up to a tie below 1e-4 in the logits, where they may part."""
    for ours, theirs, row in zip(tokens, expected, logits, strict=True):
        if ours != theirs:
            return abs(float(row[ours] - row[theirs])) < 1e-4
    return True
