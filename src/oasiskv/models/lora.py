"""Merging a LoRA of the attention projections, with a new RoPE base, into a model folder."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from oasiskv.errors import ModelError
from oasiskv.models.progress import Report
from oasiskv.models.quiet import quiet_transformers

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def merge_lora(
    base: Path, adapter: Path, folder: Path, context_tokens: int, report: Report
) -> None:
    """Write ``base`` with ``adapter`` merged in to ``folder``, in bf16.

    ``W += b @ a`` in float32 for each projection of each layer; the LoRA's scale is in ``b``.
    The RoPE base comes from the adapter's metadata.

    Args:
        base: Hugging Face folder of a Llama model.
        adapter: safetensors with ``layers.<i>.<projection>.a`` ``[R, in]`` and ``.b`` ``[out, R]``.
        folder: an empty folder.
        context_tokens: the positions that the merged model allows.
        report: told what is going on.

    Raises:
        ModelError: the adapter is damaged or does not fit the model.
    """
    with quiet_transformers():
        report("reading the base model", 0.1)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(base)
        report("merging the adapter", 0.4)
        targets = {
            f"layers.{index}.{name}": getattr(layer.self_attn, name)
            for index, layer in enumerate(model.model.layers)
            for name in PROJECTIONS
        }
        rope_theta = add_lora(targets, adapter)
        model.config.rope_parameters = {"rope_type": "default", "rope_theta": rope_theta}
        model.config.max_position_embeddings = context_tokens
        tokenizer.model_max_length = context_tokens
        report("writing", 0.6)
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def add_lora(targets: dict[str, nn.Linear], adapter: Path) -> float:
    """Add the adapter's ``b @ a`` to the weights of ``targets``, in place; returns the RoPE base.

    Args:
        targets: tensor name less ``.a`` or ``.b`` -> the layer it belongs to.
        adapter: the safetensors file.

    Raises:
        ModelError: the file is damaged, or its names or shapes are not those of ``targets``.
    """
    try:
        with safe_open(adapter, "pt") as file:
            pairs = {key: file.get_tensor(key).float() for key in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except (SafetensorError, FileNotFoundError) as error:
        raise ModelError(f"the adapter {adapter} cannot be read: {error}") from error
    expected = {f"{target}.{half}" for target in targets for half in "ab"}
    if pairs.keys() != expected:
        odd = sorted(pairs.keys() ^ expected)
        raise ModelError(
            f"the adapter {adapter} does not fit the model: {len(odd)} tensors are missing or "
            f"unknown, the first is {odd[0]!r}"
        )
    if "rope_theta" not in metadata:
        raise ModelError(f"the adapter {adapter} has no rope_theta in its metadata")
    for target, layer in targets.items():
        a, b = pairs[f"{target}.a"], pairs[f"{target}.b"]
        out_dim, in_dim = layer.weight.shape
        if a.ndim != 2 or a.shape[1] != in_dim or b.shape != (out_dim, a.shape[0]):
            raise ModelError(
                f"the adapter {adapter} does not fit the model: {target} has a {tuple(a.shape)} "
                f"and b {tuple(b.shape)}; [R, {in_dim}] and [{out_dim}, R] are needed"
            )
        layer.weight.data += b @ a
    return float(metadata["rope_theta"])
