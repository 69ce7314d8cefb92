"""The memory plan against numbers computed by hand."""

import logging
from dataclasses import replace

import pytest
import torch

from oasiskv.config import OasisConfig
from oasiskv.core.geometry import KVGeometry
from oasiskv.vllm.logs import log_start
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
    most_requests=256,
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
        "7 dense, 16 with OasisKV (the host store limits: host_gib=17.9913 would hold 72)"
    )


def test_dense_requests_are_those_of_vllm_alone_with_the_memory_of_the_digests():
    # 32768 digests of 24576 bytes are 6144 blocks of the pool: 22527 / 2048 = 10.9...
    plan = replace(PLAN, digests_in_pool=True)
    assert (plan.digest_pool_blocks, plan.dense_requests) == (6144, 10)
    assert (PLAN.digest_pool_blocks, PLAN.dense_requests) == (0, 7)


# Of the quick start: 45 KiB of KV a token, 512 MiB of KV memory and its digests of 3/32.
QUICK = replace(
    PLAN,
    pool_blocks=591,
    store_blocks=1456,
    block_bytes=737280,
    digest_bytes=69120,
    digests_in_pool=True,
    longest_tokens=4096,
    hot_blocks=48,
    threshold_tokens=864,
    pool_block_bytes=737280,
)


@pytest.mark.parametrize(
    ("change", "fit", "said"),
    [
        # 1456 / 256 = 5.7; 1 + (591 - 305) / 55 = 6.2. A store of 6 has digests of 144 blocks, and
        # 583 of 727 are left.
        ({}, (2, 5), "the host store limits: host_gib=1.0547 would hold 6"),
        ({"workers": 2}, (2, 5), "the host store limits: host_gib=2.1094 would hold 6"),
        ({"most_requests": 4}, (2, 5), "max_num_seqs=4 limits: 5 fit"),
        (
            {"store_blocks": 600, "most_requests": 4},
            (2, 2),
            "the host store limits: host_gib=0.7032 would hold 4",
        ),
        # Less for digests, more for the pool: all of the 727 blocks but 144.
        (
            {"store_blocks": 4368, "pool_blocks": 318},
            (2, 1),
            "the KV pool limits: host_gib=1.0547 would hold 6",
        ),
        (
            {"store_blocks": 1536, "pool_blocks": 583},
            (2, 6),
            "the KV pool limits: raise kv_cache_memory_bytes and host_gib, or lower hot_tokens",
        ),
        (
            {"store_blocks": 2000, "digests_in_pool": False},
            (2, 6),
            "the KV pool limits: raise kv_cache_memory_bytes, or lower hot_tokens",
        ),
        (
            {"longest_tokens": 864},
            (13, 10),
            "none of them passes the threshold of 864 tokens, so OasisKV makes no room: raise "
            "max_model_len, or lower hot_tokens or threshold_tokens",
        ),
    ],
)
def test_what_limits_and_what_to_change(change, fit, said):
    plan = replace(QUICK, **change)
    assert (plan.dense_requests, plan.sparse_requests) == fit
    assert plan.limit == said


@pytest.mark.parametrize("digests_in_pool", [False, True])
@pytest.mark.parametrize("store_blocks", [256, 1456, 4000])
def test_the_advice_holds_what_it_says_and_none_holds_more(digests_in_pool, store_blocks):
    plan = replace(QUICK, digests_in_pool=digests_in_pool, store_blocks=store_blocks)
    memory = plan.pool_blocks + plan.digest_pool_blocks

    def fit(store):
        digests = -(-store * plan.digest_bytes // plan.pool_block_bytes) if digests_in_pool else 0
        return replace(plan, store_blocks=store, pool_blocks=memory - digests).sparse_requests

    assert plan.best.sparse_requests == max(fit(store) for store in range(0, 9000, 256))
    assert plan.best.sparse_requests == fit(plan.best.store_blocks)


def test_fewer_than_vllm_alone_is_a_warning(caplog, monkeypatch):
    config = OasisConfig(host_gib=1, budget_tokens=512, hot_tokens=768)
    fewer = replace(QUICK, pool_blocks=20000)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    for plan, warned in [(QUICK, False), (fewer, True), (replace(fewer, most_requests=5), False)]:
        caplog.clear()
        log_start(config, plan)
        warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert (warnings != []) == plan.holds_fewer == warned
    log_start(config, fewer)
    assert caplog.records[-1].getMessage() == (
        "OasisKV holds fewer requests of max_model_len=4096 tokens at once (5) than vLLM alone "
        "(78): the host store limits: host_gib=44.1211 would hold 251"
    )


@pytest.mark.parametrize(("digest", "share"), [("minmax", 1 / 16), ("keys4", 3 / 16)])
def test_digests_are_a_share_of_two_byte_kv(digest, share):
    geometry = KVGeometry(8, 4, 8, 64, dtype=torch.bfloat16)
    config = OasisConfig(digest=digest)
    assert geometry.block_bytes == 131072
    assert digest_row_bytes(config, geometry) == share * 131072
