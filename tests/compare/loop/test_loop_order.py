"""What two loops do differently is said in the loop's words, and equal loops are equal."""

from dataclasses import replace

import pytest

from roundoff.compare.loop.loop_order import loop_causes
from roundoff.compare.loop.optimizer_steps import optimizer_steps
from roundoff.compare.loop.optimizer_turns import TURNS
from roundoff.record import HELD, LoopEvent


def event(what, call=0, of="", **numbers):
    return LoopEvent(
        what=what, of=of, line=f"train.py:{call + 1}", call=call, numbers=numbers
    )


def loop(*names, steps=2, lr=0.1):
    """The events of a loop that does the same in each step."""
    events = []
    for step in range(steps):
        for call, name in enumerate(names):
            numbers = {"lr": lr, "foreach": 0.0} if name == "optimizer.step" else {}
            numbers |= {"max_norm": 1.0} if name == "clip_grad_norm_" else {}
            of = "SGD" if name in ("optimizer.step", "zero_grad") else ""
            events.append((step, event(name, call, of, **numbers)))
    return events


USUAL = ("zero_grad", "backward", "optimizer.step")
AMP = ("zero_grad", "scaler.scale", "backward", "scaler.unscale_", "clip_grad_norm_")


def test_a_step_is_what_went_into_it():
    first, second = optimizer_steps(loop(*USUAL))
    assert (first.gathered, len(first.backward), second.gathered) == (1, 1, 1)
    summed = optimizer_steps(loop("backward", "optimizer.step", steps=3))
    assert [step.gathered for step in summed] == [1, 2, 3]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (USUAL, USUAL),
        (USUAL, ("backward", "optimizer.step", "zero_grad")),
        (("zero_grad", *USUAL), USUAL),
    ],
)
def test_loops_that_do_the_same_are_equal(ours, theirs):
    assert loop_causes(loop(*ours), loop(*theirs), rank=0) == []


CLIPPED = ("zero_grad", "backward", "clip_grad_norm_", "optimizer.step")
BY_SCALER = ("scaler.step", "optimizer.step", "scaler.update")


def test_a_scaler_that_divides_its_scale_out_does_the_same_as_none():
    assert loop_causes(loop(*CLIPPED), loop(*AMP, *BY_SCALER), rank=0) == []
    assert loop_causes(loop(*AMP, *BY_SCALER), loop(*CLIPPED), rank=0) == []


def test_a_clip_of_scaled_gradients_is_named_beside_a_loop_without_a_scale():
    early = (*AMP[:3], "clip_grad_norm_", *BY_SCALER)
    [cause] = loop_causes(loop(*CLIPPED), loop(*early), rank=0)
    assert "the reference has no loss scale" in cause.evidence


def test_a_scale_that_no_scaler_divides_out_is_named():
    left = (*AMP[:3], "optimizer.step")
    [cause] = loop_causes(loop(*USUAL), loop(*left), rank=0)
    assert cause.name == "loss scale"


def test_how_an_optimizer_computes_is_no_setting():
    other = [
        (step, event(e.what, e.call, e.of, **{**e.numbers, "foreach": 1.0}))
        if e.numbers
        else (step, e)
        for step, e in loop(*USUAL)
    ]
    assert loop_causes(loop(*USUAL), other, rank=0) == []


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (USUAL, USUAL[1:], "not cleared"),
        (USUAL, ("backward", "zero_grad", "optimizer.step"), "cleared between"),
        (USUAL, ("zero_grad", "backward", *USUAL[1:]), "2 backward passes"),
        (USUAL, USUAL[:2], "never in the candidate"),
        (
            (*AMP, "optimizer.step"),
            (*AMP[:3], AMP[4], AMP[3], "optimizer.step"),
            "before the gradients are unscaled",
        ),
        ((*AMP, "optimizer.step"), (*AMP[:4], "optimizer.step"), "not clipped"),
    ],
)
def test_what_differs_is_named(ours, theirs, words):
    causes = loop_causes(loop(*ours), loop(*theirs), rank=0)
    assert words in causes[0].evidence


def test_a_schedule_that_moves_before_the_optimizer():
    def with_schedule(*names):
        rates = iter((0.05, 0.025) if names[0] == "scheduler.step" else (0.1, 0.05))
        return [
            (step, event(e.what, e.call, e.of, lr=next(rates)) if e.numbers else e)
            for step, e in loop(*names)
        ]

    ours = with_schedule(*USUAL, "scheduler.step")
    theirs = with_schedule("scheduler.step", *USUAL)
    (cause,) = loop_causes(ours, theirs, rank=0)
    assert "scheduler.step() comes before optimizer.step()" in cause.evidence
    assert "0.05 where the reference has 0.1" in cause.evidence


