"""A small random model as a Hugging Face folder, with a tokenizer of one token per character."""

import json
import string

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

ALPHABET = string.printable


def save_tiny(folder, family="llama", **settings):
    """Save a model of ``family``; ``settings`` go into its config, over the defaults."""
    defaults = {
        "vocab_size": len(ALPHABET),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "initializer_range": 0.25,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    config = AutoConfig.for_model(family, **(defaults | settings))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return save_tokenizer(folder)


def save_tokenizer(folder):
    """Save the tokenizer of one token per character."""
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(ALPHABET)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def save_config(folder, **config):
    """Save a config.json alone, as of a model that is refused before its weights are read."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder
