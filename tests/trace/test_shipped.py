"""The traces that travel with the package are what their README says."""

import pytest

from oasiskv.data import data_path
from oasiskv.trace import read_trace
from oasiskv.trace.names import BUILT_IN, SUFFIX

README = data_path("traces/README.md")


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_shipped_trace_is_what_its_readme_says(name):
    trace, text = read_trace(name), README.read_text()
    head, run = trace.header, trace.header.recording
    assert f"`{name}{SUFFIX}`" in text
    assert (head.layers, head.kv_heads, head.steps, head.budget_blocks) == (30, 3, 255, 64)
    assert trace.candidates == (447, 463)
    assert trace.positions[0] == 7244 + 1
    assert (run.model, run.text) == ("smollm2-135m", f"{BUILT_IN[name]}-0-0")
    assert (run.lookahead, run.drafts, run.digest) == ("last_accepted", "none", "keys4")
    assert (run.hysteresis, run.hot_blocks * 16, run.cap_blocks) == (1.0, 1536, 6)
    # Every step of a recording wants all of K.
    assert all(bool((step.wanted >= 0).all()) for step in trace.steps())


def test_traces_are_small_and_none_is_left_out():
    files = list(README.parent.glob(f"*{SUFFIX}"))
    assert {file.name.removesuffix(SUFFIX) for file in files} == set(BUILT_IN)
    assert sum(file.stat().st_size for file in files) < 1_200_000
