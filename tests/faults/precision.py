"""Low precision where it does harm: a step computed in fp16 or bf16 that needs more."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .bank import fault
from .program import Program, replace


def _sharp(p: Program) -> None:
    """Scores up to about 20, as a head has that looks at one token."""
    with torch.no_grad():
        p.model.blocks[1].attention.query.weight *= 6


def _massive(p: Program) -> None:
    """One channel of the residual stream in the hundreds, as in trained language models."""
    with torch.no_grad():
        p.model.blocks[1].feed.down.weight[3] *= 800


@fault(
    "encoder",
    "softmax in fp16 without taking the maximum away",
    "blocks.1.attention/{_to_copy,exp,sum,div,_softmax}",
    clean=_sharp,
)
def softmax_without_maximum(p: Program) -> None:
    def weights(_, scores: Tensor) -> Tensor:
        e = scores.half().exp()
        return (e / e.sum(-1, keepdim=True)).float()

    replace(p.model.blocks[1].attention, weights=weights)


@fault(
    "decoder",
    "rotary tables kept in bf16",
    "blocks.1.attention.rotary/{_to_copy,cos,sin}",
)
def rotary_tables(p: Program) -> None:
    def tables(_, angles: Tensor) -> tuple[Tensor, Tensor]:
        return angles.cos().bfloat16().float(), angles.sin().bfloat16().float()

    replace(p.model.blocks[1].attention.rotary, tables=tables)


@fault(
    "decoder",
    "positions counted in bf16: 501 is 500",
    "blocks.0.attention.rotary/{arange#1,_to_copy}",
)
def positions_in_bf16(p: Program) -> None:
    rotary = p.model.blocks[0].attention.rotary
    exact = rotary.places
    replace(rotary, places=lambda _, n: exact(n).bfloat16().float())


@fault(
    "decoder",
    "RMSNorm squares in fp16",
    "blocks.2.norm2/{_to_copy,pow,mean}",
    clean=_massive,
)
def squares_in_fp16(p: Program) -> None:
    def scale(norm, x: Tensor) -> Tensor:
        return torch.rsqrt(x.half().pow(2).mean(-1, keepdim=True).float() + norm.eps)

    replace(p.model.blocks[2].norm2, scale=scale)


@fault("decoder", "cross entropy in bf16", "/{_to_copy,_log_softmax,nll_loss_forward}")
def loss_in_bf16(p: Program) -> None:
    p.loss = lambda model, ids: F.cross_entropy(
        model(ids)[:, :-1].flatten(0, 1).bfloat16(), ids[:, 1:].flatten()
    ).float()


@fault(
    "encoder",
    "a mean whose sum is accumulated in bf16",
    "pool/{_to_copy,sum,add,select*,zeros*,new_zeros*}",
)
def sum_in_bf16(p: Program) -> None:
    def forward(_, x: Tensor, real: Tensor) -> Tensor:
        weights = real.to(x.dtype)[..., None]
        terms, total = (
            x * weights,
            x.new_zeros(x.shape[0], x.shape[2], dtype=torch.bfloat16),
        )
        for t in range(x.shape[1]):
            total = total + terms[:, t].bfloat16()
        return total.float() / weights.sum(1)

    replace(p.model.pool, forward=forward)


@fault(
    "cnn",
    "a variance as E[x²] - E[x]² in fp16",
    "norm/{native_batch_norm,_to_copy,mean,sub,mul,pow}",
)
def variance_in_fp16(p: Program) -> None:
    def forward(norm, x: Tensor) -> Tensor:
        half = x.half()
        mean = half.mean((0, 2, 3))
        variance = (half * half).mean((0, 2, 3)) - mean * mean
        mean, variance = mean.float()[:, None, None], variance.float()[:, None, None]
        x = (x - mean) * torch.rsqrt(variance + norm.eps)
        return x * norm.weight[:, None, None] + norm.bias[:, None, None]

    replace(p.model.norm, forward=forward)


@fault("lstm", "the cell's state kept in bf16", "cell/{_to_copy,add}")
def state_in_bf16(p: Program) -> None:
    exact = p.model.cell.keep
    replace(p.model.cell, keep=lambda _, *gates: exact(*gates).bfloat16().float())


@fault("encoder", "one matrix product in fp16", "blocks.2.feed.down/{_to_copy,addmm}")
def product_in_fp16(p: Program) -> None:
    def forward(layer, x: Tensor) -> Tensor:
        return F.linear(x.half(), layer.weight.half(), layer.bias.half()).float()

    replace(p.model.blocks[2].feed.down, forward=forward)


def _outlier(p: Program) -> None:
    """One channel of the gate is large, as in trained language models."""
    with torch.no_grad():
        for layer in (p.model.blocks[1].feed.gate, p.model.blocks[1].feed.up):
            layer.weight[5] *= 400


@fault(
    "decoder",
    "a gated product that overflows in fp16",
    "blocks.1.feed/{_to_copy,mul}",
    clean=_outlier,
)
def product_overflows_in_fp16(p: Program) -> None:
    replace(
        p.model.blocks[1].feed,
        gated=lambda _, gate, up: (F.silu(gate).half() * up.half()).float(),
    )


@fault(
    "cnn",
    "the losses of a large batch summed in fp16",
    "/{_to_copy,sum,nll_loss_forward,mean,div}",
)
def losses_in_fp16(p: Program) -> None:
    def loss(model, images: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(model(images), labels, reduction="none").half()
        return (each.sum() / len(each)).float()

    p.loss = loss


@fault(
    "lstm",
    "weights rounded to bf16 after each update: no master copy",
    "/{_to_copy,copy_}",
    phase="optimizer",
    steps=2,
)
def no_master_weights(p: Program) -> None:
    def rounded(optimizer: torch.optim.Optimizer, *_: object) -> None:
        with torch.no_grad():
            for value in p.model.parameters():
                value.copy_(value.bfloat16())

    p.optimizer.register_step_post_hook(rounded)
