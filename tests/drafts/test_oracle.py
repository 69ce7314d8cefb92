import pytest

from oasiskv.drafts.oracle import OracleDrafts
from oasiskv.errors import ConfigError, StateError

KNOWN = list(range(100, 120))


@pytest.fixture
def source():
    return OracleDrafts({"r": KNOWN}, {"r": 3})


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17])
@pytest.mark.parametrize("done", [0, 1, 5, 19, 20, 25])
def test_proposes_by_position(source, count, done):
    # By position alone: the output so far need not be the known one.
    assert source.propose("r", [1, 2, 3] + [0] * done, count) == KNOWN[done : done + count]


def test_inside_the_prompt_there_is_nothing(source):
    assert source.propose("r", [], 1) == []
    assert source.propose("r", [1, 2], 4) == []


def test_finish_keeps_what_the_caller_owns(source):
    source.finish("r")
    assert source.propose("r", [1, 2, 3], 2) == [100, 101]


def test_refuses_what_it_does_not_know(source):
    with pytest.raises(StateError, match="'other'"):
        source.propose("other", [1], 1)
    with pytest.raises(ConfigError, match="b"):
        OracleDrafts({"a": [1]}, {"a": 1, "b": 2})
