"""Gradients of ports: rounded much, cut somewhere, clipped in another way."""

from __future__ import annotations

import itertools
import linecache
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundoff


def drawn(*shape, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * scale


LEAVES = {
    "a": drawn(8, 6, seed=1, scale=0.5),
    "b": drawn(8, 8, seed=2, scale=0.4),
    "c": drawn(5, 8, seed=3, scale=0.4),
}
X = 3 * drawn(7, 6, seed=4)
Y = 3 * drawn(7, 5, seed=5)


def product(x, w):
    return torch.einsum("bi,oi->bo", x, w)


def tanh(x):
    return 2 * torch.sigmoid(2 * x) - 1


def far(scores, y):
    return ((scores - y) ** 2).mean()


@pytest.fixture
def compared(program, tmp_path):
    """``compared(reference, port)``: a step of each, recorded and compared.

    ``prepare`` and ``optimizer``: what either does to its gradients.
    """

    numbers = itertools.count()

    def compare(
        reference,
        port,
        *,
        prepare=(None, None),
        optimizers=(None, None),
        data=(X, Y),
    ):
        folders = []
        for function, prepared, made in zip(
            (reference, port), prepare, optimizers, strict=True
        ):
            net = program(function, **LEAVES)
            optimizer = (made or adam)(net.parameters())
            folders.append(tmp_path / str(next(numbers)))
            with roundoff.capture(folders[-1], net, keep="tensors"):
                net(*data).backward()
                if prepared is not None:
                    prepared(net)
                optimizer.step()
        return roundoff.compare(reference=folders[0], candidate=folders[1])

    return compare


def text(line):
    return linecache.getline(__file__, int(line.rpartition(":")[2])).strip()


# -- one program alone hands a gradient on ---------------------------------------------


def with_branch(m, x, y):
    h = torch.tanh(F.linear(x, m.a))
    h = h + torch.relu(F.linear(h, m.b))
    return F.mse_loss(F.linear(h, m.c), y)


def right_branch(m, x, y):
    h = tanh(product(x, m.a))
    h = h + product(h, m.b).clamp(min=0)
    return far(product(h, m.c), y)


def detached_branch(m, x, y):
    h = tanh(product(x, m.a))
    g = product(h.detach(), m.b).clamp(min=0)
    return far(product(h + g, m.c), y)


def detached_twice_in_one_call(m, x, y):
    h = tanh(product(x, m.a))
    both = torch.stack([h, h.detach()])
    return far(product(both[0] + product(both[1], m.b).clamp(min=0), m.c), y)


def branch_without_gradient(m, x, y):
    h = tanh(product(x, m.a))
    with torch.no_grad():
        g = torch.maximum(h @ m.b.T, torch.zeros(()))
    return far(product(h + g, m.c), y)


def with_target(m, x, y):
    h = torch.tanh(F.linear(x, m.a))
    target = torch.sigmoid(F.linear(h, m.b)).detach()
    return F.mse_loss(h, target) + F.mse_loss(F.linear(h, m.c), y)


def learning_target(m, x, y):
    h = tanh(product(x, m.a))
    target = 1 / (1 + torch.exp(-(h @ m.b.T)))
    return far(h, target) + far(product(h, m.c), y)


def routed(m, x, y):
    votes = F.linear(x, m.a)
    fixed = votes.detach()
    logits = torch.zeros(7, 8)
    for turn in range(3):
        shares = F.softmax(logits, 1)
        pose = torch.tanh(shares * (votes if turn == 2 else fixed))
        if turn < 2:
            logits = logits + fixed * pose.detach()
    return F.mse_loss(F.linear(pose, m.c), y)


def learning_routes(m, x, y):
    votes = x @ m.a.T
    logits = torch.zeros(7, 8)
    for _ in range(2):
        logits = logits + tanh(logits.softmax(1) * votes).detach() * votes
    return far(product(tanh(logits.softmax(1) * votes), m.c), y)


def with_steps(m, x, y):
    h = F.linear(x, m.a)
    steps = h + (torch.round(4 * h) / 4 - h).detach()
    return F.mse_loss(F.linear(steps, m.c), y)


def flat_steps(m, x, y):
    h = product(x, m.a)
    steps = torch.floor(4 * h + 0.5) * 0.25
    return far(product(steps, m.c), y)


def with_mask(m, x, y):
    h = F.linear(x, m.a)[None, None]
    # a mask of booleans becomes one of numbers, which has no gradient
    mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    h = F.scaled_dot_product_attention(h, h, h, attn_mask=mask)[0, 0]
    return focal(F.linear(h, m.c), y, lambda sure: sure)


def with_mask_and_detached(m, x, y):
    h = product(x, m.a)
    later = torch.ones(len(x), len(x)).triu(1) > 0
    scores = product(h, h / 8**0.5) - 1e9 * later
    shares = (scores - scores.amax(1, keepdim=True)).exp()
    h = product(shares / shares.sum(1, keepdim=True), h.T)
    return focal(product(h, m.c), y, lambda sure: sure.detach())


def focal(scores, y, handed_on):
    sure = torch.sigmoid(scores)
    return ((1 - handed_on(sure)) * (scores - y) ** 2).mean()


def weighed(m, x, y):
    h = F.linear(x, m.a)
    return F.mse_loss(F.linear(F.softmax(h, 1) * h, m.c), y)


def weighed_by_a_fixed_total(m, x, y):
    h = product(x, m.a)
    # the reference has no such value: only the shares
    total = torch.logsumexp(h, 1, keepdim=True).detach()
    return far(product((h - total).exp() * h, m.c), y)


def in_windows(m, x, y):
    h = F.linear(x, m.a)
    windows = F.unfold(h.view(-1, 1, 2, 4), (1, 3), padding=(0, 1))
    return F.mse_loss(F.linear(windows.mean(1) + h, m.c), y)


def in_windows_of_detached(m, x, y):
    h = product(x, m.a)
    rows = F.pad(h.detach().view(-1, 2, 4), (1, 1))
    means = (rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]) / 3
    return far(product(means.reshape(-1, 8) + h, m.c), y)


