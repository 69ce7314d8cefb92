"""The settings page of the docs, made from ``OasisConfig``: ``python -m oasiskv.settings_page``."""

import sys
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from oasiskv.config import BLOCK_TOKENS, OasisConfig

HEAD = f"""# Settings

<!-- Made by `python -m oasiskv.settings_page > docs/settings.md`; change src/oasiskv/config.py. -->

All of `OasisConfig`. Unknown settings are refused. `sink_tokens` (0 or more), `window_tokens`,
`budget_tokens` and `hot_tokens` (at least the budget) are multiples of the block, {BLOCK_TOKENS}
tokens. The reference engine takes them all but `mode` `under_pressure`. The [vLLM plugin](vllm.md)
needs `host_gib` and does not take `mode` `dense`, `draft_tokens` and `prefill_tokens`, for which
vLLM has settings of its own.

| setting | type | default | legal | what it is |
| --- | --- | --- | --- | --- |
"""
SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def settings_page() -> str:
    """The page as Markdown: one row per setting, in the order of ``OasisConfig``."""
    rows = (_row(name, field) for name, field in OasisConfig.model_fields.items())
    return HEAD + "".join(rows)


def _row(name: str, field: FieldInfo) -> str:
    kind, choices = _kind(field.annotation)
    default = field.default.value if isinstance(field.default, Enum) else field.default
    bounds = ", ".join(
        f"{sign} {getattr(rule, rule_name)}"
        for rule in field.metadata
        for rule_name, sign in SIGNS.items()
        if hasattr(rule, rule_name)
    )
    text = (field.description or "").replace("|", "\\|")
    return f"| `{name}` | {kind} | `{default}` | {choices or bounds} | {text} |\n"


def _kind(annotation: Any) -> tuple[str, str]:  # noqa: ANN401 - a type, or a form of typing
    """Name of a type, and its choices where it has a few."""
    if get_origin(annotation) is Literal:
        return "choice", ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        inner = [part for part in get_args(annotation) if part is not NoneType]
        kinds = " or ".join(_kind(part)[0] for part in inner)
        return f"{kinds} or None", ""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "choice", ", ".join(f"`{member.value}`" for member in annotation)
    return annotation.__name__, ""


if __name__ == "__main__":
    sys.stdout.write(settings_page())
