"""A suite runs, goes on after a kill, and becomes tables and a picture."""

import json
from dataclasses import replace

import pytest
import torch

from oasiskv.errors import ConfigError
from oasiskv.evals.methods import ASSISTED, METHODS
from oasiskv.evals.suite import jobs
from oasiskv.evals.suite.compare import compare
from oasiskv.evals.suite.plots import plot
from oasiskv.evals.suite.rows import Row, RowFile, read_rows
from oasiskv.evals.suite.run import Batch, measure
from oasiskv.evals.suite.suites import SUITES, Part
from oasiskv.evals.suite.tables import markdown, sections, settings
from oasiskv.evals.tasks import TASKS
from oasiskv.evals.tasks.base import Question
from tiny import make_model, prompt_of, tiny_llama

BUDGET = 64
ALL = tuple(name for name, method in METHODS.items() if not method.ablation)
RUN = {"suite": "tiny"}


def question(kind, name, answer=(), new=0):
    asked = prompt_of(10, seed=2) if kind == "answer" else []
    return Question("task", name, name, prompt_of(400), asked, list(answer), kind, new)


def batch(kind, names=("one",), methods=ALL, **given):
    questions = tuple(question(kind, name, **given) for name in names)
    return Batch("tiny", 500, questions, (BUDGET,), methods, 0)


def ask_made(monkeypatch, names, config):
    """A task "made" that asks questions of these names, of a model that is nowhere."""

    class Made:
        def make(self, tokenizer, count, tokens, seed):
            return [question("forced", name) for name in names]

    monkeypatch.setattr(jobs, "resolve_model", str)
    monkeypatch.setattr(jobs, "load_tokenizer", str)
    monkeypatch.setattr(jobs, "read_config", lambda _: config)
    monkeypatch.setitem(jobs.TASKS, "made", Made())


def row(method="dense", budget=512, group="a", **values):
    return Row("m", "t", group, group, "answer", method, budget, 100, **values)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("answer", {"answer": [1], "new": 3}),
        ("forced", {"answer": prompt_of(40, seed=3)}),
        ("free", {"new": 40}),
    ],
)
def test_every_method_gives_a_row(kind, given):
    assistant = make_model()
    [rows] = measure(tiny_llama(), batch(kind, **given), assistant).values()
    assert {row.method for row in rows} == set(ALL)
    assert len(rows) == len(ALL)
    dense = rows[0]
    assert (dense.method, dense.budget) == ("dense", 0)
    assert dense.moved_bytes is None
    for found in rows:
        if kind == "answer":
            assert found.score in (0, 1)
            assert found.dense_score == dense.score
        else:
            assert found.kl >= -1e-6
            # Quest leaves two layers dense, and there are two.
            assert (found.kl < 1e-6) == (found.method in ("dense", "quest"))
            if kind == "free":
                # Dense is the surest of its own text.
                assert found.nll >= dense.nll - 1e-5
            assert len(found.agree_by_quarter) == 4
    if kind == "free":
        assert dense.first_difference == 40
    predicted = {row.method for row in rows if row.agreement is not None}
    assert predicted == {name for name in ALL if name.startswith("oasis")}


def test_a_run_that_was_killed_goes_on(tmp_path):
    path = tmp_path / "rows.jsonl"
    first = RowFile(path, RUN)
    first.add("a", [row(score=1.0, dense_score=1.0, mass=(0.5, 0.25))])
    first.add("b", [row(group="b", score=0.0, dense_score=1.0)])
    with path.open("a") as out:
        out.write('{"unit": "c", "rows": [{"mo')
    again = RowFile(path, RUN)
    assert again.units == first.units
    again.add("c", [row(group="c")])
    assert list(RowFile(path, RUN).units) == ["a", "b", "c"]


@pytest.mark.parametrize("text", ["", "{", '{"suite": "tiny"}\n{"unit": 1}\n', "[]\nnull\n"])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="give another --out"):
        RowFile(path, RUN)


def test_a_file_of_another_run_is_refused(tmp_path):
    RowFile(tmp_path / "rows.jsonl", RUN)
    with pytest.raises(ConfigError, match="another run"):
        RowFile(tmp_path / "rows.jsonl", {"suite": "other"})