def in_turns(m, x, y):
    h = F.linear(x, m.a)
    level = torch.zeros(len(x), 1)
    for _ in range(3):
        level = level.detach()
        z = torch.sigmoid(F.linear(h, m.b) + level)
        h = (1 - z) * h + z * torch.tanh(F.linear(z * h, m.b))
        level = level + h.mean(1, keepdim=True)
    return F.mse_loss(F.linear(h, m.c) + level, y)


def in_turns_of_detached(m, x, y):
    h = product(x, m.a)
    level = torch.zeros(len(x), 1)
    for _ in range(3):
        level, h = level.detach(), h.detach()
        z = torch.sigmoid(product(h, m.b) + level)
        h = torch.lerp(h, tanh(product(h * z, m.b)), z)
        level = h.sum(1, keepdim=True) / 8 + level
    return far(product(h, m.c) + level, y)


@pytest.mark.parametrize(
    ("reference", "port", "line"),
    [
        (in_turns, in_turns_of_detached, "level, h = level.detach()"),
        (in_windows, in_windows_of_detached, "h.detach().view"),
        (weighed, weighed_by_a_fixed_total, "total = torch.logsumexp"),
        (with_mask, with_mask_and_detached, "sure.detach()"),
        (with_branch, detached_branch, "h.detach()"),
        (with_branch, detached_twice_in_one_call, "h.detach()"),
        (with_branch, branch_without_gradient, "g = torch.maximum"),
        (with_target, learning_target, "target = 1 /"),
        # of detached values one behind the other each cuts what the others hand on
        (routed, learning_routes, "votes = x @"),
    ],
)
def test_a_gradient_that_is_cut_is_named(reference, port, line, compared):
    [culprit] = compared(reference, port).culprits()
    assert culprit.looks_like == "gradient cut"
    assert culprit.phase == "forward"
    assert line in text(culprit.line)
    # a total of exponentials is no value of a softmax, and a state that is handed on is not
    # made anew: nothing of the reference is named in their places
    assert (culprit.reference_site is None) == (reference in (weighed, in_turns))


