"""Both forward passes of two programs by different hands, in fp64."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import roundoff
from roundoff.compare.judging.explain import RecordedStep
from roundoff.compare.ports.fp64_values import in_fp64
from roundoff.compare.ports.port_results import last_results
from roundoff.compare.records.recorded_rows import rows_of
from roundoff.compare.values.value_flow import flow_of
from roundoff.compare.values.value_regions import Sides, limit_of
from roundoff.record import StepTensors


def test_a_constant_of_nought_is_no_mask_of_the_other_program(sides_of, program):
    """Nought and minus infinity are alike in what is known of them: nothing but a mask."""

    def ours(m, x):
        scores = x @ m.weight
        return torch.where(x < 0, -torch.inf, scores).softmax(-1).square().sum(0)

    def theirs(m, x):
        bias = torch.where(x < 0, -1e10, 0.0)
        return (
            torch.softmax(torch.einsum("bi,io->bo", x, m.weight) + bias, -1)
            .pow(2)
            .sum(0)
        )

    weight = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(2))
    sides = sides_of(program(ours, weight=weight), program(theirs, weight=weight), x)
    exact = in_fp64(sides)
    assert exact is not None
    end = list(exact.candidate.in_order())[-1]
    wanted = theirs(program(theirs, weight=weight).double(), x.double())
    # one sum of nine terms and a softmax of six: a few roundings of 2**-53 each way
    torch.testing.assert_close(
        exact.candidate.tensor(end.key), wanted, rtol=1e-14, atol=0.0
    )


def test_memory_that_a_kernel_leaves_unwritten_does_not_tell(sides_of, program):
    """``_ctc_loss`` keeps a recursion, of which only the steps of each length are written."""
    texts = torch.tensor([[1, 2, 2, 3], [4, 0, 0, 0]])
    steps, letters = torch.tensor([9, 4]), torch.tensor([4, 1])

    def costs(m, x):
        # what was in the memory before: far from what another run finds there
        spoilt = torch.full((2, 9, 9), 3e4)
        del spoilt
        scores = (x @ m.weight).log_softmax(-1)
        return F.ctc_loss(scores, texts, steps, letters, reduction="none")

    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    x = torch.randn(9, 2, 6, generator=torch.Generator().manual_seed(2))
    sides = sides_of(program(costs, weight=weight), program(costs, weight=weight), x)
    kept = [v for v in sides.candidate.values.values() if v.row.place == 1]
    assert [(v.operator, v.sketch) for v in kept] == [("_ctc_loss", None)]
    assert in_fp64(sides) is not None


def test_a_program_in_fp64_ends_with_what_its_backward_pass_began_with(
    program, tmp_path
):
    """Values that nothing reads, each the only one of its size, are no results of it."""

    def beside(more):
        def run(m, x):
            scores = x @ m.weight
            more(scores)
            return scores.square().mean()

        return run

    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(2))
    flows = []
    for name, more in (
        ("reference", lambda scores: scores.detach().exp()),
        ("candidate", lambda scores: scores.detach().sin()),
    ):
        net = program(beside(more), weight=weight)
        with roundoff.capture(tmp_path / name, net, keep="tensors") as run:
            net(x).backward()
            run.step()
        recorded = roundoff.load(tmp_path / name)
        tensors = StepTensors(recorded, 0, 0)
        flows.append(flow_of(RecordedStep(rows_of(recorded, 0, 0), tensors)))
    reference, candidate = flows
    sides = Sides(reference, candidate, limit_of(reference, candidate))
    sides.match()
    exact = in_fp64(sides)
    assert exact is not None
    exact.match()
    keys = [end.key for end in last_results(sides)]
    assert [end.key for end in last_results(exact)] == keys


def test_a_mean_that_is_nothing_but_rounding_does_not_tell(sides_of, program):
    """A layer without a bias keeps the mean of normalized rows at zero: fp32 leaves 1e-9."""

    def ours(m, x):
        x = (x - x.mean(0)) / x.std(0)
        return F.instance_norm((x @ m.weight).t()[None]).tanh().square().sum()

    def theirs(m, x):
        x = (x - x.mean(0)) / x.std(0)
        h = torch.einsum("bi,io->ob", x, m.weight)
        h = (h - h.mean(1, keepdim=True)) / (
            h.var(1, correction=0)[:, None] + 1e-5
        ).sqrt()
        return h.tanh().square().sum()

    weight = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(2))
    sides = sides_of(program(ours, weight=weight), program(theirs, weight=weight), x)
    assert in_fp64(sides) is not None


def test_what_is_made_of_whole_numbers_alone_is_as_it_was_recorded(sides_of, program):
    """A third of a place that data say, and of one that the model chooses, are one number."""

    def ways(m, x):
        start = torch.arange(9).float() / 3
        end = (x @ m.weight).argmax(1).float() / 3
        return ((end - start) * (x @ m.weight)[:, 0]).sum()

    weight = torch.randn(6, 9, generator=torch.Generator().manual_seed(1))
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(2))
    sides = sides_of(program(ways, weight=weight), program(ways, weight=weight), x)
    exact = in_fp64(sides)
    assert exact is not None
    thirds = [v for v in exact.candidate.in_order() if v.operator == "div"]
    assert len(thirds) == 2
    for third in thirds:
        recorded = sides.candidate.tensor(third.key)
        assert torch.equal(exact.candidate.tensor(third.key), recorded.double())
