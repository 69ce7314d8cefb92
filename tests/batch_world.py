"""An engine without a model, to tier requests in: KV and queries are random."""

import random
from types import SimpleNamespace

import torch

from oasiskv.config import OasisConfig
from oasiskv.core.batch_limits import BatchLimits
from oasiskv.core.geometry import KVGeometry
from oasiskv.vllm.batch_layers import BatchLayers
from oasiskv.vllm.layers import SparseLayers, StepTokens
from oasiskv.vllm.shapes import ModelLayers

GEOMETRY = KVGeometry(
    num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=32, dtype=torch.float32
)
NAMES = ("layer 0", "layer 1")
BLOCKS, STORE_BLOCKS, SLOTS, DRAFTS = 400, 200, 6, 3
SINK_BLOCKS, GONE = 1, -1
LIMITS = BatchLimits(max_requests=4, max_tokens=512, max_drafts=DRAFTS, step_tokens=384)


def config_of(digest, lookahead):
    return OasisConfig(
        budget_tokens=64,
        hot_tokens=16 * SLOTS,
        sink_tokens=16 * SINK_BLOCKS,
        window_tokens=32,
        cap_fraction=0.5,
        digest=digest,
        lookahead=lookahead,
    )


class World:
    """An engine without a model: random KV and queries, blocks and store blocks handed out.

    Attributes:
        read: by request what attention over its compact table read in the last step, the last block
            apart: tiles of each layer, ``[blocks, heads, block_tokens, 2 * head_dim]``.
        preempted: by request that comes back first block of its window, 0 if it was dense.
        resumed: requests that came back sparse so far.
        before_forward: called before a step writes anything.
    """

    def __init__(self, make, config, device, threshold):
        self.threshold = threshold
        generator = torch.Generator().manual_seed(0)
        shape = (BLOCKS, GEOMETRY.num_kv_heads, *GEOMETRY.tile_shape)
        self.caches = [torch.randn(shape, generator=generator).to(device) for _ in NAMES]
        self.tables, self.starts = {}, {}
        self.free, self.free_store = list(range(BLOCKS)), list(range(STORE_BLOCKS))
        self.store, self.read = {}, {}
        self.preempted, self.resumed = {}, 0
        self.before_forward = lambda: None
        self.layers = make(self, config)

    def step(self, steps, dropped, observed=True):
        """Run one step.

        Args:
            steps: name -> (StepTokens, queries per layer, new KV per layer).
            dropped: name -> whether it was preempted, and not ended.
            observed: of ``after_step``.
        """
        self.layers.step_number += 1
        for name, preempted in dropped.items():
            if preempted and name in self.tables:
                self.preempt(name)
            else:
                self.drop(name)
        loads = []
        for name, (tokens, _, _) in steps.items():
            self.starts[name] = tokens.start
            known, start = [], 0
            if name in self.preempted:
                known, start = self.store[name], self.preempted.pop(name)
                slots = self.resume(name, start, loads)
            else:
                slots = [] if name in self.tables else self.admit(name)
            table, end = self.tables[name], tokens.start + tokens.scheduled
            table += [self.free.pop() for _ in range(-(-end // 16) - len(table))]
            new = [self.free_store.pop() for _ in range(end // 16 - len(self.store[name]))]
            known = list(known)
            self.store[name] += new
            news = SimpleNamespace(
                store_blocks=known + new, slots=slots, known=len(known), resume_start=start
            )
            self.layers.take_news(name, news)
        if loads:
            self.layers.load(loads)
        self.layers.settle(list(steps))
        self.read = {name: [] for name in steps}
        self.before_forward()
        for index, layer in enumerate(NAMES):
            if isinstance(self.layers, BatchLayers):
                self.layers.wait(layer)
            for name, step in steps.items():
                self._forward(index, name, *step)
        taken = {
            name: (tokens, bool(tokens.sampled) and tokens.computed > self.threshold)
            for name, (tokens, _, _) in steps.items()
        }
        return self.layers.after_step(taken, observed)

    def admit(self, name):
        """A new request; returns its slots."""
        self.tables[name], self.store[name] = [], []
        return [self.free.pop() for _ in range(SLOTS)]

    def drop(self, name):
        """A request ends: what it had is handed out again."""
        self.layers.drop(name)
        self.preempted.pop(name, None)
        self._free_blocks(name)
        self.free_store += self.store.pop(name, [])

    def preempt(self, name):
        """All that a request had is handed out again, but for its closed blocks in the store."""
        closed = self.layers.stored(name)
        self.preempted[name] = self.layers.window_start(name) or 0
        self.layers.drop(name, keep=self.preempted[name] > 0)
        self._free_blocks(name)
        self.free_store += self.store[name][closed:]
        del self.store[name][closed:]

    def resume(self, name, start, loads):
        """A preempted request has blocks again, to be loaded; returns its slots."""
        stored = self.store[name]
        between = range(SINK_BLOCKS, start)
        table = [GONE if i in between else self.free.pop() for i in range(len(stored))]
        self.tables[name] = table
        pairs = zip(stored, table, strict=True)
        loads += [(block, mine) for block, mine in pairs if mine != GONE]
        self.resumed += start > SINK_BLOCKS
        return [self.free.pop() for _ in range(SLOTS)]

    def _free_blocks(self, name):
        self.free += [block for block in self.tables.pop(name, []) if block != GONE]

    def _forward(self, index, name, tokens, queries, values):
        """One layer of one request: write KV, keep queries, read what attention reads."""
        cache, size = self.caches[index], GEOMETRY.block_tokens
        for token in range(tokens.scheduled):
            block, place = divmod(tokens.start + token, size)
            cache[self.tables[name][block], :, place] = values[index][token].to(cache)
        query = queries[index].to(cache)
        self.layers.before_attention(NAMES[index], name, query, len(tokens.drafts))
        table = self.layers.table(name, tokens.start + tokens.scheduled)
        if table is not None:
            self.read[name].append(cache[table[0][:-1].to(cache.device)])


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
    """Draws what happens to up to four requests at a time.

    Parts of prompts, drafts, ends, preemptions and, some steps later, returns.
    """

    def __init__(self, seed):
        self._draw = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._lengths, self._prompts, self._count = {}, {}, 0

    def next(self):
        """``(steps, dropped)`` for ``World.step``."""
        draw, dropped = self._draw, {}
        for name, length in list(self._lengths.items()):
            if length > 360 or draw.random() < 0.02:
                dropped[name] = False
                del self._lengths[name], self._prompts[name]
            elif length and draw.random() < 0.05:
                dropped[name] = True
                # What it has after its last block in the store is computed again, and one more.
                self._prompts[name] = max(self._prompts[name], length + 1)
                self._lengths[name] = length // 16 * 16
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
