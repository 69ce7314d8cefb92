"""``oasiskv serve``: ``vllm serve`` with OasisKV's flags filled in."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from oasiskv.errors import ConfigError
from oasiskv.models.resolve import resolve_model
from oasiskv.vllm import engine_args, platform_of_engines
from oasiskv.vllm.compat import disabled, installed_version
from oasiskv.vllm.flags import add_flags, help_text, take_settings

if TYPE_CHECKING:
    from oasiskv.vllm.command import ServeCommand

_ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
"""What vLLM reads that OasisKV needs."""

_HELP = ("-h", "--help")


def serve(model: str, words: Sequence[str]) -> None:
    """Run vLLM's server in this process until it ends.

    Args:
        model: built-in name, folder or hub id.
        words: OasisKV's settings as flags, and any flags of ``vllm serve``.

    Raises:
        ConfigError: a setting is unknown or not legal, this vLLM is not supported, or a flag of
            vLLM's is given that OasisKV fills in.
        ModelError: there is no such model.
    """
    if any(word in _HELP for word in (model, *words)):
        sys.stdout.write(help_text())
        return
    if model.startswith("-"):
        raise ConfigError(f"{model} stands where MODEL is needed: oasiskv serve MODEL [flags]")
    command = make_command()
    parsed = parse(command, model, words)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    command.run(parsed, [model, *words])


def make_command() -> ServeCommand:
    """The command line of ``vllm serve``, with OasisKV's flags.

    Raises:
        ConfigError: this vLLM is not supported.
    """
    if disabled():
        installed_version()
    else:
        platform_of_engines()
    # Imported late: only now it is known that vLLM is there, and has what we need.
    from oasiskv.vllm.command import ServeCommand

    return ServeCommand(add_flags)


def parse(command: ServeCommand, model: str, words: Sequence[str]) -> Namespace:
    """A command line as ``vllm serve`` is to have it; arguments and errors as of ``serve``.

    What is compared is what vLLM has read, however it was written: abbreviated, with dots, in a
    file of flags.
    """
    parsed = command.parse([model, *words])
    filled = engine_args(**take_settings(parsed))
    if filled:
        filled["async_scheduling"] = False
    # vLLM's parser knows of which type it has each.
    ours = command.parse([model, *_as_words(filled)])
    for name in filled:
        found, wanted = getattr(parsed, name), getattr(ours, name)
        if found not in (command.default(name), wanted):
            raise ConfigError(
                f"--{name.replace('_', '-')} is filled in by oasiskv serve with {_short(wanted)}, "
                f"and {_short(found)} is given: leave it out of the command line and of the file "
                "of flags, or run vllm serve with all of OasisKV's flags"
            )
        setattr(parsed, name, wanted)
    parsed.model_tag = str(resolve_model(model))
    if parsed.model_tag != model and not parsed.served_model_name:
        parsed.served_model_name = [model]
    return parsed


def _as_words(arguments: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            words += [f"--{flag}", text]
    return words


def _short(value: object) -> object:
    """A value as an error shows it: of a KV connector's configuration the connector."""
    return getattr(value, "kv_connector", value)