def with_penalty_of_gradients(m, x, y):
    x = x.detach().requires_grad_()
    scores = F.linear(torch.tanh(F.linear(x, m.a)), m.c)
    (gradient,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    return F.mse_loss(scores, y) + gradient.square().sum(1).mean()


def penalty_of(**graph):
    def run(m, x, y):
        x = x.detach().requires_grad_()
        scores = product(tanh(product(x, m.a)), m.c)
        (gradient,) = torch.autograd.grad(scores.sum(), x, **graph)
        return far(scores, y) + torch.einsum("bi,bi->", gradient, gradient) / len(x)

    return run


def test_a_gradient_that_is_a_constant_in_a_penalty_is_named_where_it_is_asked_for(
    compared,
):
    assert compared(with_penalty_of_gradients, penalty_of(create_graph=True)).agrees
    wrong = penalty_of(retain_graph=True)
    [culprit] = compared(with_penalty_of_gradients, wrong).culprits()
    assert culprit.looks_like == "gradient cut"
    assert "create_graph=False" in culprit.evidence
    assert "torch.autograd.grad(" in text(culprit.line)
    assert "torch.autograd.grad(" in text(culprit.reference_line)


def with_penalty_and_branch(m, x, y):
    x = x.detach().requires_grad_()
    h = torch.tanh(F.linear(x, m.a))
    scores = F.linear(h, m.c)
    (gradient,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    penalty = gradient.square().sum(1).mean()
    return F.mse_loss(scores, y) + penalty + F.linear(h, m.b).square().mean()


def penalty_and_detached_branch(m, x, y):
    x = x.detach().requires_grad_()
    h = tanh(product(x, m.a))
    scores = product(h, m.c)
    (gradient,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    penalty = torch.einsum("bi,bi->", gradient, gradient) / len(x)
    side = product(h.detach(), m.b)
    return far(scores, y) + penalty + (side * side).mean()


def with_a_fixed_norm(m, x, y):
    """The weight is divided by its largest singular value, whose vectors are constants."""
    with torch.no_grad():
        u = F.normalize(m.a @ torch.ones(m.a.shape[1]), dim=0)
        v = F.normalize(m.a.T @ u, dim=0)
    h = torch.tanh(F.linear(x, m.a / torch.dot(u, m.a @ v)))
    # of the second pass the head learns nothing
    m.c.requires_grad_(False)
    second = F.linear(h, m.c).mean()
    m.c.requires_grad_(True)
    return F.mse_loss(F.linear(h.detach(), m.c), y) + second


def fixed_norm(handed_on):
    def run(m, x, y):
        fixed = m.a.detach()
        u = fixed.sum(1)
        u = u / u.square().sum().sqrt()
        v = (u[:, None] * fixed).sum(0)
        v = v / v.square().sum().sqrt()
        sigma = torch.einsum("i,ij,j->", u, m.a.view(m.a.shape), v)
        h = tanh(product(x, m.a) / sigma)
        second = product(handed_on(h), m.c.detach()).mean()
        return far(product(h.detach(), m.c), y) + second

    return run


def attended_with_penalty(detached):
    def run(m, x, y):
        x = x.detach().requires_grad_()
        h = F.linear(x, m.a)[None, None]
        h = F.scaled_dot_product_attention(h, h, h)[0, 0]
        (gradient,) = torch.autograd.grad(h.sum(), x, retain_graph=True)
        side = detached(h)
        loss = F.mse_loss(F.linear(h, m.c), y) + F.linear(side, m.b).square().mean()
        return loss + gradient.square().mean()

    return run


def attended_by_hand(m, x, y):
    x = x.detach().requires_grad_()
    h = product(x, m.a)
    h = product((product(h, h) / 8**0.5).softmax(1), h.t())
    (gradient,) = torch.autograd.grad(h.sum(), x, retain_graph=True)
    side = h.detach()
    loss = far(product(h, m.c), y) + (product(side, m.b) ** 2).mean()
    return loss + (gradient * gradient).mean()


def test_a_kernel_without_a_second_derivative_is_differentiated_once(compared):
    """That its gradient is a constant is tried too, and no kernel ends the comparison."""
    assert compared(
        attended_with_penalty(lambda h: h.detach()), attended_by_hand
    ).agrees
    reference = attended_with_penalty(lambda h: h)
    [culprit] = compared(reference, attended_by_hand).culprits()
    assert culprit.looks_like == "gradient cut"
    assert "h.detach()" in text(culprit.line)


def test_a_cut_beside_a_penalty_of_gradients_is_named(compared):
    [culprit] = compared(
        with_penalty_and_branch, penalty_and_detached_branch
    ).culprits()
    assert culprit.looks_like == "gradient cut"
    assert "h.detach()" in text(culprit.line)


class OverAFixedLayer(nn.Module):
    """Its middle layer is not trained: a buffer, or a parameter without a gradient."""

    def __init__(self, *, is_buffer, handed_on=lambda h: h):
        super().__init__()
        self.a, self.c = (nn.Parameter(LEAVES[name].clone()) for name in "ac")
        if is_buffer:
            self.register_buffer("b", LEAVES["b"].clone())
        else:
            self.b = nn.Parameter(LEAVES["b"].clone(), requires_grad=False)
        self.is_buffer = is_buffer
        self.handed_on = handed_on

    def forward(self, x, y):
        if self.is_buffer:
            h = torch.tanh(F.linear(torch.tanh(F.linear(x, self.a)), self.b))
            return F.mse_loss(F.linear(h, self.c) * (1 + h.mean(1, keepdim=True)), y)
        h = tanh(product(tanh(product(x, self.a)), self.b))
        return far(product(h, self.c) * (self.handed_on(h).sum(1)[:, None] / 8 + 1), y)


def test_a_cut_is_named_beside_parameters_that_neither_trains(tmp_path):
    def recorded(folder, **how):
        net = OverAFixedLayer(**how)
        with roundoff.capture(tmp_path / folder, net, keep="tensors"):
            net(X, Y).backward()
        return tmp_path / folder

    reference = recorded("reference", is_buffer=True)
    right = recorded("right", is_buffer=False)
    assert roundoff.compare(reference=reference, candidate=right).agrees
    wrong = recorded("wrong", is_buffer=False, handed_on=lambda h: h.detach())
    [culprit] = roundoff.compare(reference=reference, candidate=wrong).culprits()
    assert culprit.looks_like == "gradient cut"
    assert "h.detach()" in text(culprit.line)


def test_a_parameter_that_one_of_two_passes_does_not_train(compared):
    assert compared(with_a_fixed_norm, fixed_norm(lambda h: h)).agrees
    wrong = fixed_norm(lambda h: h.detach() + 0 * h)
    [culprit] = compared(with_a_fixed_norm, wrong).culprits()
    assert culprit.looks_like == "gradient cut"
    assert "h.detach() + 0" in text(culprit.line)


class Distances(torch.autograd.Function):
    """Distances [N] from rows [N, C] to others, which makes its gradients with them.

    The backward pass inside reads the root, and the forward pass goes on with it.
    """

    @staticmethod
    def forward(ctx, rows, others):
        with torch.enable_grad():
            rows = rows.detach().requires_grad_()
            distances = (rows - others).square().sum(1).sqrt()
            (gradient,) = torch.autograd.grad(distances.sum(), rows)
        ctx.save_for_backward(gradient)
        return distances.detach()

    @staticmethod
    def backward(ctx, back):
        (gradient,) = ctx.saved_tensors
        return gradient * back[:, None], None


class PerPlace(Distances):
    """Divides its gradients by how many numbers a row has."""

    @staticmethod
    def backward(ctx, back):
        (gradient,) = ctx.saved_tensors
        return gradient * back[:, None] / gradient.shape[1], None


def with_distances(m, x, y):
    h = torch.tanh(F.linear(x, m.a) / 4)
    distances = torch.linalg.vector_norm(F.linear(h, m.c) - y, dim=1)
    return distances[:4].mean()


def distances_with_gradients(edit, function=Distances, reduce=torch.mean):
    def run(m, x, y):
        h = edit(tanh(product(x, m.a) / 4))
        rows = product(h, m.c)[:4]
        return reduce(function.apply(rows, y[:4]))

    return run


def test_what_stands_before_a_loss_that_makes_its_own_gradients_is_named(compared):
    right = distances_with_gradients(lambda h: h)
    assert compared(with_distances, right).agrees
    wrong = distances_with_gradients(lambda h: torch.cat([h[:3], 0.9 * h[3:]]))
    [culprit] = compared(with_distances, wrong).culprits()
    assert "0.9 * h[3:]" in text(culprit.line)


def over_the_batch(distances):
    return distances.sum() / 7


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"reduce": over_the_batch}, "return distances.sum() / 7"),
        ({"function": PerPlace}, "/ gradient.shape[1], None"),
    ],
)
def test_a_factor_is_named_behind_a_loss_that_makes_its_own_gradients(
    changed, line, compared
):
    wrong = distances_with_gradients(lambda h: h, **changed)
    [culprit] = compared(with_distances, wrong).culprits()
    assert line in text(culprit.line)