def test_a_learning_rate_is_one_cause_for_all_steps():
    (cause,) = loop_causes(loop(*USUAL), loop(*USUAL, lr=0.2), rank=0)
    assert cause.evidence == "learning rate of SGD: 0.2 where the reference has 0.1"
    assert cause.step == 0


def test_another_tools_run_has_no_loop():
    assert loop_causes([], loop(*USUAL), rank=0) == []


def turns(*optimizers):
    """The events of loops whose optimizers step in this order, all in one step."""
    events = []
    for call, name in enumerate(optimizers):
        events.append((0, event("backward", 2 * call)))
        events.append((0, event("optimizer.step", 2 * call + 1, name, lr=0.1)))
    return events


def test_fewer_turns_of_an_inner_loop_are_told():
    causes = loop_causes(turns(*"DDGDDG"), turns(*"DGDG"), rank=0)
    (cause,) = [cause for cause in causes if cause.name == TURNS]
    assert "1 step of D before another optimizer steps" in cause.evidence
    assert cause.line == "train.py:2"
    more = loop_causes(turns(*"DGDG"), turns(*"DDGDDG"), rank=0)
    assert more[0].name == TURNS


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("ABAB", "BABA"), ("DDGDD", "DDGD"), ("AAA", "AA"), ("ABC", "CBA")],
)
def test_optimizers_in_another_order_or_cut_off_take_the_same_turns(ours, theirs):
    causes = loop_causes(turns(*ours), turns(*theirs), rank=0)
    assert [cause for cause in causes if cause.name == TURNS] == []


def test_optimizers_that_step_in_another_order_are_known_by_what_they_hold():
    """They are numbered in the order in which they step first."""

    def of_two(*pairs):
        names = ("Adam", "Adam#1")
        return [
            (0, event("optimizer.step", call, name, lr=lr, **{HELD: held}))
            for call, (name, (held, lr)) in enumerate(zip(names, pairs, strict=True))
        ]

    ours = of_two((100.0, 0.1), (40.0, 0.3))
    assert loop_causes(ours, of_two((40.0, 0.3), (100.0, 0.1)), rank=0) == []
    (cause,) = loop_causes(ours, of_two((40.0, 0.2), (100.0, 0.1)), rank=0)
    assert "0.2 where the reference has 0.3" in cause.evidence


def of_one_that_holds_two(first, second):
    """Two optimizers that step inside of another one's step."""
    whole = first[0] + second[0]
    events = [event("zero_grad", 0, "Both"), event("backward", 1)]
    events.append(event("optimizer.step", 2, "Both", **{HELD: whole}))
    for name, (held, lr) in (("Adam", first), ("Adam#1", second)):
        inner = event("optimizer.step", 3, name, lr=lr, **{HELD: held})
        events.append(replace(inner, inside="Both"))
    return [(0, each) for each in events]


def of_one(held):
    return [
        (0, event("zero_grad", 0, "Trainer")),
        (0, event("backward", 1)),
        (0, event("optimizer.step", 2, "Trainer", **{HELD: held})),
    ]


def test_an_optimizer_that_steps_others_is_one():
    ours = of_one_that_holds_two((100.0, 0.1), (40.0, 0.3))
    assert loop_causes(ours, of_one(140.0), rank=0) == []
    assert loop_causes(of_one(140.0), ours, rank=0) == []
    (cause,) = loop_causes(
        ours, of_one_that_holds_two((100.0, 0.1), (40.0, 0.2)), rank=0
    )
    assert "0.2 where the reference has 0.3" in cause.evidence
    assert "Adam#1" in cause.evidence


def test_a_wrapper_may_do_itself_what_it_hands_on_to_none():
    """It decays gradients, and the optimizer inside, which has its groups, does not."""

    def of_wrapper(decay, inner_decay):
        numbers = {HELD: 100.0, "weight_decay": decay}
        inner = {HELD: 100.0, "weight_decay": inner_decay}
        outer = event("optimizer.step", 2, "Wrapper", **numbers)
        return [
            (0, outer),
            (0, replace(event("optimizer.step", 3, "SGD", **inner), inside="Wrapper")),
        ]

    ours = [
        (0, event("optimizer.step", 2, "LARS", **{HELD: 100.0, "weight_decay": 0.02}))
    ]
    assert loop_causes(ours, of_wrapper(0.02, 0.0), rank=0) == []
    (cause,) = loop_causes(ours, of_wrapper(0.03, 0.0), rank=0)
    assert "0.03 where the reference has 0.02" in cause.evidence


