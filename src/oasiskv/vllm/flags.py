"""OasisKV's settings as flags of a command line, made from the fields of ``OasisConfig``."""

from __future__ import annotations

from argparse import (
    SUPPRESS,
    ArgumentParser,
    BooleanOptionalAction,
    Namespace,
    RawDescriptionHelpFormatter,
)
from typing import Any

from pydantic.fields import FieldInfo

from oasiskv.config import OasisConfig
from oasiskv.options import NONE, is_none
from oasiskv.setting_types import (
    bounds_of,
    choices_of,
    default_of,
    is_switch,
    may_be_none,
    type_of,
)
from oasiskv.vllm.settings import VLLM_HAS

FLAGS = {f"oasiskv_{name}": name for name in OasisConfig.model_fields if name not in VLLM_HAS}
"""Attribute of a parsed command line -> setting. vLLM has attributes of its own beside them."""

GROUP = "OasisKV"

_EPILOG = f"""\
Every other flag is vLLM's: oasiskv serve MODEL --help=all lists all, --help=GROUP or --help=WORD
some (--help={GROUP}: these). All may stand in a file: --config FILE.yaml."""


def add_flags(parser: ArgumentParser) -> None:
    """Give a parser a flag for each setting; only those that are given become attributes.

    Values are text, for ``OasisConfig`` to read and to refuse.
    """
    group = parser.add_argument_group(GROUP, "Settings of OasisKV.")
    for attribute, name in FLAGS.items():
        field = OasisConfig.model_fields[name]
        how: dict[str, Any] = {"dest": attribute, "default": SUPPRESS, "help": _help(field)}
        if is_switch(field):
            how["action"] = BooleanOptionalAction
        else:
            how["metavar"] = type_of(field).split()[0].upper()
        if may_be_none(field):
            how["type"] = _none_or_text
        group.add_argument("--" + name.replace("_", "-"), **how)


def take_settings(parsed: Namespace) -> dict[str, Any]:
    """Take OasisKV's settings out of a parsed command line.

    Returns:
        Those that were given, by name, values as written.
    """
    given = [attribute for attribute in FLAGS if hasattr(parsed, attribute)]
    return {FLAGS[attribute]: vars(parsed).pop(attribute) for attribute in given}


def help_text() -> str:
    """What ``oasiskv serve MODEL --help`` prints; vLLM need not be installed."""
    parser = ArgumentParser(
        prog="oasiskv serve MODEL",
        description="vLLM's OpenAI server with OasisKV. MODEL is a built-in name, a folder or a "
        "hub id. --host-gib is needed.",
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
        usage="oasiskv serve MODEL --host-gib GIB [flags of OasisKV and of vLLM]",
    )
    add_flags(parser)
    return parser.format_help()


def _none_or_text(text: str) -> str | None:
    return None if is_none(text) else text


def _help(field: FieldInfo) -> str:
    legal = [*choices_of(field), *bounds_of(field), *(NONE[:1] if may_be_none(field) else ())]
    ends = [f"legal: {', '.join(legal)}"] if legal else []
    text = f"{field.description} ({'; '.join([*ends, f'default: {default_of(field)}'])})"
    # The parser has a use of its own for percent signs.
    return text.replace("%", "%%")
