"""Where two runs part, on graphs of a few rows written by hand: a rule a test, for both kinds of run.

A graph is ``{record: (operator, inputs)}``; records are the same on both sides unless said. ``errors`` are distances from
the reference, 0 where not given. Rounding explains 1e-3 everywhere.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundoff.compare.judging.divergence import Divergence
from roundoff.compare.judging.explain import EarlierSteps
from roundoff.compare.judging.later_values import clear_what_agrees_later
from roundoff.compare.judging.read_later import ReadLater
from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.compare.records.replay import CallReplay
from roundoff.compare.rounding.findings import (
    INHERITED,
    OWN,
    Bound,
    Distance,
    Finding,
    contributions,
)

TOLERANCE = 1e-3
LEAF = "input"


def rows(graph, **columns):
    """Rows of a graph. Leaves have no call."""
    found = {}
    for record, (operator, inputs) in graph.items():
        changed = {k: value[record] for k, value in columns.items() if record in value}
        usual = {"overload": f"aten.{operator}.default", "dtype": "float32"}
        found[record] = RecordedRow(
            record=record,
            call=-1 if operator == LEAF else record,
            operator=operator,
            inputs=list(inputs),
            **usual | changed,
        )
    return found


class Measures:
    """What a graph says of itself; every answer can be given by the test."""

    def __init__(self, distance, replays=None, **answers):
        self.distance = distance
        self.can_replay = replays is not None
        self.hidden_error = answers.pop("hidden_error", 0.0)
        self._replays = replays
        self.__dict__.update(answers)

    def distance_within(self, one, other):
        return Distance(None)

    def bound(self, twin, row):
        return Bound(TOLERANCE)

    def operands(self, twin, row):
        if len(twin.inputs) != len(row.inputs):
            return []
        return list(zip(twin.inputs, row.inputs, strict=True))

    def changed_arguments(self, twin, row):
        return ()

    def replay(self, twin, row, *, same_inputs):
        return self._replays[row.record]

    def run_as_it_was(self, row):
        return CallReplay(reason="no tensors were kept")

    def is_noise(self, twin):
        return False

    def carried(self, row):
        return 0.0, False

    def is_another_formula(self, twin, row, error, shared):
        return False


def judged(
    graph,
    errors,
    *,
    reference=None,
    counterpart=None,
    exact=None,
    cross=(),
    replays=None,
    **options,
):
    """The step, judged.

    ``cross`` has distances of values that are not each other's counterparts, infinite where
    not given.
    """
    columns = options.pop("columns", {})
    guessed = frozenset(options.pop("guessed", ()))
    ours, theirs = rows(reference or graph, **columns), rows(graph, **columns)
    pairs = {r: r for r in theirs if r in ours} if counterpart is None else counterpart

    def distance(one, other):
        if pairs.get(other) != one:
            return dict(cross).get((one, other), Distance(math.inf))
        found = errors.get(other, 0.0)
        return found if isinstance(found, Distance) else Distance(found, found == 0)

    step = Divergence(
        ours,
        theirs,
        pairs,
        frozenset(pairs if exact is None else exact),
        Measures(distance, replays, **options),
        guessed=guessed,
    )
    step.run()
    clear_what_agrees_later(step, lambda: ReadLater.of(None))
    return step


def run(graph, errors, **options):
    """The findings of ``judged``."""
    return judged(graph, errors, **options).findings


CHAIN = {
    0: (LEAF, []),
    1: ("mm", [0]),
    2: ("relu", [1]),
    3: ("mm", [2]),
    4: ("sum", [3]),
}
NOT_RUN = CallReplay(reason="draws random numbers")
HONEST = CallReplay(semantic=0.0, kernel=1e-7, excess=0.1)
BROKEN = CallReplay(semantic=0.0, kernel=0.1, excess=90.0)
WRONG = CallReplay(semantic=0.2, kernel=1e-7, excess=0.1)


def causes(findings):
    return {r: (f.cause, f.origin) for r, f in findings.items() if f.cause is not None}


def test_equal_runs_have_no_cause():
    found = run(CHAIN, {})
    assert causes(found) == {}
    assert all(f.own_error == 0 for f in found.values())


def test_inputs_equal_output_not_and_what_follows_inherits():
    errors = {2: 0.1, 3: 0.1, 4: 0.05}
    found = run({**CHAIN, 2: ("gelu", [1])}, errors)
    assert causes(found) == {2: (OWN, 2), 3: (INHERITED, 2), 4: (INHERITED, 2)}
    assert found[2].own_error == 0.1
    assert found[3].own_error == 0


def test_the_same_with_tensors_asks_the_call():
    errors = {1: 0.1, 2: 0.1, 3: 0.2, 4: 0.2}
    assert causes(run(CHAIN, errors, replays={1: WRONG, 3: HONEST}))[1] == (OWN, 1)
    assert causes(run(CHAIN, errors, replays={1: WRONG, 3: HONEST}))[3] == (
        INHERITED,
        1,
    )
    found = run(CHAIN, errors, replays={1: BROKEN, 3: BROKEN})
    assert causes(found)[3] == (OWN, 3), (
        "twice as far off as its input, and by its own kernel"
    )
    assert causes(found)[4] == (INHERITED, 3)
    assert causes(run(CHAIN, errors, replays={1: HONEST, 3: HONEST})) == {}, (
        "each call gives what it should"
    )


def test_rounding_is_no_fault():
    assert causes(run(CHAIN, {1: 2e-4, 2: 2e-4, 3: 4e-4, 4: 9e-4})) == {}


def test_of_equal_inputs_only_a_part_of_the_tolerance_is_explained():
    """The tolerance leaves room for inputs that are rounded."""
    assert causes(run(CHAIN, {1: TOLERANCE / 2})) == {1: (OWN, 1)}
    assert causes(run(CHAIN, {1: TOLERANCE / 5})) == {}


def test_a_cancelling_sum_amplifies_from_statistics_alone():
    def bound(_one, row):
        return Bound(TOLERANCE, 1.0, 1000.0 if row.record == 3 else 1.0)

    errors = {1: 4e-5, 2: 4e-5, 3: 0.02, 4: 0.02}
    assert causes(run(CHAIN, errors, bound=bound)) == {}
    assert causes(run(CHAIN, errors))[3] == (OWN, 3)


def test_an_operator_that_only_moves_values_is_not_at_fault_for_what_it_moves():
    graph = {**CHAIN, 2: ("gather", [1])}
    assert causes(run(graph, {1: 1e-3 / 8, 2: 0.5})) == {}, "it may pick what is wrong"
    assert causes(run(graph, {2: 0.5})) == {2: (OWN, 2)}, (
        "of equal inputs it moves others"
    )


@pytest.mark.parametrize(
    "replays",
    [None, dict.fromkeys(range(5), CallReplay(reason="draws random numbers"))],
)
def test_infinite_errors_begin_where_the_inputs_are_finite(replays):
    found = run(CHAIN, {1: 1e-4, 2: 1e-4, 3: math.inf, 4: math.inf}, replays=replays)
    assert causes(found) == {3: (OWN, 3), 4: (INHERITED, 3)}
    assert found[3].own_error == math.inf
    assert found[4].own_error == 0


def test_unknown_inputs_do_not_agree():
    """Nothing was kept of the input: it may well be what is wrong. Only an error that no operator makes of the least
    difference that statistics show (32 times it) is the operator's own."""
    errors = {1: 0.1, 2: 0.1}
    assert causes(run(CHAIN, errors, hidden_error=0.01)) == {
        1: (OWN, 1),
        2: (INHERITED, 1),
    }
    unknown = run(CHAIN, {0: Distance(None), **errors}, hidden_error=0.01)
    assert causes(unknown) == {}
    assert unknown[1].unknown
    assert unknown[0].own_error is None
    assert causes(
        run(CHAIN, {0: Distance(None), **errors}, replays={1: BROKEN, 2: HONEST})
    )[1] == (OWN, 1)
    assert (
        causes(
            run(CHAIN, {0: Distance(None), **errors}, replays={1: HONEST, 2: HONEST})
        )
        == {}
    )


