"""``ForcedRefetch`` for requests that are tiered at once."""

from collections.abc import Sequence

import torch

from oasiskv.core.batch import BatchRequest, BatchTiering
from oasiskv.core.geometry import KVGeometry
from oasiskv.ops.gather.reference import gather_tiles
from oasiskv.stores.host import HostStore


class BatchRefetch:
    """Evict half of the hot set of each sparse request and fetch it again, in another order.

    Per layer and head a random half of the filled slots is overwritten with NaN, and the same
    blocks are fetched into them from the store, permuted. With a hot set as large as the context
    the output must not change.

    Args:
        seed: which slots, and in which order.

    Attributes:
        fetched_bytes: bytes fetched so far.
    """

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.fetched_bytes = 0

    def __call__(
        self,
        tiering: BatchTiering,
        geometry: KVGeometry,
        store: HostStore,
        caches: Sequence[torch.Tensor],
        requests: Sequence[BatchRequest],
    ) -> None:
        """Disturb the sparse ones of ``requests``; nothing may run aside.

        Args:
            tiering: of the requests.
            geometry: sizes of a block.
            store: that holds their blocks.
            caches: the engine's KV tensor of each layer.
            requests: any.
        """
        for request in requests:
            if not request.sparse or not request.filled:
                continue
            count = (request.filled + 1) // 2
            for layer, cache in enumerate(caches):
                shape = (geometry.num_kv_heads, request.filled)
                shuffled = torch.rand(shape, generator=self._generator).argsort(dim=-1)
                victims = shuffled[:, :count].to(cache.device)
                order = victims[:, torch.randperm(count, generator=self._generator)]
                resident = tiering.state.resident[layer, request.row]
                last_wanted = tiering.state.last_wanted[layer, request.row]
                blocks, ages = resident.gather(-1, order), last_wanted.gather(-1, order)
                slots = tiering.state.slots[request.row][victims].long()
                heads = torch.arange(len(slots), device=cache.device)[:, None]
                cache[slots, heads] = float("nan")
                sources = tiering.state.store_index[request.row][blocks.long()].long()
                self.fetched_bytes += gather_tiles(store.layer(layer), sources, cache, slots)
                resident.scatter_(-1, victims, blocks)
                last_wanted.scatter_(-1, victims, ages)
