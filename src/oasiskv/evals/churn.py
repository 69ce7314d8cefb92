"""How much of the budget is fetched per step on real text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

from oasiskv.config import OasisConfig
from oasiskv.drafts.lookahead import LookaheadMode
from oasiskv.drafts.oracle import OracleDrafts
from oasiskv.hf.engine import Engine
from oasiskv.hf.loading import LoadedModel
from oasiskv.hf.prefill import prefill
from oasiskv.stores.host import HostStore


@dataclass(frozen=True)
class Churn:
    """Missing blocks per step, as a share of the budget, over layers and KV heads.

    Args:
        hysteresis: factor on the score of resident blocks.
        hot_tokens: S.
        per_text: mean over the steps of each text.
        worst_step: the largest share of any one step.
    """

    hysteresis: float
    hot_tokens: int
    per_text: list[float]
    worst_step: float


def run(
    loaded: LoadedModel,
    texts: Sequence[Sequence[int]],
    prefill_tokens: int,
    config: OasisConfig,
    arms: Sequence[tuple[float, int]],
    on_run: Callable[[], None],
) -> list[Churn]:
    """Decode real text by teacher forcing, the next token always being the right draft.

    Args:
        loaded: the model.
        texts: token ids; what follows ``prefill_tokens`` is decoded.
        prefill_tokens: tokens of each text that are prefilled.
        config: everything but hysteresis and hot set.
        arms: pairs (hysteresis, hot_tokens) to compare on the same prefill.
        on_run: called after each text and arm.
    """
    shares: list[list[list[float]]] = [[] for _ in arms]
    for text in texts:
        prompt, forced = list(text[:prefill_tokens]), list(text[prefill_tokens:])
        shared = prefill(loaded, prompt)
        for index, (hysteresis, hot_tokens) in enumerate(arms):
            arm = config.model_copy(
                update={
                    "hysteresis": hysteresis,
                    "hot_tokens": hot_tokens,
                    "cap_fraction": None,
                    "lookahead": LookaheadMode.HELD_BACK,
                    "draft_tokens": 1,
                }
            )
            store = HostStore(loaded.geometry, loaded.geometry.blocks_for(len(text)))
            drafts = OracleDrafts({"churn": forced}, {"churn": prefill_tokens})
            engine = Engine(loaded, arm, store=store, drafts=drafts)
            request = engine.submit("churn", prompt, len(forced), forced=forced, prefilled=shared)
            engine.run()
            shares[index].append(
                [float(s.misses.sum()) / s.wanted for s in request.stats.traffic if s.wanted]
            )
            on_run()
    return [
        Churn(hysteresis, hot_tokens, [mean(steps) for steps in arm], max(map(max, arm)))
        for (hysteresis, hot_tokens), arm in zip(arms, shares, strict=True)
    ]