def test_masks_of_different_size_say_nothing():
    graph = {0: (LEAF, []), 1: ("full", []), 2: ("add", [0, 1]), 3: ("softmax", [2])}
    found = run(
        graph,
        {1: Distance(0.0, masked=True), 2: Distance(0.0, masked=True), 3: 0.1},
        hidden_error=0.01,
    )
    assert causes(found) == {}
    assert found[3].unknown
    assert found[3].inputs == 0


def test_memory_that_nothing_was_written_to_and_workspaces():
    graph = {0: (LEAF, []), 1: ("empty_like", [0]), 2: ("mkldnn_rnn_layer", [0])}
    columns = {"dtype": {2: "uint8"}, "place": {2: 3}}
    assert causes(run(graph, {1: 5.0, 2: math.inf}, columns=columns)) == {}


def test_a_wrong_input_is_read():
    """3 reads what 1 made where the reference reads 2; 1 and 2 are right."""
    reference = {0: (LEAF, []), 1: ("mm", [0]), 2: ("mul", [1]), 3: ("mm", [2])}
    graph = {**reference, 3: ("mm", [1])}
    found = run(graph, {3: 0.5}, reference=reference, cross={(2, 1): Distance(0.6)})
    assert causes(found) == {3: (OWN, 3)}
    assert (found[3].read, found[3].missing) == ((2, 1), None)
    near = run(graph, {3: 1e-4}, reference=reference, cross={(2, 1): Distance(1e-5)})
    assert causes(near) == {}, "another tensor with the same values"


