"""OasisKV as a model of EleutherAI's lm_eval, under the name ``oasiskv``.

Importing this package registers it, so that
``lm_eval.simple_evaluate(model="oasiskv", model_args=...)`` finds it; ``oasiskv eval harness`` does
the same for lm_eval's command line.
"""

import lm_eval.models  # noqa: F401 - or lm_eval, finding a model registered, adds none of its own
from lm_eval.api.registry import register_model

from oasiskv.evals.harness.model import OasisLM

__all__ = ["OasisLM"]

register_model("oasiskv")(OasisLM)
