"""Requests of ``SparseLayers`` that come back sparse after a preemption."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oasiskv.core.kept import KeptSlots
from oasiskv.core.pipeline import Pipeline
from oasiskv.core.residency import ResidentMap
from oasiskv.errors import TransferError
from oasiskv.ops.gather.reference import gather_tiles

if TYPE_CHECKING:
    from oasiskv.vllm.layers import SparseLayers, WorkerRequest


def keep_slots(request: WorkerRequest) -> KeptSlots | None:
    """What is in the slots of a request that is being preempted; None while dense."""
    residents = request.residents
    if residents is None:
        return None
    start = request.kv.window_start
    return KeptSlots.copy(residents.blocks, residents.last_wanted, residents.filled, start)


def resume(
    layers: SparseLayers, request: WorkerRequest, kept: KeptSlots | None, window_start: int
) -> None:
    """A request is sparse again, with the tiles in its slots that were there; or with none, if
    it is to fail.

    Args:
        layers: of one model.
        request: has its store blocks and its slots.
        kept: what was in the slots.
        window_start: first block of the window as the scheduler sees it.

    Raises:
        TransferError: the request was not sparse with that window in this model, because it had
            failed; or a tile is damaged in the store.
    """
    geometry, device = layers.geometry, layers.caches[0].device
    residents = ResidentMap(geometry, len(request.kv.slots), device)
    request.residents = residents
    request.pipeline = Pipeline(request.request_id, request.generation, geometry.num_layers)
    request.kv.resume(window_start)
    if kept is None or kept.window_start != window_start:
        raise TransferError(
            f"it was preempted with its window at block {window_start}, and the layers of this "
            f"model were at {kept.window_start if kept else None}, having failed before"
        )
    stored = request.store_index(device)[kept.blocks[..., : kept.filled].to(device)]
    used = sorted(set(stored.flatten().tolist()))
    damaged = layers.store.damaged_blocks(used) if used else set()
    if damaged:
        raise TransferError(f"store blocks {sorted(damaged)} are damaged")
    residents.blocks.copy_(kept.blocks)
    residents.last_wanted.copy_(kept.last_wanted)
    residents.filled = kept.filled
    slots = request.kv.slots[: kept.filled].expand_as(stored[0])
    for layer, cache in enumerate(layers.caches):
        gather_tiles(layers.store.layer(layer), stored[layer], cache, slots)
