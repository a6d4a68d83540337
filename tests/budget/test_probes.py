"""roundoff.budget.probes: K probe gradients at once, handed over outside the vmap level."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

from roundoff.budget.probes import backward, hand_over

torch.manual_seed(0)
A = torch.randn(3, 4)
PROBES = torch.randn(5, 3)


def graph():
    anchor = torch.tensor(-0.0, requires_grad=True)
    x = torch.randn(4) + anchor
    return anchor, x, A @ x


@pytest.mark.parametrize("batched", [True, False])
def test_the_callback_gets_all_gradients_as_one_plain_tensor(batched):
    anchor, x, z = graph()
    seen = []

    def callback(gradients):
        assert not torch._C._functorch.is_batchedtensor(gradients)
        assert gradients.tolist()  # a plain tensor: its values can be read
        seen.append(gradients.clone())

    x.register_hook(lambda gradient: hand_over(gradient, callback))
    backward([z], anchor, [PROBES], batched=batched)
    assert len(seen) == (1 if batched else 5)
    # one row of four fp32 products and three sums each, in another order
    torch.testing.assert_close(
        torch.cat(seen),
        PROBES @ A,
        rtol=0,
        atol=8 * 2**-23 * float((PROBES.abs() @ A.abs()).max()),
    )


def test_several_outputs_share_their_probes():
    anchor, x, z = graph()
    y = 2.0 * x
    seen = []
    x.register_hook(lambda gradient: hand_over(gradient, seen.append))
    other = torch.randn(5, 4)
    backward([z, y], anchor, [PROBES, other], batched=True)
    torch.testing.assert_close(
        seen[0], PROBES @ A + 2.0 * other, rtol=0, atol=1e-5
    )  # 5 fp32 terms below 10


def test_an_output_that_no_gradient_reaches_is_no_error():
    anchor, _, z = graph()
    alone = torch.randn(2, requires_grad=True)
    backward([alone, z], anchor, [torch.ones(5, 2), PROBES], batched=True)
    backward([alone], anchor, [torch.ones(5, 2)], batched=True)
    backward([alone], anchor, [torch.ones(5, 2)], batched=False)


@pytest.mark.parametrize("batched", [True, False])
def test_the_graph_is_freed_unless_kept(batched):
    anchor, x, _ = graph()
    z = x.exp()  # keeps its result for the backward pass
    probes = torch.randn(5, 4)
    if not batched:
        backward([z], anchor, [probes], batched=False, keep_graph=True)
    backward([z], anchor, [probes], batched=batched)
    with pytest.raises(RuntimeError, match="second time"):
        backward([z], anchor, [probes], batched=batched)


def test_a_formula_without_a_batched_form_does_not_warn():
    anchor = torch.tensor(-0.0, requires_grad=True)
    x = torch.randn(1, 2, 3, 4) + anchor
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(
            [F.scaled_dot_product_attention(x, x, x)],
            anchor,
            [torch.randn(5, 1, 2, 3, 4)],
            batched=True,
        )
