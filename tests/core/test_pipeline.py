"""The stages of a layer, and completions that must change nothing."""

from dataclasses import replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from oasiskv.core.pipeline import LayerPlan, Pipeline, Stage
from oasiskv.errors import StateError
from oasiskv.stores.base import Ticket

LAYERS = 3


def make_plan():
    """One tile for one of two heads."""
    victims = torch.tensor([[0, -1], [-1, -1]])
    return LayerPlan(torch.tensor([[5, -1], [-1, -1]]), victims, torch.zeros((2, 4)))


def make_pipeline():
    return Pipeline("a", generation=2, num_layers=LAYERS)


def bring_to(stage, layer=1, step=4):
    """A pipeline with one layer at ``stage``, and the plan and ticket it has by then."""
    pipeline, plan, ticket = make_pipeline(), make_plan(), None
    order = list(Stage)
    if order.index(stage) >= 1:
        pipeline.predicted(layer, step)
    if order.index(stage) >= 2:
        pipeline.planned(layer, plan)
    if order.index(stage) >= 3:
        ticket = pipeline.launch(layer)
    if order.index(stage) >= 4:
        assert pipeline.complete(ticket) is plan
    assert pipeline.stage(layer) is stage
    return pipeline, plan, ticket


ACTIONS = {
    "predicted": (Stage.IDLE, lambda pipeline: pipeline.predicted(1, 4)),
    "planned": (Stage.PREDICTED, lambda pipeline: pipeline.planned(1, make_plan())),
    "launch": (Stage.PLANNED, lambda pipeline: pipeline.launch(1)),
    "settle": (Stage.PLANNED, lambda pipeline: pipeline.settle(1)),
}


def foreign(ticket):
    """Tickets that differ in one thing each from the one that is waited for."""
    return {
        "request": replace(ticket, request_id="b"),
        "earlier generation": replace(ticket, generation=ticket.generation - 1),
        "later generation": replace(ticket, generation=ticket.generation + 1),
        "earlier step": replace(ticket, step=ticket.step - 1),
        "later step": replace(ticket, step=ticket.step + 1),
        "another layer": replace(ticket, layer=(ticket.layer + 1) % LAYERS),
        "layer past the last": replace(ticket, layer=LAYERS),
        "negative layer": replace(ticket, layer=ticket.layer - LAYERS),
        "layer far below zero": replace(ticket, layer=-LAYERS - 1),
        "kind write": replace(ticket, kind="write"),
        "a write of the request": replace(ticket, kind="write", layer=-1),
    }


FOREIGN = list(foreign(Ticket("read", "a", 2, 4, 1)))


def test_num_tiles_counts_pairs_and_not_padding():
    assert make_plan().num_tiles == 1
    assert LayerPlan(*torch.full((2, 3, 2), -1), torch.zeros((3, 4))).num_tiles == 0


def test_every_layer_starts_idle():
    pipeline = make_pipeline()
    assert [pipeline.stage(layer) for layer in range(LAYERS)] == [Stage.IDLE] * LAYERS
    assert pipeline.waiting() == []


def test_a_transfer_from_prediction_to_attention():
    pipeline, plan = make_pipeline(), make_plan()
    pipeline.predicted(1, step=4)
    assert pipeline.stage(1) is Stage.PREDICTED
    pipeline.planned(1, plan)
    assert pipeline.stage(1) is Stage.PLANNED
    ticket = pipeline.launch(1)
    assert ticket == Ticket("read", "a", 2, 4, 1)
    assert pipeline.stage(1) is Stage.IN_FLIGHT
    assert pipeline.waiting() == [ticket]
    assert pipeline.complete(ticket) is plan
    assert pipeline.stage(1) is Stage.READY
    assert pipeline.waiting() == []
    pipeline.consume(1, step=5)
    assert pipeline.stage(1) is Stage.IDLE
    assert pipeline.ignored == 0


def test_a_plan_without_tiles_settles_without_a_transfer():
    pipeline, plan, _ = bring_to(Stage.PLANNED)
    assert pipeline.settle(1) is plan
    assert pipeline.stage(1) is Stage.READY
    assert pipeline.waiting() == []
    pipeline.consume(1, step=5)
    assert pipeline.stage(1) is Stage.IDLE


