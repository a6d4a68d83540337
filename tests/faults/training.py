"""Wrong training: gradients, their scale, the optimizer, what is kept between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .bank import fault
from .program import Program, replace


def _gradients(p: Program) -> list[Tensor]:
    return [value.grad for value in p.model.parameters() if value.grad is not None]


def _in_parts(join: Callable[[Tensor, int], Tensor]) -> Callable[[Program], None]:
    """Steps that accumulate the gradients of two halves of the batch."""

    def step(p: Program, number: int) -> None:
        p.optimizer.zero_grad()
        for part in zip(*(t.chunk(2) for t in p.batches[number]), strict=True):
            join(p.loss(p.model, *part), 2).backward()
        p.optimizer.step()

    return lambda p: setattr(p, "step", step)


@fault(
    "encoder",
    "accumulated gradients not divided by the number of parts",
    "/div",
    clean=_in_parts(lambda loss, n: loss / n),
)
def accumulation_not_averaged(p: Program) -> None:
    _in_parts(lambda loss, n: loss)(p)


def _scaled(order: str) -> Callable[[Program], None]:
    """A loss scale by hand; ``order`` says when the gradients are unscaled and clipped."""

    def step(p: Program, number: int) -> None:
        p.optimizer.zero_grad()
        (p.loss(p.model, *p.batches[number]) * 1024.0).backward()
        for what in order.split():
            if what == "unscale":
                for gradient in _gradients(p):
                    gradient.mul_(1 / 1024.0)
            else:
                nn.utils.clip_grad_norm_(p.model.parameters(), 1.0)
        p.optimizer.step()

    return lambda p: setattr(p, "step", step)


@fault(
    "decoder",
    "gradients clipped before they are unscaled",
    "/{mul_*,linalg_vector_norm*,stack,_foreach_*} clip* unscale_",
    phase="forward|optimizer",
    clean=_scaled("unscale clip"),
)
def clipped_before_unscaled(p: Program) -> None:
    _scaled("clip unscale")(p)


@fault(
    "lstm",
    "gradients never unscaled",
    "/{mul_*,linalg_vector_norm*,_foreach_*} clip* unscale_",
    phase="forward|optimizer",
    clean=_scaled("unscale clip"),
)
def never_unscaled(p: Program) -> None:
    _scaled("clip")(p)


def _clipped(kind: float) -> Callable[[Program], None]:
    def step(p: Program, number: int) -> None:
        p.optimizer.zero_grad()
        p.loss(p.model, *p.batches[number]).backward()
        nn.utils.clip_grad_norm_(p.model.parameters(), 0.1, norm_type=kind)
        p.optimizer.step()

    return lambda p: setattr(p, "step", step)


@fault(
    "cnn",
    "gradients clipped by their largest element, not their L2 norm",
    "/{linalg_vector_norm*,_foreach_*,abs*,max*} clip*",
    phase="forward|optimizer",
    clean=_clipped(2.0),
)
def clipped_by_maximum(p: Program) -> None:
    _clipped(torch.inf)(p)


def _two_ranks(mean: bool) -> Callable[[Program], None]:
    """Data parallelism in one process: two ranks' gradients on half a batch each are added, then averaged."""

    def step(p: Program, number: int) -> None:
        found = []
        for part in zip(*(t.chunk(2) for t in p.batches[number]), strict=True):
            p.optimizer.zero_grad()
            p.loss(p.model, *part).backward()
            found.append(_gradients(p))
        for value, *parts in zip(p.model.parameters(), *found, strict=True):
            total = torch.stack(parts).sum(0)
            value.grad = total / len(parts) if mean else total
        p.optimizer.step()

    return lambda p: setattr(p, "step", step)


@fault(
    "cnn",
    "an all-reduce that sums where the other averages",
    "/{div*,sum*}",
    phase="optimizer",
    clean=_two_ranks(mean=True),
)
def sum_for_mean(p: Program) -> None:
    _two_ranks(mean=False)(p)


def _optimizer(kind: Any, **options: Any) -> Callable[[Program], None]:
    return lambda p: setattr(p, "optimizer", kind(p.model.parameters(), **options))


@fault(
    "encoder",
    "Adam's weight decay, which goes through the moments, for AdamW's",
    "/{mul_#*[02468],add,add#*} decoupled_weight_decay",
    phase="optimizer",
)
def coupled_decay(p: Program) -> None:
    _optimizer(torch.optim.Adam, lr=1e-2, weight_decay=0.1)(p)


@fault(
    "decoder",
    "beta2 0.999 for 0.95",
    "/{mul_#*[13579],addcmul_*} betas*",
    phase="optimizer",
    clean=_optimizer(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.95)),
)
def adam_beta(p: Program) -> None:
    _optimizer(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.999))(p)


@fault(
    "cnn",
    "Adam eps 1e-3 (advised for Inception) for 1e-8",
    "/add_#*[13579] eps",
    phase="optimizer",
)
def adam_eps(p: Program) -> None:
    _optimizer(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-3)(p)


@fault(
    "lstm",
    "a learning rate three times too large",
    "/{mul_#*[02468],addcdiv_*} learning*",
    phase="optimizer",
)
def learning_rate(p: Program) -> None:
    p.optimizer.param_groups[0]["lr"] *= 3


@fault(
    "cnn",
    "momentum with dampening",
    "/add_#*[02468] dampening",
    phase="optimizer",
    steps=2,
    clean=_optimizer(torch.optim.SGD, lr=0.05, momentum=0.9),
)
def momentum_dampening(p: Program) -> None:
    _optimizer(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1)(p)