def test_as_many_values_in_other_optimizers_are_no_update_left_out():
    def of_two(*sizes):
        names = ("Adam", "Adam#1")
        return [
            (0, event("optimizer.step", call, name, **{HELD: held}))
            for call, (name, held) in enumerate(zip(names, sizes, strict=True))
        ]

    assert loop_causes(of_two(100.0, 40.0), of_one(140.0)[2:], rank=0) == []
    causes = loop_causes(of_two(100.0, 40.0), of_one(100.0)[2:], rank=0)
    assert "missing update" in [cause.label for cause in causes]


def of_each(**held):
    events = [
        event("optimizer.step", call, name, **{HELD: values})
        for call, (name, values) in enumerate(held.items())
    ]
    return [(0, each) for each in events]


def test_parameters_that_two_optimizers_hold_are_told():
    ours = of_each(Adam=100.0, Adagrad=40.0)
    (cause,) = loop_causes(ours, of_each(Adam=140.0, Adagrad=40.0), rank=0)
    assert cause.evidence == (
        "the optimizer Adam holds 140 values, in the reference 100: those of Adagrad too, "
        "which both optimizers update, so that they move twice in a step (train.py:1 and "
        "train.py:2)"
    )
    # more of what no other holds, and values that another hands over
    assert loop_causes(ours, of_each(Adam=120.0, Adagrad=40.0), rank=0) == []
    assert loop_causes(ours, of_each(Adam=120.0, Adagrad=20.0), rank=0) == []


def test_gradients_without_a_graph_of_their_own_are_told():
    def penalty(**numbers):
        return [(0, event("autograd.grad", 3, **numbers)), *loop(*USUAL)]

    (cause,) = loop_causes(penalty(create_graph=1.0), penalty(), rank=0)
    assert "without create_graph" in cause.evidence
    assert cause.line == "train.py:4"
    assert loop_causes(penalty(), penalty(), rank=0) == []
    (more,) = loop_causes(penalty(), penalty(create_graph=1.0), rank=0)
    assert "with create_graph, the reference without" in more.evidence


def two_groups(first, second):
    """One step of an optimizer with two groups: values held, and the weight decay."""
    numbers = {HELD: first[0], "weight_decay": first[1]}
    numbers |= {f"{HELD} (group 1)": second[0], "weight_decay (group 1)": second[1]}
    return [
        (0, event("backward", 0)),
        (0, event("optimizer.step", 1, "SGD", **numbers)),
    ]


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        (((40, 0.0), (800, 0.1)), None),
        (((60, 0.0), (780, 0.1)), "0 for 60 values and 0.1 for 780 values where"),
        (((40, 0.1), (800, 0.1)), "0.1 where the reference has 0"),
        (((40, 0.1), (800, 0.0)), "0.1 where the reference has 0 and 0 where"),
        (((800, 0.1), (40, 0.2)), "0.2 where the reference has 0 (group 1)"),
    ],
)
def test_groups_of_parameters_in_another_order_are_the_same(candidate, words):
    ours = two_groups((800, 0.1), (40, 0.0))
    causes = loop_causes(ours, two_groups(*candidate), rank=0)
    assert (words is None) == (causes == [])
    assert words is None or words in causes[0].evidence


def test_groups_cut_in_another_way_are_the_same_settings():
    ours = two_groups((800, 0.1), (40, 0.0))

    def of_three(decay):
        [backward, (step, last)] = two_groups((30, 0.0), (800, decay))
        numbers = {f"{HELD} (group 2)": 10, "weight_decay (group 2)": 0.0}
        numbers |= last.numbers
        return [backward, (step, event(last.what, 1, last.of, **numbers))]

    assert loop_causes(ours, of_three(0.1), rank=0) == []
    [cause] = loop_causes(ours, of_three(0.2), rank=0)
    assert cause.evidence == (
        "weight decay of SGD: 0 for 40 values and 0.2 for 800 values where the "
        "reference has 0.1 for 800 values and 0 for 40 values"
    )


def test_a_group_that_is_left_out_is_no_other_setting():
    """What its parameters miss is told of their updates."""
    ours = two_groups((800, 0.1), (40, 0.0))
    [backward, (step, last)] = ours
    numbers = {name: n for name, n in last.numbers.items() if "group" not in name}
    theirs = [backward, (step, event(last.what, 1, last.of, **numbers))]
    assert loop_causes(ours, theirs, rank=0) == []


def two_optimizers(*backward):
    """The events of steps in which two optimizers step after these backward passes."""
    events = [(0, event("zero_grad", 0, "SGD")), (0, event("zero_grad", 1, "Adagrad"))]
    events += [(0, event("backward", call)) for call in backward]
    events += [(0, event("optimizer.step", 8, name)) for name in ("SGD", "Adagrad")]
    return events + [(step + 1, e) for step, e in events]


