"""The command line: one clear line and exit code 2 for bad input, one object for --json."""

import json
import signal
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file

from oasiskv import cli
from tiny_folder import save_config, save_tiny

SMALL = ["--budget", "32", "--hot", "48", "--sink", "16", "--window", "16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def prompt(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 6)
    return path


def run(monkeypatch, *arguments):
    """Run the command in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["oasiskv", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code


def generate(monkeypatch, folder, prompt, *more):
    return run(monkeypatch, "generate", "--model", folder, "--prompt-file", prompt, *SMALL, *more)


def test_json_is_one_object_with_the_documented_keys(monkeypatch, capsys, folder, prompt):
    assert generate(monkeypatch, folder, prompt, "--max-new-tokens", 40, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    documented = {
        *("text", "token_ids", "prompt_tokens", "dense_kv_bytes", "fast_tier_kv_bytes"),
        *("digest_bytes", "store_bytes", "fetched_bytes_per_step", "cap_bytes_per_step"),
        *("hit_rate", "agreement", "tokens_per_step"),
    }
    assert documented <= set(report)
    assert report["prompt_tokens"] == 270
    assert len(report["token_ids"]) == 40
    assert len(report["text"]) == 40
    assert 0 < report["fast_tier_kv_bytes"] < report["dense_kv_bytes"]
    assert 0 < max(report["fetched_bytes_per_step"]) <= report["cap_bytes_per_step"]
    assert 0 < report["hit_rate"] <= 1
    assert 0 < report["agreement"] <= 1
    assert report["tokens_per_step"] >= 1


def test_text_then_one_table(monkeypatch, capsys, folder, prompt):
    assert generate(monkeypatch, folder, prompt, "--max-new-tokens", 20) == 0
    out = capsys.readouterr().out
    for row in ("KV, dense", "KV, fast tier", "digests", "host store", "cap", "hit rate"):
        assert row in out


def test_streamed_text_is_the_reported_text(monkeypatch, capsys, folder, prompt):
    generate(monkeypatch, folder, prompt, "--max-new-tokens", 20, "--json")
    text = json.loads(capsys.readouterr().out)["text"]
    generate(monkeypatch, folder, prompt, "--max-new-tokens", 20)
    assert text in capsys.readouterr().out


def test_plot_writes_a_picture(monkeypatch, folder, prompt, tmp_path):
    picture = tmp_path / "out.png"
    assert generate(monkeypatch, folder, prompt, "--max-new-tokens", 20, "--plot", picture) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_seed_repeats_sampled_text(monkeypatch, capsys, folder, prompt):
    texts = []
    for seed in (1, 1, 2):
        options = ("--temperature", 1, "--seed", seed, "--max-new-tokens", 20, "--json")
        generate(monkeypatch, folder, prompt, *options)
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("draft", ["none", "ngram", "assistant"])
def test_each_draft_source_gives_the_same_greedy_text(monkeypatch, capsys, folder, prompt, draft):
    options = ("--draft", draft, "--assistant", folder, "--dense", "--max-new-tokens", 20, "--json")
    generate(monkeypatch, folder, prompt, *options)
    text = json.loads(capsys.readouterr().out)["text"]
    generate(monkeypatch, folder, prompt, "--draft", "none", "--dense", *options[-3:])
    assert json.loads(capsys.readouterr().out)["text"] == text


def refused(monkeypatch, capsys, text, *arguments):
    """The command ends with code 2 and one line on standard error that holds ``text``."""
    assert run(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("oasiskv: error: ")
    assert text in captured.err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--budget", 0), "budget_tokens=0"),
        (("--budget", 40), "budget_tokens=40"),
        (("--budget", 64), "hot_tokens=48"),
        (("--window", 8), "window_tokens=8"),
        (("--sink", -16), "sink_tokens=-16"),
        (("--lookahead", "sideways"), "lookahead"),
        (("--draft", "assistant"), "--assistant"),
        (("--cap", 0), "cap_fraction=0.0"),
        (("--cap", "some"), "--cap"),
        (("--threshold", "1.5"), "--threshold"),
        (("--host-gib", 2**17), "GiB of memory are available: lower host_gib"),
        (("--hot", 2**30, "--threshold", 0), "lower the largest of them"),
        (("--sink", 2**30, "--threshold", 0), "sink_tokens=1073741824"),
        (("--temperature", -1), "temperature"),
        (("--max-new-tokens", 0), "max_new_tokens=0"),
        (("--device", "abacus"), "abacus"),
        (("--host-gib", 1e-9), "host_gib"),
        (("--bogus", 1), "--bogus"),
        (("--budget", "many"), "--budget"),
    ],
)
def test_bad_settings(monkeypatch, capsys, folder, prompt, options, text):
    arguments = ("--model", folder, "--prompt-file", prompt, *SMALL, *options)
    refused(monkeypatch, capsys, text, "generate", *arguments)


@pytest.mark.parametrize(
    ("content", "text"), [("", "empty"), (" \n", "empty"), ("a" * 4096, "allows 4096")]
)
def test_bad_prompts(monkeypatch, capsys, folder, tmp_path, content, text):
    path = tmp_path / "bad.txt"
    path.write_text(content)
    refused(monkeypatch, capsys, text, "generate", "--model", folder, "--prompt-file", path, *SMALL)


def test_missing_prompt_file(monkeypatch, capsys, folder, tmp_path):
    arguments = ("--model", folder, "--prompt-file", tmp_path / "none.txt", *SMALL)
    refused(monkeypatch, capsys, "none.txt", "generate", *arguments)


def test_missing_model_folder(monkeypatch, capsys, prompt, tmp_path):
    arguments = ("--model", tmp_path / "nowhere", "--prompt-file", prompt, *SMALL)
    refused(monkeypatch, capsys, "nowhere", "generate", *arguments)


def test_state_space_model(monkeypatch, capsys, prompt, tmp_path):
    bad = save_config(tmp_path / "m", model_type="mamba", architectures=["MambaForCausalLM"])
    arguments = ("--model", bad, "--prompt-file", prompt, *SMALL)
    refused(monkeypatch, capsys, "state-space", "generate", *arguments)


def test_hybrid_model_with_linear_attention(monkeypatch, capsys, prompt, tmp_path):
    bad = save_config(tmp_path / "m", model_type="qwen3_next")
    arguments = ("--model", bad, "--prompt-file", prompt, *SMALL)
    refused(monkeypatch, capsys, "linear attention", "generate", *arguments)


def test_multi_latent_attention(monkeypatch, capsys, prompt, tmp_path):
    bad = save_config(tmp_path / "m", model_type="deepseek_v3", kv_lora_rank=512)
    arguments = ("--model", bad, "--prompt-file", prompt, *SMALL)
    refused(monkeypatch, capsys, "multi-latent", "generate", *arguments)


def test_an_assistant_that_cannot_be_loaded(monkeypatch, capsys, folder, prompt, tmp_path):
    bad = save_config(tmp_path / "m", model_type="llama")
    arguments = ("--model", folder, "--prompt-file", prompt, *SMALL)
    drafts = ("--draft", "assistant", "--assistant", bad)
    refused(monkeypatch, capsys, "cannot load a model", "generate", *arguments, *drafts)


def test_only_sliding_windows(monkeypatch, capsys, prompt, tmp_path):
    bad = save_config(tmp_path / "m", model_type="mistral", sliding_window=64)
    arguments = ("--model", bad, "--prompt-file", prompt, *SMALL)
    refused(monkeypatch, capsys, "sliding window", "generate", *arguments)


def test_nan_weights(monkeypatch, capsys, prompt, tmp_path):
    bad = save_tiny(tmp_path / "nan")
    weights = load_file(bad / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(weights, bad / "model.safetensors", {"format": "pt"})
    arguments = ("--model", bad, "--prompt-file", prompt, *SMALL)
    refused(monkeypatch, capsys, "NaN", "generate", *arguments)


def test_settings_that_may_be_none(monkeypatch, capsys, folder, prompt):
    configs = []
    monkeypatch.setattr(cli, "run_generate", lambda *given, **_: configs.append(given[2]) or 1 / 0)
    for options in (("--cap", "none", "--threshold", "None"), ("--cap", 0.5, "--threshold", 99)):
        with pytest.raises(ZeroDivisionError):
            generate(monkeypatch, folder, prompt, *options)
    found = [(config.cap_fraction, config.threshold_tokens) for config in configs]
    assert found == [(None, None), (0.5, 99)]


def test_a_store_too_small_for_the_request(monkeypatch, capsys, folder, prompt):
    arguments = ("--model", folder, "--prompt-file", prompt, *SMALL, "--host-gib", 2**-15)
    refused(monkeypatch, capsys, "host_gib", "generate", *arguments)


def test_interrupt_leaves_terminal_and_cache_clean(folder, prompt, tmp_path):
    command = [sys.executable, "-c", "from oasiskv.cli import main; main()", "generate"]
    options = ["--model", folder, "--prompt-file", prompt, *SMALL, "--max-new-tokens", "3000"]
    process = subprocess.Popen(
        [*command, *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": "", "OASISKV_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
    )
    assert process.stdout.read(400), "nothing was streamed"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == b"\ninterrupted\n"
    # No escape sequence that would need undoing, and nothing left in the cache.
    assert b"\x1b" not in out
    assert not (tmp_path / "home").exists() or not any((tmp_path / "home").rglob("*"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_text_of_the_cpu(monkeypatch, capsys, folder, prompt):
    texts = []
    for device in ("cpu", "cuda"):
        options = ("--device", device, "--max-new-tokens", 40, "--json")
        generate(monkeypatch, folder, prompt, *options)
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1]


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_serving_without_vllm_is_one_line(monkeypatch, capsys, folder):
    assert run(monkeypatch, "serve", folder, "--host-gib", "1", "--port", "8000") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "vLLM is not installed" in line
