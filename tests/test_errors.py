"""errors.py: the drawn text is the product, so the whole text is compared."""

from __future__ import annotations

import copy
import pickle

import pytest

from roundoff import errors
from roundoff.errors import InfeasibleError, PlanError, RoundoffError, WorkloadError

SUBCLASSES = [
    getattr(errors, name)
    for name in errors.__all__
    if name not in ("RoundoffError", "InfeasibleError")
]


def test_message_with_every_part():
    error = RoundoffError(
        "no such site", where="plan.json", expected="a site", got="'a'", do="fix it"
    )
    assert (
        str(error)
        == "plan.json: no such site\n  expected: a site\n  got: 'a'\n  do: fix it"
    )
    assert (error.what, error.where, error.expected, error.got, error.do) == (
        "no such site",
        "plan.json",
        "a site",
        "'a'",
        "fix it",
    )


def test_missing_parts_have_no_line():
    assert str(RoundoffError("broken")) == "broken"
    assert str(RoundoffError("broken", do="mend it")) == "broken\n  do: mend it"
    assert RoundoffError("broken").got is None


def test_empty_part_is_still_shown():
    # An empty string is a real answer ("got: nothing"), unlike None.
    assert str(RoundoffError("broken", got="")) == "broken\n  got: "


@pytest.mark.parametrize("cls", SUBCLASSES)
def test_every_class_is_caught_as_roundoff_error(cls):
    with pytest.raises(RoundoffError, match="broken"):
        raise cls("broken")


def test_hierarchy():
    assert issubclass(InfeasibleError, PlanError)
    assert issubclass(errors.GradientPathError, WorkloadError)
    assert issubclass(errors.NonFiniteError, WorkloadError)
    assert not issubclass(RoundoffError, (ValueError, RuntimeError))


def test_infeasible_keeps_its_numbers():
    pinned = ("a/linear",)
    error = InfeasibleError("no plan", best_db=12.5, pinned=pinned, do="unpin a/linear")
    assert (error.best_db, error.pinned) == (12.5, ["a/linear"])
    assert str(error) == "no plan\n  do: unpin a/linear"
    assert InfeasibleError("no plan", best_db=0.0).pinned == []


@pytest.mark.parametrize(
    "clone",
    [copy.copy, lambda e: pickle.loads(pickle.dumps(e))],
    ids=["copy", "pickle"],
)
@pytest.mark.parametrize(
    "error",
    [
        WorkloadError("broken", where="w.py", got="3", do="mend it"),
        InfeasibleError(
            "no plan", best_db=12.5, pinned=["a/linear"], do="unpin a/linear"
        ),
    ],
    ids=["plain", "infeasible"],
)
def test_copy_and_pickle_keep_text_and_attributes(error, clone):
    again = clone(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_the_nearest_names_come_best_first_whatever_their_case():
    names = ["MatMul", "BatchMatMul", "Softmax"]
    assert errors.nearest("matmul", names) == ["MatMul", "BatchMatMul"]
    assert errors.nearest("matmul", names, at_most=1) == ["MatMul"]
    assert errors.nearest("zzz", names) == []


def test_the_question_names_every_choice_and_is_none_without_one():
    assert errors.did_you_mean(["bf16", "fp16"]) == "did you mean bf16 or fp16?"
    assert errors.did_you_mean([]) is None


def test_examples_are_the_first_names_where_none_is_near():
    assert errors.examples("layr", ["", "head", "layer"]) == "layer"
    assert errors.examples("zzz", ["", "head", "layer"]) == "head, layer"
    assert errors.examples("zzz", []) == ""
