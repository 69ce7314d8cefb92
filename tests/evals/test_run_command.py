"""``oasiskv eval run``: tasks and methods of one's choice on a model of one's own."""

import pytest
import torch
from typer.testing import CliRunner

from oasiskv.cli import app
from oasiskv.errors import ConfigError, OasisError
from oasiskv.evals.suite import jobs
from oasiskv.evals.suite.rows import read_rows
from oasiskv.evals.suite.run import Batch
from oasiskv.evals.tasks.base import Question
from tiny_folder import save_tiny

TASKS = ("--task", "needle_keys", "--task", "forced_prose", "--questions", "2")
METHODS = ("--method", "oasis-none", "--method", "quest")


def run(folder, out, *options):
    given = ("eval", "run", "--model", folder, "--tokens", 1000, "--budget", 64, "--out", out)
    fixed = ("--device", "cpu", "--jobs", "1", *options)
    return CliRunner().invoke(app, [str(each) for each in (*given, *fixed)])


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """A process that measures takes a thread a core: on a small model they wait for one another."""
    monkeypatch.setattr(jobs.os, "cpu_count", lambda: 1)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_of_ones_own(tmp_path, family):
    folder, out = save_tiny(tmp_path / "model", family), tmp_path / "out"
    assert run(folder, out, *TASKS, *METHODS).exit_code == 0
    rows = read_rows(out / "rows.jsonl")
    assert {(row.task, row.method, row.budget) for row in rows} == {
        (task, method, budget)
        for task in ("needle_keys", "forced_prose")
        for method, budget in (("dense", 0), ("oasis-none", 64), ("quest", 64))
    }
    assert len(rows) == 4 * 3
    for name in ("tables.md", "quality.png"):
        assert (out / name).stat().st_size > 0
    # Nothing is measured twice, and what was measured is not mixed with something else.
    before = (out / "rows.jsonl").read_bytes()
    assert run(folder, out, *TASKS, *METHODS).exit_code == 0
    assert (out / "rows.jsonl").read_bytes() == before
    found = run(folder, out, *TASKS)
    assert isinstance(found.exception, ConfigError)
    assert "another run" in str(found.exception)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--task", "needles"), "--task needles: needed is one of passkey, "),
        (("--method", "dense"), "--method dense: needed is one of exact, "),
        (("--method", "oasis-assistant"), "and --assistant are needed together"),
        (("--method", "quest", "--assistant", "x"), "and --assistant are needed together"),
        ((*TASKS, "--tokens", "5000"), "allows 4096: give --tokens 4096 or fewer"),
        ((*TASKS, "--budget", "2048"), "ask for longer prompts or for smaller budgets"),
    ],
)
def test_what_cannot_be_run(tmp_path, options, message):
    found = run(save_tiny(tmp_path / "model"), tmp_path / "out", *options)
    assert isinstance(found.exception, OasisError)
    assert message in str(found.exception)


def test_sliding_windows_are_refused(tmp_path):
    some = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    folder = save_tiny(tmp_path / "model", "qwen2", **some)
    found = run(folder, tmp_path / "out", *TASKS)
    assert "`oasiskv eval harness` takes this model" in str(found.exception)


@pytest.mark.parametrize(
    ("names", "advice"), [("abcd", "--at-once 2 takes less"), ("a", "needed is a larger GPU")]
)
def test_too_many_questions_for_the_memory(monkeypatch, names, advice):
    def measure(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(jobs, "measure", measure)
    monkeypatch.setattr(jobs, "_load", lambda model, device: None)
    questions = tuple(Question("t", n, n, [1], [1], [1], "answer", 1) for n in names)
    batch = Batch("m", 100, questions, (64,), ("dense",), 0)
    with pytest.raises(ConfigError, match=f"^{len(names)} of the questions.*{advice}"):
        jobs._measure(batch, "cuda")


def test_what_there_is():
    shown = CliRunner().invoke(app, ["eval", "list"]).output
    assert "json_pairs" in shown
    assert "oasis-oracle1-free" in shown