def with_momentum(parameters):
    """What it keeps of a gradient in the first step are views of it."""
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def test_a_cut_is_named_where_the_optimizer_keeps_gradients(compared):
    optimizers = (with_momentum, with_momentum)
    [culprit] = compared(with_branch, detached_branch, optimizers=optimizers).culprits()
    assert culprit.looks_like == "gradient cut"
    assert "h.detach()" in text(culprit.line)


class Decayed(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(p, alpha=0.1)
        return super().step()


class OfLosses(torch.optim.SGD):
    """What regularizes is a loss, whose gradients it asks for in its step."""

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        with torch.enable_grad():
            losses = torch.stack([p.square().sum() / 2 for p in parameters])
            more = torch.autograd.grad(losses.sum(), parameters)
        for p, gradient in zip(parameters, more, strict=True):
            p.grad.add_(gradient, alpha=0.1)
        return super().step()


def test_a_cut_is_named_where_the_optimizer_asks_for_gradients(compared):
    optimizers = (
        lambda parameters: Decayed(parameters, 0.05),
        lambda parameters: OfLosses(parameters, 0.05),
    )
    assert compared(with_branch, right_branch, optimizers=optimizers).agrees
    [culprit] = compared(with_branch, detached_branch, optimizers=optimizers).culprits()
    assert culprit.looks_like == "gradient cut"
    assert "h.detach()" in text(culprit.line)


def on_pixels(m, x, y):
    image = x.view(7, 3, 1, 2).permute(0, 3, 1, 2).contiguous()
    maps = F.conv2d(image, m.a.view(8, 2, 3, 1), padding=(1, 0))
    h = maps.mean((2, 3))
    h = h + torch.relu(F.linear(h, m.b))
    return F.mse_loss(F.linear(h, m.c), y)


def on_pixels_channels_last(m, x, y):
    image = x.view(7, 3, 1, 2).permute(0, 3, 1, 2)
    maps = F.conv2d(image, m.a.view(8, 2, 3, 1), padding=(1, 0))
    # where the kernel has left the channels last, this is a view
    h = maps.permute(0, 2, 3, 1).view(21, 8).view(7, 3, 8).mean(1)
    h = h + product(h.detach(), m.b).clamp(min=0)
    return far(product(h, m.c), y)


def test_a_cut_behind_a_view_of_channels_last_is_named(compared):
    [culprit] = compared(on_pixels, on_pixels_channels_last).culprits()
    assert culprit.looks_like == "gradient cut"
    assert "h.detach()" in text(culprit.line)


def in_one_buffer(m, x, y):
    top = torch.zeros(7, 24)
    top[:, :8] = product(x, m.a)
    for turn in (1, 2):
        before = tanh(top[:, : 8 * turn].detach())
        top[:, 8 * turn : 8 * turn + 8] = product(before[:, -8:], m.b) - before[:, :8]
    both = (top[:, 8:16] + top[:, 16:]).clamp(min=0)
    return far(product(both + top[:, :8], m.c), y)


def in_lists(m, x, y):
    parts = [F.linear(x, m.a)]
    for _ in range(2):
        parts.append(torch.tanh(parts[-1]) @ m.b.T - torch.tanh(parts[0]))
    return F.mse_loss(F.linear(F.relu(parts[1] + parts[2]) + parts[0], m.c), y)


def test_a_cut_in_a_buffer_that_is_filled_in_turns_is_named(compared):
    [culprit] = compared(in_lists, in_one_buffer).culprits()
    assert culprit.looks_like == "gradient cut"
    assert ".detach()" in text(culprit.line)


def test_a_batch_may_be_cut_out_of_one_tensor(compared):
    """Tokens and targets are, mostly: neither is what became of the other."""
    both = torch.cat([X, Y], 1)
    data = both[:, : X.shape[1]], both[:, X.shape[1] :]
    [culprit] = compared(with_branch, detached_branch, data=data).culprits()
    assert culprit.looks_like == "gradient cut"
    assert "h.detach()" in text(culprit.line)


class Slower(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.factor * grad, None


def slower(m, x, y):
    h = Slower.apply(torch.tanh(F.linear(x, m.a)), 0.1)
    h = h + torch.relu(F.linear(h, m.b))
    return F.mse_loss(F.linear(h, m.c), y)


def scaled_port(scale, handed_on=lambda h: h):
    def run(m, x, y):
        h = scale(tanh(product(x, m.a)))
        h = h + product(handed_on(h), m.b).clamp(min=0)
        return far(product(h, m.c), y)

    return run


def test_a_gradient_that_is_scaled_by_hand_agrees(compared):
    right = scaled_port(lambda h: Back.apply(h, -0.1))
    assert compared(slower, right).agrees
    assert compared(slower, scaled_port(lambda h: 0.1 * h + (0.9 * h).detach())).agrees


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (lambda h: h, "hands on 1 times its gradient, and 0.1 times"),
        (lambda h: Back.apply(h, 0.1), "hands on -0.1 times its gradient, and 0.1"),
    ],
)
def test_another_factor_of_a_gradient_is_named(scale, words, compared):
    [culprit] = compared(slower, scaled_port(scale)).culprits()
    assert culprit.looks_like == "gradient cut"
    assert words in culprit.evidence
    assert "grad * ctx.factor" in text(culprit.reference_line)


