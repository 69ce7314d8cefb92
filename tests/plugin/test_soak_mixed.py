"""Requests of all kinds, mixed, in pools and stores too small for them: stock vLLM's answers.

By default a few chapters; 20,000 requests in each mode with ``-m soak``. A failure tells its
chapter. ``-k "drafts and always" --soak-chapters 7`` runs that one alone, and ``--soak-kinds`` with
some kinds of requests and disturbances (``ALL`` in soak/asked.py, after commas).
"""

import logging
from itertools import chain

import pytest
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest

from oasiskv.vllm import runtime
from plugin.probe import NGRAM, probed
from plugin.soak.asked import ADAPTERS, ALL, CHAPTER, LONGEST, Chapter
from plugin.soak.soaking import Soak
from plugin.soak.stock import LORA, stock_answers
from plugin.test_lora import save_adapter

log = logging.getLogger(__name__)
MODES = {
    # The hot set covers every request.
    "always": (72, {"threshold_tokens": 116, "hot_tokens": 448}),
    # Less than the context, or nobody would go sparse: tokens are compared up to there.
    "under_pressure": (44, {"threshold_tokens": 144, "hot_tokens": 96, "mode": "under_pressure"}),
}
"""Blocks of the pool, and settings."""
ARGS = {
    **LORA,
    "max_model_len": LONGEST,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
    "scheduling_policy": "priority",
}
# Stock vLLM goes wrong where a part ends on an accepted draft: its KV stays for the next part.
WITH_DRAFTS = ALL - {"long parts"}
ENGINES = {
    "plain": ({"speculative_config": None}, "last_accepted", set(), ALL),
    "drafts": ({"speculative_config": NGRAM}, "last_accepted", set(), WITH_DRAFTS),
    "at once": ({"speculative_config": NGRAM}, "held_back", {"cpu"}, WITH_DRAFTS),
}
SHARES = {"few": (2, 0, 2), "20,000": (80, 80, 40)}
"""Chapters of each engine."""
LONG = [pytest.mark.soak, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def adapters(tiny_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {None: None} | {
        name: LoRARequest(name, number, str(save_adapter(folder / name, tiny_folder, number, 0.05)))
        for number, name in enumerate(ADAPTERS)
        if name
    }


@pytest.fixture(autouse=True, scope="module")
def logits_without_adapters():
    """None of ours changes logits, and vLLM's CPU build fails to compute those of prompts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PunicaWrapperCPU, "add_lora_logits", lambda *args, **settings: None)
        yield


@pytest.fixture(scope="module", params=["few", pytest.param("20,000", marks=LONG)])
def chapters(request, tiny_folder, adapters):
    """By engine its chapters, and stock vLLM's answers to all."""
    kinds, only = (request.config.getoption(f"--soak-{name}") for name in ("kinds", "chapters"))
    found, first = {}, 0
    for (name, engine), count in zip(ENGINES.items(), SHARES[request.param], strict=True):
        numbers = range(first, first + count)
        first += count
        if only is not None:
            numbers = [number for number in map(int, only.split(",")) if number in numbers]
        wanted = engine[-1] & set(kinds.split(",")) if kinds else engine[-1]
        found[name] = [Chapter(number, wanted) for number in numbers]
    return found, stock_answers(tiny_folder, adapters, list(chain(*found.values())))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("engine", ENGINES)
def test_mixed(request, tiny_folder, adapters, chapters, monkeypatch, mode, engine):
    own, known = chapters[0][engine], chapters[1]
    if not own:
        pytest.skip("has no chapters")
    args, lookahead, batched_on, _ = ENGINES[engine]
    monkeypatch.setattr(runtime, "BATCHED_ON", batched_on)
    # One request of the longest fits twice into the store.
    pool, settings = MODES[mode]
    settings = settings | {"host_gib": 0.001, "lookahead": lookahead}
    args = ARGS | args | {"num_gpu_blocks_override": pool}
    with probed(tiny_folder, settings=settings, **args) as probe:
        soak = Soak(probe, adapters, known)
        for chapter in own:
            soak.run(chapter)
    log.info("%s", soak)
    for tie in soak.ties:
        log.warning("a tie: %s", tie)
    if not request.config.getoption("--soak-kinds"):
        soak.assert_enough(CHAPTER * len(own))
