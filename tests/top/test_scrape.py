"""What a server says is read with care: it may be anything."""

import math
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oasiskv.errors import ConfigError
from oasiskv.top import scrape as scraping
from oasiskv.top.scrape import ScrapeError, fetch, metrics_url, parse, scrape
from top.server import BODY, OASIS, VLLM, giving, serving

URL = "http://server/metrics"


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("localhost:8000", "http://localhost:8000/metrics"),
        ("http://localhost:8000/", "http://localhost:8000/metrics"),
        ("https://host/metrics", "https://host/metrics"),
        ("http://[::1]:8000", "http://[::1]:8000/metrics"),
    ],
)
def test_addresses(address, url):
    assert metrics_url(address) == url


@pytest.mark.parametrize(
    "address",
    [
        "",
        "file:///etc/passwd",
        "ftp://host",
        "http://",
        "http://host:99999",
        "http://a b",
        "http://[x",
    ],
)
def test_what_is_no_address(address):
    with pytest.raises(ConfigError, match="no address"):
        metrics_url(address)


def test_samples_are_summed_over_engines():
    second = OASIS.replace('engine="0"', 'engine="1"')
    one, both = parse(BODY, 1.0, URL), parse(BODY + second, 1.0, URL)
    assert one.counters["vllm:oasiskv_wanted_tiles_total"] == 1000
    assert one.gauges["vllm:oasiskv_requests.sparse"] == 2
    assert one.buckets == {0.001: 9, 0.003: 10, math.inf: 10}
    assert (one.models, one.engines) == (("tiny",), 1)
    assert both.counters["vllm:oasiskv_wanted_tiles_total"] == 2000
    assert both.counters["vllm:oasiskv_refusals_total.store"] == 14
    assert both.counters["vllm:generation_tokens_total"] == 500
    assert both.engines == 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("", "is no vLLM server"),
        ("<html>vllm:</html>", "is no vLLM server"),
        (VLLM, "is vLLM without OasisKV"),
        (BODY + 'vllm:oasiskv_requests{state="sparse', "malformed"),
        (BODY + "vllm:oasiskv_requests", "malformed"),
        (BODY + "vllm:oasiskv_requests{} one", "malformed"),
    ],
)
def test_what_is_not_it(body, words):
    with pytest.raises(ScrapeError, match=words):
        parse(body, 0.0, URL)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "1e999"])
def test_values_that_cannot_be_are_left_out(value):
    found = parse(BODY + f"vllm:oasiskv_transitions_total{{}} {value}\n", 0.0, URL)
    assert found.counters["vllm:oasiskv_transitions_total"] == 5


def test_names_cannot_steer_the_terminal():
    evil = BODY.replace("tiny", "\x1b[2Jtiny\x9b" + "x" * 100)
    [model] = parse(evil, 0.0, URL).models
    assert model.isprintable()
    assert len(model) == 60


@given(st.text(alphabet='{}",=\\ \n\t#abc019.eE+-NaInf\u2028', max_size=60))
def test_anything_after_a_name_is_read_or_refused(text):
    try:
        found = parse(BODY + "vllm:oasiskv_requests" + text + "\n", 0.0, URL)
    except ScrapeError:
        return
    values = (*found.counters.values(), *found.gauges.values())
    assert all(math.isfinite(value) and value >= 0 for value in values)


def test_a_server():
    with serving(giving(BODY)) as address:
        assert scrape(metrics_url(address)).gauges["vllm:oasiskv_requests.dense"] == 1


def redirects(handler):
    handler.send_response(302)
    handler.send_header("Location", "file:///etc/passwd")
    handler.end_headers()


def closes(handler):
    handler.connection.close()


def gives_less_than_it_says(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b"vllm:")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (giving("gone", 404), "status 404"),
        (redirects, "status 302"),
        (giving(b"\xff\xfe"), "no text"),
        (closes, "cannot be reached"),
        (gives_less_than_it_says, "95 bytes too early"),
    ],
)
def test_servers_that_answer_badly(answer, words):
    with serving(answer) as address, pytest.raises(ScrapeError, match=words):
        scrape(metrics_url(address))


def test_nobody_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/metrics"
        with pytest.raises(ScrapeError, match=r"cannot be reached: .*refused"):
            fetch(url)


def test_an_endless_answer_is_cut_off(monkeypatch):
    monkeypatch.setattr(scraping, "MOST_BYTES", 2**18)
    sent = []

    def endless(handler):
        handler.send_response(200)
        handler.end_headers()
        while True:
            try:
                sent.append(handler.wfile.write(b"vllm:" * 10000))
            except OSError:
                return

    with serving(endless) as address, pytest.raises(ScrapeError, match="more than 262144 bytes"):
        scrape(metrics_url(address))
    assert sum(sent) < 2**25


def test_a_slow_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(scraping, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/metrics"
        with pytest.raises(ScrapeError, match="cannot be reached: timed out"):
            fetch(url)


def test_no_proxy_is_asked(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    with serving(giving(BODY)) as address:
        assert fetch(metrics_url(address)) == BODY