def test_a_cut_behind_a_gradient_that_is_scaled_is_named(compared):
    port = scaled_port(lambda h: Back.apply(h, -0.1), lambda h: h.detach())
    [culprit] = compared(slower, port).culprits()
    assert "hands no gradient on" in culprit.evidence
    assert "h.detach()" in text(culprit.line)


def stop_gradient(x):
    return x.detach()


def gentle(m, x, y):
    """One memory is read three times on a line, and hands on a tenth of its gradient."""
    h = torch.tanh(F.linear(x, m.a))
    h = h.detach() + 0.1 * (h - h.detach())
    h = h + torch.relu(F.linear(h, m.b))
    return F.mse_loss(F.linear(h, m.c), y)


def gentle_with_a_helper(m, x, y):
    h = tanh(product(x, m.a))
    h = 0.1 * h + 0.9 * stop_gradient(h)
    h = h + product(stop_gradient(h), m.b).clamp(min=0)
    return far(product(h, m.c), y)


def test_a_cut_is_named_where_a_helper_is_called(compared):
    port = scaled_port(lambda h: 0.1 * h + 0.9 * stop_gradient(h))
    assert compared(gentle, port).agrees
    [culprit] = compared(gentle, gentle_with_a_helper).culprits()
    assert culprit.looks_like == "gradient cut"
    assert "product(stop_gradient(h), m.b)" in text(culprit.line)


