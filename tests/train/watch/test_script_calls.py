"""NaN and Inf that a script makes itself: the operator, the user's line, the operands."""

from __future__ import annotations

import textwrap

import pytest

import roundoff

HEAD = """
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
def update(loss):
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
#: what the step does, the phase, a part of the cause
BORN = {
    "0/0 in the loss": (
        """
        error = net(torch.randn(6, 4)).square().mean(1)
        weights = torch.zeros(6)
        update((error * weights).sum() / weights.sum())  # HERE
        """,
        "loss",
        "0 / 0 in div (the dividend is a number, 0, the divisor is a number, 0)",
    ),
    "log of zero": (
        """
        p = F.one_hot(torch.arange(3), 3).float()
        logs = p.log()  # HERE
        update((p * (logs - net(torch.randn(3, 4)))).sum())
        """,
        "loss",
        "log of zero (it reads values (3, 3) from 0 to 1, 6 zeros)",
    ),
    "inf - inf": (
        """
        large = net(torch.full((2, 4), 1e4)).exp()  # HERE
        update((large - large.amax(1, keepdim=True)).sum())
        """,
        "loss",
        "exp of values up to",
    ),
    "all keys masked": (
        """
        scores = net(torch.randn(6, 4))
        scores = scores.masked_fill(torch.ones(6, 3, dtype=torch.bool), -torch.inf)
        update(scores.softmax(1).square().sum())  # HERE
        """,
        "loss",
        "masked everywhere",
    ),
    "the root of zero backward": (
        """
        y = net(torch.randn(6, 4))
        update((y - y.detach()).square().sum(1).sqrt().sum())  # HERE
        """,
        "loss",
        "the derivative of sqrt at 0 is infinite (it reads values (6,), all 0)",
    ),
    "a root that where hides": (
        """
        r = (torch.zeros(6, 4) @ net.weight.T).square().sum(1)
        update(torch.where(r > 0, r.sqrt(), 0.0).sum() + net.bias.sum())  # HERE
        """,
        "loss",
        "the derivative of sqrt at 0 is infinite",
    ),
    "a constant column standardised": (
        """
        x = torch.randn(6, 4)
        x[:, 2] = 5
        x = (x - x.mean(0)) / x.std(0)  # HERE
        update(net(x).square().mean())
        """,
        "data",
        "1 zero)",
    ),
    "NaN in the data": (
        """
        data = torch.randn(12, 4)
        data.view(-1)[7] = torch.nan
        x = data[:6]  # HERE
        update(net(x).square().mean())
        """,
        "data",
        "no operator of the script has made it",
    ),
    "clipping by a norm of zero": (
        """
        opt.zero_grad()
        (net(torch.randn(6, 4)) * 0).sum().backward()
        norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
        for p in net.parameters():
            p.grad.mul_(1.0 / norm)  # HERE
        opt.step()
        """,
        "gradients",
        "division by zero in reciprocal (the divisor is a number, 0)",
    ),
    "overflow in float16": (
        """
        y = net(torch.full((6, 4), 2e3)).half()
        update((y * y).float().mean())  # HERE
        """,
        "loss",
        "passes the largest float16",
    ),
}


@pytest.fixture
def events(tmp_path, monkeypatch):
    """``events(step)``: what is said of a script that does ``step`` once, and its text."""
    monkeypatch.chdir(tmp_path)

    def run(step):
        text = HEAD + textwrap.dedent(step)
        (tmp_path / "train.py").write_text(text)
        said = []
        roundoff.watch(["train.py"], said.append)
        return said, text

    return run


@pytest.mark.parametrize("name", BORN)
def test_what_a_script_makes_itself_is_named_on_its_line(events, name):
    step, phase, cause = BORN[name]
    said, text = events(step)
    (event,) = (e for e in said if e.name in ("not finite", "loss not finite"))
    lines = text.splitlines()
    place = next(n for n, line in enumerate(lines, 1) if "# HERE" in line)
    assert event.phase == phase
    assert event.line == f"train.py:{place}"
    assert cause in event.cause


def test_weights_that_the_update_of_an_earlier_step_spoilt_are_not_the_datas_fault(
    events,
):
    said, _ = events("""
        table = nn.Embedding(9, 4)
        opt = torch.optim.Adam(
            [*table.parameters(), *net.parameters()], lr=0.1, eps=0.0
        )
        for first in (0, 3):
            rows = torch.arange(first, first + 3)
            update(F.cross_entropy(net(table(rows)), torch.arange(3)))
    """)
    (event,) = (e for e in said if e.name == "not finite")
    assert event.phase == "weights"
    assert event.origin == "weight"
    assert "its optimizer" in event.advice


def test_an_infinity_that_a_mask_wrote_is_no_birth(events):
    said, _ = events("""
        scores = net(torch.randn(6, 4))
        scores = scores.masked_fill(torch.eye(6, 3, dtype=torch.bool), -torch.inf)
        update(scores.softmax(1).square().sum())
    """)
    assert [event.name for event in said] == ["step", "end"]


# torch's own, while it compiles: it asks each tensor for its gradient
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_script_that_compiles_a_function_is_not_listened_to(events):
    said, _ = events("""
        import torch.overrides
        double = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)
        update(double(net(torch.randn(6, 4))).sum())
        assert not torch.overrides._get_current_function_mode_stack()
    """)
    assert [event.name for event in said] == ["step", "end"]
