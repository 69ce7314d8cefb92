"""KV events of the store, put together as they come."""

from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec

from oasiskv.stores.prefix import PrefixBlocks
from oasiskv.vllm import events as events_module
from oasiskv.vllm.events import StoreEvents

HASHES = [bytes([index]) * 32 for index in range(6)]
KNOWN = [maybe_convert_block_hash(block) for block in HASHES]
"""As events have them."""


@pytest.fixture
def events(monkeypatch):
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    monkeypatch.setattr(
        events_module,
        "event_extra_keys",
        lambda request, start, stop: ("salt",) if not start else None,
    )
    return StoreEvents(spec, 0)


def request(hashes, lora=None):
    return SimpleNamespace(
        block_hashes=hashes, all_token_ids=list(range(16 * len(hashes))), lora_request=lora
    )


def test_blocks_that_follow_one_another_are_one_event(events):
    one, other = request(HASHES[:4]), request([HASHES[0], *HASHES[4:]])
    for index in (0, 1, 3):
        events.published(one, index)
    events.published(other, 1)
    first, second, third = events.take()
    assert (first.block_hashes, first.parent_block_hash) == (KNOWN[:2], None)
    assert first.token_ids == list(range(32))
    assert first.extra_keys == [("salt",), None]
    assert (first.medium, first.block_size, first.group_idx) == ("CPU", 16, 0)
    assert first.kv_cache_spec_kind == "full_attention"
    assert (second.block_hashes, second.parent_block_hash) == ([KNOWN[3]], KNOWN[2])
    assert (third.block_hashes, third.parent_block_hash) == ([KNOWN[4]], KNOWN[0])
    assert third.token_ids == list(range(16, 32))
    assert events.take() == []


def test_a_lora_is_named(events):
    events.published(request(HASHES, SimpleNamespace(adapter_id=3, name="adapter")), 0)
    [event] = events.take()
    assert (event.lora_id, event.lora_name) == (3, "adapter")


def test_what_makes_room_or_is_reset_or_damaged_is_removed(events):
    store = PrefixBlocks(3, 1)
    store.on_unpublished = events.unpublished
    blocks = store.reserve(3)
    for index, block in enumerate(blocks):
        store.publish(block, HASHES[index])
    store.free(blocks)
    store.reserve(1)
    store.unpublish(blocks[1])
    events.published(request(HASHES), 4)
    store.unpublish_all()
    first, between, last = events.take()
    assert isinstance(between, BlockStored)
    assert isinstance(first, BlockRemoved)
    # The end of a prefix before its start.
    assert first.block_hashes == [KNOWN[2], KNOWN[1]]
    assert (first.medium, first.group_idx) == ("CPU", 0)
    assert last.block_hashes == [KNOWN[0]]
