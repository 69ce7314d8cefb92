"""What ``bench ops`` times: each op at one size, the bytes that it must move, and its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from oasiskv.ops.digest.reference import Keys4

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Sizes:
    """One layer of the sparse requests of a step.

    Args:
        rows: requests.
        blocks: candidates of each.
        kv_heads: KV heads.
        group: query heads of one KV head.
        head_dim: of the model.
        budget: K, in blocks.
        slots: S, in blocks.
        cap: most tiles fetched per request and KV head.
        tiles: blocks whose digest is built, and tiles that a gather moves, about.
        dtype: of keys and values.
    """

    rows: int
    blocks: int
    kv_heads: int
    group: int
    head_dim: int
    budget: int
    slots: int
    cap: int
    tiles: int
    dtype: torch.dtype


GPU_SIZES = Sizes(64, 1024, 8, 4, 128, 128, 192, 13, 4096, torch.bfloat16)
CPU_SIZES = Sizes(2, 256, 2, 4, 64, 32, 48, 4, 64, torch.float32)


@dataclass(frozen=True)
class Case:
    """One op at one size.

    Args:
        name: of the op and its variant, the op first.
        shape: sizes, for people.
        moved_bytes: bytes that the op cannot avoid to move.
        link: what they move over: ``memory``, ``h2d`` or ``d2h``.
        run: ``run(module, side)`` runs the op of one form, side 0 for the reference and 1 for the
            kernel, whose module that is; each side has outputs of its own.
        results: what ``run`` left at a side.
        relative: largest relative error of the kernel's results; 0: they are equal.
    """

    name: str
    shape: str
    moved_bytes: int
    link: str
    run: Callable[[ModuleType, int], None]
    results: Callable[[int], tuple[Tensor, ...]]
    relative: float = 0.0

    @property
    def op(self) -> str:
        """Folder of the op."""
        return self.name.split()[0]

    def difference(self) -> str:
        """In what the results of the two sides differ; empty if in nothing that matters."""
        for expected, found in zip(self.results(0), self.results(1), strict=True):
            if self.relative:
                error = ((found - expected).abs() / expected.abs().clamp(min=1e-12)).max()
                # Written so that NaN is refused too.
                if not float(error) <= self.relative:
                    return f"relative error {float(error):.2e}, {self.relative} is allowed"
            elif not torch.equal(expected, found):
                return f"{int((expected != found).sum())} of {expected.numel()} numbers differ"
        return ""


def make_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """The cases, made one after the other, so that the memory of each is free before the next."""
    yield _digest_case(sizes, device, keys4=False)
    yield _digest_case(sizes, device, keys4=True)
    yield _score_case(sizes, device, keys4=False)
    yield _score_case(sizes, device, keys4=True)
    yield _plan_case(sizes, device)
    yield _gather_case(sizes, device, "memory", sizes.head_dim)
    if device.type == "cuda":
        for head_dim in (sizes.head_dim, sizes.head_dim // 2):
            yield _gather_case(sizes, device, "h2d", head_dim)
            yield _gather_case(sizes, device, "d2h", head_dim)


def _digest_case(sizes: Sizes, device: torch.device, *, keys4: bool) -> Case:
    heads, dim, blocks = sizes.kv_heads, sizes.head_dim, sizes.tiles
    cache = _random((blocks, heads, BLOCK_TOKENS, 2 * dim), sizes.dtype, device)
    index = torch.randperm(blocks, device=device)
    outputs = [_digests(blocks, sizes, device, keys4=keys4) for _ in range(2)]

    def run(module: ModuleType, side: int) -> None:
        if keys4:
            module.write_keys4(cache, index, Keys4(*outputs[side]), index)
        else:
            module.write_minmax(cache, index, outputs[side][0], index)

    return Case(
        f"digest {'keys4' if keys4 else 'minmax'}",
        f"{blocks} blocks x {heads} heads, D={dim}",
        _nbytes(cache) // 2 + _nbytes(*outputs[0]),
        "memory",
        run,
        lambda side: outputs[side],
    )


def _score_case(sizes: Sizes, device: torch.device, *, keys4: bool) -> Case:
    rows, count, heads, dim = sizes.rows, sizes.blocks, sizes.kv_heads, sizes.head_dim
    queries = _random((rows, 4, heads * sizes.group, dim), sizes.dtype, device)
    lookahead = torch.arange(rows, device=device) % 4
    blocks = torch.randperm(rows * count, device=device).reshape(rows, count).int()
    first = torch.zeros(rows, dtype=torch.int32, device=device)
    end = first + count
    pool = _digests(rows * count, sizes, device, keys4=keys4)
    if keys4:
        pool[0].random_(256)
        pool[1].uniform_(0, 0.25)
    else:
        pool[0].normal_()
        pool[0][:, :, 1] = pool[0][:, :, 0] + 2
    scores: list[Tensor] = [queries, queries]

    def run(module: ModuleType, side: int) -> None:
        args = (blocks, first, end)
        if keys4:
            scores[side] = module.keys4_scores(queries, lookahead, Keys4(*pool), *args, dim**-0.5)
        else:
            scores[side] = module.minmax_scores(queries, lookahead, pool[0], *args, 0.5, dim**-0.5)

    return Case(
        f"score {'keys4' if keys4 else 'minmax'}",
        f"{rows} rows x {count} blocks x {heads} heads, D={dim}, group {sizes.group}",
        _nbytes(*pool),
        "memory",
        run,
        lambda side: (scores[side],),
        relative=1e-2 if keys4 else 1e-3,
    )


def _plan_case(sizes: Sizes, device: torch.device) -> Case:
    rows, heads, count, slots = sizes.rows, sizes.kv_heads, sizes.blocks, sizes.slots
    scores = torch.rand(rows, heads, count, device=device) ** 4
    order = scores.argsort(dim=-1, descending=True)
    # All but the best few of the wanted are resident, as from one step to the next.
    skipped = sizes.cap // 2
    resident = order[..., skipped : skipped + slots].contiguous()
    ages = torch.randint(100, (rows, heads, slots), device=device)
    last_wanted = [ages, ages.clone()]
    first = torch.zeros(rows, dtype=torch.int32, device=device)
    end, filled = first + count, first + slots
    step = torch.tensor(100, device=device)
    nan = torch.zeros(1, dtype=torch.int32, device=device)
    plans: list[tuple[Tensor, ...]] = [(), ()]

    def run(module: ModuleType, side: int) -> None:
        plans[side] = module.plan_rows(
            scores, first, end, resident, last_wanted[side], filled, step, nan,
            budget=sizes.budget, cap=sizes.cap, hysteresis=1.5,
        )  # fmt: skip

    def results(side: int) -> tuple[Tensor, ...]:
        wanted, *others = plans[side]
        return (wanted.sort(dim=-1).values, *others, last_wanted[side])

    return Case(
        "plan",
        f"{rows} rows x {count} blocks x {heads} heads, K={sizes.budget}, S={slots}, "
        f"cap {sizes.cap}",
        _nbytes(scores, resident, ages),
        "memory",
        run,
        results,
    )


def _gather_case(sizes: Sizes, device: torch.device, link: str, head_dim: int) -> Case:
    heads, rows = sizes.kv_heads, sizes.rows
    places = -(-sizes.tiles // (heads * rows))
    shape = (rows * places, heads, BLOCK_TOKENS, 2 * head_dim)
    tiles = _random(shape, sizes.dtype, device)
    source = tiles if link != "h2d" else tiles.cpu().pin_memory()
    host = link == "d2h"
    dests = tuple(
        torch.zeros(shape, dtype=sizes.dtype, device="cpu" if host else device, pin_memory=host)
        for _ in range(2)
    )
    index = torch.stack([torch.randperm(rows * places, device=device) for _ in range(2 * heads)])
    take, put = index.reshape(2, heads, rows, places).transpose(1, 2)

    def run(module: ModuleType, side: int) -> None:
        module.gather_rows(source, take, dests[side], put)

    def results(side: int) -> tuple[Tensor, ...]:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (dests[side],)

    return Case(
        f"gather {link}, head dim {head_dim}",
        f"{rows * places * heads} tiles of {_nbytes(tiles[0, 0])} bytes",
        _nbytes(tiles) * (2 if link == "memory" else 1),
        link,
        run,
        results,
    )


def _digests(rows: int, sizes: Sizes, device: torch.device, *, keys4: bool) -> tuple[Tensor, ...]:
    """Zeros: a pool of one layer."""
    heads, dim = sizes.kv_heads, sizes.head_dim
    if not keys4:
        return (torch.zeros((rows, heads, 2, dim), dtype=sizes.dtype, device=device),)
    return (
        torch.zeros((rows, heads, BLOCK_TOKENS, dim // 2), dtype=torch.uint8, device=device),
        torch.zeros((rows, heads, 2, dim), dtype=torch.float16, device=device),
    )


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device=device).to(dtype)


def _nbytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