def test_a_missing_straight_through_estimator_is_named(compared):
    [culprit] = compared(with_steps, flat_steps).culprits()
    assert culprit.looks_like == "gradient cut"
    assert "steps = h +" in text(culprit.reference_line)


# -- a loss with one term less ---------------------------------------------------------


def with_penalty(m, x, y):
    scores = F.linear(torch.tanh(F.linear(x, m.a)), m.c)
    return F.mse_loss(scores, y) + 0.3 * F.relu(-scores).mean()


def penalty_that_nothing_uses(m, x, y):
    scores = product(tanh(product(x, m.a)), m.c)
    loss = far(scores, y)
    penalty = (-scores).clamp(min=0)
    return loss if penalty is not None else penalty


def test_a_term_that_is_computed_and_not_added_is_left_out(compared):
    [culprit] = compared(with_penalty, penalty_that_nothing_uses).culprits()
    assert culprit.evidence.startswith("left out is add of ")
    assert "return ((scores - y) ** 2).mean()" in text(culprit.line)
    assert "0.3 * F.relu" in text(culprit.reference_line)


# -- a backward pass that rounds much --------------------------------------------------


def of_differences(m, x, y):
    h = torch.tanh(F.linear(x, m.a))
    return torch.log((h + 30 - 30).abs() + 1e-6).mean() + with_branch(m, x, y)


def of_differences_in_another_way(m, x, y):
    # exact but for rounding: 2e-6 of numbers that are 0.01 and less
    h = tanh(product(x, m.a)) - 17 + 17
    logs = torch.log2(torch.maximum(h, -h) + 1e-6) * math.log(2)
    return logs.sum() / logs.numel() + right_branch(m, x, y)


class AlmostRight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.tanh(x)

    @staticmethod
    def backward(ctx, gradient):
        [x] = ctx.saved_tensors
        # a third of what rounding may do in fp32: 2e-5 of 6.1e-5
        return gradient * (1 - torch.tanh(x) ** 2) * (1 + 2e-5)


def almost_right(m, x, y):
    h = AlmostRight.apply(product(x, m.a))
    h = h + product(h, m.b).clamp(min=0)
    return far(product(h, m.c), y)


def test_gradients_of_right_ports_agree(compared):
    assert compared(with_branch, right_branch).agrees
    assert compared(of_differences, of_differences_in_another_way).agrees


def test_less_than_rounding_in_a_backward_pass_is_found(compared):
    [culprit] = compared(with_branch, almost_right).culprits()
    assert culprit.phase == "backward"


# -- what is done to gradients afterwards ----------------------------------------------


def clip(net, norm=0.5):
    nn.utils.clip_grad_norm_(net.parameters(), norm)


def less(net):
    clip(net, 1.0)


@torch.no_grad()
def clip_by_hand(net):
    norm = torch.sqrt(sum((p.grad**2).sum() for p in net.parameters()))
    for p in net.parameters():
        p.grad.mul_(torch.clamp(0.5 / (norm + 1e-6), max=1.0))


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-3)


class Clipping(torch.optim.Optimizer):
    """Adam written out, which clips on the way, and not in place."""

    norm = 0.5

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        norm = torch.sqrt(sum((p.grad * p.grad).sum() for p in parameters))
        for p in parameters:
            mean = 0.1 * self.clipped(p, norm)
            square = 0.001 * self.clipped(p, norm) ** 2
            p -= 1e-3 * (mean / 0.1) / (torch.sqrt(square / 0.001) + 1e-8)

    def clipped(self, p, norm):
        return p.grad * torch.clamp(self.norm / (norm + 1e-6), max=1.0)


