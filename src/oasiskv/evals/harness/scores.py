"""Log-likelihoods of known tokens: decoded, whatever the model would say, as OasisKV decodes."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from oasiskv.config import OasisConfig
from oasiskv.core.tiering import LATEST_QUERIES
from oasiskv.drafts.lookahead import LookaheadMode
from oasiskv.drafts.oracle import OracleDrafts
from oasiskv.errors import ModelError, PromptError
from oasiskv.evals.harness.runner import Job, Runner
from oasiskv.hf.engine import StepRecord
from oasiskv.hf.loading import LoadedModel
from oasiskv.hf.prefill import Prefilled, prefill

Pair = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context and of its continuation, each at least one."""

Score = tuple[float, bool]
"""Log-probability of a continuation, in nats, and whether it is the greedy one."""

# Right drafts cost nothing where nothing is fetched: so many known tokens go into one step.
_DENSE_STEP_TOKENS = 64


class Scorer:
    """Scores continuations.

    The context is prefilled, dense as always, and once where pairs share it. Its last token
    predicts the continuation's first. The others are decoded step by step, sparsely past the
    threshold, as outputs are.

    Args:
        loaded: the model.
        config: settings.
        runner: decodes with them.
        batch_size: most pairs computed together.
    """

    def __init__(
        self, loaded: LoadedModel, config: OasisConfig, runner: Runner, batch_size: int
    ) -> None:
        self._loaded = loaded
        self._config = config
        self._batch_size = batch_size
        self._known: dict[str, Sequence[int]] = {}
        self._known_from: dict[str, int] = {}
        dense = config.model_copy(
            update={
                "mode": "dense",
                "draft_tokens": _DENSE_STEP_TOKENS,
                "lookahead": LookaheadMode.LAST_ACCEPTED,
            }
        )
        self._dense = Runner(loaded, dense, OracleDrafts(self._known, self._known_from))
        # The same numbers as step by step, in fewer steps.
        self._decode = self._dense if config.mode == "dense" else runner

    def continuations(self, pairs: Sequence[Pair], done: Callable[[int], object]) -> list[Score]:
        """Score continuations of contexts that may be shared.

        Args:
            pairs: contexts and continuations.
            done: called after each batch with the number of its pairs.

        Raises:
            OasisError: a pair is not legal, or a request failed.
        """
        if not all(continuation for _, continuation in pairs):
            raise PromptError("a continuation has no tokens: at least one is needed to score it")
        return self._run(self._decode, pairs, done)

    def texts(self, pairs: Sequence[Pair]) -> list[Score]:
        """Score texts, each after the one token, or few, that it is given as its context.

        As far as decoding would be dense they are computed in few steps; the rest is decoded.
        Errors are those of ``continuations``.
        """
        heads: list[Pair] = []
        tails: list[Pair] = []
        for context, text in pairs:
            cut = len(text)
            if self._config.mode != "dense":
                cut = max(0, self._config.resolved_threshold_tokens - len(context))
            heads.append((context, text[:cut]))
            tails.append(([*context, *text[:cut]], text[cut:]))
        dense = self._run(self._dense, heads)
        rest = self._run(self._decode, tails)
        return [(a[0] + b[0], a[1] and b[1]) for a, b in zip(dense, rest, strict=True)]

    def _run(
        self,
        runner: Runner,
        pairs: Sequence[Pair],
        done: Callable[[int], object] = lambda _: None,
    ) -> list[Score]:
        """Score all pairs; an empty continuation is certain."""
        scores: list[Score] = [(0.0, True)] * len(pairs)
        contexts = [tuple(context) for context, _ in pairs]
        uses = Counter(contexts)
        # The longest first, which sizes the store; equal ones together, which share a prefill.
        order = sorted(
            (index for index, (_, continuation) in enumerate(pairs) if continuation),
            key=lambda index: (-len(contexts[index]), contexts[index]),
        )
        prefilled: Prefilled | None = None
        for start in range(0, len(order), self._batch_size):
            batch = order[start : start + self._batch_size]
            jobs = []
            for name, index in enumerate(batch):
                context, continuation = pairs[index]
                shared = uses[contexts[index]] > 1
                prefilled = self._prefilled(context, prefilled) if shared else None
                jobs.append(Job(context, len(continuation), continuation, prefilled=prefilled))
                self._known[str(name)] = continuation
                self._known_from[str(name)] = len(context)
            runner.run(jobs, observer=_Adder(scores, batch))
            done(len(batch))
        return scores

    def _prefilled(self, context: Sequence[int], last: Prefilled | None) -> Prefilled | None:
        """A prefill to share: the last one where it fits, None where none can be shared."""
        loaded = self._loaded
        if len(context) <= LATEST_QUERIES or any(w is not None for w in loaded.sliding_windows):
            return None
        if last is not None and last.tokens == list(context[:-LATEST_QUERIES]):
            return last
        return prefill(loaded, context, self._config.prefill_tokens)


class _Adder:
    """Adds what each step says of the tokens it gained to the scores of a batch.

    Args:
        scores: of all pairs; written to.
        batch: index of each request's pair.
    """

    def __init__(self, scores: list[Score], batch: Sequence[int]) -> None:
        self._scores = scores
        self._batch = batch

    def __call__(self, record: StepRecord) -> None:
        tokens = torch.tensor(record.accepted)
        logits = record.logits[: len(tokens)]
        gained = logits.double().log_softmax(dim=-1).gather(1, tokens[:, None]).sum()
        if not bool(torch.isfinite(gained)):
            raise ModelError(
                "a log-probability is NaN or infinite: look at the weights and at dtype (float16 "
                "may overflow)"
            )
        index = self._batch[int(record.request.request_id)]
        total, greedy = self._scores[index]
        right = bool((logits.argmax(dim=-1) == tokens).all())
        self._scores[index] = (total + float(gained), greedy and right)
