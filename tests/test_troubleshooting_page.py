"""docs/troubleshooting.md has a row for each error that a user of the plugin can meet."""

import ast
import re
from pathlib import Path

import oasiskv

SOURCE = Path(oasiskv.__file__).parent
PAGE = Path(__file__).parent.parent / "docs" / "troubleshooting.md"
USERS = {"ConfigError", "StoreFullError", "TransferError"}
"""Errors that a user can do something about; a StateError is a bug."""


def template(node):
    """What an f-string says, with an ellipsis for each value."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
        return "".join(parts)
    return "…"


def messages():
    for path in [*SOURCE.glob("vllm/*.py"), *SOURCE.glob("stores/*.py"), SOURCE / "config.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in USERS:
                yield f"{path.name}:{node.lineno}", template(node.args[0])


def rows():
    return re.findall(r"^\| `(.+?)` \|", PAGE.read_text(), re.MULTILINE)


def test_every_error_has_a_row():
    found = rows()
    missing = [
        (where, said)
        for where, said in messages()
        if said != "…" and not any(row in said for row in found)
    ]
    assert not missing


def test_every_row_is_an_error():
    said = [text for _, text in messages()]
    assert [row for row in rows() if not any(row in text for text in said)] == []
