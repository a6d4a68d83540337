"""Which label a fault gets, from rows written by hand and values made for it."""

from __future__ import annotations

import torch

from roundoff.compare.judging.symptoms import ADVICE, Fault, symptom
from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.compare.records.replay import CallReplay
from roundoff.compare.rounding.findings import Finding


def row(record, operator="mul", inputs=(), **columns):
    usual = {
        "record": record,
        "call": record,
        "operator": operator,
        "site": f"net/{operator}",
        "line": "train.py:7",
        "name": None,
        "inputs": list(inputs),
        "dtype": "float32",
        "shape": [6, 10],
        "numel": 60,
        "nan": 0,
        "posinf": 0,
        "neginf": 0,
        "inplace": False,
        "overload": f"aten.{operator}.default",
        "phase": "forward",
    }
    return RecordedRow(**usual | columns)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def looks(
    mine,
    twin=None,
    *,
    values=None,
    missing=None,
    cut=None,
    ours=(),
    theirs=(),
    counterpart=None,
    **finding,
):
    """The label and evidence for the candidate's row ``mine``; ``values`` are what it should give and gave."""
    twin = twin or row(1)
    expected, actual = values or (None, None)
    rows = (
        {r.record: r for r in (*ours, twin)},
        {r.record: r for r in (*theirs, mine)},
    )
    found = symptom(
        Fault(
            finding=Finding(mine.record, 1.0, **finding),
            row=mine,
            twin=twin,
            reference=rows[0],
            candidate=rows[1],
            counterpart={mine.record: twin.record} | (counterpart or {}),
            expected=expected,
            actual=actual,
            missing=missing,
            detach=cut,
        )
    )
    assert found.advice == ADVICE[found.label]
    return found.label, found.evidence


RIGHT = random(6, 10).double()
NOISY = RIGHT.float() * (1 + 0.01 * random(6, 10, seed=1))
SAME_PROGRAM = CallReplay(semantic=0.0, kernel=0.1, excess=40.0)


def test_a_missing_operator():
    gone = row(0, "div")
    assert looks(row(1), missing=gone) == (
        "missing operator",
        "net/div (train.py:7) is in the reference only, and its result is not read here",
    )


def test_a_parameter_that_is_read_in_the_reference_only():
    parameter = row(1, "parameter", call=-1, name="net.bias")
    view = row(2, "t", [1], view_of=1)
    what = "the reference reads net.bias (train.py:7) there, which is not read here"
    for missing in (parameter, view):
        found = looks(row(5), row(6), ours=[parameter, view], missing=missing)
        assert found == (
            "missing operator",
            what,
        )


def test_another_input_or_one_that_was_written_over():
    there, here = row(2, "relu"), row(3, "norm", line=None)
    what = "reads net/norm where the reference reads net/relu (train.py:7)"
    assert looks(row(5), ours=[there], theirs=[here], read=(2, 3)) == (
        "other input",
        what,
    )
    over = row(4, "sub_", [3], inplace=True)
    label, _ = looks(
        row(5), ours=[there], theirs=[here, over], read=(2, 4), counterpart={3: 2}
    )
    assert label == "stale or shared buffer"
    label, _ = looks(
        row(5), ours=[there], theirs=[here, over], read=(2, 4), counterpart={3: 1}
    )
    assert label == "other input", "it was written over something else"
    old = row(3, "buffer", call=-1)
    assert (
        looks(row(5), ours=[there], theirs=[old], read=(2, 3))[0]
        == "stale or shared buffer"
    )


