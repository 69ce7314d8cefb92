"""Scores straight from the digest pool: reference and kernel against a loop in float64."""

import copy
import math

import pytest
import torch

from backends import BACKENDS, DEVICE, far_view, load_op
from oasiskv.ops.digest.reference import Keys4, build_keys4, build_minmax, dequantize_keys4
from oasiskv.ops.score.launch import fit_span

both = pytest.mark.parametrize("backend", BACKENDS)

# query heads, KV heads, head dim, dtype of queries and keys: groups of 1 to 8
MODELS = [
    (2, 2, 64, torch.float32),
    (6, 2, 80, torch.bfloat16),
    (4, 1, 96, torch.float16),
    (8, 2, 128, torch.bfloat16),
    (6, 1, 64, torch.float16),
    (7, 1, 96, torch.float32),
    (8, 1, 128, torch.float32),
]
FIRST = [0, 1, 3, 65, 5]
END = [150, 70, 3, 149, 101]
BLOCKS, CAPACITY, FREE = 150, 200, 20
KINDS = ["minmax", "keys4"]


class Case:
    """Five requests on one layer of a pool whose free rows hold NaN."""

    def __init__(self, model, seed=0):
        heads, self.kv_heads, self.dim, dtype = model
        self.group = heads // self.kv_heads
        generator = torch.Generator().manual_seed(seed)
        rows = len(FIRST)
        self.queries = torch.randn(rows, 3, heads, self.dim, generator=generator).to(dtype)
        self.lookahead = torch.tensor([2, 0, 1, 1, 0])
        tiles = torch.randn(CAPACITY, self.kv_heads, 16, 2 * self.dim, generator=generator) * 2
        tiles[:FREE] = math.nan
        self.tiles = tiles.to(dtype)
        blocks = [torch.randperm(CAPACITY - FREE, generator=generator) for _ in range(rows)]
        self.blocks = (torch.stack(blocks)[:, :BLOCKS] + FREE).int()
        self.first, self.end = torch.tensor(FIRST), torch.tensor(END)
        index = torch.arange(BLOCKS)
        self.candidates = (index >= self.first[:, None]) & (index < self.end[:, None])
        # What is no candidate points far outside the pool.
        self.blocks.masked_fill_(~self.candidates, 2**30)
        self.scale = self.dim**-0.5
        self.minmax = build_minmax(self.tiles)
        self.keys4 = build_keys4(self.tiles)

    def layer(self, part):
        """One layer of three; the others hold NaN."""
        garbage = math.nan if part.dtype.is_floating_point else 255
        pool = torch.full((len(part), 3, *part.shape[1:]), garbage, dtype=part.dtype)
        pool[:, 1] = part
        return pool.to(DEVICE)[:, 1]

    def arguments(self):
        return [t.to(DEVICE) for t in (self.blocks, self.first, self.end)]

    def run(self, kind, backend):
        scores = load_op("score", f"{kind}_scores", backend)
        queries = [self.queries.to(DEVICE), self.lookahead.to(DEVICE)]
        if kind == "minmax":
            digest, options = self.layer(self.minmax), (0.5, self.scale)
        else:
            digest, options = Keys4(*(self.layer(part) for part in self.keys4)), (self.scale,)
        return scores(*queries, digest, *self.arguments(), *options).cpu()

    def expected(self, kind):
        """``(scores, largest |query| . |key|)``, both in float64."""
        out = torch.zeros(len(FIRST), self.kv_heads, BLOCKS, dtype=torch.float64)
        largest = 0.0
        keys = dequantize_keys4(self.keys4).double()
        for row, (start, end) in enumerate(zip(FIRST, END, strict=True)):
            rows = self.blocks[row, start:end].long()
            for head in range(self.queries.shape[2]):
                kv_head = head // self.group
                query = self.queries[row, self.lookahead[row], head].double()
                if kind == "minmax":
                    low, high = self.minmax[rows, kv_head].double().unbind(-2)
                    logits = (high + low) / 2 @ query + 0.5 * ((high - low) / 2 @ query.abs())
                    size = torch.maximum(low.abs(), high.abs()) @ query.abs()
                    logits = logits * self.scale
                else:
                    logits = (keys[rows, kv_head] @ query * self.scale).logsumexp(-1)
                    size = self.keys4.scale_zero[rows, kv_head].double().abs()
                    size = (size[:, 0] * 15 + size[:, 1]) @ query.abs()
                out[row, kv_head, start:end] += logits.softmax(-1) / self.group
                largest = max([largest, *size.tolist()])
        return out, largest


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
@both
def test_scores_equal_the_loop(model, kind, backend):
    case = Case(model)
    expected, largest = case.expected(kind)
    got = case.run(kind, backend)
    assert got.dtype == torch.float32
    assert got.shape == expected.shape
    assert bool((got.masked_fill(case.candidates[:, None], 0) == 0).all())
    # What the kernels promise of a logit: float16 keys, or queries in two terms.
    error = largest * case.scale * (2**-11 if kind == "keys4" and backend == "triton" else 2**-16)
    relative = math.expm1(2 * error) + 1e-5
    torch.testing.assert_close(got.double(), expected, rtol=relative, atol=1e-30)
    if error < 0.01:
        order = expected.argsort(-1, descending=True)[..., :8]
        worst = got.gather(-1, order).double() / expected.gather(-1, order)
        assert bool((worst[case.end > case.first] - 1).abs().max() <= relative)
    sums = got.sum(-1)[case.end > case.first]
    torch.testing.assert_close(sums, torch.ones_like(sums))


