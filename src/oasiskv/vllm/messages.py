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
        known: how many of ``store_blocks``, the first ones, hold its first blocks already; only
            with its first message.
        loads: pairs (store block, block of vLLM's pool) to copy before the forward.
        resume_start: first block of its window, if it was preempted sparse and is back in this
            step; else 0.
    """

    store_blocks: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    known: int = 0
    loads: list[tuple[int, int]] = field(default_factory=list)
    resume_start: int = 0


@dataclass
class OasisMetadata(KVConnectorMetadata):
    """Scheduler to workers.

    Args:
        requests: scheduled requests that go through the store.
        dropped: requests to forget, before anything else; and whether what is in their slots is
            kept until they come back or are to be forgotten too.
    """

    requests: dict[str, RequestMessage]
    dropped: dict[str, bool]


@dataclass
class OasisAck(KVConnectorWorkerMetadata):
    """Workers to scheduler, after each step.

    Args:
        window_start: first window block of each sparse request of this step: what lies between
            sink and window is in the store, and the slots are filled.
        stored: blocks in the store of each request of this step.
        damaged: store blocks that hold something else than was written there.
        in_flight: requests, dropped ones included, of which a write or a transfer is on its way.
        workers: how many acknowledge this together.
    """

    window_start: dict[str, int]
    stored: dict[str, int] = field(default_factory=dict)
    in_flight: set[str] = field(default_factory=set)
    damaged: set[int] = field(default_factory=set)
    workers: int = 1

    def aggregate(self, other: KVConnectorWorkerMetadata) -> OasisAck:
        """What both workers have acknowledged, and what either has on its way."""
        if not isinstance(other, OasisAck):
            raise TypeError(f"cannot put an OasisAck and a {type(other).__name__} together")
        return OasisAck(
            _least(self.window_start, other.window_start),
            _least(self.stored, other.stored),
            self.in_flight | other.in_flight,
            self.damaged | other.damaged,
            self.workers + other.workers,
        )


def _least(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    return {name: min(first[name], second[name]) for name in first.keys() & second.keys()}
