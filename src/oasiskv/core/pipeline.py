"""Predict -> plan -> transfer, with an explicit state per layer.

A completion changes something only if its ticket is the very one that the layer waits for: late,
repeated and foreign completions change nothing.
"""

from dataclasses import dataclass, field, replace
from enum import Enum

import torch

from oasiskv.errors import StateError
from oasiskv.stores.base import Ticket


class Stage(Enum):
    """Where one layer stands between two reads of its slots."""

    IDLE = "idle"
    PREDICTED = "predicted"
    PLANNED = "planned"
    IN_FLIGHT = "in flight"
    READY = "ready"


@dataclass(frozen=True)
class LayerPlan:
    """The swap plan of one layer: pairs (missing block, victim slot) per KV head.

    Args:
        sources: int64 ``[heads, n]`` blocks of the request, -1 for none.
        victims: int64 ``[heads, n]`` slots, -1 for none.
        last_wanted: int64 ``[heads, slots]`` of the resident map once the plan is carried out.
    """

    sources: torch.Tensor
    victims: torch.Tensor
    last_wanted: torch.Tensor

    @property
    def num_tiles(self) -> int:
        """Tiles that the plan moves."""
        return int((self.victims >= 0).sum())

    def without(self, pairs: torch.Tensor) -> "LayerPlan":
        """The plan less some pairs, bool ``[heads, n]``: their victims stay as they are."""
        pairs = pairs.to(self.victims.device)
        sources, victims = (part.masked_fill(pairs, -1) for part in (self.sources, self.victims))
        return replace(self, sources=sources, victims=victims)


@dataclass
class _Layer:
    stage: Stage = Stage.IDLE
    step: int = -1
    plan: LayerPlan | None = None
    ticket: Ticket | None = None


@dataclass
class Pipeline:
    """The layers of one sparse request.

    Per layer and step: ``predicted`` -> ``planned`` -> ``launch`` -> ``complete`` -> ``consume``.
    A plan without tiles is ready without a transfer: ``settle`` instead of ``launch``.

    Args:
        request_id: the request.
        generation: tells this life of the request id from earlier ones.
        num_layers: sparse layers.
    """

    request_id: str
    generation: int
    num_layers: int
    ignored: int = 0
    _layers: list[_Layer] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._layers = [_Layer() for _ in range(self.num_layers)]

    def stage(self, layer: int) -> Stage:
        """Where ``layer`` stands."""
        return self._layers[layer].stage

    def predicted(self, layer: int, step: int) -> None:
        """The lookahead query of ``layer`` in ``step`` is known."""
        state = self._advance(layer, Stage.IDLE, Stage.PREDICTED)
        state.step = step

    def planned(self, layer: int, plan: LayerPlan) -> None:
        """The swap plan of ``layer`` is made."""
        self._advance(layer, Stage.PREDICTED, Stage.PLANNED).plan = plan

    def launch(self, layer: int) -> Ticket:
        """The transfer of ``layer`` starts; returns the ticket whose completion counts."""
        state = self._advance(layer, Stage.PLANNED, Stage.IN_FLIGHT)
        state.ticket = Ticket("read", self.request_id, self.generation, state.step, layer)
        return state.ticket

    def settle(self, layer: int) -> LayerPlan:
        """The plan of ``layer`` moves nothing: ready at once; returns the plan to commit."""
        state = self._advance(layer, Stage.PLANNED, Stage.READY)
        return self._plan_of(state)

    def complete(self, ticket: Ticket) -> LayerPlan | None:
        """A completion came in.

        Returns:
            The plan to commit, or None if the ticket is not the one waited for: then nothing
            changed and ``ignored`` counts it.
        """
        known = ticket.kind == "read" and 0 <= ticket.layer < self.num_layers
        state = self._layers[ticket.layer] if known else _Layer()
        if state.stage is not Stage.IN_FLIGHT or state.ticket != ticket:
            self.ignored += 1
            return None
        state.stage = Stage.READY
        return self._plan_of(state)

    def consume(self, layer: int, step: int) -> None:
        """Attention of ``layer`` is about to read the slots in ``step``.

        Raises:
            StateError: a transfer of an earlier step is not complete, so a slot may be half
                written.
        """
        state = self._layers[layer]
        if state.stage is Stage.IDLE:
            return
        if state.stage is not Stage.READY or state.step >= step:
            raise StateError(
                f"request {self.request_id}, layer {layer}: step {step} may not read the slots "
                f"while the plan of step {state.step} is {state.stage.value}"
            )
        self._layers[layer] = _Layer()

    def waiting(self) -> list[Ticket]:
        """Tickets of the transfers in flight, layers in order."""
        return [
            state.ticket
            for state in self._layers
            if state.stage is Stage.IN_FLIGHT and state.ticket is not None
        ]

    def _advance(self, layer: int, needed: Stage, to: Stage) -> _Layer:
        state = self._layers[layer]
        if state.stage is not needed:
            raise StateError(
                f"request {self.request_id}, layer {layer}: {to.value} needs stage "
                f"{needed.value}, found {state.stage.value}"
            )
        state.stage = to
        return state

    def _plan_of(self, state: _Layer) -> LayerPlan:
        if state.plan is None:
            raise StateError(f"request {self.request_id}: a layer is {state.stage.value} unplanned")
        return state.plan