def test_the_parts_of_a_loss_may_go_backward_one_by_one():
    found = loop_causes(two_optimizers(3), two_optimizers(3, 4), rank=0)
    # the second optimizer takes both passes too: nothing was left from before
    assert [cause.name for cause in found] == ["backward"]
    left = [(s, e) for s, e in two_optimizers(3) if e.call != 1]
    found = loop_causes(two_optimizers(3), left, rank=0)
    assert [(c.name, c.step) for c in found] == [("zero_grad", 1)]


def test_a_clip_before_the_backward_pass_clips_nothing():
    early = ("zero_grad", "clip_grad_norm_", "backward", "optimizer.step")
    late = ("zero_grad", "backward", "clip_grad_norm_", "optimizer.step")
    found = loop_causes(loop(*late), loop(*early), rank=0)
    assert [cause.name for cause in found] == ["clip of the gradients"]
    assert "clip_grad_norm_ (train.py:2)) before the backward pass" in found[0].evidence
    assert "the reference clips them after it" in found[0].evidence
    found = loop_causes(loop(*early), loop(*late), rank=0)
    assert "the reference clips before it" in found[0].evidence
    # a clip after each of two passes is one after the last
    often = ("zero_grad", *2 * late[1:3], "optimizer.step")
    assert loop_causes(loop(*often), loop(*often), rank=0) == []


def test_clips_between_backward_passes_are_told():
    once = ("zero_grad", "backward", "backward", "clip_grad_norm_", "optimizer.step")
    each = ("zero_grad", *2 * ("backward", "clip_grad_norm_"), "optimizer.step")
    [found] = loop_causes(loop(*once), loop(*each), rank=0)
    assert found.name == "clip of the gradients"
    assert "after backward passes 1 and 2 of 2" in found.evidence
    assert (
        "the reference clips (clip_grad_norm_ (train.py:4)) after backward pass 2"
        in (found.evidence)
    )
    [found] = loop_causes(loop(*each), loop(*once), rank=0)
    assert "after backward pass 2 of 2" in found.evidence


def test_groups_that_are_clipped_by_norms_of_their_own_are_told():
    once = ("zero_grad", "backward", "clip_grad_norm_", "optimizer.step")
    groups = (*once[:2], *2 * once[2:3], once[3])
    [found] = loop_causes(loop(*once), loop(*groups), rank=0)
    assert found.name == "clip of the gradients"
    assert "by 2 norms, each of a part of the gradients" in found.evidence
    assert "by one norm of all gradients" in found.evidence
    assert loop_causes(loop(*groups), loop(*groups), rank=0) == []
    values = tuple(name.replace("norm", "value") for name in once)
    several = tuple(name.replace("norm", "value") for name in groups)
    assert loop_causes(loop(*values), loop(*several), rank=0) == []


def of_two(*names, held=(8.0, 3.0)):
    """Two steps of a loop with two optimizers, each of which holds some of the values."""
    sizes = dict(zip(("SGD", "Adam"), held, strict=True))
    settings = {
        "clip": ("clip_grad_norm_", "", {"max_norm": 1.0, HELD: sizes["SGD"]}),
        **{of: ("optimizer.step", of, {HELD: n}) for of, n in sizes.items()},
    }
    events = []
    for step in range(2):
        for call, name in enumerate(names):
            what, of, numbers = settings.get(name, (name, "", {}))
            events.append((step, event(what, call, of, **numbers)))
    return events


def test_a_clip_goes_with_the_optimizer_that_holds_what_it_clips():
    usual = of_two("backward", "Adam", "backward", "clip", "SGD")
    late = of_two("backward", "Adam", "backward", "SGD", "clip")
    assert loop_causes(usual, usual, rank=0) == []
    causes = loop_causes(usual, late, rank=0)
    assert "the gradients are not clipped before SGD steps" in causes[0].evidence
    assert not any("Adam" in cause.evidence for cause in causes)
    assert len(causes) == 1


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (("backward", "zero_grad"), (), "it clears the gradients of 1 pass without a"),
        ((), ("backward", "zero_grad"), "a step: one is skipped that the reference"),
        (("backward",), (), "another number of micro-batches"),
    ],
)
def test_a_step_that_is_skipped_is_told_from_micro_batches(ours, theirs, words):
    found = loop_causes(
        loop("zero_grad", *ours, *USUAL[1:]),
        loop("zero_grad", *theirs, *USUAL[1:]),
        rank=0,
    )
    [passes] = (cause for cause in found if cause.name == "backward")
    assert words in passes.evidence
