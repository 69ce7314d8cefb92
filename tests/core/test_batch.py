"""Requests tiered at once do what they do one by one: same choices, same tiles, same slots."""

import random
from types import SimpleNamespace

import pytest
import torch

from oasiskv.config import OasisConfig
from oasiskv.core.batch import BatchLimits
from oasiskv.core.geometry import KVGeometry
from oasiskv.vllm.batch_layers import BatchLayers
from oasiskv.vllm.layers import SparseLayers, StepTokens
from oasiskv.vllm.shapes import ModelLayers

GEOMETRY = KVGeometry(
    num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=32, dtype=torch.float32
)
NAMES = ("layer 0", "layer 1")
BLOCKS, STORE_BLOCKS, SLOTS, DRAFTS = 400, 200, 6, 3
LIMITS = BatchLimits(max_requests=4, max_tokens=512, max_drafts=DRAFTS)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def config_of(digest, lookahead):
    return OasisConfig(
        budget_tokens=64,
        hot_tokens=16 * SLOTS,
        sink_tokens=16,
        window_tokens=32,
        cap_fraction=0.5,
        digest=digest,
        lookahead=lookahead,
    )


class World:
    """An engine without a model: random KV and queries, blocks and store blocks handed out."""

    def __init__(self, make, config, device, threshold):
        self.threshold = threshold
        generator = torch.Generator().manual_seed(0)
        shape = (BLOCKS, GEOMETRY.num_kv_heads, *GEOMETRY.tile_shape)
        self.caches = [torch.randn(shape, generator=generator).to(device) for _ in NAMES]
        self.tables, self.starts = {}, {}
        self.free, self.free_store = list(range(BLOCKS)), list(range(STORE_BLOCKS))
        self.store = {}
        self.layers = make(self, config)

    def step(self, steps, dropped):
        """Run one step; ``steps``: name -> (StepTokens, queries per layer, new KV per layer)."""
        self.layers.step_number += 1
        for name in dropped:
            self.layers.drop(name)
            self.free += self.tables.pop(name)
            self.free_store += self.store.pop(name)
        for name, (tokens, _, _) in steps.items():
            self.starts[name] = tokens.start
            slots = []
            if name not in self.tables:
                slots = [self.free.pop() for _ in range(SLOTS)]
                self.tables[name], self.store[name] = [], []
            table, end = self.tables[name], tokens.start + tokens.scheduled
            table += [self.free.pop() for _ in range(-(-end // 16) - len(table))]
            new = [self.free_store.pop() for _ in range(end // 16 - len(self.store[name]))]
            self.store[name] += new
            self.layers.take_news(name, SimpleNamespace(store_blocks=new, slots=slots, known=0))
        self.layers.settle(list(steps))
        for name, (tokens, queries, values) in steps.items():
            for index, layer in enumerate(NAMES):
                for token in range(tokens.scheduled):
                    block, place = divmod(tokens.start + token, 16)
                    cache = self.caches[index]
                    cache[self.tables[name][block], :, place] = values[index][token].to(cache)
                query = queries[index].to(self.caches[index])
                self.layers.before_attention(layer, name, query, len(tokens.drafts))
        taken = {
            name: (tokens, bool(tokens.sampled) and tokens.computed > self.threshold)
            for name, (tokens, _, _) in steps.items()
        }
        return self.layers.after_step(taken, observed=True)


def one_by_one(world, config):
    model = ModelLayers(NAMES, GEOMETRY, is_draft=False)
    return SparseLayers(model, config, world.caches, STORE_BLOCKS, world.tables.__getitem__)


def at_once(world, config):
    return BatchLayers(
        ModelLayers(NAMES, GEOMETRY, is_draft=False),
        config,
        world.caches,
        STORE_BLOCKS,
        world.tables.__getitem__,
        world.starts.__getitem__,
        LIMITS,
    )


class Script:
    """Draws what happens to up to four requests at a time: parts of prompts, drafts, ends."""

    def __init__(self, seed):
        self._draw = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._lengths, self._prompts, self._count = {}, {}, 0

    def next(self):
        """``(steps, dropped)`` for ``World.step``."""
        draw, dropped = self._draw, []
        for name, length in list(self._lengths.items()):
            if length > 360 or draw.random() < 0.02:
                dropped.append(name)
                del self._lengths[name], self._prompts[name]
        while len(self._lengths) < 4 and draw.random() < 0.5:
            name = f"request {self._count}"
            self._count += 1
            self._lengths[name], self._prompts[name] = 0, draw.randint(20, 260)
        steps = {name: self._tokens(name) for name in self._lengths if draw.random() < 0.9}
        return steps, dropped

    def _tokens(self, name):
        draw, start = self._draw, self._lengths[name]
        left = self._prompts[name] - start
        if left > 0:
            count = min(left, draw.randint(1, 90))
            tokens = StepTokens(start, count, [], [1] if count == left else [])
        else:
            drafts = draw.randint(0, DRAFTS)
            sampled = [1] * draw.randint(1, max(1, drafts))
            tokens = StepTokens(start, 1 + drafts, [1] * drafts, sampled)
        self._lengths[name] = tokens.computed
        shape = (2, tokens.scheduled, GEOMETRY.num_query_heads, GEOMETRY.head_dim)
        queries = 3 * torch.randn(shape, generator=self._generator)
        shape = (2, tokens.scheduled, GEOMETRY.num_kv_heads, 2 * GEOMETRY.head_dim)
        return tokens, queries, torch.randn(shape, generator=self._generator)


@pytest.mark.parametrize("device", DEVICES)
# Past 8: even the sink leaves the window later. Past 100: blocks that leave it fill free slots.
# Past 176: no slot is free.
@pytest.mark.parametrize("threshold", [8, 100, 176])
@pytest.mark.parametrize(
    ("digest", "lookahead"), [("keys4", "held_back"), ("minmax", "last_accepted")]
)
def test_same_choices_and_tiles(device, digest, lookahead, threshold):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    config = config_of(digest, lookahead)
    single = World(one_by_one, config, "cpu", threshold)
    batch = World(at_once, config, device, threshold)
    script = Script(seed=3)
    compared = 0
    for _ in range(150):
        steps, dropped = script.next()
        expected, got = single.step(steps, dropped), batch.step(steps, dropped)
        assert got.keys() == expected.keys()
        if device == "cuda":
            torch.cuda.synchronize()
        for name, wanted in expected.items():
            start = single.layers.window_start(name)
            assert batch.layers.window_start(name) == start
            if wanted is None:
                assert got[name] is None
            else:
                assert torch.equal(got[name].sort(-1).values.cpu(), wanted.sort(-1).values)
                compared += wanted.numel()
            if start is not None:
                end = steps[name][0].computed
                table, tokens = single.layers.table(name, end)
                ours, same_tokens = batch.layers.table(name, end)
                assert (ours.tolist(), same_tokens) == (table.tolist(), tokens)
                # Sink, slots and window hold the same tiles, up to tokens that nobody wrote.
                for mine, theirs in zip(batch.caches, single.caches, strict=True):
                    assert torch.equal(mine[ours[:-1]].cpu(), theirs[table[:-1]])
    assert compared > 2000
    assert int(batch.layers.tiering.state.moved_tiles) > 500
    assert int(batch.layers.tiering.state.nan_scores) == 0


def test_the_state_takes_what_was_taken_off_for_it():
    config = config_of("keys4", "held_back")
    world = World(at_once, config, "cpu", threshold=8)
    assert world.layers.tiering.state.nbytes == LIMITS.state_bytes(GEOMETRY, config)
