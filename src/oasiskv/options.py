"""Options that several commands share."""

from typing import Annotated

import typer

Device = Annotated[str | None, typer.Option(help="cpu or cuda; default what is there")]
"""Where models run; ``pick_device`` takes it."""
