"""Two tensor-parallel ranks: the tokens of one, whatever happens, and everything back in each."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from plugin.driver import Driver
from plugin.probe import NGRAM
from plugin.ranks import ranked
from tiny import prompt_of

GIB = 2**30
# Two layers of one KV head of 32 in float32: what a rank holds of a block.
BLOCK_BYTES = 16 * 2 * 32 * 4 * 2


@pytest.fixture(scope="module")
def model(tiny_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


class TestHotSetOfTheContext:
    """All scenarios in which tokens are exact, in one engine: four query and two KV heads."""

    @pytest.fixture(scope="class")
    @classmethod
    def probe(cls, tiny_folder, model):
        settings = {"lookahead": "held_back", "threshold_tokens": 100}
        with ranked(
            tiny_folder,
            settings=settings,
            speculative_config=NGRAM,
            num_gpu_blocks_override=150,
            max_num_batched_tokens=128,
        ) as probe:
            yield probe

    def test_each_rank_has_half_of_the_host_store_and_the_same_blocks(self, probe):
        ranks = probe.ranks()
        assert len({rank["process"] for rank in ranks}) == 2
        assert [rank["kv_heads"] for rank in ranks] == [[1], [1]]
        capacity = GIB // 16 // 2 // BLOCK_BYTES
        assert [rank["store_blocks"] for rank in ranks] == [{capacity}] * 2
        assert probe.state.store.capacity_blocks == capacity
        assert sum(rank["store_bytes"] for rank in ranks) == GIB // 16

    def test_dense_and_sparse_with_drafts(self, probe, model):
        driver = Driver(probe)
        for index, length in enumerate((20, 300, 150, 90)):
            driver.add(str(length), prompt_of(length, seed=index), 30)
        driver.finish()
        sparse = {driver.requests[name].request_id for name in ("300", "150", "90")}
        assert probe.sparse >= sparse
        assert all(probe.given_back[name] for name in sparse)
        assert len(driver.done) == 4
        assert all(rank["fetched_bytes"] for rank in probe.ranks())
        driver.assert_right_and_all_back(model)
