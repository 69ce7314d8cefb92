"""Records what a real run wants."""

from collections.abc import Callable

import numpy as np

from oasiskv.config import OasisConfig
from oasiskv.drafts.lookahead import LookaheadMode
from oasiskv.errors import ConfigError
from oasiskv.evals.tasks.base import Question
from oasiskv.hf.engine import Engine, StepRecord
from oasiskv.hf.loading import LoadedModel
from oasiskv.stores.host import HostStore
from oasiskv.trace.builder import TraceBuilder
from oasiskv.trace.format import Trace
from oasiskv.trace.header import Recording


def recording_config(budget_tokens: int, hot_tokens: int, digest: str) -> OasisConfig:
    """Settings of a run that is recorded: one token a step, and the plain top K.

    Hysteresis would make what is wanted depend on the hot set, so that it would not be the same at
    another S; drafts would make it depend on where they come from.

    Raises:
        ConfigError: a size or the digest is not legal.
    """
    return OasisConfig.model_validate(
        {
            "budget_tokens": budget_tokens,
            "hot_tokens": hot_tokens,
            "digest": digest,
            "hysteresis": 1.0,
            "lookahead": LookaheadMode.LAST_ACCEPTED,
        }
    )


def record(
    loaded: LoadedModel,
    question: Question,
    config: OasisConfig,
    model: str,
    on_tokens: Callable[[int], None],
) -> Trace:
    """Decode a question and its answer by teacher forcing, and keep what each step wants.

    Args:
        loaded: the model.
        question: its prompt is prefilled; what it asks and the answer are decoded.
        config: of ``recording_config``.
        model: the model's name.
        on_tokens: called after each step with the tokens computed so far.

    Raises:
        ConfigError: the question has no known answer.
        TraceError: the context is too short to go sparse.
    """
    forced = [*question.question, *question.answer]
    if not forced:
        raise ConfigError(f"task={question.task}: it has no known answer that could be decoded")
    total = len(question.prompt) + len(forced)
    geometry = loaded.geometry
    rows = geometry.num_layers * geometry.num_kv_heads
    engine = Engine(loaded, config, store=HostStore(geometry, geometry.blocks_for(total)))
    builder = TraceBuilder(rows)

    def keep(step: StepRecord) -> None:
        if step.selection is None:
            return
        end = step.request.kv.window_start
        wanted = step.selection.wanted.reshape(rows, -1).cpu().numpy()
        mask = np.zeros((rows, end + 1), dtype=np.bool_)
        # The padding, -1, marks the last place.
        np.put_along_axis(mask, wanted, True, axis=1)
        builder.add(step.request.computed, end, mask[:, :end])

    engine.observer = keep
    request = engine.submit("record", question.prompt, len(forced), forced=forced)
    for output in engine.stream():
        if output.error is not None:
            raise output.error
        on_tokens(request.computed)
    return builder.build(
        layers=geometry.num_layers,
        kv_heads=geometry.num_kv_heads,
        block_tokens=geometry.block_tokens,
        budget_blocks=config.budget_blocks,
        sink_blocks=config.sink_blocks,
        window_blocks=config.window_blocks,
        recording=Recording.of(
            model=model,
            text=question.name,
            context_tokens=total,
            digest=config.digest,
            lookahead=config.lookahead.value,
            drafts="none",
            hysteresis=config.hysteresis,
            hot_blocks=config.hot_blocks,
            cap_blocks=config.cap_blocks,
        ),
    )