def test_a_missing_operator_is_named():
    reference = {
        0: (LEAF, []),
        1: ("mm", [0]),
        2: ("div", [1]),
        3: ("view", [2]),
        4: ("softmax", [3]),
    }
    graph = {0: (LEAF, []), 1: ("mm", [0]), 4: ("softmax", [1])}
    found = run(graph, {4: 0.5}, reference=reference, cross={(3, 1): Distance(0.6)})
    assert causes(found) == {4: (OWN, 4)}
    assert found[4].missing == 2, "the view only hands it on"


def test_a_write_to_a_part_of_memory_is_named_where_it_is_missing():
    """4 is the memory of 0 after its part 1 was written; the graph reads 0 as it was."""
    reference = {
        0: (LEAF, []),
        1: ("select", [0]),
        2: ("copy_", [1]),
        4: (LEAF, [2]),
        5: ("mm", [4]),
    }
    graph = {0: (LEAF, []), 5: ("mm", [0])}
    found = run(graph, {5: 0.5}, reference=reference, cross={(4, 0): Distance(0.6)})
    assert causes(found) == {5: (OWN, 5)}
    assert found[5].missing == 2


def test_an_extra_operator_stands_between():
    reference = {0: (LEAF, []), 1: ("mm", [0]), 4: ("softmax", [1])}
    graph = {0: (LEAF, []), 1: ("mm", [0]), 2: ("mul", [1]), 4: ("softmax", [2])}
    found = run(graph, {4: 0.5}, reference=reference)
    assert causes(found) == {4: (OWN, 4)}
    assert found[4].region == [2]