def test_layers_are_independent():
    pipeline, _, _ = bring_to(Stage.IN_FLIGHT, layer=1)
    assert [pipeline.stage(layer) for layer in (0, 2)] == [Stage.IDLE, Stage.IDLE]
    pipeline.consume(0, step=5)
    assert pipeline.stage(1) is Stage.IN_FLIGHT


def test_waiting_lists_layers_in_order():
    pipeline = make_pipeline()
    for layer in (2, 0):
        pipeline.predicted(layer, 4)
        pipeline.planned(layer, make_plan())
        pipeline.launch(layer)
    assert [ticket.layer for ticket in pipeline.waiting()] == [0, 2]


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("stage", list(Stage))
def test_an_action_is_legal_in_one_stage_only_and_else_changes_nothing(action, stage):
    needed, act = ACTIONS[action]
    pipeline, _, ticket = bring_to(stage)
    if stage is needed:
        act(pipeline)
        return
    with pytest.raises(StateError, match=f"needs stage {needed.value}, found {stage.value}$"):
        act(pipeline)
    assert pipeline.stage(1) is stage
    assert pipeline.waiting() == ([ticket] if stage is Stage.IN_FLIGHT else [])


@pytest.mark.parametrize("stage", [Stage.PREDICTED, Stage.PLANNED, Stage.IN_FLIGHT])
def test_slots_may_not_be_read_before_the_transfer_is_complete(stage):
    pipeline, plan, _ = bring_to(stage)
    text = f"request a, layer 1: step 5 may not read .* plan of step 4 is {stage.value}$"
    with pytest.raises(StateError, match=text):
        pipeline.consume(1, step=5)
    assert pipeline.stage(1) is stage
    if stage is Stage.IN_FLIGHT:
        assert pipeline.complete(pipeline.waiting()[0]) is plan


@pytest.mark.parametrize("step", [3, 4])
def test_a_plan_is_for_a_later_step_than_the_one_that_made_it(step):
    pipeline, _, _ = bring_to(Stage.READY, step=4)
    with pytest.raises(StateError, match="plan of step 4 is ready"):
        pipeline.consume(1, step)
    assert pipeline.stage(1) is Stage.READY


def test_a_layer_without_a_plan_may_be_read():
    pipeline = make_pipeline()
    pipeline.consume(1, step=5)
    assert pipeline.stage(1) is Stage.IDLE


@pytest.mark.parametrize("difference", FOREIGN)
@pytest.mark.parametrize("stage", list(Stage))
def test_a_foreign_completion_changes_nothing_and_is_counted(difference, stage):
    pipeline, plan, ticket = bring_to(stage)
    stranger = foreign(Ticket("read", "a", 2, 4, 1))[difference]
    assert pipeline.complete(stranger) is None
    assert pipeline.ignored == 1
    assert [pipeline.stage(layer) for layer in range(LAYERS)] == [Stage.IDLE, stage, Stage.IDLE]
    if stage is Stage.IN_FLIGHT:
        assert pipeline.waiting() == [ticket]
        assert pipeline.complete(ticket) is plan


@pytest.mark.parametrize("stage", [Stage.IDLE, Stage.PREDICTED, Stage.PLANNED])
def test_a_completion_before_the_launch_changes_nothing(stage):
    pipeline, _, _ = bring_to(stage)
    assert pipeline.complete(Ticket("read", "a", 2, 4, 1)) is None
    assert pipeline.stage(1) is stage
    assert pipeline.ignored == 1


def test_a_repeated_completion_changes_nothing():
    pipeline, _, ticket = bring_to(Stage.READY)
    assert pipeline.complete(ticket) is None
    assert pipeline.stage(1) is Stage.READY
    assert pipeline.ignored == 1


def test_a_completion_after_the_slots_were_read_changes_nothing():
    pipeline, _, ticket = bring_to(Stage.READY)
    pipeline.consume(1, step=5)
    assert pipeline.complete(ticket) is None
    assert pipeline.stage(1) is Stage.IDLE
    assert pipeline.ignored == 1


def test_a_completion_of_an_earlier_step_does_not_end_the_next_transfer():
    pipeline, _, old = bring_to(Stage.READY)
    pipeline.consume(1, step=5)
    pipeline.predicted(1, step=5)
    plan = make_plan()
    pipeline.planned(1, plan)
    new = pipeline.launch(1)
    assert pipeline.complete(old) is None
    assert pipeline.waiting() == [new]
    assert pipeline.complete(new) is plan


