"""The names that modules and their parameters go by in a recording."""

from __future__ import annotations

import copy

import torch
from torch import nn

import roundoff


def named(run):
    """Return the names of all parameters that a recording has."""
    names = roundoff.load(run).ops.collect()["name"].drop_nulls().to_list()
    return {name for name in names if not name.endswith(".grad")}


def test_two_networks_of_one_class_have_names_of_their_own(tmp_path):
    policy = nn.Tanh()
    first = nn.Linear(3, 2)
    student = nn.Linear(2, 2)
    teacher = copy.deepcopy(student)
    with roundoff.capture(tmp_path / "run") as run:
        x = policy(first(torch.ones(4, 3)))
        (student(x) - teacher(x)).square().sum().backward()
        run.step()
    assert named(tmp_path / "run") == {
        "weight",
        "bias",
        "Linear.weight",
        "Linear.bias",
        "Linear_2.weight",
        "Linear_2.bias",
    }


class Parts(nn.Module):
    """A model that is never called: its methods call its parts."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict(
            {"wide": nn.Linear(3, 4), "narrow": nn.Linear(4, 2)}
        )

    def score(self, x):
        return self.layers["narrow"](self.layers["wide"](x).tanh()).sum()


def test_parts_of_what_is_never_called_have_its_names(tmp_path):
    net = Parts()
    slow = copy.deepcopy(net)
    with roundoff.capture(tmp_path / "run") as run:
        (net.score(torch.ones(4, 3)) - slow.score(torch.ones(4, 3))).backward()
        run.step()
    names = {"layers.wide.weight", "layers.wide.bias"}
    names |= {"layers.narrow.weight", "layers.narrow.bias"}
    assert named(tmp_path / "run") == names | {f"Parts.{name}" for name in names}
    sites = set(roundoff.load(tmp_path / "run").ops.collect()["module"])
    assert {"layers.wide", "Parts.layers.narrow"} <= sites


def test_a_network_that_is_gone_leaves_its_name(tmp_path):
    main = nn.Linear(3, 2)
    with roundoff.capture(tmp_path / "run") as run:
        for _ in range(3):
            inner = nn.Bilinear(2, 2, 1)
            hidden = main(torch.ones(4, 3))
            inner(hidden, hidden).sum().backward()
            del inner
            run.step()
    inner_names = {name for name in named(tmp_path / "run") if "Bilinear" in name}
    assert inner_names == {"Bilinear.weight", "Bilinear.bias"}


def test_a_call_of_the_library_has_the_line_that_asked_for_it(tmp_path):
    model = nn.Linear(3, 2)
    with roundoff.capture(tmp_path / "run", model) as run:
        twin = copy.deepcopy(model)
        (model(torch.ones(4, 3)) - twin(torch.ones(4, 3))).sum().backward()
        run.step()
    calls = roundoff.load(tmp_path / "run").ops.collect()
    clones = calls.filter(calls["operator"] == "clone")
    lines = {line.rpartition("/")[2].partition(":")[0] for line in clones["line"]}
    assert len(clones) == 2
    assert lines == {"test_module_paths.py"}


class Speller(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(3, 4)
        self.letters = nn.Linear(4, 2)

    def forward(self, x):
        return self.letters(self.encoder(x).tanh()).sum()


def test_parts_that_are_called_before_their_model_have_its_names(tmp_path):
    net = Speller()
    kept = nn.Sequential(net.letters)  # a few parts, held for something else
    with roundoff.capture(tmp_path / "run") as run:
        with torch.no_grad():
            net.letters(net.encoder(torch.ones(4, 3)))
        net(torch.ones(4, 3)).backward()
        run.step()
    names = {"encoder.weight", "encoder.bias", "letters.weight", "letters.bias"}
    assert named(tmp_path / "run") == names
    assert len(kept) == 1
