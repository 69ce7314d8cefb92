"""Traces that travel with the package, and finding one by name or path."""

from pathlib import Path

from oasiskv.data import data_path
from oasiskv.errors import TraceError
from oasiskv.trace.format import Trace, read_trace_file

SUFFIX = ".oasistrace"

BUILT_IN = {f"smollm2-{text}": f"forced_{text}" for text in ("prose", "code", "dialogue")}
"""Name -> the task that it was recorded from."""


def read_trace(name_or_path: str | Path) -> Trace:
    """Read a trace; what the file says is checked, it may come from anywhere.

    Args:
        name_or_path: a built-in name, or a file. An existing file goes before a name.

    Raises:
        TraceError: it is neither, or is no trace, a damaged one, or one that is too large.
    """
    path = Path(name_or_path)
    if path.is_file():
        return read_trace_file(path)
    if str(name_or_path) in BUILT_IN:
        return read_trace_file(data_path(f"traces/{name_or_path}{SUFFIX}"))
    raise TraceError(
        f"{str(name_or_path)!r} is neither a file nor a built-in trace; built-in traces: "
        f"{', '.join(BUILT_IN)}"
    )
