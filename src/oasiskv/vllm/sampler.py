"""Holding drafts back from vLLM's rejection sampler, so that they only look ahead."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from oasiskv.drafts.lookahead import LookaheadMode, split_drafts

if TYPE_CHECKING:
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


class HeldBackSampler:
    """Stands in for a runner's rejection sampler, which never sees the drafts held back.

    The position of the first draft held back becomes the bonus position: its token is an ordinary
    sample of the target, so that output keeps the target's distribution.

    Args:
        sampler: vLLM's own, which does the work.
        mode: ``held_back`` holds back the last draft of each request, ``paper`` all of them.
    """

    def __init__(self, sampler: RejectionSampler, mode: LookaheadMode) -> None:
        self._sampler = sampler
        self._mode = mode

    def __call__(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Sample as vLLM's rejection sampler does, without the drafts held back."""
        kept = [len(split_drafts(range(n), self._mode)[0]) for n in metadata.num_draft_tokens]
        seen, keep = hold_back(metadata, kept)
        spec = sampling_metadata.spec_token_ids
        if spec:
            # vLLM's list may be longer than the batch; what is past it is not read.
            trimmed = [ids[:n] for ids, n in zip(spec, kept, strict=False)] + spec[len(kept) :]
            sampling_metadata = replace(sampling_metadata, spec_token_ids=trimmed)
        if not seen.max_spec_len:
            return self._sampler.sampler(
                logits=logits[seen.bonus_logits_indices], sampling_metadata=sampling_metadata
            )
        probs = None if draft_probs is None else draft_probs[keep]
        return self._sampler(seen, probs, logits, sampling_metadata)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the runner asks for
        return getattr(self._sampler, name)


def hold_back(
    metadata: SpecDecodeMetadata, kept: list[int]
) -> tuple[SpecDecodeMetadata, torch.Tensor]:
    """Metadata of a step in which each request has only its first ``kept`` drafts.

    Args:
        metadata: vLLM's, not modified.
        kept: drafts to keep of each request.

    Returns:
        The metadata, and a bool mask ``[drafts]`` of those kept.
    """
    device = metadata.draft_token_ids.device
    counts = metadata.num_draft_tokens
    keep = torch.tensor(
        [i < k for n, k in zip(counts, kept, strict=True) for i in range(n)],
        dtype=torch.bool,
        device=device,
    )
    bonus = metadata.bonus_logits_indices.clone()
    start = 0
    for row, (count, few) in enumerate(zip(counts, kept, strict=True)):
        if few < count:
            bonus[row] = metadata.target_logits_indices[start + few]
        start += count

    sums = torch.tensor(
        list(accumulate(kept)), dtype=metadata.cu_num_draft_tokens.dtype, device=device
    )
    # cu_num_sampled_tokens stays: vLLM finds a request's rows of the logits by it, for
    # log-probabilities, and the logits still have a row for each draft that was fed.
    seen = replace(
        metadata,
        draft_token_ids=metadata.draft_token_ids[keep],
        num_draft_tokens=kept,
        cu_num_draft_tokens=sums,
        target_logits_indices=metadata.target_logits_indices[keep],
        bonus_logits_indices=bonus,
    )
    return seen, keep
