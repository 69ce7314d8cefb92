import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oasiskv.drafts.lookahead import LookaheadMode, lookahead_row, split_drafts
from oasiskv.drafts.verify import Sampling, verify
from oasiskv.errors import StateError

HELD, LAST, PAPER = LookaheadMode


@pytest.mark.parametrize(
    ("mode", "drafts", "verified", "held"),
    [
        (HELD, [], [], []),
        (HELD, [5], [], [5]),
        (HELD, [5, 6, 7], [5, 6], [7]),
        (LAST, [], [], []),
        (LAST, [5, 6, 7], [5, 6, 7], []),
        (PAPER, [], [], []),
        (PAPER, [5], [], [5]),
        (PAPER, [5, 6, 7], [], [5]),
    ],
)
def test_split(mode, drafts, verified, held):
    assert split_drafts(drafts, mode) == (verified, held)


@pytest.mark.parametrize(
    ("mode", "drafts", "accepted", "row"),
    [
        (HELD, [], [9], 0),
        (HELD, [5], [5], 1),  # the sampler chose the held-back draft
        (HELD, [5], [9], 0),
        (HELD, [5, 6, 7], [5, 6, 7], 3),  # all accepted, the sampler chose the held-back draft
        (HELD, [5, 6, 7], [5, 6, 9], 2),  # all accepted, another token chosen
        (HELD, [5, 6, 7], [5, 9], 1),  # d2 rejected
        (HELD, [5, 6, 7], [9], 0),  # d1 rejected
        (HELD, [5, 6, 7], [7], 0),  # the token of a later draft, but not of its position
        (HELD, [5, 5, 5], [5, 5, 5], 3),
        (LAST, [], [9], 0),
        (LAST, [5], [5, 9], 1),
        (LAST, [5], [9], 0),
        (LAST, [5, 6, 7], [5, 6, 7, 9], 3),
        (LAST, [5, 6, 7], [5, 6, 9], 2),
        (LAST, [5, 6, 7], [9], 0),
        (PAPER, [], [9], 0),
        (PAPER, [5], [5], 1),
        (PAPER, [5], [9], 1),  # wrong or right, the draft's query
    ],
)
def test_row(mode, drafts, accepted, row):
    assert lookahead_row(mode, drafts, accepted) == row


@pytest.mark.parametrize("count", [1, 15, 16, 17])
def test_rows_of_many_drafts(count):
    drafts = list(range(count))
    for kept in range(count):
        # With 99 sampled after `kept` accepted drafts, and with the next draft sampled.
        assert lookahead_row(HELD, drafts, [*drafts[:kept], 99]) == kept
        assert lookahead_row(LAST, drafts, [*drafts[:kept], 99]) == kept
    assert lookahead_row(HELD, drafts, drafts) == count
    assert lookahead_row(LAST, drafts, [*drafts, 99]) == count


@pytest.mark.parametrize(
    ("mode", "drafts", "accepted"),
    [(HELD, [5], []), (HELD, [5], [5, 6]), (LAST, [5], [5, 6, 7]), (PAPER, [5], [5, 6])],
)
def test_refuses_impossible_outcomes(mode, drafts, accepted):
    with pytest.raises(StateError, match=f"{len(accepted)} accepted tokens.*{mode.value}"):
        lookahead_row(mode, drafts, accepted)


@given(
    st.sampled_from([HELD, LAST]),
    st.lists(st.integers(0, 2), max_size=17),
    st.lists(st.integers(0, 2), min_size=18, max_size=18),
)
def test_the_row_is_the_last_that_was_computed_on_the_output(mode, proposed, target):
    """What was fed up to the row is the output so far, and one more row would not be."""
    verified, held = split_drafts(proposed, mode)
    fed = verified + held
    logits = torch.nn.functional.one_hot(torch.tensor(target), 3).float()
    accepted = verify(logits[: len(verified) + 1], verified, Sampling(), None)
    row = lookahead_row(mode, fed, accepted)
    assert fed[:row] == accepted[:row]
    assert row == len(fed) or fed[row : row + 1] != accepted[row : row + 1]
