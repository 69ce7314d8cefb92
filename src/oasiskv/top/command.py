"""The command: a table once, or again and again until Ctrl-C."""

from __future__ import annotations

import time
from datetime import datetime

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from oasiskv.errors import ConfigError
from oasiskv.top.figures import restarted
from oasiskv.top.scrape import ScrapeError, Snapshot, metrics_url, scrape
from oasiskv.top.view import render


class Watch:
    """Looks at one server again and again.

    Args:
        url: of its metrics.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._before: Snapshot | None = None
        self._after: Snapshot | None = None
        self._note = ""

    def look(self) -> RenderableType:
        """Ask the server, and say what it said; of one that is not there, what it said last."""
        try:
            new = scrape(self._url)
        except ScrapeError as error:
            note = f"{error}; asking again"
            if self._after is None:
                return Text(note)
            return render(self._after, None, self._url, f"{note}. This is what it said last.")
        self._before, self._after = self._after, new
        if self._before is not None and restarted(self._before, new):
            self._before = None
            self._note = f"The server has started again, before {datetime.now():%H:%M:%S}."
        return render(new, self._before, self._url, self._note)


def run_top(address: str, interval_s: float, once: bool, console: Console) -> None:
    """Show a server's metrics.

    Args:
        address: of the server.
        interval_s: between two looks.
        once: print one table and end.
        console: where to.

    Raises:
        ConfigError: the address is none, or what is to be updated is no terminal.
        ScrapeError: with ``once``, the server did not say what is needed.
    """
    url = metrics_url(address)
    if once:
        console.print(render(scrape(url), None, url))
        return
    if not console.is_terminal:
        raise ConfigError("standard output is no terminal: --once prints one table and ends")
    watch = Watch(url)
    live = Live(console=console, screen=True, auto_refresh=False)
    try:
        live.start()
        while True:
            live.update(watch.look(), refresh=True)
            time.sleep(interval_s)
    except KeyboardInterrupt:
        # How it is meant to end.
        return
    finally:
        # Not by ``with``, whose end would not come if it were interrupted at its start.
        live.stop()
