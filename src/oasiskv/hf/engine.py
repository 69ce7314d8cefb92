"""The reference engine: any causal model of transformers, decoding with OasisKV."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import torch

from oasiskv.config import OasisConfig
from oasiskv.core.selection import Selection
from oasiskv.core.tiering import LATEST_QUERIES, Tiering
from oasiskv.drafts.base import DraftSource, NoDrafts
from oasiskv.drafts.lookahead import LookaheadMode, lookahead_row, split_drafts
from oasiskv.drafts.verify import Sampling, accept_known, verify
from oasiskv.errors import ConfigError, OasisError, PromptError, StoreFullError, TransferError
from oasiskv.hf.admission import check_prompt, check_sparse_size, check_store, make_request
from oasiskv.hf.batch import Segment, StepBatch
from oasiskv.hf.loading import LoadedModel
from oasiskv.hf.request import Phase, Request
from oasiskv.stores.base import Store
from oasiskv.stores.host import HostStore

if TYPE_CHECKING:
    from oasiskv.hf.prefill import Prefilled


@dataclass(frozen=True)
class StepOutput:
    """What one step gave a request.

    Args:
        request_id: the request.
        tokens: new tokens, in order.
        finished: the request has ended; with ``error`` if it failed.
        error: why it failed.
    """

    request_id: str
    tokens: list[int]
    finished: bool
    error: OasisError | None = None


@dataclass(frozen=True)
class StepRecord:
    """What an observer sees of one request after each of its decode steps.

    Args:
        request: the request, to be read only.
        step: number of the step.
        logits: ``[1 + verified drafts, vocabulary]`` float32 on the CPU.
        accepted: tokens that the step gained.
        selection: what the next step wants; None while dense or without candidates.
    """

    request: Request
    step: int
    logits: torch.Tensor
    accepted: list[int]
    selection: Selection | None


class Engine:
    """Runs requests of different lengths in one batch, prefill and decode mixed.

    Args:
        loaded: the model.
        config: settings.
        store: where closed blocks go; None: a host store of ``config.host_gib``. In mode
            ``dense`` none is used.
        drafts: where lookahead tokens come from.
        agreement_every: measure prediction agreement every so many sparse steps; 0: never.

    Attributes:
        before_step: called with the engine before each step, when all transfers of the step
            before are complete; tests disturb the hot set here.
        observer: called with a ``StepRecord`` after each decode step of each request.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: OasisConfig,
        store: Store | None = None,
        drafts: DraftSource | None = None,
        agreement_every: int = 0,
    ) -> None:
        self.loaded = loaded
        self.config = config
        self.drafts = drafts or NoDrafts()
        self.requests: dict[str, Request] = {}
        self.before_step: Callable[[Engine], None] | None = None
        self.observer: Callable[[StepRecord], None] | None = None
        self.step_number = 0
        self.tiering: Tiering | None = None
        if config.mode == "under_pressure":
            raise ConfigError(
                "mode=under_pressure is not legal in the reference engine: it must be 'always' or "
                "'dense'"
            )
        if config.mode != "dense":
            if store is None:
                if config.host_gib is None:
                    raise OasisError("an engine needs a store, or host_gib to make one")
                store = HostStore.of_size(loaded.geometry, config.host_gib, config.checksums)
            self.tiering = Tiering(loaded.geometry, config, store, loaded.device, agreement_every)
        self._generations = count()
        self._failed: list[Request] = []

    @property
    def running(self) -> list[Request]:
        """Requests that are not ended, oldest first."""
        return [request for request in self.requests.values() if request.phase.running]

    @property
    def fast_tier_kv_bytes(self) -> int:
        """KV bytes of full-attention layers in the fast tier, from their storages."""
        return sum(request.kv.nbytes for request in self.running)

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        forced: Sequence[int] = (),
        prefilled: "Prefilled | None" = None,
    ) -> Request:
        """Take in a request; ``step`` computes it.

        Args:
            request_id: a name that no running request has.
            prompt: token ids, at least one.
            max_new_tokens: most tokens to decode, forced ones included; at least 1. Decoding also
                ends at an end-of-sequence token and at the model's longest sequence.
            sampling: how tokens are chosen; greedy by default.
            forced: token ids to decode instead of sampled ones, first.
            prefilled: KV of the prompt's first tokens, computed before.

        Raises:
            PromptError: the prompt is empty, too long, not made of the model's tokens, or not
                what was prefilled.
            StoreFullError: the store could not hold the request even alone.
        """
        if request_id in self.requests and self.requests[request_id].phase.running:
            raise PromptError(f"request id {request_id!r} is in use by a running request")
        check_prompt(self.loaded, prompt, max_new_tokens, forced)
        if self.tiering is not None:
            check_store(self.loaded, self.tiering.store, request_id, len(prompt) + max_new_tokens)
        check_sparse_size(self.loaded, self.config, len(prompt) + max_new_tokens)
        request = make_request(
            self.loaded,
            self.config,
            request_id,
            next(self._generations),
            prompt,
            max_new_tokens,
            sampling or Sampling(),
            forced,
        )
        if prefilled is not None:
            if request.prompt[: len(prefilled.tokens)] != prefilled.tokens:
                raise PromptError("the prompt does not begin with the tokens that were prefilled")
            request.kv.load(prefilled.layers, len(prefilled.tokens))
            request.computed = len(prefilled.tokens)
        self.requests[request_id] = request
        return request

    def abort(self, request_id: str) -> None:
        """End a request; does nothing for one that has ended or is unknown."""
        request = self.requests.get(request_id)
        if request is not None and request.phase.running:
            self._end(request, Phase.ABORTED)

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Greedy outputs of several prompts, decoded together.

        Raises:
            OasisError: a request failed.
        """
        ids = [f"generate-{index}" for index in range(len(prompts))]
        requests = [
            self.submit(name, prompt, max_new_tokens)
            for name, prompt in zip(ids, prompts, strict=True)
        ]
        self.run()
        return [request.output for request in requests]

    def run(self) -> None:
        """Run steps until no request is left.

        Raises:
            OasisError: a request failed; those that run are left where they are.
        """
        for output in self.stream():
            if output.error is not None:
                raise output.error

    def stream(self) -> Iterator[StepOutput]:
        """Run steps until no request is left, and yield what they give."""
        while self.running:
            yield from self.step()

    @torch.no_grad()
    def step(self) -> list[StepOutput]:
        """One forward of the target model over all running requests."""
        self.step_number += 1
        self._settle()
        if self.before_step is not None:
            self.before_step(self)
            self._settle()
        segments = [self._segment(request) for request in self.running]
        outputs: list[StepOutput] = []
        if segments:
            for segment, logits in zip(segments, self._forward(segments), strict=True):
                if segment.request.phase.running:
                    outputs.extend(self._finish_segment(segment, logits))
        outputs.extend(StepOutput(r.request_id, [], True, r.error) for r in self._failed)
        self._failed = []
        return outputs

    def _segment(self, request: Request) -> Segment:
        start = request.computed
        if request.phase is Phase.PREFILL:
            tokens = request.prompt[start : start + self.config.prefill_tokens]
            end = start + len(tokens)
            keep = max(0, end - max(start, len(request.prompt) - LATEST_QUERIES))
            return Segment(request, start, tokens, [], keep if self.tiering else 0, [])
        room = min(
            1 if self.config.lookahead is LookaheadMode.PAPER else self.config.draft_tokens,
            request.max_new_tokens - len(request.output),
            self.loaded.max_tokens - start - 1,
        )
        drafts = self.drafts.propose(request.request_id, request.tokens, room)
        tokens = [request.tokens[-1], *drafts]
        return Segment(request, start, tokens, drafts, len(tokens) if self.tiering else 0, [])

    def _forward(self, segments: list[Segment]) -> Iterable[torch.Tensor]:
        """Logits of each segment: of all rows in decode, of the last one at the prompt's end."""
        device = self.loaded.device
        tokens = [token for segment in segments for token in segment.tokens]
        positions = [p for segment in segments for p in range(segment.start, segment.end)]
        rows: list[int] = []
        counts = []
        offset = 0
        for segment in segments:
            size = len(segment.tokens)
            wanted = size
            if segment.is_prefill:
                wanted = int(segment.end == len(segment.request.prompt))
            rows.extend(range(offset + size - wanted, offset + size))
            counts.append(wanted)
            offset += size
        logits = self.loaded.model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            logits_to_keep=torch.tensor(rows, dtype=torch.int64, device=device),
            oasis_batch=StepBatch(segments, self.loaded.sliding_windows, self.step_number),
        ).logits[0]
        return torch.split(logits.float().cpu(), counts)

    def _finish_segment(self, segment: Segment, logits: torch.Tensor) -> list[StepOutput]:
        request = segment.request
        if segment.is_prefill:
            request.computed = segment.end
            accepted = self._choose(request, logits, []) if len(logits) else []
        else:
            accepted = self._choose(request, logits, segment.drafts)
            request.computed += len(accepted)
            request.stats.accepted.append(len(accepted))
        selection = None
        if self.tiering is not None:
            try:
                selection = self._tier(self.tiering, segment, accepted)
            except TransferError as error:
                self._fail(request, error)
            if not request.phase.running:
                return []
        if accepted and request.phase is Phase.PREFILL:
            request.phase = Phase.DENSE
        if self.observer is not None and accepted:
            kept = logits[: 1 + len(split_drafts(segment.drafts, self.config.lookahead)[0])]
            self.observer(StepRecord(request, self.step_number, kept, accepted, selection))
        return self._emit(request, accepted) if accepted else []

    def _tier(self, tiering: Tiering, segment: Segment, accepted: list[int]) -> Selection | None:
        """Everything between two forwards that moves KV."""
        request, step = segment.request, self.step_number
        self._close_blocks(tiering, request)
        if not request.phase.running or not segment.keep:
            return None
        queries = segment.kept_queries()
        row = 0
        if request.phase is Phase.SPARSE:
            row = lookahead_row(self.config.lookahead, segment.drafts, accepted)
        elif not segment.is_prefill:
            queries = queries[:, : len(accepted)]
        due = bool(accepted) and request.computed > self.config.resolved_threshold_tokens
        selection = tiering.after_step(request, queries, row, due, step)
        if request.residents is not None:
            request.phase = Phase.SPARSE
        return selection

    def _choose(self, request: Request, logits: torch.Tensor, drafts: list[int]) -> list[int]:
        """Tokens that this step gains."""
        verified, _ = split_drafts(drafts, self.config.lookahead)
        forced = request.forced[len(request.output) :]
        if forced:
            return accept_known(verified, forced)
        return verify(logits[: len(verified) + 1], verified, request.sampling, request.generator)

    def _emit(self, request: Request, accepted: list[int]) -> list[StepOutput]:
        """Add new tokens to the output, up to an end."""
        new: list[int] = []
        finished = False
        for token in accepted:
            new.append(token)
            forced = len(request.output) + len(new) <= len(request.forced)
            full = len(request.output) + len(new) == request.max_new_tokens
            if full or (token in self.loaded.eos_tokens and not forced):
                finished = True
                break
        request.output.extend(new)
        if finished:
            self._end(request, Phase.FINISHED)
        return [StepOutput(request.request_id, new, finished)]

    def _settle(self) -> None:
        if self.tiering is None:
            return
        self.tiering.collect()
        for request in self.running:
            if request.pipeline is not None:
                try:
                    self.tiering.settle(request, request.pipeline)
                except TransferError as error:
                    self._fail(request, error)

    def _close_blocks(self, tiering: Tiering, request: Request) -> None:
        """Close blocks; while the store is full, the newest request has to go."""
        while request.phase.running:
            try:
                tiering.close_blocks(request, self.step_number)
            except StoreFullError as error:
                newest = max(self.running, key=lambda other: other.generation)
                self._fail(newest, error)
                tiering.drain(newest)
            else:
                return

    def _fail(self, request: Request, error: OasisError) -> None:
        if not request.phase.running:
            return
        request.error = error
        self._end(request, Phase.FAILED)
        self._failed.append(request)

    def _end(self, request: Request, phase: Phase) -> None:
        request.phase = phase
        request.ended = True
        request.stats.final_kv_bytes = request.kv.nbytes
        self.drafts.finish(request.request_id)
        if self.tiering is not None:
            self.tiering.release(request)
        else:
            request.kv.drop()