def test_a_replaced_region_is_judged_as_a_whole():
    """The reference's one norm is a square, a mean and a product here; their end is paired with it."""
    reference = {0: (LEAF, []), 9: ("rms_norm", [0]), 10: ("mm", [9])}
    graph = {
        0: (LEAF, []),
        1: ("pow", [0]),
        2: ("mean", [1]),
        9: ("mul", [0, 2]),
        10: ("mm", [9]),
    }
    found = run(graph, {9: 0.02, 10: 0.02}, reference=reference, exact=[0, 10])
    assert causes(found) == {9: (OWN, 9), 10: (INHERITED, 9)}
    assert found[9].region == [1, 2]
    fused = CallReplay(kernel=1e-7, region_excess=0.2)
    assert (
        causes(
            run(
                graph,
                {9: 2e-3, 10: 2e-3},
                reference=reference,
                exact=[0, 10],
                replays={9: fused, 10: HONEST},
            )
        )
        == {}
    )
    other = CallReplay(kernel=0.02, region_excess=50.0)
    found = run(
        graph,
        {9: 2e-3, 10: 2e-3},
        reference=reference,
        exact=[0, 10],
        replays={9: other, 10: HONEST},
    )
    assert causes(found)[9] == (OWN, 9)


def test_a_region_run_on_what_is_no_counterpart_says_nothing():
    """What is paired with the region's input differs wholly, and the result agrees."""
    graph = {0: (LEAF, []), 8: ("mul", [0]), 9: ("neg", [8]), 10: ("mm", [9])}
    reference = {0: (LEAF, []), 7: ("sub", [0]), 9: ("mul", [7]), 10: ("mm", [9])}
    other = CallReplay(kernel=1.2, region_excess=50.0)

    def found(error):
        return causes(
            run(
                graph,
                {0: 5.0, 9: error, 10: error},
                reference=reference,
                exact=[10],
                replays={9: other, 10: HONEST},
                carried=lambda _: (5.0, False),
            )
        )

    assert 9 not in found(2e-3)
    assert found(1.2)[9] == (OWN, 9), "as far off as the region says"


def test_a_gradient_that_nothing_makes_is_of_the_step_before():
    graph = {0: ("gradient", []), 1: ("mul", [0])}
    unseen = CallReplay(reason="its arguments were not recorded")
    options = {"replays": {0: unseen, 1: HONEST}, "exact": [0, 1]}
    left = run(graph, {0: 3e-3, 1: 3e-3}, carried=lambda _: (3e-3, False), **options)
    assert OWN not in {cause for cause, _ in causes(left).values()}
    new = run(graph, {0: 3e-2, 1: 3e-2}, carried=lambda _: (3e-3, False), **options)
    assert causes(new)[0] == (OWN, 0), "ten times what the step before has left"


@pytest.mark.parametrize(("adds_in_place", "cause"), [(True, OWN), (False, None)])
def test_a_gradient_that_was_left_is_seen_and_one_of_a_compiled_pass_is_not(
    adds_in_place, cause
):
    """By statistics, where bf16 may hide more than the error: 0 is left by the step before.

    The reference hands on its new gradient, 1, in the place of the sum.
    """
    graph = {0: (LEAF, []), 1: ("mm", []), 2: ("add_", [0, 1])}
    reference = {1: ("mm", []), 2: ("detach", [1])}
    columns = {
        "phase": dict.fromkeys(graph, "backward"),
        "inplace": {2: adds_in_place},
    }
    found = run(
        graph,
        {2: 5 * TOLERANCE},
        reference=reference,
        exact=[1],
        hidden_error=1.0,
        columns=columns,
    )
    assert found[2].cause == cause


def test_memory_that_nothing_was_written_to_leaves_no_error():
    graph = {0: ("empty", []), 1: (LEAF, []), 2: ("mm", [1])}
    memory = EarlierSteps()
    memory.remember(judged(graph, {0: 2841.9, 2: 1e-4}))
    assert memory.worst == 1e-4
    assert not memory.parted


def test_what_an_earlier_step_left_is_inherited():
    found = run(CHAIN, {0: 0.1, 1: 0.1}, carried=lambda _: (0.08, True))
    assert causes(found)[0] == (INHERITED, None)
    assert found[0].carried
    assert causes(run(CHAIN, {0: 0.1, 1: 0.1}))[0] == (OWN, 0), (
        "there from the first step on"
    )
    honest = run(CHAIN, {0: 0.9, 1: 0.9}, carried=lambda _: (0.08, False), replays={})
    assert causes(honest)[0] == (OWN, 0), "ten times what rounding had left"
    assert (
        causes(
            run(CHAIN, {0: 0.09, 1: 0.09}, carried=lambda _: (0.08, False), replays={})
        )
        == {}
    )


