"""The plugin on CUDA, with FlashAttention: stock vLLM's output on the sparse path."""

import logging

import pytest
import torch

from tiny import prompt_of
from tiny_folder import save_tiny

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("vllm")

from vllm import SamplingParams

from oasiskv.vllm import engine_args
from oasiskv.vllm.batch_layers import BatchLayers
from plugin.engines import engine
from plugin.probe import NGRAM, probed

pytestmark = pytest.mark.gpu
log = logging.getLogger(__name__)
NEW = 24
PROMPTS = [prompt_of(length) for length in [*range(96, 112), 7, 16, 128, 250]]
ARGS = {
    "dtype": "bfloat16",
    "block_size": 16,
    "num_gpu_blocks_override": 3000,
    "max_model_len": 1024,
    "max_num_seqs": 64,
    "enable_prefix_caching": False,
    "kv_cache_memory_bytes": 2**32,
}
NOISE = 0.1
"""Between the log-probabilities of two bf16 kernels that sum in another order."""


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Not here: vLLM compiles, and the compiler's tuning refuses deterministic algorithms."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", head_dim=64)


def decode(llm, prompts):
    """``(tokens, log-probabilities of the five best)`` of each prompt's greedy continuation."""
    sampling = SamplingParams(
        temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=5
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return [(list(o.outputs[0].token_ids), o.outputs[0].logprobs) for o in outputs]


@pytest.fixture(scope="module")
def stock(folder):
    """Stock vLLM's, eager and compiled: the two round differently."""
    found = {}
    for eager in (True, False):
        with engine(folder, **(ARGS | {"enforce_eager": eager})) as llm:
            found[eager] = decode(llm, PROMPTS)
    return found


def largest_difference(ours, stock):
    """Of log-probabilities, as long as tokens are the same; they may part at a near-tie only."""
    largest = 0.0
    for (tokens, logprobs), (expected, reference) in zip(ours, stock, strict=True):
        for token, wanted, mine, theirs in zip(tokens, expected, logprobs, reference, strict=True):
            common = mine.keys() & theirs.keys()
            gaps = [abs(mine[key].logprob - theirs[key].logprob) for key in common]
            largest = max(largest, *gaps)
            if token != wanted:
                assert abs(theirs[wanted].logprob - theirs[token].logprob) < NOISE
                break
    return largest


ENGINES = {
    "no drafts": {},
    "last_accepted": {"speculative_config": NGRAM},
    "held_back, small steps": {
        "speculative_config": NGRAM,
        "settings": {"lookahead": "held_back"},
        "max_num_batched_tokens": 72,
    },
    "piecewise graphs": {
        "enforce_eager": False,
        "compilation_config": {"cudagraph_mode": "PIECEWISE"},
    },
    "full graphs": {"enforce_eager": False},
    "full graphs, held_back": {
        "enforce_eager": False,
        "speculative_config": NGRAM,
        "settings": {"lookahead": "held_back"},
    },
}


@pytest.mark.parametrize("args", ENGINES.values(), ids=ENGINES.keys())
def test_forced_refetch_gives_stock_vllms_output(folder, stock, args):
    with probed(folder, **(ARGS | args)) as probe:
        ours = decode(probe.llm, PROMPTS)
        reference = stock[args.get("enforce_eager", True)]
        difference = largest_difference(ours, reference)
        same = sum(mine[0] == theirs[0] for mine, theirs in zip(ours, reference, strict=True))
        log.info("largest difference %.4f, %d the same to the end", difference, same)
        assert difference < NOISE
        assert len(probe.sparse) == len(PROMPTS)
        assert probe.refetch.fetched_bytes > 0
        tiering = probe.runtime.target.tiering
        assert tiering.graphs.replays > NEW
        assert int(tiering.state.nan_scores) == 0
        probe.assert_all_back()


SMALL = {
    "budget_tokens": 64,
    "hot_tokens": 96,
    "sink_tokens": 16,
    "window_tokens": 32,
    "host_gib": 0.0625,
}


@pytest.mark.parametrize("waits", [True, False])
def test_each_layer_of_a_full_graph_waits_for_its_transfer(folder, monkeypatch, waits):
    """With what runs aside held up, the output stays; it does not where the wait is left out."""
    if not waits:
        monkeypatch.setattr(BatchLayers, "wait", lambda *args: None)
    prompts = [prompt_of(length) for length in (250, 260, 270, 400)]
    args = ARGS | {"enforce_eager": False} | engine_args(**SMALL)
    with engine(folder, **args) as llm:
        expected = decode(llm, prompts)
        run = BatchLayers._run

        def late(layers, *args):
            torch.cuda._sleep(50_000_000)
            run(layers, *args)

        monkeypatch.setattr(BatchLayers, "_run", late)
        assert (decode(llm, prompts) == expected) == waits
