"""The layers of a step as CUDA graphs: launching ops one by one takes longer than they run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from oasiskv.core.batch_layer import FirstFill, LayerState, StepWork


class _Graph:
    """Some work with its input, int32 ``[size]``, captured on the current stream."""

    def __init__(
        self,
        size: int,
        device: torch.device,
        work: Callable[[torch.Tensor], None],
        shares: _Graph | None,
    ) -> None:
        self._input = torch.zeros(size, dtype=torch.int32, device=device)
        self._graph = torch.cuda.CUDAGraph()
        pool = shares._graph.pool() if shares is not None else None
        with torch.cuda.graph(self._graph, pool=pool, stream=torch.cuda.current_stream()):
            work(self._input)

    def __call__(self, values: Sequence[int]) -> None:
        host = torch.tensor(values, dtype=torch.int32, pin_memory=True)
        self._input.copy_(host, non_blocking=True)
        self._graph.replay()


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """What unpins memory or frees a graph when it is collected would end a capture in an error."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class LayerGraphs:
    """All layers after a step, captured for each number of blocks that may close, and of rows.

    Captured on the current stream, which must be the one that replays them: they share memory.

    Args:
        state: of all requests, warmed up.
        num_layers: layers.
        sizes: size of the input by number of blocks that close, or leave, in a step, and rows.
        fill_size: size of a transition's input.
        layer_done: called after a layer's last op.
        device: of the state.

    Attributes:
        replays: steps so far.
    """

    def __init__(
        self,
        state: LayerState,
        num_layers: int,
        sizes: dict[tuple[int, int], int],
        fill_size: int,
        layer_done: Callable[[int], None],
        device: torch.device,
    ) -> None:
        def layers(width: int, size: int, flat: torch.Tensor) -> None:
            work = StepWork.of(flat[:size], width) if size else None
            fill = FirstFill.of(flat[size:]) if len(flat) > size else None
            for layer in range(num_layers):
                if work is not None:
                    state.run(layer, work, None)
                if fill is not None:
                    state.first_fill(layer, fill)
                layer_done(layer)

        self._sizes = sizes
        self.replays = 0
        torch.cuda.synchronize(device)
        with _nothing_collected():
            self._fill = _Graph(fill_size, device, partial(layers, 0, 0), shares=None)
            self._steps = {
                (key, fills): _Graph(
                    size + fills * fill_size,
                    device,
                    partial(layers, key[0], size),
                    shares=self._fill,
                )
                for key, size in sizes.items()
                for fills in (0, 1)
            }

    def step(
        self, width: int, rows: int, values: Sequence[int], fills: Sequence[Sequence[int]]
    ) -> None:
        """Replay what follows a step.

        Args:
            width: number of blocks that may close.
            rows: of the state that are looked at.
            values: as ``StepWork.of`` takes them; nothing is done for what is missing.
            fills: transitions, each as ``FirstFill.of`` takes it. The first runs with the step,
                layer by layer, so that the next forward need not wait for all of the step first.
        """
        padding = [0] * (self._sizes[width, rows] - len(values))
        first = fills[0] if fills else []
        self._steps[(width, rows), min(len(fills), 1)]([*values, *padding, *first])
        for fill in fills[1:]:
            self._fill(fill)
        self.replays += 1