def test_a_number_where_the_reference_reads_a_tensor_of_other_values():
    seen = row(0, "sum", min=3990.0, max=4022.0)
    of_tensor = row(2, "div", [1, 0], arguments='[[{"record":1},{"record":0}],{}]')
    of_number = row(2, "div", [1], arguments='[[{"record":1},4224],{}]')
    what = "divides by 4224 where the reference divides by net/sum (train.py:7)"
    assert looks(of_number, of_tensor, ours=[seen]) == ("other input", what)
    what = "divides by net/sum (train.py:7) where the reference has 4224"
    assert looks(of_tensor, of_number, theirs=[seen]) == ("other input", what)
    made_here = {"theirs": [seen, row(1, "exp")], "region": [0]}
    assert looks(of_tensor, of_number, **made_here) == ("other input", what)
    made_here["region"] = [0, 1]
    assert looks(of_tensor, of_number, **made_here)[1] != what, "more is made otherwise"
    # the same number in a tensor is no other value
    all_alike = row(0, "full", min=4224.0, max=4224.0)
    label, _ = looks(
        of_number, of_tensor, ours=[all_alike], values=(RIGHT, NOISY.double())
    )
    assert label != "other input"


def test_a_changed_argument_is_a_wrong_constant_unless_it_changes_nothing():
    text = ("eps: 1e-05, here 0.001",)
    assert looks(row(1), arguments=text) == ("wrong constant", text[0])
    assert (
        looks(row(1), arguments=text, replayed=CallReplay(semantic=1e-3))[0]
        == "wrong constant"
    )
    assert (
        looks(row(1), arguments=text, replayed=SAME_PROGRAM, values=(RIGHT, NOISY))[0]
        == "wrong kernel"
    )


def test_another_operator():
    again = CallReplay(semantic=0.1, kernel=0.0, excess=0.0)
    assert looks(row(1, "gelu"), row(1, "silu"), replayed=again) == (
        "other operator",
        "gelu where the reference has silu",
    )
    assert looks(row(1, "mean"), row(1, "div"), region=[])[0] == "other operator"


def test_an_extra_operator_works_on_what_the_reference_hands_on():
    source, twin = row(1, "addmm"), row(1, "addmm")
    inserted = row(2, "softmax", [1])
    label, text = looks(inserted, twin, theirs=[source], counterpart={1: 1})
    assert (label, text) == (
        "extra operator",
        "softmax works on what the reference's addmm hands on as it is",
    )
    handed = row(2, "detach", [1])
    assert (
        looks(inserted, handed, ours=[twin], theirs=[source], counterpart={1: 1})[0]
        == "extra operator"
    )
    between = row(3, "mul", [2])
    assert (
        looks(between, twin, theirs=[source, inserted], counterpart={1: 1}, region=[2])[
            0
        ]
        == "extra operator"
    )
    assert (
        looks(inserted, twin, theirs=[source], counterpart={1: 7})[0]
        == "other operator"
    )


def test_a_buffer_that_only_one_program_changes():
    leaf = row(1, "buffer", call=-1, name="norm.running_mean")
    assert looks(row(4, "native_batch_norm", [0]), leaf) == (
        "extra operator",
        "native_batch_norm changes norm.running_mean, which the reference leaves as it is",
    )


def test_specials():
    assert looks(row(1, nan=3)) == ("NaN", "3 NaN where the reference has 0")
    assert looks(row(1, posinf=2, dtype="float16"), row(1, dtype="float16")) == (
        "overflow",
        "2 +Inf where the reference has 0, in float16",
    )
    assert looks(row(1, "full"), row(1, "full", neginf=1056)) == (
        "wrong constant",
        "0 -Inf where the reference has 1,056",
    )
    assert looks(row(1, "add"), row(1, "masked_fill", neginf=5)) == (
        "other operator",
        "add where the reference has masked_fill: 0 -Inf where the reference has 5",
    )
    nothing = row(1, nan=None, posinf=None, neginf=None)
    assert looks(nothing, nothing)[0] == "difference"


