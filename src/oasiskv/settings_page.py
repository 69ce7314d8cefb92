"""The settings page of the docs, made from ``OasisConfig``: ``python -m oasiskv.settings_page``."""

import sys

from pydantic.fields import FieldInfo

from oasiskv.config import BLOCK_TOKENS, OasisConfig
from oasiskv.setting_types import bounds_of, choices_of, default_of, type_of

HEAD = f"""# Settings

<!-- Made by `python -m oasiskv.settings_page > docs/settings.md`; change src/oasiskv/config.py. -->

All of `OasisConfig`. Unknown settings are refused. `sink_tokens` (0 or more), `window_tokens`,
`budget_tokens` and `hot_tokens` (at least the budget) are multiples of the block, {BLOCK_TOKENS}
tokens. The reference engine takes them all but `mode` `under_pressure`. The [vLLM plugin](vllm.md)
needs `host_gib` and does not take `mode` `dense`, `draft_tokens` and `prefill_tokens`, for which
vLLM has settings of its own.

`oasiskv serve` takes each as a flag: `--hot-tokens 3072`, a choice by its name, None as `none`, a
bool as `--checksums` or `--no-checksums`. A file of flags in YAML (vLLM's `--config FILE.yaml`)
takes the same names: `hot-tokens: 3072`, None as `null`, a bool as `true` or `false`. `vllm serve`
takes them in the JSON of `kv_connector_extra_config`: `"hot_tokens": 3072`, None as `null`.

| setting | type | default | legal | what it is |
| --- | --- | --- | --- | --- |
"""


def settings_page() -> str:
    """The page as Markdown: one row per setting, in the order of ``OasisConfig``."""
    rows = (_row(name, field) for name, field in OasisConfig.model_fields.items())
    return HEAD + "".join(rows)


def _row(name: str, field: FieldInfo) -> str:
    legal = ", ".join([f"`{choice}`" for choice in choices_of(field)] or bounds_of(field))
    text = (field.description or "").replace("|", "\\|")
    return f"| `{name}` | {type_of(field)} | `{default_of(field)}` | {legal} | {text} |\n"


if __name__ == "__main__":
    sys.stdout.write(settings_page())