@pytest.mark.parametrize("kind", KINDS)
@both
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_free_digest_shows_in_its_row_and_head_only(kind, backend):
    case = Case(MODELS[1])
    victim = int(case.blocks[1, 40])
    case.minmax[victim, 1] = math.nan
    case.keys4.scale_zero[victim, 1] = math.nan
    elsewhere = (case.blocks == victim) & case.candidates
    got = case.run(kind, backend)
    for row in range(len(FIRST)):
        touched = bool(elsewhere[row].any())
        part = got[row, 1, FIRST[row] : END[row]]
        assert bool(part.isnan().all()) if touched and len(part) else not part.isnan().any()
        assert not got[row, 0].isnan().any()


@pytest.mark.parametrize("kind", KINDS)
@both
def test_no_rows_and_no_blocks(kind, backend):
    case = Case(MODELS[0])
    whole = case.run(kind, backend)
    case.end = case.first.clone()
    assert bool((case.run(kind, backend) == 0).all())
    case.queries, case.lookahead = case.queries[:0], case.lookahead[:0]
    case.blocks, case.first, case.end = case.blocks[:0], case.first[:0], case.end[:0]
    assert case.run(kind, backend).shape == (0, *whole.shape[1:])


@both
def test_fi363_rows_of_no_block_of_one_and_of_8192(backend):
    generator = torch.Generator().manual_seed(0)
    digests = torch.randn(8192, 1, 2, 16, generator=generator).sort(dim=2).values
    queries = torch.randn(3, 1, 1, 16, generator=generator)
    blocks = torch.stack([torch.randperm(8192, generator=generator) for _ in range(3)])
    first, end = torch.tensor([5, 8191, 0]), torch.tensor([5, 8192, 8192])
    arguments = [queries, torch.zeros(3, dtype=torch.int64), digests, blocks, first, end]
    score = load_op("score", "minmax_scores", backend)
    got = score(*(t.to(DEVICE) for t in arguments), 0.5, 1.0).cpu()
    assert bool((got[0] == 0).all())
    assert got[1, 0].nonzero().tolist() == [[8191]]
    assert float(got[1, 0, 8191]) == 1
    low, high = digests[blocks[2], 0].double().unbind(1)
    query = queries[2, 0, 0].double()
    expected = ((high + low) / 2 @ query + 0.5 * ((high - low) / 2 @ query.abs())).softmax(-1)
    torch.testing.assert_close(got[2, 0].double(), expected, rtol=1e-3, atol=1e-12)


@both
def test_v50427_offsets_past_two_to_the_31_elements(backend, monkeypatch):
    case = Case((4, 2, 64, torch.float16))
    pool = far_view((3, 2, 2, 64), 2**30 + 64, torch.float16, monkeypatch)
    pool[1:] = case.minmax[30:32].to(DEVICE)
    blocks = torch.tensor([[2, 1]], device=DEVICE)
    query, zero = case.queries[:1].to(DEVICE), torch.tensor([0], device=DEVICE)
    scores = load_op("score", "minmax_scores", backend)
    got = scores(query, zero, pool, blocks, zero, zero + 2, 0.5, 0.125)
    near = load_op("score", "minmax_scores", "reference")
    small = pool[1:].clone()
    expected = near(
        query, zero, small, torch.tensor([[1, 0]], device=DEVICE), zero, zero + 2, 0.5, 0.125
    )
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=0)


@both
def test_heads_that_do_not_divide_are_refused(backend):
    case = Case(MODELS[0])
    case.queries = torch.zeros(5, 3, 5, 64)
    with pytest.raises(ValueError, match="found 5 and 2"):
        case.run("minmax", backend)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", KINDS)