def test_what_was_there_before_anything_ran():
    leaf = row(0, "parameter", call=-1)
    turned = random(6, 6)
    assert (
        looks(leaf, leaf, values=(turned, turned.t().contiguous()))[0]
        == "wrong axis or layout"
    )
    assert looks(leaf, leaf, values=(RIGHT, random(6, 10, seed=3))) == (
        "other values",
        "it differs before anything ran",
    )
    assert looks(leaf, leaf) == ("other values", "it differs before anything ran")
    buffer = row(0, "buffer", call=-1)
    assert looks(buffer, buffer, values=(RIGHT, torch.zeros(6, 10))) == (
        "stale or shared buffer",
        "a buffer that differs before anything ran: every element is zero",
    )
    made = row(3, "new_zeros")
    assert looks(row(0, "input", call=-1), made, ours=[made]) == (
        "stale or shared buffer",
        "left from before, where the reference makes it by net/new_zeros (train.py:7)",
    )
    narrow = row(0, "parameter", call=-1, dtype="bfloat16")
    assert looks(narrow, leaf)[0] == "narrower format"


def test_another_shape():
    found = looks(row(1, shape=[48, 80]), row(1, shape=[45, 80]))
    assert found == ("other shape", "[48, 80] where the reference has [45, 80]")


def test_random_draws_are_no_structure():
    drawn = row(1, "bernoulli_", overload="aten.bernoulli_.float")
    masks = (random(6, 10) > 0).float(), (random(6, 10, seed=1) > 0).float()
    label, text = looks(drawn, row(1, "bernoulli_"), values=masks)
    assert label == "noise"
    assert text.startswith("bernoulli_ draws random numbers")


def test_narrower_formats():
    assert looks(row(1, dtype="bfloat16")) == (
        "narrower format",
        "bfloat16 where the reference has float32",
    )
    assert looks(row(1, dtype="uint8"), row(1, dtype="int64")) == (
        "overflow",
        "uint8 where the reference has int64",
    )
    assert looks(row(1), row(1, dtype="bfloat16"))[0] == "difference", (
        "a wider one is no loss"
    )
    assert looks(row(1, "copy_"), values=(RIGHT, RIGHT.bfloat16().float())) == (
        "narrower format",
        "every value is one of bfloat16, in float32",
    )
    assert (
        looks(row(1), values=(RIGHT, RIGHT.bfloat16().float()), replayed=SAME_PROGRAM)[
            0
        ]
        == "narrower format"
    )
    inner = row(1, "_to_copy", dtype="float16")
    assert looks(
        row(2, "add", [1]),
        row(1, "norm"),
        theirs=[inner],
        region=[1],
        values=(RIGHT, NOISY),
    ) == (
        "narrower format",
        "net/_to_copy (train.py:7) is in float16, the result in float32",
    )


def test_one_value_of_another_operator_has_no_factor():
    """A label smoothing left on is no loss that is 0.5 times what it should be."""
    loss = row(1, "nll_loss", shape=[], numel=1)
    inserted = row(2, "add", [1], shape=[], numel=1)
    label, _ = looks(
        inserted,
        loss,
        theirs=[loss],
        counterpart={1: 1},
        values=(torch.tensor(2.0), torch.tensor(1.0)),
    )
    assert label == "extra operator"


def test_structure_then_kernel_then_noise():
    assert looks(row(1), values=(RIGHT, 2 * RIGHT.float()), replayed=SAME_PROGRAM) == (
        "constant factor",
        "2 times what it should be",
    )
    label, text = looks(row(1), values=(RIGHT, NOISY), replayed=SAME_PROGRAM)
    assert label == "wrong kernel"
    assert text.startswith(
        "40 times what rounding explains on the inputs it had; half of the values that differ are off by"
    )
    label, text = looks(row(1), values=(RIGHT, NOISY))
    assert label == "noise"
    assert text.startswith("no structure in the difference; half of")
    assert looks(row(1), replayed=SAME_PROGRAM) == (
        "wrong kernel",
        "40 times what rounding explains on the inputs it had",
    )
    assert looks(row(1))[0] == "difference"


def test_a_gradient_that_is_cut_names_the_side():
    detach = row(9, "detach")
    there = "only the reference detaches at net/detach (train.py:7)"
    assert looks(row(1), missing=detach, cut=detach) == ("gradient cut", there)
    assert looks(row(1), cut=detach) == (
        "gradient cut",
        "the reference does not detach at net/detach (train.py:7)",
    )
