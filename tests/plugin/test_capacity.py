"""What the plugin is for: more requests at once in the same KV pool, and none preempted."""

import json
import sys

import pytest
from vllm import SamplingParams

from oasiskv import cli
from oasiskv.bench.capacity import Workload, measure
from oasiskv.config import OasisConfig
from oasiskv.errors import ConfigError
from oasiskv.vllm import engine_args
from plugin.engines import engine
from tiny import prompt_of

REQUESTS, PROMPT, NEW = 8, 1996, 64
SINK, HOT, WINDOW = 1, 16, 4
DENSE = -(-PROMPT // 16) + HOT
SPARSE = SINK + HOT + WINDOW + 1
CONFIG = OasisConfig(budget_tokens=128, hot_tokens=256, sink_tokens=16, window_tokens=64)


@pytest.fixture(scope="module")
def reports():
    return measure(Workload(REQUESTS, PROMPT, NEW), CONFIG)


def test_digests_are_taken_off_the_same_memory(reports):
    stock, oasis = reports
    block_bytes = oasis.pool_bytes // oasis.pool_blocks
    # 4-bit keys: half a byte a key and four bytes a channel, of eight bytes a key and value.
    assert oasis.digest_bytes == oasis.store_bytes * 3 // 32
    left = stock.pool_bytes - oasis.digest_bytes
    assert left - block_bytes < oasis.pool_bytes <= left
    # The prompt of a seventh request beside six sparse ones just fits.
    assert 6 * SPARSE + DENSE <= oasis.pool_blocks - 1 < 7 * SPARSE + DENSE


def test_seven_requests_decode_where_stock_runs_two(reports):
    stock, oasis = reports
    assert (stock.decoding_at_once, stock.preemptions) == (2, 0)
    assert (oasis.decoding_at_once, oasis.preemptions) == (7, 0)
    assert oasis.steps < stock.steps


def test_a_sparse_request_holds_sink_hot_set_and_window(reports):
    stock, oasis = reports
    assert oasis.dense_peak_blocks == DENSE
    assert (oasis.decode_least_blocks, oasis.decode_peak_blocks) == (SPARSE, SPARSE)
    assert 6 * SPARSE + DENSE - 16 <= oasis.peak_pool_blocks < oasis.pool_blocks
    assert stock.decode_peak_blocks is None
    # Sampled after each step: a request's last one has given its blocks back by then.
    assert stock.dense_peak_blocks == -(-(PROMPT + NEW - 1) // 32)


def test_the_command_prints_one_object(monkeypatch, capfd):
    sizes = ["--requests", "2", "--prompt-tokens", "300", "--new-tokens", "24"]
    more = ["--budget", "32", "--hot", "32", "--window", "16", "--json"]
    monkeypatch.setattr(sys, "argv", ["oasiskv", "bench", "capacity", *sizes, *more])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code
    result = json.loads(capfd.readouterr().out)
    assert result["workload"]["prompt_tokens"] == 300
    assert result["stock"]["decoding_at_once"] == result["oasis"]["decoding_at_once"] == 2
    assert result["oasis"]["decode_peak_blocks"] == 1 + 2 + 1 + 1
    assert result["oasis"]["store_peak_blocks"] > 0


def test_a_pool_too_small_for_one_request_is_refused():
    with pytest.raises(ConfigError, match="at least 2320 are needed"):
        measure(Workload(REQUESTS, PROMPT, NEW, pool_tokens=2304), CONFIG)


def preemptions(llm, sizes):
    """Of requests of ``(prompt tokens, new tokens)`` that arrive together."""
    for index, (prompt, new) in enumerate(sizes):
        sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        text = {"prompt_token_ids": prompt_of(prompt, seed=index)}
        llm.llm_engine.add_request(f"{len(sizes)}-{index}", text, sampling)
    requests = list(llm.llm_engine.engine_core.engine_core.scheduler.requests.values())
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    return [request.num_preemptions for request in requests]


def test_dense_requests_and_sparse_ones_share_a_full_pool(tiny_folder):
    plugin = engine_args(**CONFIG.model_dump(exclude_unset=True), host_gib=0.02)
    usable = -(-(PROMPT + NEW) // 16) + HOT
    short = 16 * (usable - DENSE)
    settings = {
        "num_gpu_blocks_override": usable + 1,
        "max_model_len": PROMPT + NEW,
        "max_num_batched_tokens": 4096,
    }
    with engine(tiny_folder, **(settings | plugin)) as llm:
        # The short one needs another block in step 2: what the long one gives back is there.
        assert preemptions(llm, [(short, 32), (PROMPT, NEW)]) == [0, 0]
        # The pool holds the short ones, with fewer than S blocks to spare: none are kept for the
        # long one, which has to wait.
        assert usable - 6 * 22 < HOT
        assert preemptions(llm, [(336, 16)] * 6 + [(PROMPT, NEW)]) == [0] * 7
