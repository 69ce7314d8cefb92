"""The reference engine on CUDA: the same code, the stock engine's output, on the sparse path."""

import pytest
import torch

from oasiskv.config import OasisConfig
from oasiskv.drafts.ngram import NgramDrafts
from oasiskv.hf import Engine, wrap_model
from oasiskv.stores.host import HostStore
from oasiskv.testing.refetch import ForcedRefetch
from tiny import make_model, prompt_of, same_up_to_ties, stock_greedy, stock_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SMALL = {"budget_tokens": 64, "sink_tokens": 16, "window_tokens": 16}
LENGTHS = [7, 96, 103, 111, 160]


def run(device, config, lengths, new=24):
    loaded = wrap_model(make_model().to(device))
    store = HostStore(loaded.geometry, 200)
    engine = Engine(loaded, config, store=store, drafts=NgramDrafts())
    engine.before_step = ForcedRefetch(seed=2)
    outputs = engine.generate([prompt_of(length) for length in lengths], new)
    assert store.pinned
    assert engine.before_step.fetched_bytes > 0
    assert store.free_blocks == store.capacity_blocks
    return outputs


@pytest.mark.parametrize("digest", ["minmax", "keys4"])
def test_whole_context_gives_the_stock_output(digest):
    config = OasisConfig(hot_tokens=256, threshold_tokens=0, digest=digest, **SMALL)
    for length, tokens in zip(LENGTHS, run("cuda", config, LENGTHS), strict=True):
        expected, logits = stock_greedy(stock_llama(), prompt_of(length), 24)
        assert same_up_to_ties(tokens, expected, logits), length


@pytest.mark.parametrize("digest", ["minmax", "keys4"])
def test_sparse_output_is_that_of_the_cpu(digest):
    config = OasisConfig(hot_tokens=64, digest=digest, **SMALL)
    lengths = [400, 500]
    assert run("cuda", config, lengths) == run("cpu", config, lengths)


def test_fast_tier_on_the_device_is_bounded():
    loaded = wrap_model(make_model().to("cuda"))
    config = OasisConfig(hot_tokens=64, **SMALL)
    engine = Engine(loaded, config, store=HostStore(loaded.geometry, 200))
    request = engine.submit("a", prompt_of(1000), 200)
    sizes = set()
    while request.phase.running:
        engine.step()
        if request.residents is not None and request.phase.running:
            assert request.kv.layers[0].device.type == "cuda"
            sizes.add(request.kv.nbytes)
    assert len(sizes) == 1
    assert sizes.pop() < request.stats.dense_kv_bytes / 4
