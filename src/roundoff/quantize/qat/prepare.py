"""prepare_qat and convert: learners stand where a quantized model's quantizers stand,
and give way to them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn

from roundoff.errors import PatternError, QuantizationError
from roundoff.quantize.model import QuantizedModel
from roundoff.quantize.qat.learner import Learner
from roundoff.quantize.qat.learners import make_learner
from roundoff.quantize.qat.low_bit import Bnn, Xnor
from roundoff.quantize.qat.straight_through import Affine
from roundoff.quantize.quantizer import Quantizer

__all__ = ["clip_binary_", "convert", "prepare_qat"]


def prepare_qat(
    model: QuantizedModel,
    *,
    weights: str = "lsq",
    activations: str = "lsq+",
    only: Mapping[str, str] | None = None,
    parameters: Mapping[str, Mapping[str, Any]] | None = None,
    start: Literal["calibrated", "paper"] = "calibrated",
) -> dict[str, str]:
    """Put learners where the quantizers of a model stand, in place, and the model in training mode.

    Formats and granularities stay what they are: to train in two bits, quantize to two
    bits first. Which layers take part is the plan's affair too; the papers of DoReFa,
    BNN, XNOR-Net, TWN and TTQ keep the first and the last layer in fp32.

    Args:
        model: a quantized model.
        weights: name of the learner for weights, see ``LEARNERS``.
        activations: the same for values.
        only: other learners by pattern over quantizer names (``*``, ``?``; the first
            that matches decides); ``""`` leaves the quantizer as it is.
        parameters: of a learner by its name, such as ``{"ulq": {"fixed_min": True}}``.
        start: from the scales that the model has, or from what each learner's paper
            starts from, given the weight or the first batch.

    Returns:
        Quantizers that stay as they are, with the reason: dynamic ones, whose scale is
        not their own. Their gradient is straight-through.

    Raises:
        QuantizationError: a learner cannot do the format, granularity or role of a
            quantizer, or its weight is computed in the model's forward pass and cannot
            be put on the learner's grid; a model that is not quantized. The model is as
            before.
        PatternError: a pattern of ``only`` matches no quantizer.
    """
    _check(model, "prepare_qat")
    patterns = only or {}
    matches = {name: _first_match(name, patterns) for name, _ in model.named()}
    _check_used(patterns, matches)
    kept = {}
    learners = {}
    for name, quantizer in model.named():
        pattern = matches[name]
        usual = weights if quantizer.weight else activations
        chosen = usual if pattern is None else patterns[pattern]
        if not chosen:
            kept[name] = "left as it is by `only`"
        elif quantizer.dynamic:
            kept[name] = "dynamic: its scale is chosen from each tensor"
        else:
            settings = (parameters or {}).get(chosen, {})
            learners[name] = _learner(model, name, quantizer, chosen, start, settings)
    if not learners:
        raise _nothing_to_learn(kept)
    for name, learner in learners.items():
        model.put_(name, learner)
    model.train()
    return kept


def _nothing_to_learn(kept: Mapping[str, str]) -> QuantizationError:
    return QuantizationError(
        "there is nothing to learn",
        where="prepare_qat",
        expected="a quantizer with a scale",
        got="; ".join(sorted(set(kept.values()))) or "a model without quantizers",
    )


def _first_match(name: str, patterns: Iterable[str]) -> str | None:
    return next((each for each in patterns if fnmatchcase(name, each)), None)


def _check_used(patterns: Iterable[str], matches: Mapping[str, str | None]) -> None:
    """Raise ``PatternError`` where a pattern decides for none of the quantizers."""
    unused = set(patterns).difference(matches.values())
    if unused:
        raise PatternError(
            "a pattern matches no quantizer",
            where="only",
            got=", ".join(sorted(unused)),
            expected=f"names such as {next(iter(matches), 'conv.weight')}",
        )


def _check(model: Any, where: str) -> None:
    if not isinstance(model, QuantizedModel):
        raise QuantizationError(
            "not a quantized model",
            where=where,
            expected="what roundoff.quantize returned",
            got=type(model).__name__,
            do="quantize it: ro.quantize(model, plan, batches)",
        )


def _learner(
    model: QuantizedModel,
    name: str,
    quantizer: Any,
    chosen: str,
    start: str,
    parameters: Mapping[str, Any],
) -> Learner:
    """A learner for one quantizer."""
    if isinstance(quantizer, Learner):
        raise QuantizationError(
            "this quantizer is a learner already",
            where=name,
            expected="a plain quantizer",
            got=quantizer.kind,
            do="convert the model first",
        )
    granularity = quantizer.granularity
    role: Literal["weight", "activation"] = "activation"
    if quantizer.weight:
        role = "weight"
    calibrated = quantizer.scale is not None and start == "calibrated"
    try:
        learner = make_learner(
            chosen,
            quantizer.fmt,
            granularity,
            quantizer.qparams() if calibrated else None,
            role=role,
            **parameters,
        )
    except QuantizationError as error:
        raise QuantizationError(
            error.what,
            where=f"{name} ({chosen}, {quantizer.fmt.name}, {role})",
            got=error.got,
            expected=error.expected,
            do=error.do,
        ) from error
    learner.name = name
    learner.sites = quantizer.sites
    learner.operand = quantizer.operand
    if quantizer.weight:
        _start(learner, _parameter(model, name), chosen)
    return learner


def _start(learner: Learner, weight: nn.Parameter | None, chosen: str) -> None:
    """Start a learner of weights from its parameter."""
    if weight is None and not isinstance(learner, Affine):
        raise QuantizationError(
            f"{chosen} transforms a weight, and this one is no parameter",
            where=learner.name,
            expected="a parameter of the model",
            got="a value computed in the forward pass",
            do="use lsq or ste here, with `only`",
        )
    if weight is not None:
        learner.to(weight.device)
        if not learner.ready:
            learner.start_from(weight.detach())


def _parameter(model: QuantizedModel, name: str) -> nn.Parameter | None:
    """The parameter that a quantizer of weights is named by."""
    return dict(model.model.named_parameters(remove_duplicate=False)).get(name)


def convert(model: QuantizedModel) -> QuantizedModel:
    """Put plain quantizers where the learners stand, in place, with the weights on
    their grids; in evaluation mode.

    The model computes what it computed with its learners in evaluation mode, bit for
    bit. A transformed weight may need another format than was trained (see
    ``Learner.grid``): DoReFa's of k bits one of k + 1, TTQ's int8.

    Returns:
        The same model.

    Raises:
        QuantizationError: a learner never saw a value, so it has no scale; a model that
            is not quantized. The model is as before.
    """
    _check(model, "convert")
    model.eval()
    converted: list[
        tuple[str, Quantizer, nn.Parameter | None, torch.Tensor | None]
    ] = []
    for name, learner in all_learners(model):
        quantizer = Quantizer(
            name, learner.grid, learner.operand, learner.granularity, learner.sites
        )
        parameter = _parameter(model, name) if learner.weight else None
        weight = None
        if parameter is not None:
            weight, qparams = learner.frozen(parameter)
        else:
            qparams = learner.qparams()
        quantizer.set_(qparams, learner.kind)
        converted.append((name, quantizer, parameter, weight))
    for name, quantizer, parameter, weight in converted:
        model.put_(name, quantizer.eval())
        if parameter is not None and weight is not None:
            with torch.no_grad():
                parameter.copy_(weight)
    return model


def all_learners(model: QuantizedModel) -> list[tuple[str, Learner]]:
    """Names and learners of a model in training."""
    modules: list[tuple[str, nn.Module]] = list(model.named())
    return [(name, module) for name, module in modules if isinstance(module, Learner)]


def clip_binary_(model: QuantizedModel) -> None:
    """Clip the weights behind BinaryNet's learners to [-1, 1], as its paper does after
    each update (section 2.4).

    Beyond that their gradient is 0, and they would never come back.
    """
    for name, learner in all_learners(model):
        parameter = _parameter(model, name)
        if (
            isinstance(learner, Bnn)
            and not isinstance(learner, Xnor)
            and learner.weight
            and parameter is not None
        ):
            with torch.no_grad():
                parameter.clamp_(-1.0, 1.0)
