"""Wrong code: an axis, a layout, an index, a mask, a weight in the wrong place."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .bank import fault
from .program import Program, evaluate, replace


def _evaluation(p: Program) -> None:
    p.model.eval()
    p.step = evaluate


@fault(
    "decoder", "softmax over the queries, not the keys", "blocks.1.attention/_softmax"
)
def softmax_axis(p: Program) -> None:
    replace(p.model.blocks[1].attention, weights=lambda _, scores: scores.softmax(-2))


@fault(
    "encoder",
    "heads joined without transposing them back",
    "blocks.1.attention/{transpose#4,clone#3,_unsafe_view#5,view#4}",
)
def heads_not_transposed(p: Program) -> None:
    replace(
        p.model.blocks[1].attention,
        join=lambda _, x: x.reshape(x.shape[0], x.shape[2], -1),
    )


@fault("cnn", "NHWC images viewed as NCHW instead of permuted", "/{permute,view}")
def nhwc_viewed(p: Program) -> None:
    replace(p.model, channels_first=lambda _, x: x.view(x.shape[0], 3, *x.shape[1:3]))


@fault("encoder", "attention without its scale", "blocks.0.attention/{div,masked_fill}")
def scale_missing(p: Program) -> None:
    replace(p.model.blocks[0].attention, scores=lambda _, q, k: q @ k.transpose(-1, -2))


@fault("decoder", "the residual taken after the norm", "blocks.1/add")
def residual_after_norm(p: Program) -> None:
    def forward(block, x):
        x = block.norm1(x)
        x = x + block.attention(x)
        return x + block.feed(block.norm2(x))

    replace(p.model.blocks[1], forward=forward)


def _centred(p: Program) -> None:
    _evaluation(p)

    def branch(block, x):
        return block.norm2(
            block.conv2(
                F.relu(block.norm1(block.conv1(x - x.mean((2, 3), keepdim=True))))
            )
        )

    replace(p.model.coarse[1], branch=branch)


@fault(
    "cnn",
    "an in-place subtraction overwrites what the shortcut adds",
    "coarse.1/{sub,sub_,add}",
    clean=_centred,
)
def shortcut_overwritten(p: Program) -> None:
    def branch(block, x):
        x -= x.mean((2, 3), keepdim=True)
        return block.norm2(block.conv2(F.relu(block.norm1(block.conv1(x)))))

    replace(p.model.coarse[1], branch=branch)


@fault("lstm", "softmax in the model and again in the loss", "/{_softmax,_log_softmax}")
def softmax_twice(p: Program) -> None:
    p.loss = lambda model, ids, lengths, labels: F.cross_entropy(
        model(ids, lengths).softmax(-1), labels
    )


@fault(
    "decoder",
    "labels not shifted: each token predicts itself",
    "/{slice,view,_log_softmax,nll_loss_forward}",
)
def labels_not_shifted(p: Program) -> None:
    p.loss = lambda model, ids: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


@fault("lstm", "ids stored as uint8, of a vocabulary of 300", "words/_to_copy")
def ids_wrap(p: Program) -> None:
    replace(p.model.words, index=lambda _, ids: ids.to(torch.uint8).long())


@fault(
    "lstm",
    "a hash multiplied in int32, which overflows",
    "words/{_to_copy,mul,remainder}",
)
def product_overflows(p: Program) -> None:
    replace(p.model.words, bucket=lambda _, ids: (ids.to(torch.int32) * 73856093) % 64)


@fault(
    "lstm",
    "the last step taken, padding or not, instead of the last real one",
    "/{arange,sub,index,select#8}",
)
def last_step_of_padding(p: Program) -> None:
    replace(p.model, last=lambda _, x, lengths: x[:, -1])


@fault(
    "decoder",
    "rotary pairs interleaved where the weights expect halves",
    "blocks.0.attention/{split*,neg*,cat*,slice*,stack*}",
)
def rotary_interleaved(p: Program) -> None:
    def turned(_, x):
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)

    replace(p.model.blocks[0].attention, turned=turned)


@fault(
    "decoder",
    "positions that ignore what is cached: they start at 0",
    "blocks.2.attention.rotary/arange#1",
)
def positions_restart(p: Program) -> None:
    # only distances count for the scores, so the last layer's tables show it and the output hardly does
    replace(
        p.model.blocks[2].attention.rotary,
        places=lambda _, n: torch.arange(0, n, dtype=torch.float32),
    )


@fault("encoder", "positions counted from 1", "/{cumsum,sub,clamp}")
def positions_from_one(p: Program) -> None:
    replace(p.model, positions=lambda _, real: real.long().cumsum(1))


@fault(
    "decoder", "the causal mask lets each token see the next", "blocks.1.attention/triu"
)
def mask_off_by_one(p: Program) -> None:
    replace(
        p.model.blocks[1].attention,
        mask=lambda _, n: torch.full((n, n), -math.inf).triu(2),
    )


@fault(
    "decoder", "masked by -1e4 instead of -inf", "blocks.2.attention/{full,triu,add*}"
)
def mask_of_ten_thousand(p: Program) -> None:
    replace(
        p.model.blocks[2].attention, mask=lambda _, n: torch.full((n, n), -1e4).triu(1)
    )


@fault(
    "encoder",
    "the padding mask added as 0 and 1, not as 0 and -inf",
    "blocks.0.attention/{masked_fill,_to_copy,bitwise_not,add}",
)
def mask_added_as_ones(p: Program) -> None:
    replace(
        p.model.blocks[0].attention,
        masked=lambda _, scores, real: scores + real[:, None, None, :].float(),
    )


def _empty_sentence(p: Program) -> None:
    """One sentence is padding alone; masked with the lowest finite number, its attention is uniform."""
    p.batches[0][0][2] = 0

    def masked(_, scores, real):
        return scores.masked_fill(
            ~real[:, None, None, :], torch.finfo(scores.dtype).min
        )

    for block in p.model.blocks:
        replace(block.attention, masked=masked)
    p.model.pool.forward = lambda x, real: (
        (x * real[..., None]).sum(1) / real.sum(1, keepdim=True).clamp(min=1)
    )


@fault(
    "encoder",
    "-inf for the lowest finite number: NaN where a sentence is all padding",
    "blocks.0.attention/{masked_fill,_softmax}",
    clean=_empty_sentence,
)
def all_masked(p: Program) -> None:
    replace(
        p.model.blocks[0].attention,
        masked=lambda _, scores, real: scores.masked_fill(
            ~real[:, None, None, :], -math.inf
        ),
    )


@fault(
    "encoder", "a square weight loaded transposed", "blocks.1.attention.query.weight"
)
def weight_transposed(p: Program) -> None:
    weight = p.model.blocks[1].attention.query.weight
    with torch.no_grad():
        weight.copy_(weight.t().clone())


@fault(
    "lstm",
    "gates loaded in the order input, cell, forget, output",
    "cell.x.weight cell.x.bias cell.h.weight cell.h.bias",
)
def gates_permuted(p: Program) -> None:
    with torch.no_grad():
        for value in p.model.cell.parameters():
            i, f, g, o = value.chunk(4)
            value.copy_(torch.cat([i, g, f, o]))


@fault(
    "cnn",
    "running statistics of an earlier checkpoint",
    "fine.1.norm1.running_mean fine.1.norm1.running_var",
    clean=_evaluation,
)
def stale_statistics(p: Program) -> None:
    norm = p.model.fine[1].norm1
    norm.running_mean.zero_()
    norm.running_var.fill_(1.0)


@fault("cnn", "the bias of the head dropped", "head/{addmm,mm} head.bias")
def bias_dropped(p: Program) -> None:
    p.model.head.bias = None


@fault(
    "lstm",
    "the state of the last batch goes on into this one",
    "/{new_zeros,input#1,input#2}",
    steps=2,
)
def state_not_reset(p: Program) -> None:
    fresh = p.model.start
    replace(p.model, start=lambda model, x: getattr(model, "ended", None) or fresh(x))


@fault("encoder", "a mean over padding too", "pool/*")
def mean_over_padding(p: Program) -> None:
    replace(p.model.pool, forward=lambda _, x, real: x.mean(1))
