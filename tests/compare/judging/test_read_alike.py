"""What one line makes in several turns of a loop: of two vectors one product stands in two
turns, and which is which is no finding."""

from __future__ import annotations

import torch

import roundoff


class Surgery(torch.nn.Module):
    """Gradients of tasks are projected where they clash, as PCGrad does."""

    def __init__(self, power):
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        self.power = power
        self.order = torch.Generator().manual_seed(4)
        self.tasks = torch.nn.Parameter(torch.randn(4, 6, generator=generator))

    def forward(self, x):
        grads = self.tasks * (x.abs() + 0.1) ** self.power
        with torch.no_grad():
            mended = grads.clone()
            for i, one in enumerate(mended):
                for j in torch.randperm(4, generator=self.order).tolist():
                    dot = one @ grads[j]
                    if i != j and dot < 0:
                        one.sub_(dot / grads[j].square().sum() * grads[j])
        return grads * mended.sum(0)


def test_a_product_of_another_turn_is_no_other_input(tmp_path):
    x = torch.randn(6, generator=torch.Generator().manual_seed(5))
    folders = []
    for power in (1.0, -2.0):
        module = Surgery(power)
        folders.append(tmp_path / f"run{power}")
        with roundoff.capture(folders[-1], module, keep="tensors") as run:
            module(x).square().sum().backward()
            run.step()
    ours, theirs = map(str, folders)
    found = roundoff.compare(reference=ours, candidate=theirs).culprits(9)
    assert found[0].operator == "pow", found[0].evidence
    assert not any(each.looks_like == "other input" for each in found)
