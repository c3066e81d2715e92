"""The two tables of states: what a node's state allows, and what an event does to a scoring job."""

from __future__ import annotations

import itertools

import pytest

from helpers.fake_tree import FakePasses, FakeTree
from helpers.pseudo_random_policy import PseudoRandomPolicy
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.lifecycle.job import RULES, Action, Fact, JobEvent, Outcome, Stage, decide
from sgl_kvevict.lifecycle.pending import RULES as RANGE_RULES
from sgl_kvevict.lifecycle.pending import RangeEvent, RangeFact, RangeStage, RangeStep, next_step
from sgl_kvevict.lifecycle.pressure import STEPS
from sgl_kvevict.lifecycle.table import Change, State, require

SPANS = {State.LIGHT, State.COMPRESSED, State.SQUEEZED}
ALLOWED = {
    Change.INSTALL: {State.FULL},
    Change.GROW: SPANS,
    Change.SQUEEZE: SPANS,
    Change.SPLIT: {*State},
    Change.DROP: {*State},
}


@pytest.mark.parametrize(("state", "change"), itertools.product(State, Change))
def test_every_change_of_every_state_is_allowed_or_refused(state, change):
    if state in ALLOWED[change]:
        require(state, change)
    else:
        with pytest.raises(InvariantError, match=rf"{change.name} .* '{state.value}'"):
            require(state, change)


def test_every_state_has_a_next_step_and_only_the_last_ones_lead_below_the_budget():
    assert {state: step.is_below_budget for state, step in STEPS.items()} == {
        State.FULL: False,
        State.LIGHT: False,
        State.COMPRESSED: True,
        State.SQUEEZED: True,
    }


JOB_STEPS = {
    (Stage.DUE, JobEvent.TURN): [({Fact.NOTHING_LEFT}, Outcome.COMPRESSED), (set(), Action.BEGIN)],
    (Stage.SCORING, JobEvent.TURN): [({Fact.CHANGED}, Outcome.COMPRESSED), (set(), Action.START_PASS)],
    (Stage.SCORING, JobEvent.PASS_READ): [
        ({Fact.UNUSABLE}, Outcome.FAILED),
        ({Fact.UNUSABLE, Fact.CHANGED, Fact.PROBES_LEFT}, Outcome.FAILED),
        ({Fact.CHANGED}, Outcome.COMPRESSED),
        ({Fact.CHANGED, Fact.PROBES_LEFT}, Outcome.COMPRESSED),
        ({Fact.PROBES_LEFT}, Action.WAIT),
        (set(), Action.COMPRESS),
    ],
    **{(stage, JobEvent.ABORTED): [(set(), Outcome.ABORTED), (set(Fact), Outcome.ABORTED)] for stage in Stage},
    **{(stage, JobEvent.DROPPED): [(set(), Outcome.DROPPED), (set(Fact), Outcome.DROPPED)] for stage in Stage},
    **{(stage, JobEvent.FAILED): [(set(), Outcome.FAILED), (set(Fact), Outcome.FAILED)] for stage in Stage},
}
"""(stage, event) -> facts that hold, and what follows; other pairs cannot happen."""


@pytest.mark.parametrize(("stage", "event"), itertools.product(Stage, JobEvent))
def test_every_event_at_every_stage_leads_to_one_step_or_is_refused(stage, event):
    if (stage, event) not in JOB_STEPS:
        with pytest.raises(InvariantError, match=rf"{event.name} .* {stage.name}"):
            decide(stage, event)
        return
    for facts, step in JOB_STEPS[stage, event]:
        assert decide(stage, event, facts) is step


def test_every_rule_is_reached_and_the_last_one_of_each_pair_always_holds():
    for pair, rules in RULES.items():
        assert rules[-1][0] is None
        assert {step for _, step in rules} == {step for _, step in JOB_STEPS[pair]}


RANGE_STEPS = {
    (RangeStage.WAITING, RangeEvent.RELEASED): [
        (set(RangeFact), RangeStep.FORGET),
        ({RangeFact.FIXED}, RangeStep.STAY),
        ({RangeFact.BUSY}, RangeStep.STAY),
        (set(), RangeStep.CHOOSE),
    ],
    (RangeStage.CHOOSING, RangeEvent.RELEASED): [(set(), RangeStep.STAY), (set(RangeFact), RangeStep.STAY)],
    (RangeStage.CHOOSING, RangeEvent.TURN): [
        (set(RangeFact), RangeStep.FORGET),
        (set(RangeFact) - {RangeFact.TOO_SHORT}, RangeStep.STAY),
        ({RangeFact.EARLY}, RangeStep.STAY),
        ({RangeFact.FIXED, RangeFact.CHANGED}, RangeStep.WAIT),
        ({RangeFact.CHANGED}, RangeStep.CHOOSE),
        (set(), RangeStep.EXCHANGE),
    ],
    (RangeStage.CHOOSING, RangeEvent.SHORT): [
        (set(RangeFact), RangeStep.FORGET),
        ({RangeFact.FIXED}, RangeStep.STAY),
        ({RangeFact.CHANGED}, RangeStep.STAY),
        ({RangeFact.EARLY}, RangeStep.EXCHANGE),
        (set(), RangeStep.EXCHANGE),
    ],
}
"""(stage, event) -> facts that hold, and what follows; other pairs cannot happen."""


@pytest.mark.parametrize(("stage", "event"), itertools.product(RangeStage, RangeEvent))
def test_every_event_of_a_pending_range_leads_to_one_step_or_is_refused(stage, event):
    if (stage, event) not in RANGE_STEPS:
        with pytest.raises(InvariantError, match=rf"{event.name} .* {stage.name}"):
            next_step(stage, event)
        return
    for facts, step in RANGE_STEPS[stage, event]:
        assert next_step(stage, event, facts) is step


def test_every_rule_of_pending_ranges_is_reached():
    for pair, rules in RANGE_RULES.items():
        assert rules[-1][0] is None
        assert {step for _, step in rules} == {step for _, step in RANGE_STEPS[pair]}


def test_a_refused_change_changes_nothing():
    tree = FakeTree(PseudoRandomPolicy())
    tree.prompt(node := tree.add(20))
    span = tree.manager.spans[node.parent]
    with pytest.raises(InvariantError, match="SQUEEZE"):
        tree.manager.table.squeeze(node, 1)  # the tail is uncompressed
    assert tree.manager.table.state(node) is State.FULL and tree.manager.spans[node.parent] is span


def test_a_record_goes_as_a_whole():
    """Split, drop, new weights and a flush leave no part of a record behind."""
    tree = FakeTree(PseudoRandomPolicy(needs_passes=True), scores_any_range=True)
    table = tree.manager.table
    node = tree.add(24)
    tree.release(tree.prompt(node, warm=True))
    tree.release(tree.prompt(tree.add(4, node), found=node))
    FakePasses(tree).run()
    end = node.parent
    assert node in table.jobs and end in table.shrinking and len(table.begun_jobs) == 1
    upper = tree.cut([end], 10)
    assert upper in table.shrinking and end in table.shrinking and upper not in table.jobs
    (child,) = node.children.values()
    for below in (*child.children.values(), child, node):
        tree.drop(below)
    assert not len(table.jobs) and node not in table._records
    tree.drop(end)
    tree.drop(upper)
    assert not table._records and not table.shrinking
    tree.release(tree.prompt(tree.add(24), warm=True))
    tree.manager.forget_seen()
    assert not len(table.jobs) and not table.shrinking and table.prompts.num_bytes == 0
    tree.manager.cleared()
    assert not table._records
