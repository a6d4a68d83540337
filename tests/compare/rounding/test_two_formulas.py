"""Two programs that compute one function in other ways, and two functions."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import roundoff


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


@contextmanager
def capturable_on_the_cpu():
    """torch refuses ``capturable`` on a CPU, which computes the same."""
    asked = "_get_capturable_supported_devices"
    modules = [m for n, m in list(sys.modules.items()) if n.startswith("torch.optim.")]
    before = {m: getattr(m, asked) for m in modules if hasattr(m, asked)}
    for module in before:
        setattr(module, asked, lambda *_, **__: ["cpu"])
    try:
        yield
    finally:
        for module, function in before.items():
            setattr(module, asked, function)


def record(folder, kind, keep, **options):
    model = network()
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(4))
    optimizer = kind(model.parameters(), **options)
    with (
        capturable_on_the_cpu(),
        roundoff.capture(folder, model, keep=keep) as run,
    ):
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            run.step()


@pytest.mark.parametrize(
    ("kind", "keep", "form"),
    [
        # 1 - 0.999 in fp32 is 1.3e-5 off, in a bias that was zero
        (torch.optim.Adam, "tensors", {"foreach": False, "capturable": True}),
        (torch.optim.Adam, "stats", {"foreach": False, "capturable": True}),
        # gradients times the rate are no scale of the loss
        (torch.optim.Adagrad, "tensors", {"foreach": True}),
        # numbers are read in another order, and chains of numbers are new
        (torch.optim.ASGD, "tensors", {"foreach": True}),
        (torch.optim.NAdam, "stats", {"foreach": True}),
    ],
)
def test_another_form_of_an_optimizer_agrees(kind, keep, form, tmp_path):
    record(tmp_path / "reference", kind, keep, foreach=False)
    record(tmp_path / "candidate", kind, keep, **form)
    comparison = roundoff.compare(
        reference=tmp_path / "reference", candidate=tmp_path / "candidate"
    )
    assert not comparison.fails, comparison.answer
    assert not comparison.verdicts.get("fail")


@pytest.mark.parametrize("foreach", [False, True])
def test_a_wrong_constant_in_another_form_is_still_named(
    foreach, tmp_path, monkeypatch
):
    form = {"foreach": foreach, "capturable": True}
    record(tmp_path / "reference", torch.optim.Adam, "tensors", foreach=False)
    module = sys.modules["torch.optim.adam"]
    right = module.adam
    monkeypatch.setattr(
        module, "adam", lambda *args, **named: right(*args, **named | {"eps": 1e-4})
    )
    record(tmp_path / "candidate", torch.optim.Adam, "tensors", **form)
    comparison = roundoff.compare(
        reference=tmp_path / "reference", candidate=tmp_path / "candidate"
    )
    assert comparison.fails
    assert comparison.culprits(1)[0].phase == "optimizer", comparison.answer


def softmax_without_maximum(x):
    e = x.exp()
    return e / e.sum(-1, keepdim=True)


def over_the_other_axis(x):
    e = x.exp()
    return e / e.sum(0, keepdim=True)


@pytest.mark.parametrize(
    ("formula", "agrees"),
    [(softmax_without_maximum, True), (over_the_other_axis, False)],
)
def test_another_formula_is_no_fault_and_another_function_is(formula, agrees, tmp_path):
    x = torch.randn(6, 7, generator=torch.Generator().manual_seed(5)) + 4
    for folder, function in (
        ("reference", lambda x: x.softmax(-1)),
        ("candidate", formula),
    ):
        with roundoff.capture(tmp_path / folder, nn.Identity(), keep="tensors") as run:
            function(x) @ x.T
            run.step()
    comparison = roundoff.compare(
        reference=tmp_path / "reference", candidate=tmp_path / "candidate"
    )
    assert comparison.fails != agrees, comparison.answer


@pytest.mark.parametrize(
    ("piece", "agrees"), [(lambda x: x[:, :3], True), (lambda x: x[:, 1:4], False)]
)
def test_a_gradient_of_one_product_for_several(piece, agrees, tmp_path):
    torch.manual_seed(6)
    layer = nn.Linear(4, 5)
    x = torch.randn(2, 4, 4)

    def one_by_one():
        return torch.stack([layer(x[:, n]) for n in range(3)], 1)

    for folder, function in (
        ("reference", one_by_one),
        ("candidate", lambda: layer(piece(x))),
    ):
        layer.zero_grad()
        with roundoff.capture(tmp_path / folder, layer, keep="tensors") as run:
            function().square().sum().backward()
            run.step()
    comparison = roundoff.compare(
        reference=tmp_path / "reference", candidate=tmp_path / "candidate"
    )
    assert comparison.fails != agrees, comparison.answer
