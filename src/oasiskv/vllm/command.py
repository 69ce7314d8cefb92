"""``vllm serve`` in this process, with flags of ours beside vLLM's, all read by vLLM's parser."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from vllm.entrypoints.cli import serve
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser

from oasiskv.errors import ConfigError

_NEGATIVE = re.compile(r"-\d*\.\d+")


class _Parser(FlexibleArgumentParser):
    """vLLM's parser, which says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (oasiskv serve MODEL --help and --help=all list the flags)")


class ServeCommand:
    """The command line of ``vllm serve``.

    vLLM's own ``main`` asks for the version of a distribution named vllm.

    Args:
        add_flags: adds flags to a parser.
    """

    def __init__(self, add_flags: Callable[[ArgumentParser], None]) -> None:
        self._parser = _Parser(prog="vllm")
        commands = self._parser.add_subparsers(required=True, dest="subparser")
        [self._command] = serve.cmd_init()
        self._flags = self._command.subparser_init(commands)
        add_flags(self._flags)

    def parse(self, words: Sequence[str]) -> Namespace:
        """Read a command line, and the file of flags that it names.

        Args:
            words: what comes after ``serve``, the model first.

        Raises:
            ConfigError: it cannot be read.
        """
        parsed: Namespace = self._parser.parse_args(["serve", *_joined(words)])
        return parsed

    def default(self, attribute: str) -> Any:  # noqa: ANN401 - any flag's
        """What an attribute of a parsed command line is where nothing gives it."""
        return self._flags.get_default(attribute)

    def run(self, parsed: Namespace, words: Sequence[str]) -> None:
        """Serve until it ends.

        Args:
            parsed: the command line as it is to be.
            words: as they were written; parts of vLLM look for some in ``sys.argv``.
        """
        cli_env_setup()
        sys.argv = ["vllm", "serve", *words]
        self._command.validate(parsed)
        self._command.cmd(parsed)


def _joined(words: Sequence[str]) -> list[str]:
    """The words; ``--flag -0.5`` as one, whose number vLLM would take for a flag with a dot."""
    joined: list[str] = []
    for word in words:
        last = joined[-1] if joined else ""
        if _NEGATIVE.fullmatch(word) and last.startswith("--") and "=" not in last:
            joined[-1] = f"{last}={word}"
        else:
            joined.append(word)
    return joined
