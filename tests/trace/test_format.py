"""The file format: round trips, a reader made from the docs alone, files that are no traces."""

import json
import lzma
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from made_traces import SINK, drifting, sets_of, trace_of
from oasiskv.errors import TraceError
from oasiskv.trace import read_trace, write_trace
from oasiskv.trace.format import MAX_HEADER_BYTES, decode_trace, encode_trace


@st.composite
def made(draw):
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    budget = draw(st.integers(1, 6))
    grows = draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))
    ends = (SINK + 1 + np.cumsum(grows)).tolist()
    sets = [
        [
            draw(st.sets(st.integers(SINK, end - 1), max_size=min(budget, end - SINK)))
            for _ in range(layers * heads)
        ]
        for end in ends
    ]
    return sets, ends, layers, heads, budget


@given(made())
def test_what_is_read_is_what_was_written(case):
    sets, ends, layers, heads, budget = case
    trace = trace_of(*case)
    again = decode_trace(encode_trace(trace), "here")
    assert again.header == trace.header
    assert sets_of(again) == sets
    steps = list(again.steps())
    assert [step.end for step in steps] == ends
    assert [step.position for step in steps] == trace.positions.tolist()
    for step in steps:
        assert step.wanted.shape == (layers, heads, budget)
        for row in step.wanted.reshape(-1, budget):
            blocks = row[row >= 0]
            assert row.tolist() == [*sorted(blocks), *[-1] * (budget - len(blocks))]


def test_a_reader_made_from_the_documented_schema():
    trace = drifting()
    content = lzma.decompress(encode_trace(trace))
    line, body = content.split(b"\n", 1)
    head = json.loads(line)
    assert (head["format"], head["version"]) == ("oasiskv-trace", 1)
    steps, rows = head["steps"], head["layers"] * head["kv_heads"]
    numbers = np.frombuffer(body, "<u4").astype(int).tolist()
    positions, ends = numbers[:steps], numbers[steps : 2 * steps]
    counts = numbers[2 * steps : 2 * steps + steps * rows]
    gaps = iter(numbers[2 * steps + steps * rows :])
    wanted, found = [set() for _ in range(rows)], []
    for step in range(steps):
        for row in range(rows):
            block = -1
            for nth in range(counts[step * rows + row]):
                block = next(gaps) if nth == 0 else block + 1 + next(gaps)
                wanted[row] ^= {block}
        found.append([set(blocks) for blocks in wanted])
    assert next(gaps, None) is None
    assert found == sets_of(trace)
    assert positions == trace.positions.tolist()
    assert ends == trace.ends.tolist()


def content_of(trace):
    line, body = lzma.decompress(encode_trace(trace)).split(b"\n", 1)
    return json.loads(line), np.frombuffer(body, "<u4").copy()


def packed(head, body):
    return lzma.compress(json.dumps(head).encode() + b"\n" + body.astype("<u4").tobytes())


def refused(data, text):
    with pytest.raises(TraceError, match=text) as error:
        decode_trace(data, "bad.oasistrace")
    assert str(error.value).startswith("bad.oasistrace ")
    assert "\n" not in str(error.value)


def test_a_truncated_file_is_refused_wherever_it_ends():
    data = encode_trace(drifting(steps=8))
    for length in range(len(data)):
        refused(data[:length], "damaged|no trace")


def test_a_changed_byte_is_noticed_wherever_it_is():
    data = encode_trace(drifting(steps=8))
    for place in range(len(data)):
        changed = data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]
        refused(changed, "damaged|no trace")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "ends too early"),
        (b"PK\x03\x04 and so on", "no trace"),
        (lzma.compress(b""), "no line ends"),
        (lzma.compress(b"\n"), "header"),
        (lzma.compress(b"[" * 60_000 + b"\n"), "header"),
        (lzma.compress(b"\xff\xfe\n"), "header"),
        (lzma.compress(b" " * (MAX_HEADER_BYTES + 1) + b"\n"), "no line ends"),
        (lzma.compress(b"x" * 2**20, lzma.FORMAT_ALONE), "no trace"),
    ],
)
def test_what_is_no_trace_at_all(data, text):
    refused(data, text)


