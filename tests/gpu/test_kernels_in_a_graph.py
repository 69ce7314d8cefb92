"""Score, plan and gather captured in one CUDA graph: nothing synchronises, nothing is baked in."""

import math

import pytest
import torch

from backends import load_op
from oasiskv.ops.digest.reference import Keys4, build_keys4, build_minmax

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS, HEADS, GROUP, DIM, BLOCKS, SLOTS, CAPACITY = 5, 2, 4, 128, 300, 24, 400
OPTIONS = {"budget": 16, "cap": 5, "hysteresis": 1.5, "commit": True}


class Step:
    """One layer of five requests; the store is pinned, the slots are blocks of an engine."""

    def __init__(self, kind):
        self.kind = kind
        self.store = torch.randn(CAPACITY, 2, HEADS, 16, 2 * DIM).bfloat16().pin_memory()
        tiles = self.store[:, 1].cuda()
        self.digests = build_minmax(tiles) if kind == "minmax" else build_keys4(tiles)
        self.cache = tiles.new_full((ROWS * SLOTS, HEADS, 16, 2 * DIM), math.nan)
        self.queries = torch.randn(ROWS, 2, HEADS * GROUP, DIM, device="cuda").bfloat16()
        self.lookahead = torch.zeros(ROWS, dtype=torch.int32, device="cuda")
        self.blocks = torch.stack([torch.randperm(CAPACITY)[:BLOCKS] for _ in range(ROWS)]).cuda()
        self.slot_blocks = torch.randperm(ROWS * SLOTS).reshape(ROWS, SLOTS).cuda()
        self.first = torch.full((ROWS,), 1, device="cuda")
        self.end = torch.full((ROWS,), 1, device="cuda")
        self.slots = torch.full((ROWS,), SLOTS, device="cuda")
        self.resident = torch.full((ROWS, HEADS, SLOTS), -1, device="cuda")
        self.last_wanted = self.resident.clone()
        self.step = torch.zeros((), dtype=torch.int64, device="cuda")
        self.nan_scores = torch.zeros(1, dtype=torch.int32, device="cuda")

    def score(self, backend):
        args = (self.blocks, self.first, self.end)
        scores = load_op("score", f"{self.kind}_scores", backend)
        if self.kind == "minmax":
            return scores(self.queries, self.lookahead, self.digests, *args, 0.5, DIM**-0.5)
        return scores(self.queries, self.lookahead, Keys4(*self.digests), *args, DIM**-0.5)

    def plan(self, backend, scores, resident, last_wanted):
        return load_op("plan", "plan_rows", backend)(
            scores, self.first, self.end, resident, last_wanted, self.slots, self.step,
            self.nan_scores, **OPTIONS,
        )  # fmt: skip

    def run(self):
        scores = self.score("triton")
        plan = self.plan("triton", scores, self.resident, self.last_wanted)
        moved = load_op("gather", "gather_rows", "triton")(
            self.store[:, 1], plan.sources, self.cache, plan.victims, self.blocks, self.slot_blocks
        )
        return scores, plan, moved


@pytest.mark.parametrize("kind", ["minmax", "keys4"])
def test_a_step_in_a_graph(kind):
    torch.manual_seed(0)
    step = Step(kind)
    step.run()  # compiles, and with no candidates changes nothing
    assert bool((step.resident == -1).all())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores, plan, moved = step.run()
    for number in range(6):
        step.queries.normal_()
        step.lookahead.random_(2)
        step.step.fill_(number)
        step.end.copy_(torch.tensor([BLOCKS, 1, 40 + number, 250, 9]))
        resident, last_wanted = step.resident.clone(), step.last_wanted.clone()
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(scores, step.score("reference"), rtol=2e-2, atol=1e-7)
        expected = step.plan("reference", scores, resident, last_wanted)
        for got, wanted in zip(plan[1:], expected[1:], strict=True):
            assert torch.equal(got, wanted)
        assert torch.equal(step.resident, resident)
        assert torch.equal(step.last_wanted, last_wanted)
        assert int(moved) == int((plan.sources >= 0).sum())
        for row, head, slot in (step.resident >= 0).nonzero().tolist():
            block = step.blocks[row, step.resident[row, head, slot]]
            tile = step.cache[step.slot_blocks[row, slot], head]
            assert torch.equal(tile.cpu(), step.store[block.cpu(), 1, head])
    assert int(step.nan_scores) == 0
