"""``oasiskv serve``: ``vllm serve`` with OasisKV's flags filled in."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from oasiskv.config import OasisConfig
from oasiskv.errors import ConfigError
from oasiskv.models.resolve import resolve_model
from oasiskv.vllm import engine_args
from oasiskv.vllm.compat import run_vllm_serve
from oasiskv.vllm.settings import VLLM_HAS

SETTINGS = [name for name in OasisConfig.model_fields if name not in VLLM_HAS]
"""Settings of OasisKV that are flags here, ``--budget-tokens 1024``."""

_ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
"""What vLLM reads that OasisKV needs."""


class Flags(NamedTuple):
    """A command line, taken apart.

    Attributes:
        settings: OasisKV's, by name, values as written.
        rest: vLLM's, as they are.
    """

    settings: dict[str, str]
    rest: list[str]


def split_flags(arguments: Sequence[str]) -> Flags:
    """Tell OasisKV's flags from vLLM's.

    Args:
        arguments: ``--name value`` or ``--name=value`` with dashes or underscores; anything else is
            vLLM's.

    Raises:
        ConfigError: one of OasisKV's has no value.
    """
    settings: dict[str, str] = {}
    rest: list[str] = []
    left = list(arguments)
    while left:
        argument = left.pop(0)
        flag, has_value, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or name not in SETTINGS:
            rest.append(argument)
            continue
        if not has_value:
            if not left:
                raise ConfigError(f"{flag} needs a value, such as {flag} 1024")
            value = left.pop(0)
        settings[name] = value
    return Flags(settings, rest)


def vllm_arguments(model: str, arguments: Sequence[str]) -> list[str]:
    """The command line of ``vllm``, from ``serve`` on.

    Args:
        model: built-in name, folder or hub id.
        arguments: OasisKV's settings as flags, and any flags of ``vllm serve``.

    Raises:
        ConfigError: a setting is unknown or not legal, this vLLM is not supported, or a flag of
            vLLM's is given that OasisKV fills in.
        ModelError: there is no such model.
    """
    settings, rest = split_flags(arguments)
    filled = engine_args(**settings)
    if filled:
        filled["async_scheduling"] = False
    given = {argument.partition("=")[0].replace("_", "-") for argument in rest}
    for name in filled:
        flag = "--" + name.replace("_", "-")
        if given & {flag, flag.replace("--", "--no-", 1)}:
            raise ConfigError(
                f"{flag} is filled in by oasiskv serve: leave it out, or run vllm serve with all "
                "of OasisKV's flags"
            )
    folder = str(resolve_model(model))
    if folder != model and "--served-model-name" not in given:
        rest += ["--served-model-name", model]
    return ["serve", folder, *_as_flags(filled), *rest]


def serve(model: str, arguments: Sequence[str]) -> None:
    """Run vLLM's server in this process until it ends; arguments as of ``vllm_arguments``."""
    command = vllm_arguments(model, arguments)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    run_vllm_serve(command)


def _as_flags(arguments: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            flags += [f"--{flag}", text]
    return flags
