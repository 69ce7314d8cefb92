"""Block scores from logits in Triton: softmax of each query head, mean over those of a KV head."""

import triton
import triton.language as tl
from torch import Tensor

_TILE_BLOCKS = 1024


def softmax_scores(logits: Tensor, first: Tensor, end: Tensor, num_kv_heads: int) -> Tensor:
    """Scores ``[R, H, N]``, float32, 0 where a block is no candidate.

    Args:
        logits: float32 ``[R, Hq, N]``, contiguous; anything where a block is no candidate.
        first: integer ``[R]``, first candidate.
        end: integer ``[R]``, one past the last.
        num_kv_heads: ``H``, a divisor of ``Hq``.
    """
    num_rows, num_query_heads, num_blocks = logits.shape
    group = num_query_heads // num_kv_heads
    scores = logits.new_empty(num_rows, num_kv_heads, num_blocks)
    if scores.numel():
        _scores_kernel[(num_kv_heads, num_rows)](
            logits, first, end, scores, num_blocks,
            GROUP=group, GROUP_PADDED=triton.next_power_of_2(group),
            BLOCKS=min(_TILE_BLOCKS, triton.next_power_of_2(num_blocks)),
            WHOLE=num_blocks <= _TILE_BLOCKS,
            num_warps=4,
        )  # fmt: skip
    return scores


@triton.jit
def _scores_kernel(
    logits, first, end, scores, num_blocks,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, BLOCKS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    lower = tl.load(first + row).to(tl.int32)
    upper = tl.load(end + row).to(tl.int32)
    pair = row * tl.num_programs(0) + head
    member = tl.arange(0, GROUP_PADDED)
    at = logits + (pair * GROUP + member)[:, None] * num_blocks
    out = scores + pair * num_blocks
    if WHOLE:
        block = tl.arange(0, BLOCKS)
        mask = (member < GROUP)[:, None] & ((block >= lower) & (block < upper))[None, :]
        logit = tl.load(at + block[None, :], mask=mask, other=float("-inf"))
        top = tl.max(logit, axis=1)
        share = tl.exp(logit - tl.where(top == float("-inf"), 0.0, top)[:, None])
        total = tl.sum(share, axis=1)
        # Nobody's share of nothing: members that are padding, and rows without candidates.
        total = tl.where((member < GROUP) & (lower < upper), total, 1.0)
        share = tl.where(mask, share / (total * GROUP)[:, None], 0.0)
        tl.store(out + block, tl.sum(share, axis=0), mask=block < num_blocks)
    else:
        top = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_PADDED], tl.float32)
        for start in range(lower // BLOCKS * BLOCKS, upper, BLOCKS):
            block = start + tl.arange(0, BLOCKS)
            mask = (member < GROUP)[:, None] & ((block >= lower) & (block < upper))[None, :]
            logit = tl.load(at + block[None, :], mask=mask, other=float("-inf"))
            highest = tl.maximum(top, tl.max(logit, axis=1))
            # While only blocks before the candidates were seen there is no maximum to subtract.
            shift = tl.where(highest == float("-inf"), 0.0, highest)
            total = total * tl.exp(top - shift) + tl.sum(tl.exp(logit - shift[:, None]), axis=1)
            top = highest
        shift = tl.where(top == float("-inf"), 0.0, top)
        total = tl.where((member < GROUP) & (lower < upper), total, 1.0)
        for start in range(0, num_blocks, BLOCKS):
            block = start + tl.arange(0, BLOCKS)
            mask = (member < GROUP)[:, None] & ((block >= lower) & (block < upper))[None, :]
            logit = tl.load(at + block[None, :], mask=mask, other=float("-inf"))
            share = tl.exp(logit - shift[:, None]) / (total * GROUP)[:, None]
            share = tl.where(mask, share, 0.0)
            tl.store(out + block, tl.sum(share, axis=0), mask=block < num_blocks)
