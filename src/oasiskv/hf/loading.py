"""Load a causal language model for the reference engine, or say in one line why it cannot be."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from oasiskv.config import BLOCK_TOKENS
from oasiskv.core.geometry import KVGeometry
from oasiskv.errors import ConfigError, ModelError
from oasiskv.hf.attention import ATTENTION_NAME, register

_ATTENTION_KINDS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class LoadedModel:
    """A model that the reference engine can run.

    Args:
        model: the model, its attention set to OasisKV's.
        geometry: KV sizes of its full-attention layers.
        sliding_windows: per layer its sliding window in tokens, or None for full attention.
        max_tokens: longest sequence that its positions allow.
        eos_tokens: token ids that end a generation.
    """

    model: PreTrainedModel
    geometry: KVGeometry
    sliding_windows: tuple[int | None, ...]
    max_tokens: int
    eos_tokens: frozenset[int]

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return torch.device(self.model.device)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return int(self.model.config.vocab_size)


def pick_device(name: str | None) -> torch.device:
    """The device of this name, or, without a name, CUDA where it is there and the CPU elsewhere.

    Raises:
        ConfigError: there is no such device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is not legal: cpu or cuda is needed") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}: no CUDA device is there; --device cpu works")
    return device


def load_model(
    path: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> LoadedModel:
    """Load a local folder or hub id.

    Args:
        path: folder with config.json and weights, or a hub id.
        dtype: dtype to compute in.
        device: where to run.

    Raises:
        ModelError: the folder is missing or damaged, or the model is of a kind that OasisKV
            cannot serve.
    """
    return wrap_model(read_model(path, dtype).to(device))


def read_model(path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """Read a local folder or hub id, its attention left as it is.

    Raises:
        ModelError: the folder is missing or damaged, or the model is of a kind that OasisKV
            cannot serve.
    """
    read_config(path)
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def read_config(path: str | Path) -> PretrainedConfig:
    """Read what stands in a local folder's or hub id's config.json.

    Raises:
        ModelError: as ``read_model``.
    """
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    check_config(config)
    return config


def _unreadable(path: str | Path, error: Exception) -> ModelError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return ModelError(f"cannot load a model from {path}: {lines[0]}")


def wrap_model(model: PreTrainedModel) -> LoadedModel:
    """Take over a loaded model: checks it and sets its attention to OasisKV's.

    Raises:
        ModelError: the model is of a kind that OasisKV cannot serve, or holds a weight that is
            not finite.
    """
    config = model.config
    check_config(config)
    for name, weight in model.named_parameters():
        if not bool(torch.isfinite(weight).all()):
            raise ModelError(f"weight {name} holds NaN or infinity: the model files are damaged")
    register()
    model.set_attn_implementation(ATTENTION_NAME)
    model.eval()
    windows = sliding_windows(config)
    heads = int(config.num_attention_heads)
    geometry = KVGeometry(
        num_layers=windows.count(None),
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        num_query_heads=heads,
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        block_tokens=BLOCK_TOKENS,
        dtype=model.dtype,
    )
    return LoadedModel(
        model=model,
        geometry=geometry,
        sliding_windows=windows,
        max_tokens=int(config.max_position_embeddings),
        eos_tokens=_eos_tokens(model),
    )


def check_config(config: PretrainedConfig) -> None:
    """Refuse, before any weight is read, a model whose KV cache OasisKV cannot split.

    Raises:
        ModelError: names the model type and what stands in the way.
    """
    kind = config.model_type
    if getattr(config, "kv_lora_rank", None):
        raise ModelError(
            f"model type {kind!r} uses multi-latent attention: its cache has no keys and values "
            "per KV head to select from; a model with multi-head or grouped-query attention is "
            "needed"
        )
    state_space = any(hasattr(config, name) for name in ("state_size", "ssm_cfg", "mamba_d_state"))
    kinds = set(getattr(config, "layer_types", None) or ())
    if (
        state_space
        or not getattr(config, "num_attention_heads", None)
        or not kinds <= _ATTENTION_KINDS
    ):
        raise ModelError(
            f"model type {kind!r} has layers without an attention KV cache (state-space, recurrent "
            "or linear attention); every layer must use full or sliding-window attention"
        )
    if config.is_encoder_decoder or hasattr(config, "vision_config"):
        raise ModelError(f"model type {kind!r} is not a text-only decoder, which is needed")
    if all(window is not None for window in sliding_windows(config)):
        raise ModelError(
            f"model type {kind!r}: every layer has a sliding window (sliding_window="
            f"{config.sliding_window}), so no KV cache is left to make sparse"
        )


def sliding_windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    """Sliding window of each layer in tokens, None where attention is full."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window,) * int(config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _eos_tokens(model: PreTrainedModel) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None) or model.config.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])
