"""Options that several commands share."""

from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

Number = TypeVar("Number", int, float)

NONE = ("none", "null")
"""What stands for None on a command line, in any case."""

Device = Annotated[str | None, typer.Option(help="cpu or cuda; default what is there")]
"""Where models run; ``pick_device`` takes it."""


def or_none(kind: type[Number]) -> Callable[[str], Number | None]:
    """What reads an option that is a number, or None."""

    def read(text: str) -> Number | None:
        return None if is_none(text) else kind(text)

    return read


def is_none(text: str) -> bool:
    """Whether a word of a command line stands for None; of a YAML file it arrives as ``None``."""
    return str(text).lower() in NONE
