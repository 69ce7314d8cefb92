"""Batches of requests on the reference engine, one engine kept from batch to batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oasiskv.config import OasisConfig
from oasiskv.drafts.base import DraftSource
from oasiskv.drafts.verify import Sampling
from oasiskv.hf.engine import Engine, StepRecord
from oasiskv.hf.loading import LoadedModel
from oasiskv.hf.prefill import Prefilled
from oasiskv.hf.request import Request
from oasiskv.stores.host import HostStore

_GREEDY = Sampling()


@dataclass(frozen=True)
class Job:
    """One request.

    Args:
        prompt: token ids, at least one.
        new_tokens: most tokens to decode, forced ones included.
        forced: tokens that are decoded whatever the model says.
        sampling: how the others are chosen.
        prefilled: KV of the prompt's first tokens, computed before.
    """

    prompt: Sequence[int]
    new_tokens: int
    forced: Sequence[int] = ()
    sampling: Sampling = _GREEDY
    prefilled: Prefilled | None = None


class Runner:
    """Runs batches with the same settings.

    Without ``host_gib`` the store is as large as the largest batch so far needs: on CUDA it is
    pinned, which takes too long to do for each batch.

    Args:
        loaded: the model.
        config: settings.
        drafts: where lookahead tokens come from.

    Attributes:
        sparse_requests: how many so far had a step that chose among their blocks.
    """

    def __init__(self, loaded: LoadedModel, config: OasisConfig, drafts: DraftSource) -> None:
        self._loaded = loaded
        self._config = config
        self._drafts = drafts
        self._engine: Engine | None = None
        self._store: HostStore | None = None
        self.sparse_requests = 0

    def run(
        self,
        jobs: Sequence[Job],
        observer: Callable[[StepRecord], None] | None = None,
        stop: Callable[[Request], bool] | None = None,
    ) -> list[list[int]]:
        """Decode a batch to its end.

        Args:
            jobs: the batch; the i-th has the request id ``str(i)``.
            observer: as the engine's.
            stop: looked at after each step of a request; True ends it.

        Returns:
            The tokens of each, forced ones included.

        Raises:
            OasisError: a prompt is not legal, or a request failed.
        """
        engine = self._engine_for(jobs)
        engine.observer = observer
        requests: dict[str, Request] = {}
        try:
            for index, job in enumerate(jobs):
                name = str(index)
                requests[name] = engine.submit(
                    name, job.prompt, job.new_tokens, job.sampling, job.forced, job.prefilled
                )
            for output in engine.stream():
                if output.error is not None:
                    raise output.error
                if not output.finished and stop is not None and stop(requests[output.request_id]):
                    engine.abort(output.request_id)
        finally:
            for name in requests:
                engine.abort(name)
        self.sparse_requests += sum(bool(request.stats.traffic) for request in requests.values())
        return [request.output for request in requests.values()]

    def _engine_for(self, jobs: Sequence[Job]) -> Engine:
        """The engine of the last batch if its store is large enough."""
        loaded, config = self._loaded, self._config
        size = loaded.geometry.block_tokens
        blocks = sum(
            min(len(job.prompt) + job.new_tokens, loaded.max_tokens) // size for job in jobs
        )
        if config.mode == "dense" or config.host_gib is not None:
            self._engine = self._engine or Engine(loaded, config, drafts=self._drafts)
        elif self._engine is None or self._store is None or self._store.capacity_blocks < blocks:
            if self._store is not None:
                # Before the next is made: the two together may be more than the machine has.
                self._store.close()
            self._store = HostStore(loaded.geometry, max(1, blocks), config.checksums)
            self._engine = Engine(loaded, config, self._store, self._drafts)
        return self._engine
