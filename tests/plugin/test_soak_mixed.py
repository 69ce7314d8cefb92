"""Requests of all kinds, mixed, in pools and stores too small for them: stock vLLM's answers.

By default a few chapters; 20,000 requests in each mode with ``-m soak``. A failure tells its
chapter. ``-k "drafts and always" --soak-chapters 7`` runs that one alone, and ``--soak-kinds`` with
some kinds of requests and disturbances (``ALL`` in soak/asked.py, after commas).
"""

import logging

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
    "no drafts": ({"speculative_config": None}, "last_accepted", set(), ALL),
    "drafts": ({"speculative_config": NGRAM}, "last_accepted", set(), WITH_DRAFTS),
    "at once": ({"speculative_config": NGRAM}, "held_back", {"cpu"}, WITH_DRAFTS),
}
"""vLLM's arguments, lookahead, devices where requests are tiered at once, kinds of requests."""
LONG = [pytest.mark.soak, pytest.mark.timeout(7200)]
CASES = [
    pytest.param("no drafts", range(2), id="no drafts"),
    pytest.param("at once", range(2, 4), id="at once"),
    # 20,000 requests in all.
    pytest.param("no drafts", range(4, 84), id="many, no drafts", marks=LONG),
    pytest.param("drafts", range(84, 164), id="many, drafts", marks=LONG),
    pytest.param("at once", range(164, 204), id="many, at once", marks=LONG),
]


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


@pytest.fixture(scope="module")
def chapters(request, tiny_folder, adapters, numbers, engine):
    """Those of an engine, with stock vLLM's answers."""
    kinds, only = (request.config.getoption(f"--soak-{name}") for name in ("kinds", "chapters"))
    if only:
        numbers = [number for number in map(int, only.split(",")) if number in numbers]
    wanted = ENGINES[engine][-1] & set(kinds.split(",")) if kinds else ENGINES[engine][-1]
    found = [Chapter(number, wanted) for number in numbers]
    return found, stock_answers(tiny_folder, adapters, found)


@pytest.mark.parametrize(("engine", "numbers"), CASES, scope="module")
@pytest.mark.parametrize("mode", MODES)
def test_mixed(request, tiny_folder, adapters, chapters, monkeypatch, mode, engine):
    args, lookahead, batched_on, _ = ENGINES[engine]
    monkeypatch.setattr(runtime, "BATCHED_ON", batched_on)
    # One request of the longest fits twice into the store.
    pool, settings = MODES[mode]
    settings = settings | {"host_gib": 0.001, "lookahead": lookahead}
    args = ARGS | args | {"num_gpu_blocks_override": pool}
    found, known = chapters
    with probed(tiny_folder, settings=settings, **args) as probe:
        soak = Soak(probe, adapters, known)
        for chapter in found:
            soak.run(chapter)
    log.info("%s", soak)
    for tie in soak.ties:
        log.warning("a tie: %s", tie)
    if not request.config.getoption("--soak-kinds"):
        soak.assert_enough(CHAPTER * len(found))
