"""Parameters of which a program holds copies, a teacher's or an average's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundoff


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.leave = nn.Linear(8, 4)

    def forward(self, x):
        return self.leave(self.norm(torch.tanh(self.enter(x))))


class Halved(torch.autograd.Function):
    """A product whose backward pass is by hand; ``share`` of the gradient is handed on."""

    @staticmethod
    def forward(ctx, x, kernel, share):
        ctx.save_for_backward(x, kernel)
        ctx.share = share
        return x @ kernel

    @staticmethod
    def backward(ctx, gradient):
        x, kernel = ctx.saved_tensors
        return gradient @ kernel.T, ctx.share * (x.T @ gradient), None


class Ported(nn.Module):
    """The same by another hand: kernels are transposed, and the norm is written out."""

    def __init__(self, student, share):
        super().__init__()
        self.share = share
        self.w0 = nn.Parameter(student.enter.weight.detach().T.clone())
        self.b0 = nn.Parameter(student.enter.bias.detach().clone())
        self.gain = nn.Parameter(student.norm.weight.detach().clone())
        self.shift = nn.Parameter(student.norm.bias.detach().clone())
        self.w1 = nn.Parameter(student.leave.weight.detach().T.clone())
        self.b1 = nn.Parameter(student.leave.bias.detach().clone())

    def forward(self, x):
        h = 2 * torch.sigmoid(2 * (Halved.apply(x, self.w0, self.share) + self.b0)) - 1
        centred = h - h.mean(-1, keepdim=True)
        h = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return (h * self.gain + self.shift) @ self.w1 + self.b1


def taught(folder, student):
    """Record a step of a student that a frozen copy of it teaches."""
    both = nn.ModuleList([student, copy.deepcopy(student).requires_grad_(False)])
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    draw = torch.Generator().manual_seed(1)
    x, noise = torch.randn(2, 5, 6, generator=draw)
    with roundoff.capture(folder, both, keep="tensors") as run:
        F.mse_loss(both[0](x), both[1](x + noise)).backward()
        optimizer.step()
        run.step()
    return folder


@pytest.fixture
def compared(tmp_path):
    def compare(share):
        torch.manual_seed(0)
        student = Student()
        reference = taught(tmp_path / "reference", student)
        torch.manual_seed(0)
        candidate = taught(tmp_path / "candidate", Ported(Student(), share))
        return roundoff.compare(reference=reference, candidate=candidate)

    return compare


def test_a_student_beside_its_copy_agrees(compared):
    found = compared(1.0)
    assert found.agrees, found.answer


def test_a_gradient_is_compared_with_that_of_the_student(compared):
    first = compared(0.5).culprits()[0]
    assert first.phase == "backward"
    assert first.line.endswith(f":{Halved.backward.__code__.co_firstlineno + 3}"), (
        first.line
    )
