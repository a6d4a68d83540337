"""Broken kernels: the program is right, one call of one operator returns wrong numbers."""

from __future__ import annotations

from torch import Tensor

from .bank import fault
from .damage import (
    Damage,
    element,
    noise,
    saturated,
    stale_rows,
    tail,
    times,
    transposed,
)
from .program import Program


@fault(
    "cnn",
    "the last eighth of a convolution's output is not written",
    "fine.0.conv2/convolution",
)
def kernel_tail(p: Program) -> None:
    p.beneath = Damage("convolution", 2, tail(1 / 8))


@fault(
    "encoder",
    "one element of a layer norm's output is wrong",
    "blocks.1.norm1/native_layer_norm",
)
def one_element(p: Program) -> None:
    p.beneath = Damage("native_layer_norm", 3, element(777, -7.25))


@fault("decoder", "one NaN in the output of a matrix product", "blocks.1.feed.up/mm")
def one_nan(p: Program) -> None:
    p.beneath = Damage("mm", 12, element(100, float("nan")))


@fault("lstm", "a matrix product off by 0.1 %", "cell.h/addmm#3")
def drift(p: Program) -> None:
    p.beneath = Damage("addmm", 7, times(1.001))


@fault("encoder", "a batched matrix product off by 2 %", "blocks.1.attention/bmm#1")
def two_percent(p: Program) -> None:
    p.beneath = Damage("bmm", 3, times(1.02))


@fault(
    "decoder",
    "an activation with 1 % of noise: a table too coarse",
    "blocks.2.feed/silu",
)
def coarse_table(p: Program) -> None:
    p.beneath = Damage("silu", 2, noise(0.01))


@fault(
    "cnn",
    "a race: 1 % of noise that differs from run to run",
    "coarse.0.norm1/native_batch_norm",
    random="a race draws its noise anew in each run",
)
def race(p: Program) -> None:
    p.beneath = Damage("native_batch_norm", 5, noise(0.01, seed=None))


@fault(
    "encoder",
    "the output of a matrix product lies transposed in memory",
    "blocks.2.attention.key/addmm",
)
def transposed_output(p: Program) -> None:
    p.beneath = Damage("addmm", 13, transposed)


def _loss_scale(p: Program) -> None:
    usual = p.loss
    p.loss = lambda *args: usual(*args) * 2.0**24


@fault(
    "decoder",
    "gradients cut off at the largest value of fp16",
    "blocks.1.feed.down/mm",
    phase="backward",
    clean=_loss_scale,
)
def saturated_gradient(p: Program) -> None:
    p.beneath = Damage("mm", 22 + 2 + 7 * 2 + 1, saturated(65504.0))


@fault(
    "lstm",
    "a row of a gradient is that of another: a shared buffer",
    "cell.h/mm#4",
    phase="backward",
)
def shared_rows(p: Program) -> None:
    p.beneath = Damage("mm", 10, stale_rows)


@fault(
    "cnn",
    "the end of a weight gradient is not written",
    "fine.1.conv1/convolution_backward",
    phase="backward",
)
def gradient_tail(p: Program) -> None:
    p.beneath = Damage("convolution_backward", 6, tail(1 / 4), place=1)


@fault(
    "encoder",
    "the weight gradient of a layer norm counts one block of rows twice",
    "blocks.1.norm2/native_layer_norm_backward",
    phase="backward",
)
def counted_twice(p: Program) -> None:
    p.beneath = Damage("native_layer_norm_backward", 2, times(4 / 3), place=1)


@fault(
    "decoder",
    "updates of the same row of an embedding overwrite each other",
    "embed/embedding_dense_backward",
    phase="backward",
)
def lost_updates(p: Program) -> None:
    def last_one_wins(x: Tensor) -> None:
        ids = p.batches[0][0].flatten()
        x.div_(ids.bincount(minlength=len(x)).clamp(min=1)[:, None])

    p.beneath = Damage("embedding_dense_backward", 0, last_one_wins)


@fault("cnn", "a reduction leaves out its last part", "/mean")
def short_reduction(p: Program) -> None:
    p.beneath = Damage("mean", 0, times(63 / 81))


@fault(
    "lstm",
    "the optimizer's kernel does not write the last part",
    "/addcdiv_#4",
    phase="optimizer",
)
def optimizer_tail(p: Program) -> None:
    p.beneath = Damage("addcdiv_", 4, tail(1 / 16))