@both
def test_one_request_for_several_rows(kind, index, backend):
    """Rows of stride 0, as when several queries of one request choose."""
    case = Case(MODELS[1])
    rows = len(FIRST)
    case.lookahead = case.lookahead.to(index)
    case.first, case.end = (
        torch.full((rows,), 3, dtype=index),
        torch.full((rows,), 40, dtype=index),
    )
    case.blocks[:, 3:40] = case.blocks[:1].clamp(max=CAPACITY - 1)[:, 3:40]
    expanded, whole = copy.copy(case), case
    whole.queries = case.queries[:1].repeat(rows, 1, 1, 1)
    expanded.queries = whole.queries[:1].expand(rows, -1, -1, -1)
    expanded.blocks = whole.blocks[:1].expand(rows, -1)
    assert expanded.queries.stride(0) == expanded.blocks.stride(0) == 0
    got = expanded.run(kind, backend)
    assert torch.equal(got, whole.run(kind, backend))
    assert torch.equal(got[2], got[3])
    assert not torch.equal(got[0], got[1])


@pytest.mark.parametrize("kind", KINDS)
def test_spans_and_tiles_change_nothing(kind, monkeypatch):
    launch, softmax = (
        pytest.importorskip(f"oasiskv.ops.score.{name}") for name in ("launch", "softmax_triton")
    )
    case = Case(MODELS[3])
    case.end = case.end.clamp(max=75)
    short = case.run(kind, "triton")
    monkeypatch.setattr(launch, "_PROGRAMS", 1)
    assert torch.equal(case.run(kind, "triton"), short)
    monkeypatch.setattr(softmax, "_TILE_BLOCKS", 64)
    torch.testing.assert_close(case.run(kind, "triton"), short, rtol=1e-5, atol=0)


def test_spans_fill_the_device():
    blocks, heads = 1024, 8
    spans = {rows: fit_span(blocks, rows * heads, 4, 32) for rows in (1, 4, 16, 64, 256)}
    assert spans == {1: 8, 4: 32, 16: 128, 64: 128, 256: 128}
    assert fit_span(3, heads, 4, 32) == 4
    assert fit_span(8192, heads, 4, 32) == 64


def test_keys4_error_is_what_the_docstring_says():
    """Scales and queries over 24 powers of 2: products too large for float16, or subnormal."""
    score = pytest.importorskip("oasiskv.ops.score.triton")
    generator = torch.Generator().manual_seed(1)

    def wide(*shape):
        sign = torch.randint(2, shape, generator=generator) * 2 - 1
        return torch.exp2(12 - torch.rand(shape, generator=generator) * 24) * sign

    queries = wide(1, 1, 2, 128)
    codes = torch.randint(256, (64, 2, 16, 64), generator=generator, dtype=torch.uint8)
    scale_zero = wide(64, 2, 2, 128)
    scale_zero[:, :, 0].abs_()
    digests = Keys4(codes, scale_zero.half())
    levels = torch.cat([codes & 15, codes >> 4], dim=-1).double()
    scales, zeros = (part.unsqueeze(-2) for part in digests.scale_zero.double().unbind(-2))
    index = torch.zeros(1, dtype=torch.int32)
    where = (torch.arange(64, dtype=torch.int32)[None], index, index + 64)
    for dtype in (torch.float32, torch.float16):
        asked = queries.to(dtype)
        query = asked[0, 0].double().abs()
        product = (levels * scales @ query[..., None]).squeeze(-1)
        small = (levels * (1 + scales) + zeros.abs()).sum(-1) * query.amax(-1, keepdim=True)
        bound = (2**-11 * product + 2**-25 * small).amax(-1).T
        scale = 0.05 / float(bound.max())
        reference = load_op("score", "keys4_scores", "reference")
        expected = reference(asked.double(), index, digests, *where, scale)[0].log()
        there = [part.to(DEVICE) for part in (asked, index, *digests, *where)]
        got = score.keys4_scores(*there[:2], Keys4(*there[2:4]), *there[4:], scale)[0].cpu()
        error = (got.double().log() - expected).abs()
        # The block's own logit, and what all are divided by.
        assert bool((error <= scale * (bound + bound.amax(-1, keepdim=True))).all())


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (torch.zeros(4, 2, 8, 32, dtype=torch.uint8), "of 16 tokens; found 8"),
        (torch.zeros(4, 2, 16, 30, dtype=torch.uint8), "multiple of 8; found 60"),
        (torch.zeros(4, 2, 16, 33, dtype=torch.uint8)[..., 1:], "found offset 1 and strides"),
        (torch.zeros(4, 2, 16, 66, dtype=torch.uint8)[..., ::2], "last dimension of codes"),
    ],
)
def test_codes_that_the_kernel_cannot_read_are_refused(codes, message):
    score = pytest.importorskip("oasiskv.ops.score.triton")
    dim = 2 * codes.shape[-1]
    digests = Keys4(codes, torch.zeros(4, 2, 2, dim, dtype=torch.float16))
    index = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        score.keys4_scores(
            torch.zeros(1, 1, 2, dim), index, digests, index[None], index, index, 1.0
        )
