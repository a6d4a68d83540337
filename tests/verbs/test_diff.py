"""One value of two runs side by side, on small recorded programs; expected numbers from numpy in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import roundoff
from roundoff.compare.tensors.element_differences import AxisShare
from roundoff.errors import RunError


class Net(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.add_module(inner, torch.nn.Linear(6, 3))
        self.inner = inner

    def forward(self, x, shift):
        return torch.softmax(self.get_submodule(self.inner)(x) + shift, -1)


def record(path, inner="layer", shift=0.0, keep="tensors", dtype=torch.float32):
    torch.manual_seed(0)
    model = Net(inner).to(dtype)
    with torch.no_grad(), roundoff.capture(path, model, keep=keep) as run:
        model(
            torch.linspace(-1, 1, 24, dtype=dtype).reshape(4, 6),
            torch.tensor([0.0, shift, 0.0], dtype=dtype),
        )
        run.step()
    return roundoff.load(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {
        "good": record(folder / "good"),
        "bad": record(folder / "bad", shift=0.5),
        "renamed": record(folder / "renamed", inner="dense", shift=0.5),
        "stats": record(folder / "stats", keep="stats"),
        "half": record(folder / "half", dtype=torch.bfloat16),
    }


def test_numbers(runs):
    found = roundoff.diff("/add", reference=runs["good"], candidate=runs["bad"], rows=2)
    want, got = (runs[n].tensor("/add").double().numpy() for n in ("good", "bad"))
    error = np.abs(want - got)
    # one pass in fp32 over 12 elements: 12 roundings of 2**-24, and those of the square roots
    assert found.metrics.rel_l2 == pytest.approx(
        np.linalg.norm(error) / np.linalg.norm(want), rel=16 * 2.0**-24
    )
    assert found.error == found.metrics.rel_l2
    assert found.elements.differing == (error > 0).sum() == 4
    # all four are 0.5 off as far as fp32 adds: the first are those of the first rows
    assert [e.index for e in found.elements.first] == [[0, 1], [1, 1]]
    assert found.elements.axes[1] == AxisShare(axis=1, index=1, share=1.0)
    by_name = {s.name: s for s in found.statistics}
    assert by_name["mean"].difference == pytest.approx(
        got.mean() - want.mean(), abs=1e-6
    )  # means of numbers below 1
    assert [i.same for i in found.inputs] == [True, True]
    assert found.inputs[0].error == 0.0
    assert found.arguments == ()
    assert found.note is None


def test_names_that_differ_are_found_by_alignment(runs):
    here = roundoff.diff(
        "dense/addmm", reference=runs["good"], candidate=runs["renamed"]
    )
    there = roundoff.diff(
        "layer/addmm", reference=runs["good"], candidate=runs["renamed"]
    )
    assert here.sides == there.sides
    assert (here.sides.reference.site, here.sides.candidate.site) == (
        "layer/addmm",
        "dense/addmm",
    )
    assert (
        roundoff.diff(
            "dense.weight",
            reference=runs["good"],
            candidate=runs["renamed"],
            modules={"layer": "dense"},
        ).error
        == 0.0
    )


def test_a_parameter_by_name(runs):
    found = roundoff.diff("layer.weight", reference=runs["good"], candidate=runs["bad"])
    assert (found.error, found.elements.differing) == (0.0, 0)
    assert found.inputs == []


def test_statistics_alone(runs):
    found = roundoff.diff("/add", reference=runs["stats"], candidate=runs["bad"])
    assert (found.metrics, found.elements) == (None, None)
    assert found.error > 0
    assert found.note.startswith("the reference did not keep tensors")


def test_two_formats(runs):
    found = roundoff.diff("/_softmax", reference=runs["good"], candidate=runs["half"])
    want, got = (runs[n].tensor("/_softmax").double().numpy() for n in ("good", "half"))
    # both sums in fp32, 12 elements
    assert found.metrics.rel_l2 == pytest.approx(
        np.linalg.norm(want - got) / np.linalg.norm(want), rel=16 * 2.0**-24
    )
    assert 2.0**-8 <= found.tolerance < 0.1  # at least one rounding to bfloat16


def test_runs_are_given_by_path_too(runs):
    by_path = roundoff.diff(
        "/add", reference=str(runs["good"].path), candidate=runs["bad"].path
    )
    assert by_path == roundoff.diff(
        "/add", reference=runs["good"], candidate=runs["bad"]
    )


@pytest.mark.parametrize(
    ("site", "options", "words"),
    [
        (
            "layer/admm",
            {},
            ["neither run has this site", "layer/addmm", "'layer/admm'"],
        ),
        ("layer.weigth", {}, ["neither run has this site", "layer.weight"]),
        (
            "/add",
            {"phase": "backward"},
            [
                "'/add' has no such value",
                "forward, place 0",
                "phase backward, place any",
            ],
        ),
        ("/add", {"place": 2}, ["'/add' has no such value", "phase any, place 2"]),
        ("/add", {"step": 4}, ["not both step 4", "--step", "step 0 in the reference"]),
        ("/add", {"rank": 1}, ["not both rank 1", "--rank"]),
    ],
)
def test_what_is_not_there(runs, site, options, words):
    with pytest.raises(RunError) as caught:
        roundoff.diff(site, reference=runs["good"], candidate=runs["bad"], **options)
    assert [word for word in words if word not in str(caught.value)] == []