class AnyInterleaving(RuleBasedStateMachine):
    """Legal and illegal calls and good and bad completions in any order, against a plain model.

    Completions of any transfer ever launched come late, twice, out of order, or never.
    """

    layers = st.integers(0, LAYERS - 1)

    def __init__(self):
        super().__init__()
        self.pipeline = make_pipeline()
        self.step = 0
        self.stages = [Stage.IDLE] * LAYERS
        self.made_in = [-1] * LAYERS
        self.plans = [None] * LAYERS
        self.in_flight = {}
        self.sent = []
        self.due, self.committed = [], []
        self.ignored = 0

    def attempt(self, layer, needed, to, act):
        """``act`` if the layer is at ``needed``, moving it to ``to``; else it must be refused."""
        if self.stages[layer] is not needed:
            with pytest.raises(StateError):
                act()
            return None
        answer = act()
        self.stages[layer] = to
        return answer

    @rule()
    def next_step(self):
        self.step += 1

    @rule(layer=layers)
    def predict(self, layer):
        if self.stages[layer] is Stage.IDLE:
            # The engine predicts once per step, so that no ticket is used again.
            self.step = max(self.step, self.made_in[layer] + 1)
            self.made_in[layer] = self.step
        self.attempt(
            layer, Stage.IDLE, Stage.PREDICTED, lambda: self.pipeline.predicted(layer, self.step)
        )

    @rule(layer=layers)
    def plan(self, layer):
        plan = make_plan()
        if self.stages[layer] is Stage.PREDICTED:
            self.plans[layer] = plan
        self.attempt(
            layer, Stage.PREDICTED, Stage.PLANNED, lambda: self.pipeline.planned(layer, plan)
        )

    @rule(layer=layers)
    def launch(self, layer):
        ticket = self.attempt(
            layer, Stage.PLANNED, Stage.IN_FLIGHT, lambda: self.pipeline.launch(layer)
        )
        if ticket is not None:
            assert ticket == Ticket("read", "a", 2, self.made_in[layer], layer)
            self.in_flight[layer] = ticket
            self.sent.append(ticket)

    @rule(layer=layers)
    def settle(self, layer):
        plan = self.attempt(layer, Stage.PLANNED, Stage.READY, lambda: self.pipeline.settle(layer))
        if plan is not None:
            self.due.append(self.plans[layer])
            self.committed.append(plan)

    @rule(layer=layers)
    def attend(self, layer):
        stage = self.stages[layer]
        if stage is Stage.IDLE or (stage is Stage.READY and self.made_in[layer] < self.step):
            self.pipeline.consume(layer, self.step)
            self.stages[layer] = Stage.IDLE
        else:
            with pytest.raises(StateError):
                self.pipeline.consume(layer, self.step)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def deliver(self, data):
        ticket = data.draw(st.sampled_from(self.sent))
        plan = self.pipeline.complete(ticket)
        if self.in_flight.get(ticket.layer) == ticket:
            del self.in_flight[ticket.layer]
            self.stages[ticket.layer] = Stage.READY
            self.due.append(self.plans[ticket.layer])
        else:
            self.ignored += 1
        if plan is not None:
            self.committed.append(plan)

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), difference=st.sampled_from(FOREIGN))
    def deliver_foreign(self, data, difference):
        stranger = foreign(data.draw(st.sampled_from(self.sent)))[difference]
        if stranger not in self.sent:
            assert self.pipeline.complete(stranger) is None
            self.ignored += 1

    @invariant()
    def pipeline_is_as_the_model(self):
        found = [self.pipeline.stage(layer) for layer in range(LAYERS)]
        assert found == self.stages
        assert self.pipeline.waiting() == [self.in_flight[key] for key in sorted(self.in_flight)]
        assert self.pipeline.ignored == self.ignored

    @invariant()
    def exactly_the_plans_due_are_committed_and_none_twice(self):
        assert [id(plan) for plan in self.committed] == [id(plan) for plan in self.due]
        assert len({id(plan) for plan in self.committed}) == len(self.committed)


TestAnyInterleaving = AnyInterleaving.TestCase
TestAnyInterleaving.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
