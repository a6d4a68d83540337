"""The advice that there is: when it applies, what is tried, why, and who says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from roundoff.advise.changes import PAIR, Change
from roundoff.advise.facts import ITEM, Facts
from roundoff.advise.operator_count import OperatorCount
from roundoff.ops import MULTIPLYING_KINDS


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why a rule applies here.

    Attributes:
        text: what was seen, a sentence without a full stop.
        change: what is tried; None where it cannot be made for the user.
        place: module and line, where there is one.
        untried: why nothing is tried; "" where something is.
        share: of the step's time that is concerned, where that is known.
    """

    text: str
    change: Change | None = None
    place: str = ""
    untried: str = ""
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One advice.

    Attributes:
        name: of the advice, and of its change.
        do: what the user writes to follow it.
        why: the reason, a sentence without a full stop.
        source: who says so.
        condition: returns the evidence; None where the rule does not apply.
    """

    name: str
    do: str
    why: str
    source: str
    condition: Callable[[Facts], Evidence | None]


_TUNING = "PyTorch performance tuning guide"


def _channels_last(facts: Facts) -> Evidence | None:
    rows = [
        row
        for row in facts.counts.rows
        if row.kind == "conv" and row.phase == "forward" and row.shape.count("×") == 3
    ]
    if not rows:
        return None
    return Evidence(f"{_calls(rows)} of 2-d convolutions", Change("channels_last"))


def _fold(facts: Facts) -> Evidence | None:
    pairs = facts.normalized
    if facts.setup.train or not pairs:
        return None
    modules = tuple(f"{pair.layer}{PAIR}{pair.norm}" for pair in pairs)
    text = f"batch normalization follows {_count(len(pairs), 'layer')}"
    return Evidence(text, Change("fold_batch_norm", modules), pairs[0].layer)


def _bias(facts: Facts) -> Evidence | None:
    pairs = [pair for pair in facts.normalized if pair.has_bias]
    if not facts.setup.train or not pairs:
        return None
    modules = tuple(f"{pair.layer}{PAIR}{pair.norm}" for pair in pairs)
    layers = _count(len(pairs), "layer")
    text = f"batch normalization takes out the bias of {layers} again"
    return Evidence(text, Change("drop_bias_before_norm", modules), pairs[0].layer)


def _inference_mode(facts: Facts) -> Evidence | None:
    if facts.setup.train:
        return None
    return Evidence("gradients are recorded and not used", Change("inference_mode"))


def _bf16(facts: Facts) -> Evidence | None:
    rows = [
        row
        for row in facts.counts.rows
        if row.kind in MULTIPLYING_KINDS and row.dtype == "float32"
    ]
    total = facts.counts.macs
    if not rows or not total:
        return None
    share = sum(row.macs for row in rows) / total
    text = f"{share:.0%} of the multiply-accumulates are fp32"
    return Evidence(text, Change("bf16_autocast"))


def _fp64(facts: Facts) -> Evidence | None:
    rows = [row for row in facts.counts.rows if row.dtype == "float64"]
    if not rows:
        return None
    worst = max(rows, key=lambda row: (row.flops, row.bytes_moved))
    text = f"fp64 in {_calls(rows)}, the most work in {worst.operator}"
    return Evidence(text, Change("no_fp64"), place_of(worst))


def _attention(facts: Facts) -> Evidence | None:
    paths = facts.attention
    if not paths:
        return None
    text = f"softmax(QKᵀ)V is written out in {_count(len(paths), 'module')}"
    return Evidence(text, Change("fused_attention", paths), paths[0])


def _fused(facts: Facts) -> Evidence | None:
    optimizer = facts.optimizer
    if optimizer is None or not optimizer.can_fuse or optimizer.is_fused:
        return None
    return Evidence(f"{optimizer.name} is not fused", Change("fused_optimizer"))


def _foreach(facts: Facts) -> Evidence | None:
    optimizer = facts.optimizer
    if optimizer is None or not optimizer.can_foreach:
        return None
    if optimizer.is_foreach or optimizer.is_fused:
        return None
    text = f"{optimizer.name} steps through its tensors one by one"
    return Evidence(text, Change("foreach_optimizer"))


def _zero_grad(facts: Facts) -> Evidence | None:
    if facts.habits is None or not facts.habits.zeroes_gradients:
        return None
    text = "zero_grad(set_to_none=False) writes zeros into every gradient"
    return Evidence(text, Change("gradients_to_none"))


def _anomaly(facts: Facts) -> Evidence | None:
    if facts.habits is None or not facts.habits.detects_anomalies:
        return None
    return Evidence("anomaly mode is on", Change("no_anomaly_mode"))


def _subnormals(facts: Facts) -> Evidence | None:
    if facts.subnormal_share == 0:
        return None
    text = f"up to {facts.subnormal_share:.1%} of a tensor is subnormal"
    return Evidence(text, Change("flush_subnormals"))


def _threads(facts: Facts) -> Evidence | None:
    now = facts.roofline.threads
    if facts.cores == now or facts.device.type != "cpu":
        return None
    text = f"{_count(now, 'thread')} on {_count(facts.cores, 'core')}"
    return Evidence(text, Change("threads", value=facts.cores))


def _syncs(facts: Facts) -> Evidence | None:
    rows = [
        row
        for row in facts.counts.rows
        if row.operator == ITEM and row.phase == "forward"
    ]
    if not rows:
        return None
    text = f"a tensor's value goes to Python in {_calls(rows)} of a step"
    share = _share(facts, ITEM)
    if facts.device.type == "cpu":
        untried = "on a CPU nothing waits: the cost shows on a GPU"
    else:
        untried = "the program needs the value: move the call out of the step"
    return Evidence(text, None, place_of(rows[0]), untried, share)


def _compile(facts: Facts) -> Evidence | None:
    calls = sum(row.calls for row in facts.counts.rows)
    return Evidence(f"{_count(calls, 'kernel')} run one by one", Change("compile"))


def _copies(facts: Facts) -> Evidence | None:
    """Copies of whole tensors that no change of dtype asks for."""
    rows = [row for row in facts.counts.rows if row.operator in COPIES]
    share = sum(_share(facts, operator) for operator in COPIES)
    if not rows or share < COPY_SHARE:
        return None
    worst = max(rows, key=lambda row: row.bytes_moved)
    text = f"{_calls(rows)} copy tensors, {share:.0%} of the time"
    untried = "what asks for the copy is in the code"
    return Evidence(text, None, place_of(worst), untried, share)


#: Kernels that copy a tensor as it is, and the share of time from which that is told.
COPIES = ("clone", "contiguous")
COPY_SHARE = 0.1


#: Rules of the model and the step; those of the data stand in ``loading``, those of
#: layers in ``guidelines``.
RULES: Sequence[Rule] = (
    Rule(
        "fused_attention",
        "call torch.nn.functional.scaled_dot_product_attention",
        "the scores are neither written to memory nor read again",
        "Dao et al. 2022, FlashAttention",
        _attention,
    ),
    Rule(
        "fold_batch_norm",
        "torch.nn.utils.fusion.fuse_conv_bn_eval(conv, bn)",
        "in evaluation a batch normalization is a factor and a sum for each channel, "
        "which the weights before it can hold",
        "Jacob et al. 2018, section 3.2",
        _fold,
    ),
    Rule(
        "drop_bias_before_norm",
        "bias=False in the layers before batch normalizations",
        "the mean that is taken out contains the bias",
        _TUNING,
        _bias,
    ),
    Rule(
        "channels_last",
        "model.to(memory_format=torch.channels_last), and the images likewise",
        "kernels read all channels of a pixel at once",
        _TUNING,
        _channels_last,
    ),
    Rule(
        "inference_mode",
        "with torch.inference_mode():",
        "no graph is recorded and no version counted",
        _TUNING,
        _inference_mode,
    ),
    Rule(
        "bf16_autocast",
        "with torch.autocast(device, torch.bfloat16):",
        "half the bytes, and matrix units where the machine has them",
        "Kalamkar et al. 2019",
        _bf16,
    ),
    Rule(
        "no_fp64",
        "keep constants and buffers in fp32",
        "fp64 takes twice the bytes and at least twice the time",
        "IEEE 754: 64 bits a number; vector units hold half as many",
        _fp64,
    ),
    Rule(
        "fused_optimizer",
        "fused=True for the optimizer",
        "one kernel reads each parameter and its states once",
        _TUNING,
        _fused,
    ),
    Rule(
        "foreach_optimizer",
        "foreach=True for the optimizer",
        "one call for a list of tensors instead of one for each",
        _TUNING,
        _foreach,
    ),
    Rule(
        "gradients_to_none",
        "optimizer.zero_grad(set_to_none=True), the default",
        "the backward pass writes gradients instead of adding to zeros",
        _TUNING,
        _zero_grad,
    ),
    Rule(
        "no_anomaly_mode",
        "torch.autograd.set_detect_anomaly(False)",
        "every backward kernel's result is searched for NaN, and every call keeps its "
        "stack",
        "torch.autograd.detect_anomaly",
        _anomaly,
    ),
    Rule(
        "flush_subnormals",
        "torch.set_flush_denormal(True)",
        "many processors take a slow path for subnormal numbers",
        "torch.set_flush_denormal",
        _subnormals,
    ),
    Rule(
        "threads",
        "torch.set_num_threads(...)",
        "kernels split their work over threads",
        _TUNING,
        _threads,
    ),
    Rule(
        "compile",
        "model.compile()",
        "kernels are fused, so that values stay in registers, and Python is left out",
        "Ansel et al. 2024, PyTorch 2",
        _compile,
    ),
    Rule(
        "copies",
        "the layout that the next operator reads, from the beginning; fewer transposes "
        "before contiguous() and reshape()",
        "a copy computes nothing and moves every element twice",
        "Ma et al. 2018, ShuffleNet V2, section 2",
        _copies,
    ),
    Rule(
        "value_to_python",
        "keep .item(), float(tensor), and conditions on tensors out of the step",
        "a GPU is waited for at each",
        _TUNING,
        _syncs,
    ),
)


def place_of(row: OperatorCount) -> str:
    """Return module and line of a row as one text."""
    parts = [row.module, f"({row.line})" if row.line else ""]
    return " ".join(part for part in parts if part)


def _share(facts: Facts, operator: str) -> float:
    rows = [row for row in facts.profile.rows if row.operator == operator]
    return sum(facts.profile.share(row) for row in rows)


def _calls(rows: Sequence[OperatorCount]) -> str:
    return _count(sum(row.calls for row in rows), "call")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
