"""``oasiskv trace``: files in, files and tables out; one line for what cannot be."""

import sys

import pytest

from made_traces import drifting, sets_of
from oasiskv import cli
from oasiskv.trace import read_trace, write_trace
from tiny_folder import save_tiny


def run(monkeypatch, *arguments):
    """Run the command in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["oasiskv", "trace", *map(str, arguments)])
    # Wide enough for every column of the widest table.
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "made.oasistrace"
    write_trace(path, drifting())
    return path


def row(out, first):
    """The cells of the table row that begins with ``first``."""
    lines = [line.replace("┃", "│").strip("│ ") for line in out.splitlines()]
    [line] = [line for line in lines if line.startswith(first)]
    return [cell.strip() for cell in line.split("│")]


def test_record_then_show(monkeypatch, capsys, tmp_path):
    folder, out = save_tiny(tmp_path / "tiny"), tmp_path / "recorded.oasistrace"
    options = ("--model", folder, "--task", "forced_prose", "--tokens", 700, "--budget", 64)
    assert run(monkeypatch, "record", *options, "--out", out) == 0
    shown = capsys.readouterr().out
    trace = read_trace(out)
    assert trace.header.recording.model == "tiny"
    assert trace.header.recording.text == "forced_prose-0-0"
    assert trace.header.recording.hot_blocks == 6
    assert (trace.header.budget_blocks, trace.header.steps) == (4, 255)
    assert run(monkeypatch, "show", out) == 0
    again = capsys.readouterr().out
    assert row(again, "S/K")[1:] == ["mean", "p95 of steps", "p95 of heads"]
    assert row(again, "1.5 ") == row(shown, "1.5 ")
    assert row(again, "context, tokens")[1] == "445 to 699"


def test_replay_prints_source_and_replay_and_writes_it(monkeypatch, capsys, tmp_path, file):
    out = tmp_path / "other.oasistrace"
    options = ("--layers", 3, "--heads", 4, "--tokens", 4000, "--steps", 100, "--budget", 192)
    assert run(monkeypatch, "replay", file, *options, "--out", out) == 0
    trace = read_trace(out)
    assert (trace.header.layers, trace.header.kv_heads, trace.header.steps) == (3, 4, 100)
    assert (trace.positions[0], trace.header.budget_blocks) == (4000, 12)
    shown = capsys.readouterr().out
    assert row(shown, "layers x KV heads")[1:] == ["2 x 2", "3 x 4"]
    assert row(shown, "K ")[1:] == ["6 blocks, 96 tokens", "12 blocks, 192 tokens"]
    ratios = row(shown, "1.5 ")
    assert len(ratios) == 7
    assert abs(float(ratios[1]) - float(ratios[2])) < 0.02
    assert len(row(shown, "3-4 ")) == 3


def test_a_seed_repeats_a_replay(monkeypatch, tmp_path, file):
    sets = []
    for seed in (1, 1, 2):
        out = tmp_path / f"{len(sets)}.oasistrace"
        assert run(monkeypatch, "replay", file, "--layers", 9, "--seed", seed, "--out", out) == 0
        sets.append(sets_of(read_trace(out)))
    assert sets[0] == sets[1] != sets[2]


def test_built_in_traces_have_names(monkeypatch, capsys):
    assert run(monkeypatch, "show", "smollm2-code") == 0
    assert row(capsys.readouterr().out, "model")[1] == "smollm2-135m"


def test_markup_in_a_file_is_text(monkeypatch, capsys, tmp_path):
    trace = drifting()
    named = trace.header.recording.model_copy(update={"model": "[red]x[/nothing]"})
    header = trace.header.model_copy(update={"recording": named})
    path = tmp_path / "odd.oasistrace"
    write_trace(path, type(trace)(header, *(getattr(trace, a) for a in ARRAYS)))
    assert run(monkeypatch, "show", path) == 0
    assert row(capsys.readouterr().out, "model")[1] == "[red]x[/nothing]"


ARRAYS = ("positions", "ends", "counts", "blocks")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("show", "nothing"), "built-in traces: smollm2-prose"),
        (("show", __file__), "is no trace"),
        (("replay", "smollm2-code", "--tokens", 100, "--out", "x"), "tokens=100"),
        (("replay", "smollm2-code", "--layers", 0, "--out", "x"), "--layers"),
        (("replay", "smollm2-code"), "--out"),
        (("record", "--task", "nothing", "--out", "x"), "task='nothing'"),
        (("record", "--budget", 40, "--out", "x"), "budget_tokens=40"),
        (("record", "--digest", "crc", "--out", "x"), "digest='crc'"),
        (("record", "--out", "no-such-folder/x"), "no folder no-such-folder"),
    ],
)
def test_what_cannot_be_is_one_line(monkeypatch, capsys, arguments, text):
    assert run(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert text in line


def test_a_free_task_has_nothing_to_decode(monkeypatch, capsys, tmp_path):
    options = ("--task", "free", "--model", save_tiny(tmp_path / "tiny"), "--tokens", 2000)
    assert run(monkeypatch, "record", *options, "--out", tmp_path / "x") == 2
    assert "no known answer" in capsys.readouterr().err.splitlines()[-1]
