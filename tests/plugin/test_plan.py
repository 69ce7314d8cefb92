"""The memory plan against numbers computed by hand."""

from dataclasses import replace

import pytest
import torch

from oasiskv.config import OasisConfig
from oasiskv.core.geometry import KVGeometry
from oasiskv.vllm.plan import MemoryPlan
from oasiskv.vllm.shapes import digest_row_bytes

# Eight layers of four KV heads of 64 in bf16: a block is 16 * 2 * 64 * 2 * 4 * 8 bytes.
PLAN = MemoryPlan(
    pool_blocks=16384,
    store_blocks=32768,
    block_bytes=131072,
    digest_bytes=24576,
    digests_in_pool=False,
    block_tokens=16,
    longest_tokens=32760,
    threshold_tokens=3168,
    sink_blocks=1,
    hot_blocks=192,
    window_blocks=4,
    pool_block_bytes=131072,
)


def test_blocks_of_one_request():
    # 32760 tokens: 2047 blocks and a half, so 2048 in vLLM's pool and 2047 that close.
    assert (PLAN.dense_blocks, PLAN.stored_blocks) == (2048, 2047)
    # Sink 1, hot set 192, window 4, one open, one not yet given back.
    assert PLAN.sparse_blocks == 199
    # vLLM's own, dense, hot set.
    assert PLAN.needed_pool_blocks == 1 + 2048 + 192


def test_requests_that_fit():
    # 16383 / 2048 = 7.9...
    assert PLAN.dense_requests == 7
    # One in prefill takes 2241 of 16384; (16384 - 2241) / 199 = 71.07.
    # The store holds 32768 / 2047 = 16.
    assert PLAN.sparse_requests == 16
    assert replace(PLAN, store_blocks=10**6).sparse_requests == 72
    assert replace(PLAN, pool_blocks=2241, store_blocks=10**6).sparse_requests == 1
    assert replace(PLAN, pool_blocks=2240, store_blocks=10**6).sparse_requests == 0


def test_a_request_that_stays_below_the_threshold_needs_no_slots():
    short = replace(PLAN, longest_tokens=3168)
    assert not short.goes_sparse
    assert short.needed_pool_blocks == 1 + 198
    assert short.sparse_requests == short.dense_requests == 82
    assert replace(PLAN, longest_tokens=3169).goes_sparse


def test_a_short_sparse_request_keeps_no_more_than_it_has_beside_its_slots():
    assert replace(PLAN, longest_tokens=40, threshold_tokens=0).sparse_blocks == 192 + 3


def test_the_plan_in_words():
    assert str(PLAN) == (
        "HBM (KV pool) 2.000 GiB (16384 blocks), digests 768.00 MiB beside it, host store 4.000 GiB"
        " (32768 blocks), 131072 bytes a block; requests of max_model_len=32760 tokens that fit: "
        "7 dense, 16 with OasisKV"
    )


@pytest.mark.parametrize(("digest", "share"), [("minmax", 1 / 16), ("keys4", 3 / 16)])
def test_digests_are_a_share_of_two_byte_kv(digest, share):
    geometry = KVGeometry(8, 4, 8, 64, dtype=torch.bfloat16)
    config = OasisConfig(digest=digest)
    assert geometry.block_bytes == 131072
    assert digest_row_bytes(config, geometry) == share * 131072
