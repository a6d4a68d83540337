"""Wrong constants: the code is right, an argument of a constructor or of a call is not."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from .bank import fault
from .program import Program, evaluate, replace


@fault(
    "encoder",
    "BERT's LayerNorm eps 1e-12 left at torch's default 1e-5",
    "blocks.1.norm1/native_layer_norm",
)
def layer_norm_eps(p: Program) -> None:
    p.model.blocks[1].norm1.eps = 1e-12


@fault("cnn", "BatchNorm eps 1e-3 (Keras) for 1e-5", "coarse.0.norm1/native_batch_norm")
def batch_norm_eps(p: Program) -> None:
    p.model.coarse[0].norm1.eps = 1e-3


@fault(
    "cnn",
    "BatchNorm momentum 0.99 in Keras's meaning, 0.01 here",
    "fine.1.norm2/native_batch_norm",
)
def batch_norm_momentum(p: Program) -> None:
    p.model.fine[1].norm2.momentum = 0.99


@fault("decoder", "RMSNorm eps 1e-5 (Llama 2) for 1e-6 (Llama 1)", "blocks.2.norm1/add")
def rms_norm_eps(p: Program) -> None:
    p.model.blocks[2].norm1.eps = 1e-5


@fault("encoder", "GELU by tanh for GELU by erf", "blocks.1.feed.act/gelu")
def gelu_tanh(p: Program) -> None:
    p.model.blocks[1].feed.act = nn.GELU(approximate="tanh")


@fault(
    "cnn", "padding with zeros for reflection", "stem/{reflection_pad2d,convolution}"
)
def padding_mode(p: Program) -> None:
    p.model.stem.padding_mode = "zeros"


@fault(
    "cnn",
    "align_corners left at the other framework's default",
    "resize/upsample_bilinear2d",
)
def align_corners(p: Program) -> None:
    p.model.resize.align_corners = True


@fault(
    "cnn",
    "nearest for bilinear interpolation",
    "resize/{upsample_bilinear2d,upsample_nearest2d}",
)
def interpolation_mode(p: Program) -> None:
    p.model.resize.mode, p.model.resize.align_corners = "nearest", None


@fault("cnn", "average pooling counts its padding", "shrink/avg_pool2d")
def count_include_pad(p: Program) -> None:
    p.model.shrink.count_include_pad = True


def _floor(p: Program) -> None:
    p.model.shrink.padding = 0


@fault(
    "cnn", "pooling rounds the size of its output up", "shrink/avg_pool2d", clean=_floor
)
def ceil_mode(p: Program) -> None:
    p.model.shrink.ceil_mode = True


@fault(
    "decoder", "rotary base 500000 (Llama 3) for 10000", "blocks.1.attention.rotary/pow"
)
def rotary_base(p: Program) -> None:
    p.model.blocks[1].attention.rotary.base = 500000.0


@fault("decoder", "GELU for SiLU in the gate", "blocks.0.feed/{silu,gelu}")
def gate_activation(p: Program) -> None:
    replace(p.model.blocks[0].feed, gated=lambda _, gate, up: F.gelu(gate) * up)


@fault(
    "lstm",
    "forget bias 1 added by the code left out: the other framework had it in the weights",
    "cell/{add,sigmoid}",
)
def forget_bias(p: Program) -> None:
    replace(p.model.cell, forget=lambda _, f: torch.sigmoid(f))


@fault(
    "encoder",
    "attention scaled by the model's width, not the head's",
    "blocks.2.attention/div",
)
def scale_by_width(p: Program) -> None:
    replace(
        p.model.blocks[2].attention,
        scores=lambda _, q, k: q @ k.transpose(-1, -2) / math.sqrt(32),
    )


@fault("lstm", "dropout 0.2 for 0.1", "dropout/{bernoulli_,div_,mul}")
def dropout_share(p: Program) -> None:
    p.model.dropout.p = 0.2


@fault(
    "encoder",
    "label smoothing left on",
    "/{_log_softmax,mean,sum,neg,nll_loss_forward,div,mul,add}",
)
def label_smoothing(p: Program) -> None:
    p.loss = lambda model, ids, labels: F.cross_entropy(
        model(ids), labels, label_smoothing=0.1
    )


@fault("lstm", "loss summed over the batch, not averaged", "/nll_loss_forward")
def loss_reduction(p: Program) -> None:
    p.loss = lambda model, ids, lengths, labels: F.cross_entropy(
        model(ids, lengths), labels, reduction="sum"
    )


def _evaluation(p: Program) -> None:
    p.model.eval()
    p.step = evaluate


@fault(
    "cnn",
    "track_running_stats=False: statistics of the batch in an evaluation",
    "coarse.1.norm1/{native_batch_norm,_native_batch_norm_legit*}",
    clean=_evaluation,
)
def batch_statistics(p: Program) -> None:
    norm = p.model.coarse[1].norm1
    norm.running_mean = norm.running_var = None


@fault(
    "cnn",
    "eval() forgotten",
    "norm/* *.norm1/native_batch_norm *.norm2/native_batch_norm dropout/*",
    clean=_evaluation,
)
def eval_forgotten(p: Program) -> None:
    p.model.train()


@fault(
    "encoder",
    "dropout of one layer left on: F.dropout with its default training=True",
    "blocks.0.attention.dropout/*",
    clean=_evaluation,
)
def dropout_left_on(p: Program) -> None:
    replace(p.model.blocks[0].attention.dropout, forward=lambda _, x: F.dropout(x, 0.1))
