"""Store blocks by content, against a model that remembers everything."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from oasiskv.errors import StateError, StoreFullError
from oasiskv.stores.prefix import PrefixBlocks


def test_a_published_block_is_found_until_its_room_is_needed():
    blocks = PrefixBlocks(4, 1)
    first = blocks.reserve(3)
    for block, key in zip(first, "abc", strict=True):
        blocks.publish(block, key)
    assert blocks.match("abcd") == first
    assert blocks.match("bc") == first[1:]
    assert blocks.match("xbc") == []
    blocks.free(first)
    assert (blocks.free_blocks, blocks.kept_blocks) == (4, 3)
    # One is free, and the last of the prefix is the first to go.
    blocks.reserve(2)
    assert blocks.match("abc") == first[:2]
    assert (blocks.free_blocks, blocks.kept_blocks) == (2, 2)


def test_a_block_that_is_not_published_any_more_is_not_found():
    blocks = PrefixBlocks(4, 1)
    [used, kept] = blocks.reserve(2)
    blocks.publish(used, "used")
    blocks.publish(kept, "kept")
    blocks.free([kept])
    for block in (used, kept, 3):
        blocks.unpublish(block)
        blocks.unpublish(block)
    assert blocks.match(["used"]) == blocks.match(["kept"]) == []
    assert (blocks.free_blocks, blocks.kept_blocks) == (3, 0)
    blocks.free([used])
    assert blocks.free_blocks == 4
    assert sorted(blocks.reserve(4)) == [0, 1, 2, 3]


def test_what_was_taken_last_goes_last():
    blocks = PrefixBlocks(2, 1)
    [old] = blocks.reserve(1)
    blocks.publish(old, "old")
    [new] = blocks.reserve(1)
    blocks.publish(new, "new")
    blocks.free([old])
    blocks.free([new])
    blocks.take(blocks.match(["old"]))
    blocks.free([old])
    blocks.reserve(1)
    assert blocks.match(["old"]) == [old]
    assert blocks.match(["new"]) == []


def test_shared_blocks_stay_while_anyone_uses_them():
    blocks = PrefixBlocks(2, 1)
    shared = blocks.reserve(2)
    blocks.publish(shared[0], "a")
    blocks.take(shared[:1])
    blocks.free(shared)
    with pytest.raises(StoreFullError, match="2 more blocks are needed, 1 of 2"):
        blocks.reserve(2)
    blocks.free(shared[:1])
    assert sorted(blocks.reserve(2)) == sorted(shared)


def test_content_that_two_blocks_hold_is_found_in_the_first():
    blocks = PrefixBlocks(2, 1)
    first, second = blocks.reserve(2)
    blocks.publish(first, "a")
    blocks.publish(second, "a")
    assert blocks.match("a") == [first]
    blocks.free([second])
    assert blocks.kept_blocks == 0


@pytest.mark.parametrize("wrong", [[0, 0], [1], [0, 1]])
def test_freeing_what_is_not_in_use_frees_nothing(wrong):
    blocks = PrefixBlocks(2, 1)
    assert blocks.reserve(1) == [0]
    with pytest.raises(StateError):
        blocks.free(wrong)
    assert blocks.free_blocks == 1


def test_a_block_without_user_can_be_neither_taken_nor_published():
    blocks = PrefixBlocks(1, 1)
    with pytest.raises(StateError, match="neither in use nor kept"):
        blocks.take([0])
    with pytest.raises(StateError, match="no user"):
        blocks.publish(0, "a")


class Requests(RuleBasedStateMachine):
    """Requests over few texts, which match, take, reserve, publish and end at random."""

    def __init__(self):
        super().__init__()
        self.blocks = PrefixBlocks(12, 1)
        self.held = []
        self.content = {}
        self.published = set()
        # A key that was not published cannot be taken out.
        self.blocks.on_unpublished = self.published.remove

    @rule(text=st.text("ab", min_size=1, max_size=5))
    def start(self, text):
        keys = [text[: n + 1] for n in range(len(text))]
        found = self.blocks.match(keys)
        assert [self.content[block] for block in found] == keys[: len(found)]
        self.blocks.take(found)
        try:
            new = self.blocks.reserve(len(keys) - len(found))
        except StoreFullError:
            self.blocks.free(found)
            return
        used = {block for other in self.held for block in other}
        assert not used & set(new)
        assert not set(found) & set(new)
        for block, key in zip(new, keys[len(found) :], strict=True):
            self.content[block] = key
            if self.blocks.publish(block, key):
                assert key not in self.published
                self.published.add(key)
        self.held.append(found + new)

    @rule(data=st.data())
    def end(self, data):
        if self.held:
            self.blocks.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule()
    def forget_all(self):
        self.blocks.unpublish_all()
        assert not self.blocks.kept_blocks
        assert not self.published

    @rule(block=st.integers(0, 11))
    def forget(self, block):
        self.blocks.unpublish(block)

    @invariant()
    def what_is_said_to_be_published_is_found(self):
        known = set(self.content.values()) | self.published
        assert {key for key in known if self.blocks.match([key])} == self.published

    @invariant()
    def all_are_accounted_for(self):
        used = {block for held in self.held for block in held}
        assert self.blocks.free_blocks == 12 - len(used)


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
