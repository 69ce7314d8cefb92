"""What scheduler and workers tell each other, beside vLLM's own messages, each step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass
class RequestMessage:
    """News of one scheduled request.

    Args:
        store_blocks: further store blocks, for blocks that may close in this step.
        slots: its slots, blocks of vLLM's pool; empty unless they are new in this step.
    """

    store_blocks: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


@dataclass
class OasisMetadata(KVConnectorMetadata):
    """Scheduler to workers.

    Args:
        requests: scheduled requests that go through the store.
        dropped: requests to forget, before anything else.
    """

    requests: dict[str, RequestMessage]
    dropped: list[str]


@dataclass
class OasisAck(KVConnectorWorkerMetadata):
    """Workers to scheduler, after each step.

    Args:
        window_start: first window block of each sparse request of this step: what lies between
            sink and window is in the store, and the slots are filled.
    """

    window_start: dict[str, int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> OasisAck:
        """What both workers have acknowledged."""
        if not isinstance(other, OasisAck):
            raise TypeError(f"cannot put an OasisAck and a {type(other).__name__} together")
        both = self.window_start.keys() & other.window_start.keys()
        return OasisAck(
            {name: min(self.window_start[name], other.window_start[name]) for name in both}
        )