def test_a_changed_argument_is_asked_about_however_small_its_effect():
    replays = {1: CallReplay(semantic=1e-6, kernel=1e-8, excess=0.1)}
    found = run(
        CHAIN,
        {1: 1e-6},
        replays=replays,
        changed_arguments=lambda _a, b: ("eps: 1, here 2",) if b.call == 1 else (),
    )
    assert causes(found) == {1: (OWN, 1)}
    assert found[1].arguments == ("eps: 1, here 2",)


@pytest.mark.parametrize(("end", "healed"), [(0.0, True), (0.5, False)])
def test_gradients_that_are_added_in_another_order_heal(end, healed):
    """Three gradients of one value: (a + b) + c here, (a + c) + b in the reference; the last sum agrees, or does not."""
    leaves = {0: (LEAF, []), 1: (LEAF, []), 2: (LEAF, [])}
    reference = {**leaves, 3: ("add", [0, 2]), 4: ("add", [3, 1]), 5: ("mul", [4])}
    graph = {**leaves, 3: ("add", [0, 1]), 4: ("add", [3, 2]), 5: ("mul", [4])}
    columns = {"phase": dict.fromkeys((3, 4, 5), "backward")}
    found = run(
        graph,
        {3: 0.5, 4: end, 5: end},
        reference=reference,
        columns=columns,
        exact=[0, 1, 2, 5],
        cross={(2, 1): Distance(0.7), (1, 2): Distance(0.7)},
    )
    assert (causes(found).get(3) is None) == healed


@pytest.mark.parametrize("is_left", [True, False])
def test_a_gradient_that_a_step_leaves_heals_nothing(is_left):
    """What an optimizer divides by its size agrees again, and the gradient is wrong."""
    leaves = {0: (LEAF, []), 1: (LEAF, []), 2: (LEAF, [])}
    reference = {**leaves, 3: ("add", [0, 2]), 4: ("add", [3, 1]), 5: ("mul", [4])}
    graph = {**leaves, 3: ("add", [0, 1]), 4: ("add", [3, 2]), 5: ("mul", [4])}
    columns = {"phase": dict.fromkeys((3, 4, 5), "backward")}
    if is_left:
        columns["name"] = {4: "weight.grad"}
    found = run(
        graph,
        {3: 0.5, 4: 0.5, 5: 0.0},
        reference=reference,
        columns=columns,
        exact=[0, 1, 2, 5],
        cross={(2, 1): Distance(0.7), (1, 2): Distance(0.7)},
    )
    assert (causes(found).get(3) is None) == (not is_left)


def shares(graph, errors, owns):
    """Contributions where the errors and the own errors are given."""
    read = {r: inputs for r, (_, inputs) in graph.items()}
    findings = {}
    for record, inputs in read.items():
        finding = Finding(
            record,
            errors[record],
            own_error=owns[record],
            cause=OWN if owns[record] else None,
        )
        finding.sources = [(i, errors[i]) for i in inputs if errors[i]]
        findings[record] = finding
    return contributions(findings, read)


def test_contributions_by_hand():
    """Two faults of 0.3 and 0.4 meet in a sum: by their squares 9 to 16. A third that nothing reads is an end of its own."""
    graph = {0: ("a", []), 1: ("b", []), 2: ("add", [0, 1])}
    found = shares(graph, {0: 0.3, 1: 0.4, 2: 0.5}, {0: 0.3, 1: 0.4, 2: 0.0})
    assert found == pytest.approx({0: 0.36, 1: 0.64, 2: 0.0})
    assert set(
        shares(graph, dict.fromkeys(graph, 0.0), dict.fromkeys(graph, 0.0)).values()
    ) == {0.0}