def test_only_what_is_not_there_is_measured(tmp_path, monkeypatch):
    class Here:
        """Runs at once, in this process."""

        def __init__(self, *_args, **_settings):
            pass

        def submit(self, function, *args):
            future = jobs.Future()
            future.set_result(function(*args))
            return future

        def shutdown(self, cancel_futures):
            pass

    measured = []

    def measure_one(batch, device):
        measured.append([each.name for each in batch.questions])
        return {batch.unit(each): [row()] for each in batch.questions}

    monkeypatch.setattr(jobs, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(jobs, "_measure", measure_one)
    ask_made(monkeypatch, "abc", make_model().config)
    monkeypatch.setitem(jobs.AT_ONCE, "cpu", 2)
    parts = [Part("tiny", tokens, {"made": 3}, (BUDGET,)) for tokens in (500, 600)]
    kept = RowFile(tmp_path / "rows.jsonl", RUN)
    kept.add("tiny 500 b", [row()])
    told = []
    batches, there = jobs.batches_of(parts, 0, kept, torch.device("cpu"))
    assert there == 1
    jobs.run(batches, torch.device("cpu"), 2, kept, lambda: told.append(1))
    assert measured == [["a", "c"], ["a", "b"], ["c"]]
    assert len(told) == 5
    assert set(kept.units) == {f"tiny {tokens} {name}" for tokens in (500, 600) for name in "abc"}
    assert jobs.batches_of(parts, 0, kept, torch.device("cpu")) == ([], 6)


@pytest.mark.parametrize(("tokens", "heads", "most"), [(8192, 9, 8), (32768, 9, 4), (32768, 32, 1)])
def test_questions_at_once_by_what_fits(tmp_path, monkeypatch, tokens, heads, most):
    config = make_model().config
    config.num_attention_heads, config.max_position_embeddings = heads, tokens
    ask_made(monkeypatch, "abcdefgh", config)
    parts, kept = [Part("tiny", tokens, {"made": 8}, (BUDGET,))], RowFile(tmp_path / "rows", RUN)
    for at_once, expected in ((None, most), (3, 3)):
        batches, _ = jobs.batches_of(parts, 0, kept, torch.device("cuda"), at_once)
        assert max(len(batch.questions) for batch in batches) == expected


def test_suites_name_what_there_is():
    for parts in SUITES.values():
        for part in parts:
            assert set(part.tasks) <= set(TASKS)
            left_out = {name for name in METHODS if name not in part.methods}
            ablations = {name for name, method in METHODS.items() if method.ablation}
            if part.only:
                assert set(part.only) <= set(METHODS)
                assert not ablations & left_out
            else:
                assert left_out - {ASSISTED} == ablations
                assert (ASSISTED in left_out) == (part.assistant is None)


@pytest.fixture
def rows():
    return [
        row(method, budget, group, score=score, dense_score=dense, moved_bytes=moved)
        for method, budget, moved, scores in (
            ("dense", 0, None, "1110"),
            ("oasis-none", 512, 2**20, "1000"),
            ("oasis-none", 1024, 2**20, "1110"),
        )
        for group, score, dense in zip(
            "abcd", map(float, scores), (1.0, 1.0, 1.0, 0.0), strict=True
        )
    ]


def test_tables(rows):
    text = markdown(rows, 0)
    assert "| method | K | all | less than dense by | MiB moved a step | t, 3 of 4 |" in text
    # Three right answers of three: Clopper and Pearson's interval.
    assert "| dense | - | 1.000 (0.292 to 1.000) | 0.000 (-0.708 to 0.708) | - |" in text
    # One of three, and no wider than shares are.
    assert (
        "| oasis-none | 512 | 0.333 (0.000 to 1.000) | 0.667 (-1.000 to 1.000) | "
        "1.00 (1.00 to 1.00) | 0.33 (0.00 to 1.00) |" in text
    )
    # Three questions are too few for a loss to be called the worst.
    assert "Where most is lost" not in text
    assert "All: 3 questions." in text
    assert settings(rows) == [("dense", 0), ("oasis-none", 512), ("oasis-none", 1024)]
    assert list(sections(rows)) == ["Answers: m, 100 tokens"]


def test_a_task_that_dense_never_answers_keeps_its_column(rows):
    none = [replace(each, task="s", score=0.0, dense_score=0.0) for each in rows]
    both = [*(replace(each, task="r") for each in rows), *none, *rows]
    text = markdown(both, 0)
    assert "MiB moved a step | r, 3 of 4 | s, 0 of 4 | t, 3 of 4 |" in text
    [line] = [line for line in text.splitlines() if line.startswith("| oasis-none | 512 | 0.3")]
    assert line.endswith("| 0.33 (0.00 to 1.00) | - | 0.33 (0.00 to 1.00) |")


def test_the_largest_losses():
    answers = [
        replace(row(method, budget, f"{task}{group}", score=score, dense_score=1.0), task=task)
        for task, shares in (("a", (1.0, 0.0)), ("b", (0.5, 0.5)))
        for (method, budget), score in zip(
            (("dense", 0), ("oasis-none", 512), ("stale", 512)), (1.0, *shares), strict=True
        )
        for group in range(5)
    ]
    text = markdown(answers, 0)
    lost = text[text.index("## Where most is lost") :]
    # Five equal answers of five: Clopper and Pearson's .522; stale is not OasisKV.
    assert [
        line for line in lost.splitlines() if line.startswith("| oasis") or "stale" in line
    ] == [
        "| oasis-none | 512 | m | 100 | b | 0.500 (-0.283 to 0.761) | 5 |",
        "| oasis-none | 512 | m | 100 | a | 0.000 (-0.522 to 0.522) | 5 |",
    ]


def test_tables_of_two_runs_one_of_which_has_a_method_more(rows):
    more = [
        row("oasis-paper", 512, group, score=1.0, dense_score=1.0, moved_bytes=0.0)
        for group in "ab"
    ]
    text = markdown([*rows, *more], 0)
    assert "| oasis-paper | 512 | 1.000 (0.158 to 1.000) | 0.000 (" in text


def test_tables_of_texts():
    text = markdown(
        [
            Row(
                "m", task, task, task, "forced", "stale", 512, 100, kl=0.5, agree=0.75, nll=2.0,
                agree_by_quarter=[1.0, 0.5], first_difference=3, moved_bytes=0.0,
                mass=(mass, 0.25), recall=(0.5, 0.0),
            )
            for task, mass in (("code", 0.5), ("prose", 0.6))
        ],
        0,
    )  # fmt: skip
    assert "KL, code, 0 | KL, prose, 0 |" in text
    # Two texts that gave the same: nothing bounds a divergence but 0.
    assert "| stale | 512 | 0.5000 (0.5000 to 0.5000) | 0.750 (" in text
    assert " | 2.000 (2.000 to 2.000) | 3 (3 to 3) | 0.00 (0.00 to 0.00) | 0.5000 |" in text
    assert "2 texts." in text
    over_time = text[text.index("Agreement over time") :].splitlines()
    # A continuation of two tokens has two quarters.
    shown = "| stale | 512 | 1.000 (0.158 to 1.000) | 0.500 (0.079 to 0.921) | - | - |"
    assert shown in over_time
    # Of two that differ: Student's interval.
    assert "| stale | 512 | 0.550 (" in text
    assert text.rstrip().endswith(" | - | - | 2 |")


def test_a_second_run_inside_or_outside_of_the_first(rows):
    assert all(each.inside for each in compare(rows, rows, 0))
    other = [replace(each, score=0.0) if each.budget == 1024 else each for each in rows]
    figures = {each.what: each for each in compare(rows, other, 0)}
    assert [what for what, each in figures.items() if not each.inside] == [
        "Answers: m, 100 tokens, t, oasis-none, K = 1024: score"
    ]
    assert len(figures) == 2


def test_a_run_is_read_whatever_it_is(tmp_path, rows):
    RowFile(tmp_path / "rows.jsonl", RUN).add("a", rows)
    assert read_rows(tmp_path / "rows.jsonl") == rows
    with pytest.raises(ConfigError, match="is not there"):
        read_rows(tmp_path / "none.jsonl")


def test_a_picture(rows, tmp_path):
    plot(rows, tmp_path / "out.png", 0)
    assert (tmp_path / "out.png").stat().st_size > 10_000


def test_rows_are_plain_json(tmp_path):
    path = tmp_path / "rows.jsonl"
    RowFile(path, RUN).add(
        "a",
        next(
            iter(
                measure(tiny_llama(), batch("forced", answer=prompt_of(20)), make_model()).values()
            )
        ),
    )
    _, line = path.read_text().splitlines()
    assert {each["method"] for each in json.loads(line)["rows"]} == set(ALL)