class ClippingLess(Clipping):
    norm = 1.0


class NotClipping(Clipping):
    def clipped(self, p, norm):
        return p.grad * 1.0


class Velocity(Clipping):
    """Momentum written out: of a gradient it makes nothing but its update, rate and all."""

    @torch.no_grad()
    def step(self):  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        norm = torch.sqrt(sum((p.grad * p.grad).sum() for p in parameters))
        factor = self.norm / max(float(norm), self.norm)
        for p in parameters:
            change = 0.05 * p.grad * factor
            velocity = 0.9 * torch.zeros_like(p) - change
            p.add_(velocity)


class VelocityLess(Velocity):
    norm = 1.0


class InOneTensor(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        whole = torch.cat([p.grad.flatten() for p in parameters])
        whole = whole * torch.clamp(0.5 / (whole.norm() + 1e-6), max=1.0)
        change = 1e-3 * whole / (whole.abs() + 1e-8)
        sizes = [p.numel() for p in parameters]
        for p, part in zip(parameters, change.split(sizes), strict=True):
            p -= part.view_as(p)


@pytest.mark.parametrize(
    ("prepare", "optimizers"),
    [
        ((clip, clip_by_hand), (adam, adam)),
        ((clip, None), (adam, Clipping)),
        ((None, clip), (Clipping, adam)),
        ((clip, None), (adam, InOneTensor)),
        ((clip, None), (with_momentum, Velocity)),
    ],
)
def test_clips_that_are_the_same_agree(prepare, optimizers, compared):
    assert compared(
        with_branch, right_branch, prepare=prepare, optimizers=optimizers
    ).agrees


@pytest.mark.parametrize(
    ("prepare", "optimizers"),
    [
        ((clip, None), (adam, adam)),
        ((None, clip), (adam, adam)),
        ((clip, less), (adam, adam)),
        ((clip, None), (adam, ClippingLess)),
        ((clip, None), (adam, NotClipping)),
        ((clip, None), (with_momentum, VelocityLess)),
    ],
)
def test_another_clip_is_a_difference(prepare, optimizers, compared):
    comparison = compared(
        with_branch, right_branch, prepare=prepare, optimizers=optimizers
    )
    [culprit] = comparison.culprits()
    assert culprit.phase == "optimizer"


class Decaying(torch.optim.Optimizer):
    """AdamW written out; what it decays is 1e-5 of a parameter, and 1 % of its update."""

    decay = 0.01

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            change = p.grad / (p.grad.abs() + 1e-8)
            p.copy_(p - 1e-3 * (change + self.decay * p))


class NotDecaying(Decaying):
    decay = 0.0


def adamw(parameters):
    return torch.optim.AdamW(parameters, 1e-3, weight_decay=0.01)


def test_an_update_that_is_small_beside_its_parameter_is_compared(compared):
    assert compared(with_branch, right_branch, optimizers=(adamw, Decaying)).agrees
    comparison = compared(with_branch, right_branch, optimizers=(adamw, NotDecaying))
    [culprit] = comparison.culprits()
    assert culprit.phase == "optimizer"
    assert "p.copy_(" in text(culprit.line)


def test_a_cut_before_a_clip_is_named_and_not_the_clip(compared):
    comparison = compared(with_branch, detached_branch, prepare=(clip, clip))
    [culprit] = comparison.culprits()
    assert "h.detach()" in text(culprit.line)


def test_a_gradient_that_is_scaled_and_unscaled_agrees(compared):
    def scaled(m, x, y):
        return 1024 * right_branch(m, x, y)

    @torch.no_grad()
    def unscale(net):
        for p in net.parameters():
            p.grad.mul_(1 / 1024)

    def scaled_reference(m, x, y):
        return 1024 * with_branch(m, x, y)

    comparison = compared(scaled_reference, scaled, prepare=(unscale, unscale))
    assert comparison.agrees


def with_epsilon(m, x, y):
    h = F.group_norm(0.3 * F.linear(x, m.a), 2, eps=1e-5)
    return F.mse_loss(F.linear(torch.tanh(h), m.c), y) + 300 * (y * y).mean()


def with_another_epsilon(m, x, y):
    h = (0.3 * product(x, m.a)).view(7, 2, 4)
    h = h - h.mean(2, keepdim=True)
    h = h * (h.square().mean(2, keepdim=True) + 1e-6).rsqrt()
    return far(product(tanh(h.view(7, 8)), m.c), y) + 300 * y.square().mean()


def test_what_a_loss_hides_is_found_in_the_layer(compared):
    """In fp64 the losses agree to 1e-6, the gradients do not."""
    [culprit] = compared(with_epsilon, with_another_epsilon).culprits()
    assert culprit.phase == "forward"
    assert "rsqrt()" in text(culprit.line)
    assert "with 1e-05, not 1e-06" in culprit.evidence


def with_weights(m, x, y):
    h = torch.tanh(F.linear(x, m.a) + F.linear(torch.tanh(F.linear(x, m.a)), m.b))
    labels = (y.sum(1) > 0).long()
    weight = torch.tensor([0.4, 1.5, 1.0, 0.7, 1.2])
    return F.cross_entropy(F.linear(h, m.c), labels, weight)


def with_weights_by_hand(m, x, y, *, by_count):
    h = product(x, m.a)
    h = tanh(h + product(tanh(h), m.b))
    labels = (y.sum(1) > 0).long()
    weight = torch.tensor([0.4, 1.5, 1.0, 0.7, 1.2])
    scores = product(h, m.c)
    scores = scores - torch.logsumexp(scores, 1, keepdim=True)
    each = -torch.sum(F.one_hot(labels, 5) * weight * scores, 1)
    count = len(labels) if by_count else weight[labels].sum()
    return each.sum() / count


def by_count(m, x, y):
    return with_weights_by_hand(m, x, y, by_count=True)


def by_weight(m, x, y):
    return with_weights_by_hand(m, x, y, by_count=False)


def test_a_loss_that_is_off_by_a_factor_as_all_gradients_are(compared):
    assert compared(with_weights, by_weight).agrees
    [culprit] = compared(with_weights, by_count).culprits()
    assert text(culprit.line) == "return each.sum() / count"
    assert culprit.looks_like == "constant factor"


# -- the gradient of a sum, divided before the update -----------------------------------


class OfTheSum(torch.autograd.Function):
    """A mean is told, and the gradient is that of the sum."""

    @staticmethod
    def forward(ctx, total, number):
        return total / number

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def of_the_sum(layer):
    def run(m, x, y):
        h = layer(product(x, m.a))
        h = h + product(h, m.b).clamp(min=0)
        return OfTheSum.apply(((product(h, m.c) - y) ** 2).sum(), y.numel())

    return run


def dividing(number):
    class Dividing(torch.optim.Adam):
        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.grad.mul_(1 / number)
            return super().step(closure)

    return lambda parameters: Dividing(parameters, 1e-3)


def test_a_sum_whose_gradients_are_divided_before_the_update_agrees(compared):
    optimizers = (None, dividing(Y.numel()))
    assert compared(with_branch, of_the_sum(tanh), optimizers=optimizers).agrees


def test_another_number_that_gradients_are_divided_by_is_named(compared):
    optimizers = (None, dividing(2 * Y.numel()))
    comparison = compared(with_branch, of_the_sum(tanh), optimizers=optimizers)
    [culprit] = comparison.culprits()
    assert culprit.phase == "optimizer"
    assert "p.grad.mul_(1 / number)" in text(culprit.line)


def test_what_is_wrong_before_the_sum_is_named_and_not_its_factor(compared):
    def half(h):
        return tanh(0.5 * h)

    optimizers = (None, dividing(Y.numel()))
    comparison = compared(with_branch, of_the_sum(half), optimizers=optimizers)
    first = comparison.culprits()[0]
    assert first.phase == "forward"


def gated_at_once(m, x, y):
    """The gates of all samples are constants of the loss."""
    h = torch.tanh(F.linear(x, m.a))
    gates = F.logsigmoid(F.linear(h, m.b)).detach()
    return F.mse_loss(F.linear(h + gates, m.c), y)


def log_sigmoid(x):
    return -torch.logaddexp(-x, torch.zeros_like(x))


def one_by_one(stop):
    def port(m, x, y):
        outs = []
        for row in x.unbind(0):
            h = tanh(product(row[None], m.a))
            gate = log_sigmoid(product(h, m.b))
            gate = stop(gate)
            outs.append(product(h + gate, m.c))
        return far(torch.cat(outs), y)

    return port


def test_what_is_handed_on_sample_by_sample(compared):
    assert compared(gated_at_once, one_by_one(stop_gradient)).agrees
    [culprit] = compared(gated_at_once, one_by_one(lambda gate: gate)).culprits()
    assert culprit.looks_like == "gradient cut"
    assert "it hands a gradient on, and the reference's" in culprit.evidence
    assert "log_sigmoid" in text(culprit.line) or "logaddexp" in text(culprit.line)