def test_what_nothing_depends_on_contributes_nothing_to_it():
    graph = {
        0: ("a", []),
        1: ("b", [0]),
        2: ("c", [0]),
    }  # 1 is wrong, and read by none; 2 is the end that differs
    found = shares(
        {**graph, 3: ("d", [1])},
        {0: 0.1, 1: 0.9, 2: 0.1, 3: 0.0},
        {0: 0.1, 1: 0.9, 2: 0.0, 3: 0.0},
    )
    assert found == pytest.approx({0: 1.0, 1: 0.0, 2: 0.0, 3: 0.0})


@st.composite
def dags(draw):
    size = draw(st.integers(1, 12))
    graph, errors, owns = {}, {}, {}
    for record in range(size):
        inputs = (
            draw(st.lists(st.integers(0, record - 1), max_size=3, unique=True))
            if record
            else []
        )
        graph[record] = ("op", inputs)
        owns[record] = draw(st.sampled_from([0.0, 1e-3, 0.2, 5.0]))
        errors[record] = math.hypot(owns[record], *(errors[i] for i in inputs))
    return graph, errors, owns


@given(dags())
def test_contributions_add_up_to_one(drawn):
    graph, errors, owns = drawn
    found = shares(*drawn)
    read = {i for _, inputs in graph.values() for i in inputs}
    ends = any(errors[r] for r in graph if r not in read)
    assert math.fsum(found.values()) == pytest.approx(1.0 if ends else 0.0, abs=1e-12)
    assert all(share >= 0 for share in found.values())
    assert all(found[r] == 0 for r in graph if not owns[r])


@pytest.mark.parametrize(
    ("guessed", "end", "healed"),
    [((3,), 0.0, True), ((3,), 0.5, False), ((), 0.0, False)],
)
def test_a_counterpart_that_was_guessed_and_shows_in_nothing_heals(
    guessed, end, healed
):
    """One product here, the sum of two in the reference: the first of them is no counterpart of it."""
    leaves = {0: (LEAF, []), 1: (LEAF, [])}
    reference = {
        **leaves,
        3: ("mm", [0, 1]),
        4: ("mm", [0, 1]),
        5: ("add", [3, 4]),
        6: ("mul", [5]),
    }
    graph = {**leaves, 3: ("mm", [0, 1]), 6: ("mul", [3])}
    found = run(
        graph,
        {3: 0.5, 6: end},
        reference=reference,
        guessed=guessed,
        replays=dict.fromkeys(range(7), NOT_RUN),
        columns={"phase": dict.fromkeys((3, 4, 5, 6), "backward")},
        cross={(5, 3): Distance(end)},
    )
    assert (causes(found).get(3) is None) == healed


@pytest.mark.parametrize(
    ("end", "tensors", "healed"),
    [(0.0, True, True), (0.5, True, False), (0.0, False, False)],
)
def test_the_same_by_another_formula_heals_in_the_forward_pass_too(
    end, tensors, healed
):
    """n + z (h - n) in the reference, z h + (1 - z) n here: the product has another operand, the sum agrees.

    Not from statistics: what has equal ones may be other values.
    """
    leaves = {0: (LEAF, []), 1: (LEAF, []), 2: (LEAF, [])}
    reference = {**leaves, 3: ("sub", [0, 1]), 4: ("mul", [3, 2]), 5: ("add", [4, 1])}
    graph = {**leaves, 3: ("sub", [0, 1]), 4: ("mul", [1, 2]), 5: ("add", [4, 1])}
    found = run(
        graph,
        {4: 0.5, 5: end},
        reference=reference,
        replays=dict.fromkeys(range(6), NOT_RUN) if tensors else None,
        cross={(3, 1): Distance(0.7)},
    )
    assert (causes(found).get(4) is None) == healed


#: Run again on its own inputs; of the reference's call nothing is known.
ALONE = CallReplay(semantic=None, kernel=1e-7, excess=0.1)