@fault(
    "lstm",
    "zero_grad forgotten",
    "head/add_* cell.*/add_* words.*/add_* upper/add_* zero_grad",
    phase="backward",
    steps=2,
)
def gradients_not_cleared(p: Program) -> None:
    optimizer: Any = p.optimizer
    optimizer.zero_grad = lambda set_to_none=True: None


def _schedule(first: bool) -> Callable[[Program], None]:
    """A learning rate that grows step by step; ``first``: it is set before the step it is meant to follow."""

    def step(p: Program, number: int) -> None:
        p.optimizer.param_groups[0]["lr"] = 1e-3 * (number + 1 + first)
        p.optimizer.zero_grad()
        p.loss(p.model, *p.batches[number]).backward()
        p.optimizer.step()

    return lambda p: setattr(p, "step", step)


@fault(
    "encoder",
    "a warm-up one step ahead",
    "/{mul_#*[02468],addcdiv_*} learning*",
    phase="optimizer",
    steps=2,
    clean=_schedule(first=False),
)
def schedule_ahead(p: Program) -> None:
    _schedule(first=True)(p)


@fault(
    "decoder",
    "a detach that cuts a branch's gradient",
    "blocks.1/{detach,add} blocks.1.attention.*/mm* blocks.1.attention/*_backward*",
    phase="forward|backward",
)
def branch_detached(p: Program) -> None:
    def forward(block, x: Tensor) -> Tensor:
        x = x + block.attention(block.norm1(x)).detach()
        return x + block.feed(block.norm2(x))

    replace(p.model.blocks[1], forward=forward)


def _consistent(target: Callable[[Tensor], Tensor]) -> Callable[[Program], None]:
    """The features of a batch without its first tokens are pulled to those of the whole one, which are the target."""

    def loss(model, ids: Tensor, labels: Tensor) -> Tensor:
        whole, part = (
            model.encode(ids),
            model.encode(ids * (torch.arange(ids.shape[1]) > 2)),
        )
        return F.cross_entropy(model.head(whole), labels) + F.mse_loss(
            part, target(whole)
        )

    return lambda p: setattr(p, "loss", loss)


@fault(
    "encoder",
    "a target that is not detached",
    "/{detach*,mse_loss,mse_loss_backward,neg} pool/add*",
    phase="forward|backward",
    clean=_consistent(Tensor.detach),
)
def target_not_detached(p: Program) -> None:
    _consistent(lambda x: x)(p)


class _Gate(torch.autograd.Function):
    """SiLU times another tensor, with the backward written by hand; the derivative of SiLU is s + x s (1 - s)."""

    whole = True

    @classmethod
    def forward(cls, ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @classmethod
    def backward(cls, ctx: Any, out: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        s = torch.sigmoid(gate)
        slope = s + gate * s * (1 - s) if cls.whole else s
        return out * up * slope, out * gate * s


class _GateWithoutTerm(_Gate):
    whole = False


def _own_gate(function: type[_Gate]) -> Callable[[Program], None]:
    return lambda p: replace(
        p.model.blocks[1].feed, gated=lambda _, gate, up: function.apply(gate, up)
    )


@fault(
    "decoder",
    "a backward by hand lacks a term",
    "blocks.1.feed/{mul*,add*,rsub*}",
    phase="backward",
    clean=_own_gate(_Gate),
)
def backward_lacks_a_term(p: Program) -> None:
    _own_gate(_GateWithoutTerm)(p)


class _Squash(torch.autograd.Function):
    """tanh, whose backward by hand is ``factor`` times too large."""

    factor = 1.0

    @classmethod
    def forward(cls, ctx: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @classmethod
    def backward(cls, ctx: Any, out: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return out * (1 - y * y) * cls.factor


class _SquashTwice(_Squash):
    factor = 2.0


def _squashed(function: type[_Squash]) -> Callable[[Program], None]:
    return lambda p: replace(p.model.dropout, forward=lambda _, x: function.apply(x))


@fault(
    "lstm",
    "a backward by hand twice too large",
    "dropout/mul*",
    phase="backward",
    clean=_squashed(_Squash),
)
def backward_doubled(p: Program) -> None:
    _squashed(_SquashTwice)(p)


def _checkpointed(keep: bool) -> Callable[[Program], None]:
    """Block 1 is computed again in the backward pass; ``keep``: with the random numbers of the first time."""

    def encode(model, ids: Tensor) -> Tensor:
        real = ids != 0
        x = model.norm(model.tokens(ids) + model.places(model.positions(real)))
        for number, block in enumerate(model.blocks):
            again = number == 1
            x = (
                checkpoint(block, x, real, use_reentrant=False, preserve_rng_state=keep)
                if again
                else block(x, real)
            )
        return model.pool(x, real)

    return lambda p: replace(p.model, encode=encode)


@fault(
    "encoder",
    "a checkpoint draws its dropout anew",
    "blocks.1.attention.dropout/*",
    phase="backward",
    clean=_checkpointed(keep=True),
)
def checkpoint_draws_anew(p: Program) -> None:
    _checkpointed(keep=False)(p)


@fault(
    "decoder",
    "tied weights untied",
    "head.weight head/detach embed/{add*,embedding_dense_backward*}",
    phase="forward|backward",
)
def weights_untied(p: Program) -> None:
    p.model.head.weight = nn.Parameter(p.model.embed.weight.detach().clone())
    p.optimizer = torch.optim.AdamW(p.model.parameters(), lr=1e-2, weight_decay=0.1)


def _mean_of_all(p: Program) -> None:
    replace(p.model, last=lambda _, x, lengths: x.mean(1))


@fault(
    "lstm",
    "no padding_idx: padding learns",
    "words.known/embedding_dense_backward",
    phase="backward",
    clean=_mean_of_all,
)
def padding_learns(p: Program) -> None:
    p.model.words.known.padding_idx = None
