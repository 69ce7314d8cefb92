"""What a user gives as lm_eval's ``model_args`` and ``gen_kwargs``, checked."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

from oasiskv.config import OasisConfig
from oasiskv.drafts.verify import Sampling
from oasiskv.errors import ConfigError

Choice = TypeVar("Choice", bound=StrEnum)

# What lm_eval's tasks and transformers name and what, at this value, changes nothing.
_NEUTRAL = {"num_beams": 1, "repetition_penalty": 1.0, "top_k": 0, "min_p": 0.0}
# Which of these only narrow what is sampled from: nothing to greedy decoding.
_SAMPLING_ONLY = ("top_k", "min_p")


def settings_of(given: Mapping[str, Any], others: Iterable[str]) -> OasisConfig:
    """OasisKV's settings among the model arguments.

    Args:
        given: what is no argument of the model's own.
        others: names of those, for the error.

    Raises:
        ConfigError: a name is unknown, or a value not legal.
    """
    unknown = sorted(given.keys() - OasisConfig.model_fields.keys())
    if unknown:
        known = ", ".join([*others, *sorted(OasisConfig.model_fields)])
        raise ConfigError(
            f"unknown model argument {unknown[0]}={given[unknown[0]]!r}; known in model_args: "
            f"{known}"
        )
    config = OasisConfig(**given)
    if config.mode == "under_pressure":
        raise ConfigError("mode=under_pressure is vLLM's: it must be 'always' or 'dense'")
    return config


def one_of(choices: type[Choice], name: str, value: str) -> Choice:
    """A choice by its name.

    Raises:
        ConfigError: there is none of this name.
    """
    try:
        return choices(value)
    except ValueError:
        legal = ", ".join(choices)
        raise ConfigError(f"{name}={value!r} is not legal: it must be one of {legal}") from None


def batch_of(value: object) -> int:
    """Requests that are computed together.

    Raises:
        ConfigError: not a number from 1 on; lm_eval's ``auto`` is not supported.
    """
    try:
        size = int(str(value))
    except ValueError:
        size = 0
    if size < 1:
        raise ConfigError(
            f"batch_size={value!r} is not legal: the number of requests to compute together is "
            "needed, 1 or more; there is no auto"
        )
    return size


def sampling_of(given: Mapping[str, Any], seed: int) -> Sampling:
    """How a task wants its tokens chosen.

    Args:
        given: its ``gen_kwargs`` as lm_eval normalizes them, without ``until`` and lengths.
        seed: for what is sampled.

    Raises:
        ConfigError: a key is not supported, or a value not legal.
    """
    left = dict(given)
    temperature = float(left.pop("temperature", 0.0))
    if not left.pop("do_sample", False):
        temperature = 0.0
    top_p = float(left.pop("top_p", 1.0))
    sampling = Sampling() if temperature == 0 else Sampling(temperature, top_p, seed)
    for name, neutral in _NEUTRAL.items():
        if left.get(name) == neutral or (sampling.greedy and name in _SAMPLING_ONLY):
            left.pop(name, None)
    if left:
        found = ", ".join(f"{name}={value!r}" for name, value in left.items())
        raise ConfigError(
            f"gen_kwargs {found} not supported by the reference engine: it takes until, "
            "max_gen_toks, do_sample, temperature and top_p; set the others by --gen_kwargs to "
            "what changes nothing, or leave the task out"
        )
    return sampling