@pytest.mark.parametrize(("gain", "is_fault"), [(200.0, False), (20.0, True)])
def test_a_moment_that_nearly_vanishes_has_its_inputs_error_many_times(gain, is_fault):
    """0.9 m + 0.1 g is 1 / 200 of its terms: an error of 1e-4 in g may be 2e-2 there."""
    graph = {0: (LEAF, []), 1: ("mm", [0]), 2: ("lerp", [0, 1])}
    errors = {1: 1e-4, 2: 1e-2}
    bounds = {2: Bound(TOLERANCE, gain=gain)}
    found = run(
        graph,
        errors,
        replays={1: HONEST, 2: ALONE},
        bound=lambda twin, row: bounds.get(row.record, Bound(TOLERANCE)),
    )
    assert (found[2].cause == OWN) == is_fault


@pytest.mark.parametrize(("end", "healed"), [(0.0, True), (0.5, False)])
def test_a_memory_that_is_written_in_part_does_not_heal_in_the_other_part(end, healed):
    """The first half of a memory is wrong; the second is written after it, and agrees, as does its view.

    What reads the whole then decides.
    """
    graph = {
        0: (LEAF, []),
        1: ("zeros", []),
        3: ("mm", [0]),
        4: ("slice", [1]),
        5: ("copy_", [4, 3]),
        6: (LEAF, [5]),
        7: ("slice", [6]),
        8: ("copy_", [7, 0]),
        9: (LEAF, [8]),
        10: ("relu", [9]),
    }
    columns = {
        "inplace": {5: True, 8: True},
        "view_of": {4: 1, 7: 6},
        "numel": dict.fromkeys((0, 3, 4, 5, 7, 8), 4) | dict.fromkeys((1, 6, 9, 10), 8),
    }
    found = run(
        graph,
        {3: 0.5, 5: 0.5, 6: 0.5, 9: end, 10: end},
        guessed=(3,),
        replays=dict.fromkeys(graph, NOT_RUN),
        columns=columns,
        carried=lambda row: (0.0, False),
    )
    assert (causes(found).get(3) is None) == healed


@pytest.mark.parametrize(("end", "healed"), [(0.04, False), (1e-5, True)])
def test_a_sum_of_many_wrong_values_may_agree_by_chance(end, healed):
    """The sum of 400 values that are 0.4 off is 0.02 off where their errors are independent."""
    graph = {0: (LEAF, []), 1: ("mm", [0]), 2: ("mul", [1]), 3: ("sum", [2])}
    found = run(
        graph,
        {1: 0.4, 2: 0.4, 3: end},
        guessed=(1,),
        replays=dict.fromkeys(graph, NOT_RUN),
        columns={"numel": {0: 400, 1: 400, 2: 400, 3: 1}},
        bound=lambda twin, row: Bound(0.2 if row.record == 3 else TOLERANCE),
    )
    assert (causes(found).get(1) is None) == healed


@pytest.mark.parametrize(
    ("kept", "healed"), [(LEAF, False), ("zeros_like", False), ("div", True)]
)
def test_what_an_optimizer_keeps_is_a_result(kept, healed):
    """A moment is wrong, in memory from before or made for it; the parameter agrees. A
    denominator that is written in place is not kept."""
    graph = {
        0: (LEAF, []),
        1: (LEAF, []),
        2: (kept, [] if kept == LEAF else [1]),
        3: ("lerp_", [2, 0]),
        4: ("addcdiv_", [1, 3]),
    }
    columns = {
        "inplace": {3: True, 4: True},
        "phase": dict.fromkeys((2, 3, 4), "optimizer"),
        "name": {1: "weight", 4: "weight"},
    }
    found = run(
        graph,
        {3: 0.5},
        guessed=(3,),
        replays=dict.fromkeys(graph, NOT_RUN),
        columns=columns,
    )
    assert (causes(found).get(3) is None) == healed
