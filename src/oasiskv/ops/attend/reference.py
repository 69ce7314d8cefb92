"""Exact attention over compact block tables, in plain PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend(
    query: Tensor,
    kv_blocks: Tensor,
    block_table: Tensor,
    kv_tokens: int,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Softmax attention of one request over the first ``kv_tokens`` tokens of its block table.

    The queries are those of the last ``T`` tokens of the table: query ``i`` sees the table's
    positions up to ``kv_tokens - T + i``, of these only the last ``sliding_window`` if that is
    given, its own token included. Positions count along the table, not along the text: the order of
    older blocks does not matter, RoPE is in the keys already. What no query sees (the tail of the
    last block, blocks before the sliding window, table entries after the last block) is not read
    and may be NaN.

    Args:
        query: ``[T, Hq, D]``, ``T >= 1``, any float dtype; query head ``h`` reads KV head
            ``h // (Hq / H)``.
        kv_blocks: ``[MB, H, B, 2D]``, keys in the first ``D`` elements, any float dtype, any
            strides.
        block_table: int64 ``[M]``, blocks of ``kv_blocks``; entries that are not read may be
            anything.
        kv_tokens: tokens in the table, the ``T`` of the query included.
        scale: softmax scale of the model.
        sliding_window: tokens that a query sees, or None for all.

    Returns:
        ``[T, Hq, D]`` in the dtype of ``query``; math in float32, or float64 where an input is
        float64. Memory beside the keys and values: the mask, ``T`` times the tokens seen.

    Raises:
        ValueError: ``kv_tokens`` below ``T``, table too short, ``sliding_window`` below 1, or
            ``Hq`` not a multiple of ``H``.
    """
    num_tokens, num_query_heads, head_dim = query.shape
    num_kv_heads, block_tokens = kv_blocks.shape[1:3]
    num_blocks = -(-kv_tokens // block_tokens)
    if not 1 <= num_tokens <= kv_tokens:
        raise ValueError(
            f"a request attends with 1 to kv_tokens queries; found {num_tokens} queries and "
            f"{kv_tokens} tokens of KV, these queries' own included"
        )
    if len(block_table) < num_blocks:
        raise ValueError(
            f"the block table is too short: {kv_tokens} tokens need {num_blocks} blocks of "
            f"{block_tokens}; found {len(block_table)}"
        )
    if num_query_heads % num_kv_heads:
        raise ValueError(
            f"the number of query heads must be a multiple of the number of KV heads; "
            f"found {num_query_heads} and {num_kv_heads}"
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1 token or None; found {sliding_window}")

    first = 0 if sliding_window is None else max(0, kv_tokens - num_tokens - sliding_window + 1)
    first_block, skipped = divmod(first, block_tokens)
    tiles = kv_blocks[block_table[first_block:num_blocks]].transpose(0, 1).flatten(1, 2)
    tiles = tiles[:, skipped : skipped + kv_tokens - first]
    # KV heads as the batch: the query heads of one share its keys without a copy.
    group = num_query_heads // num_kv_heads
    dtype = torch.promote_types(torch.promote_types(query.dtype, tiles.dtype), torch.float32)
    tiles = tiles.to(dtype).unsqueeze(1).expand(-1, group, -1, -1)

    seen = torch.arange(first, kv_tokens, device=query.device)
    own = torch.arange(kv_tokens - num_tokens, kv_tokens, device=query.device)[:, None]
    mask = seen <= own
    if sliding_window is not None:
        mask &= seen > own - sliding_window
    by_kv_head = query.to(dtype).reshape(num_tokens, num_kv_heads, group, head_dim)
    output = scaled_dot_product_attention(
        by_kv_head.permute(1, 2, 0, 3),
        tiles[..., :head_dim],
        tiles[..., head_dim:],
        attn_mask=mask,
        scale=scale,
    )
    return output.permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype)


def attend_rows(
    query: Tensor,
    query_tokens: Sequence[int],
    kv_blocks: Tensor,
    block_tables: Tensor,
    kv_tokens: Sequence[int],
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """``attend`` for a batch of requests with packed queries, one after the other.

    Args:
        query: ``[total, Hq, D]``, the queries of all requests in order.
        query_tokens: queries of each of the ``R`` requests, 0 allowed.
        kv_blocks: ``[MB, H, B, 2D]``, shared by the requests.
        block_tables: int64 ``[R, M]``; entries that are not read may be anything.
        kv_tokens: tokens in each table, its queries' own included; not read where there is no
            query.
        scale: softmax scale of the model.
        sliding_window: tokens that a query sees, or None for all.

    Returns:
        ``[total, Hq, D]`` in the dtype of ``query``.

    Raises:
        ValueError: ``total`` is not the sum of ``query_tokens``, the numbers of requests differ, or
            ``attend`` refuses a request.
    """
    if not len(query_tokens) == len(kv_tokens) == len(block_tables):
        raise ValueError(
            f"query_tokens, kv_tokens and block_tables must have one entry per request; found "
            f"{len(query_tokens)}, {len(kv_tokens)} and {len(block_tables)}"
        )
    if sum(query_tokens) != len(query):
        raise ValueError(f"query_tokens add up to {sum(query_tokens)}, query holds {len(query)}")
    output = torch.empty_like(query)
    start = 0
    for row, tokens in enumerate(query_tokens):
        if tokens:
            part = slice(start, start + tokens)
            output[part] = attend(
                query[part], kv_blocks, block_tables[row], kv_tokens[row], scale, sliding_window
            )
        start += tokens
    return output
