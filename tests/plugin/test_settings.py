"""Settings of the plugin, what it logs of them, and its kill switch."""

import logging
import re

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec

import oasiskv.vllm
from oasiskv.errors import ConfigError
from oasiskv.vllm.compat import installed_version
from plugin.engines import DEFAULTS, engine, greedy
from tiny import prompt_of, same_up_to_ties, stock_greedy

SMALL = {
    "threshold_tokens": 64,
    "budget_tokens": 64,
    "hot_tokens": 128,
    "window_tokens": 16,
    # 17 blocks of 16 KiB: 272 tokens.
    "host_gib": 0.00027,
}


@pytest.fixture
def logged():
    """Levels and messages that the plugin logs; vLLM's loggers do not reach pytest's handler.

    By a filter: vLLM takes handlers away from its loggers when it sets them up.
    """
    records = []

    def note(record):
        records.append((record.levelname, record.getMessage()))
        return True

    logger = logging.getLogger("vllm.oasiskv")
    logger.addFilter(note)
    yield records
    logger.removeFilter(note)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ["host_gib is not set"]),
        (
            {"host_gib": 1, "mode": "dense"},
            ["mode=dense", "'always' or 'under_pressure'", "OASISKV_DISABLE=1"],
        ),
        ({"host_gib": 1, "draft_tokens": 2}, ["draft_tokens=2", "num_speculative_tokens"]),
        ({"host_gib": 1, "prefill_tokens": 64}, ["prefill_tokens=64", "max_num_batched_tokens"]),
        ({"host_gib": 1, "hot": 64}, ["unknown setting hot=64", "hot_tokens"]),
    ],
)
def test_settings_that_mean_nothing_in_vllm_are_refused(settings, words):
    with pytest.raises(ConfigError) as caught:
        oasiskv.vllm.engine_args(**settings)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_only_what_was_set_is_handed_to_vllm():
    args = oasiskv.vllm.engine_args(host_gib=2, lookahead="paper")
    extra = args["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra == {"host_gib": 2.0, "lookahead": "paper"}


@pytest.mark.smoke
def test_start_is_logged_once_and_max_tokens_beyond_max_model_len_is_served(tiny_folder, logged):
    args = DEFAULTS | oasiskv.vllm.engine_args(**SMALL) | {"max_model_len": 256}
    with engine(tiny_folder, **args) as llm:
        levels, (settings, plan, warning) = zip(*logged, strict=True)
        assert levels == ("INFO", "INFO", "WARNING")
        on = rf"OasisKV \S+ on vLLM {re.escape(installed_version())}: "
        assert re.match(on + "mode=always budget_tokens=64 ", settings)
        assert "threshold_tokens=64 " in settings
        assert "host_gib=0.00027" in settings
        # (256 - 1) / 16 dense; one in prefill takes 1 + 16 + 8 blocks, the others 1 + 8 + 1 + 2
        # of the other 231; the store holds one of 16 blocks.
        assert "that fit: 15 dense, 1 with OasisKV (the host store limits" in plan
        assert "(1) than vLLM alone (15): the host store limits" in warning
        assert "16384 bytes a block" in plan
        logged.clear()
        greedy(llm, [prompt_of(100)], 8)
        assert not logged
        sampling = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True, detokenize=False)
        prompt = {"prompt_token_ids": prompt_of(100)}
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 156
        assert not logged


def test_the_kill_switch_leaves_stock_arguments(monkeypatch, logged):
    monkeypatch.setenv("OASISKV_DISABLE", "1")
    # Not even the settings are looked at.
    assert oasiskv.vllm.engine_args(unknown=1) == {}
    assert logged == [("WARNING", "OASISKV_DISABLE=1: stock vLLM runs, without OasisKV")]


@pytest.mark.parametrize("value", ["0", ""])
def test_the_kill_switch_is_off(monkeypatch, value):
    monkeypatch.setenv("OASISKV_DISABLE", value)
    assert "worker_cls" in oasiskv.vllm.engine_args(host_gib=1)


def test_the_kill_switch_takes_no_other_value(monkeypatch):
    monkeypatch.setenv("OASISKV_DISABLE", "yes")
    with pytest.raises(ConfigError, match="OASISKV_DISABLE='yes' is not legal: 1 switches"):
        oasiskv.vllm.engine_args(host_gib=1)


@pytest.mark.smoke
def test_worker_and_connector_are_inert_under_the_kill_switch(tiny_folder, monkeypatch, logged):
    args = oasiskv.vllm.engine_args(**SMALL) | {"block_size": 32}
    monkeypatch.setenv("OASISKV_DISABLE", "1")
    prompts = [prompt_of(length) for length in (5, 101, 300)]
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    with engine(tiny_folder, **args) as llm:
        for prompt, tokens in zip(prompts, greedy(llm, prompts, 24), strict=True):
            assert same_up_to_ties(tokens, *stock_greedy(model, prompt, 24))
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        assert type(scheduler.connector).__name__ == "OasisConnector"
        (group,) = scheduler.kv_cache_config.kv_cache_groups
        assert type(group.kv_cache_spec) is FullAttentionSpec
        assert not scheduler.connector._state.requests
    assert not logged