HUGE = 2**63


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("format", "other", "format"),
        ("version", 2, "version"),
        ("version", "1", "version"),
        ("layers", 0, "layers"),
        ("layers", -1, "layers"),
        ("layers", HUGE, "layers"),
        ("layers", 2.5, "layers"),
        ("layers", True, "layers"),
        ("kv_heads", 2**24, "bytes"),
        ("steps", 2**21, "steps"),
        ("changes", 2**32, "bytes"),
        ("changes", 2**40, "changes"),
        ("budget_blocks", 2**24 + 1, "budget_blocks"),
        ("sink_blocks", -1, "sink_blocks"),
        ("written_by", "\x1b[31m", "written_by"),
        ("written_by", "w" * 201, "written_by"),
        ("more", 1, "more"),
        ("replay", {}, "replay.layers"),
        ("recording", None, "recording"),
    ],
)
def test_a_header_out_of_its_bounds(field, value, text):
    head, body = content_of(drifting())
    head[field] = value
    refused(packed(head, body), text)


def test_a_field_that_is_missing():
    head, body = content_of(drifting())
    del head["window_blocks"]
    refused(packed(head, body), "window_blocks: Field required")


@pytest.mark.parametrize("word", ["NaN", "Infinity", "1e999", "0.5"])
def test_a_hysteresis_that_is_no_number(word):
    head, body = content_of(drifting())
    line = json.dumps(head).replace('"hysteresis": 1.0', f'"hysteresis": {word}')
    refused(lzma.compress(line.encode() + b"\n" + body.tobytes()), "hysteresis")


def test_a_body_that_is_shorter_or_longer_than_the_header_says():
    head, body = content_of(drifting())
    refused(packed(head, body[:-1]), "asks for a body")
    refused(packed(head, np.append(body, 0)), "it holds more")
    refused(packed(head, body) + b"x", "it holds more")
    refused(packed(head, body) + packed(head, body), "it holds more")


def test_a_body_that_contradicts_itself():
    trace = drifting()
    head, body = content_of(trace)
    steps, rows = head["steps"], trace.header.rows
    ends, counts, gaps = steps, 2 * steps, 2 * steps + steps * rows

    def changed(place, value):
        other = body.copy()
        other[place] = value
        return packed(head, other)

    refused(changed(0, 0), "after the last closed block")
    refused(changed(0, 2**32 - 1), "fewer tokens")
    refused(changed(steps - 1, 0), "fewer tokens")
    refused(changed(ends, SINK), "within the sink")
    refused(changed(ends + steps - 1, 2**32 - 1), "after the last closed block")
    refused(changed(counts, 2**32 - 1), "it counts")
    refused(changed(counts, body[counts] + 1), "it counts")
    refused(changed(gaps, 0), "no candidate")
    refused(changed(gaps, 2**32 - 1), "no candidate")
    refused(changed(-1, 2**32 - 1), "no candidate")
    small = head | {"budget_blocks": head["budget_blocks"] - 1}
    refused(packed(small, body), "wants 6 blocks, K is 5")


def test_more_tiles_than_any_trace_has():
    head, body = content_of(drifting(steps=2))
    body[:4] = [2**32 - 1, 2**32 - 1, 2**27, 2**27]
    refused(packed(head, body), "tiles")


def test_a_small_file_that_unpacks_to_much_takes_no_memory():
    head, _ = content_of(drifting())
    bomb = lzma.compress(json.dumps(head).encode() + b"\n" + bytes(2**27))
    endless_line = lzma.compress(b" " * 2**27)
    tracemalloc.start()
    refused(bomb, "it holds more")
    refused(endless_line, "no line ends")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A decoder's dictionary takes 8 MiB; what the file unpacks to is 128.
    assert peak < 2**25


def test_a_file_that_asks_for_a_huge_dictionary():
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 2**28}]
    refused(lzma.compress(b"x\n", filters=filters), "[Mm]emory")


def test_arrays_that_do_not_belong_together():
    trace = drifting(steps=8)
    with pytest.raises(TraceError, match="another shape"):
        replace(trace, positions=trace.positions[:-1])
    with pytest.raises(TraceError, match="changed blocks"):
        replace(trace, blocks=trace.blocks[:-1])
    with pytest.raises(TraceError, match="do not ascend"):
        replace(trace, blocks=np.concatenate((trace.blocks[1::-1], trace.blocks[2:])))


def test_files_by_path_and_by_name(tmp_path):
    path = tmp_path / "a.oasistrace"
    write_trace(path, drifting())
    assert sets_of(read_trace(path)) == sets_of(read_trace(str(path))) == sets_of(drifting())
    with pytest.raises(TraceError, match=r"neither a file nor .* smollm2-prose"):
        read_trace(tmp_path / "none")
    with pytest.raises(TraceError, match="cannot write"):
        write_trace(tmp_path / "no folder" / "a", drifting())


def test_nothing_to_write():
    with pytest.raises(TraceError, match="no step wants a block"):
        trace_of([], [], 1, 1, 1)
