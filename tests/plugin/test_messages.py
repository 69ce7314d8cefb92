"""What workers acknowledge together."""

from types import SimpleNamespace

import pytest

from oasiskv.vllm.messages import OasisAck


def test_the_earliest_window_of_all_workers_counts():
    both = OasisAck({"a": 3, "b": 7}).aggregate(OasisAck({"a": 5, "b": 2}))
    assert both.window_start == {"a": 3, "b": 2}


def test_what_one_worker_has_not_acknowledged_does_not_count():
    one, other = OasisAck({"a": 3, "b": 7}), OasisAck({"b": 7, "c": 1})
    assert one.aggregate(other).window_start == {"b": 7}
    assert other.aggregate(one).window_start == {"b": 7}
    assert one.aggregate(OasisAck({})).window_start == {}


def test_aggregation_changes_neither():
    one, other = OasisAck({"a": 3}), OasisAck({"a": 2})
    one.aggregate(other)
    assert (one.window_start, other.window_start) == ({"a": 3}, {"a": 2})


def test_three_workers_in_any_order():
    acks = [OasisAck({"a": n, "b": 9 - n}) for n in (4, 2, 6)]
    left = acks[0].aggregate(acks[1]).aggregate(acks[2])
    right = acks[2].aggregate(acks[0].aggregate(acks[1]))
    assert left.window_start == right.window_start == {"a": 2, "b": 3}


def test_how_many_workers_acknowledged():
    one = OasisAck({})
    assert one.workers == 1
    assert one.aggregate(OasisAck({}).aggregate(OasisAck({}))).workers == 3


def test_refuses_another_connectors_acknowledgement():
    with pytest.raises(TypeError, match="SimpleNamespace"):
        OasisAck({}).aggregate(SimpleNamespace())
