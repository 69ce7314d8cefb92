"""The table: figures of two looks, and of one."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from oasiskv.top.figures import figures, restarted
from oasiskv.top.scrape import parse
from oasiskv.top.view import render
from top.server import BODY, OASIS, VLLM, grown

URL = "http://server/metrics"
BEFORE, AFTER = parse(BODY, 100.0, URL), parse(grown(BODY, 3), 102.0, URL)


def text_of(*args, width=80):
    out = io.StringIO()
    Console(file=out, width=width).print(render(*args))
    return out.getvalue()


def row(text, name):
    [found] = [line for line in text.splitlines() if line.strip().startswith(name)]
    return found.strip().removeprefix(name).split("  ")


def cells(text, name):
    return [cell.strip() for cell in row(text, name) if cell.strip()]


def test_rates_are_of_the_time_between():
    found = figures(AFTER, BEFORE)
    assert found.seconds == 2
    assert found.per_second(found.tokens) == 500
    assert found.hits == pytest.approx(0.95)
    assert (found.sparse_steps, found.fetched, found.cap) == (20, 2 * 10 * 2**20, 2 * 20 * 2**20)
    assert found.wait_s == pytest.approx(0.0005)
    assert found.wait_99_s == 0.003
    assert found.refusals == {"store": 14, "pool": 0, "late": 0}
    assert found.agreement is None


def test_a_restart_is_seen():
    assert not restarted(BEFORE, AFTER)
    assert not restarted(BEFORE, BEFORE)
    assert restarted(AFTER, BEFORE)
    gone = replace(AFTER, counters=BEFORE.counters.copy())
    del gone.counters["vllm:oasiskv_transitions_total"]
    assert restarted(BEFORE, gone)


def test_the_table():
    text = text_of(AFTER, BEFORE, URL, "a note")
    assert "a note" in text
    assert "tiny, 1 engine(s)" in text
    assert cells(text, "requests running, waiting") == ["3, 2"]
    assert cells(text, "sparse, dense") == ["2, 1"]
    assert cells(text, "transitions") == ["10", "15"]
    assert cells(text, "refused for store, pool, late") == ["14, 0, 0", "21, 0, 0"]
    assert cells(text, "output tokens") == ["500.0/s", "1,500"]
    assert cells(text, "contexts of sparse requests") == ["100.00 MiB"]
    assert cells(text, "of that in KV memory") == ["40.00 MiB", "(1 / 2.50)"]
    assert cells(text, "store used") == ["256.00 MiB", "(25.0 %)"]
    assert cells(text, "fetched  ") == ["10.00 MiB/s", "30.00 MiB"]
    assert cells(text, "fetched per step") == ["1.00 MiB", "1.00 MiB"]
    assert cells(text, "share of the cap") == ["50.0 %", "50.0 %"]
    assert cells(text, "hits") == ["95.0 %", "95.0 %"]
    assert cells(text, "wait per step: mean, 99 %") == ["0.50 ms, <= 3 ms"] * 2
    assert cells(text, "prediction agreement") == ["-", "-"]


def test_one_look_has_no_rates():
    text = text_of(BEFORE, None, URL)
    assert cells(text, "output tokens") == ["-", "500"]
    assert cells(text, "hits") == ["-", "95.0 %"]


def test_an_idle_server_and_a_fresh_one():
    text = text_of(AFTER, AFTER, URL)
    assert cells(text, "output tokens") == ["-", "1,500"]
    fresh = parse(VLLM + OASIS.splitlines()[1], 0.0, URL)
    text = text_of(fresh, fresh, URL)
    assert cells(text, "store used") == ["0 B", "(-)"]
    assert cells(text, "hits") == ["-", "-"]


def test_no_line_is_wider_than_a_terminal():
    assert max(map(len, text_of(AFTER, BEFORE, URL).splitlines())) <= 80
    # No name of a row is broken.
    assert "prediction agreement" in text_of(AFTER, BEFORE, URL)


def test_markup_of_others_is_shown_as_it_is():
    evil = parse(BODY.replace("tiny", "[red]x[/blue]"), 0.0, URL)
    assert "[red]x[/blue]" in text_of(evil, None, URL)
