"""``oasiskv eval harness``: lm_eval's command line with OasisKV as the model."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from oasiskv.errors import ConfigError
from oasiskv.hf.loading import pick_device


def run_harness(arguments: Sequence[str]) -> None:
    """Run lm_eval's ``run`` command in this process.

    Args:
        arguments: its own, such as ``--tasks``; ``--model`` and ``--device``, if they are there,
            go before OasisKV's.

    Raises:
        ConfigError: lm_eval is not installed.
        OasisError: a model argument is not legal, or the model cannot be served.
    """
    if find_spec("lm_eval") is None:
        raise ConfigError(
            "oasiskv eval harness needs lm_eval: pip install 'oasiskv[harness]' brings it"
        )
    from lm_eval.__main__ import cli_evaluate

    import oasiskv.evals.harness  # noqa: F401 - registers the model

    filled = ["--model", "oasiskv", "--device", str(pick_device(None))]
    before = sys.argv
    # lm_eval reads its arguments from there and nowhere else.
    sys.argv = ["lm-eval", "run", *filled, *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
