"""The layers of a step as CUDA graphs: launching ops one by one takes longer than they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        host = torch.zeros(len(self._input), dtype=torch.int32, pin_memory=True)
        host[: len(values)] = torch.tensor(values, dtype=torch.int32)
        self._input.copy_(host, non_blocking=True)
        self._graph.replay()


class LayerGraphs:
    """All layers after a step, captured for each number of blocks that may close, and a transition.

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
        def step(width: int, flat: torch.Tensor) -> None:
            work = StepWork.of(flat, width)
            for layer in range(num_layers):
                state.run(layer, work, None)
                layer_done(layer)

        def fill(flat: torch.Tensor) -> None:
            transition = FirstFill.of(flat)
            for layer in range(num_layers):
                state.first_fill(layer, transition)
                layer_done(layer)

        torch.cuda.synchronize(device)
        self._fill = _Graph(fill_size, device, fill, shares=None)
        self._steps = {
            key: _Graph(size, device, partial(step, key[0]), shares=self._fill)
            for key, size in sizes.items()
        }
        self.replays = 0

    def step(self, width: int, rows: int, values: Sequence[int]) -> None:
        """Replay what follows a step; ``values`` as ``StepWork.of`` takes them."""
        self._steps[width, rows](values)
        self.replays += 1

    def first_fill(self, values: Sequence[int]) -> None:
        """Replay a transition; ``values`` as ``FirstFill.of`` takes them."""
        self._fill(values)
