import pytest
from hypothesis import given
from hypothesis import strategies as st

from oasiskv.drafts.base import DraftSource, NoDrafts
from oasiskv.drafts.ngram import NgramDrafts
from oasiskv.errors import ConfigError

# Few different tokens, so that matches and overlaps are common.
texts = st.lists(st.integers(0, 3), max_size=40)


def brute_force(tokens: list[int], max_ngram: int, min_ngram: int, max_drafts: int) -> list[int]:
    """The definition, in quadratic time: grow the text by the token that followed the match."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[len(tokens) - size :]:
                grown = list(tokens)
                for offset in range(max_drafts):
                    grown.append(grown[start + size + offset])
                return grown[len(tokens) :]
    return []


@given(texts, st.integers(1, 4), st.integers(0, 3), st.sampled_from([0, 1, 2, 15, 16, 17]))
def test_equals_brute_force(tokens, min_ngram, extra, max_drafts):
    source = NgramDrafts(min_ngram + extra, min_ngram)
    expected = brute_force(tokens, min_ngram + extra, min_ngram, max_drafts)
    assert source.propose("r", tokens, max_drafts) == expected


@given(st.lists(texts, max_size=6))
def test_incremental_equals_from_scratch(pieces):
    source = NgramDrafts()
    tokens: list[int] = []
    for piece in pieces:
        tokens = tokens + piece
        assert source.propose("r", tokens, 5) == NgramDrafts().propose("r", tokens, 5)


@given(texts, texts)
def test_requests_do_not_mix_and_ids_come_again(first, second):
    source = NgramDrafts()
    source.propose("a", first, 4)
    assert source.propose("b", second, 4) == NgramDrafts().propose("b", second, 4)
    source.finish("a")
    assert source.propose("a", second, 4) == NgramDrafts().propose("a", second, 4)


@pytest.mark.parametrize("count", [1, 15, 16, 17])
def test_continues_a_period(count):
    assert NgramDrafts().propose("r", [7, 8, 7, 8], count) == ([7, 8] * count)[:count]


def test_prefers_the_longest_then_the_most_recent():
    # The pair 1 2 occurred once; 2 alone occurred later, before 9.
    assert NgramDrafts().propose("r", [1, 2, 5, 2, 9, 1, 2], 1) == [5]
    assert NgramDrafts(max_ngram=1).propose("r", [2, 5, 2, 9, 1, 2], 1) == [9]


def test_short_input_and_no_match():
    source = NgramDrafts()
    for tokens in ([], [1], [1, 2], [1, 2, 3]):
        assert source.propose("r", tokens, 4) == []
    source.finish("r")
    source.finish("unknown")


class CountedReads(list):
    reads = 0

    def __getitem__(self, key):
        self.reads += 1
        return super().__getitem__(key)


def test_a_step_reads_only_what_is_new():
    source = NgramDrafts()
    tokens = CountedReads((i * i) % 4099 for i in range(32_768))
    source.propose("r", tokens, 4)
    tokens.reads = 0
    for step in range(100):
        tokens.append(step)
        source.propose("r", tokens, 4)
    # Per step three n-grams to index, three to look up, one copy.
    assert tokens.reads <= 700


@pytest.mark.parametrize(("longest", "shortest"), [(3, 0), (2, 3), (0, 0)])
def test_refuses_impossible_sizes(longest, shortest):
    with pytest.raises(ConfigError, match=f"min_ngram = {shortest} and max_ngram = {longest}"):
        NgramDrafts(longest, shortest)


def test_no_drafts():
    source: DraftSource = NoDrafts()
    assert source.propose("r", [1, 1, 1], 4) == []
    source.finish("r")
