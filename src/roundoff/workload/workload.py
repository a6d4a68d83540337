"""Workload: the user's model with its batches and metric, given as Python objects or as a file."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from roundoff.errors import WorkloadError, wrong_type
from roundoff.preserve import preserve
from roundoff.workload.code import check_call, metric_arguments, name_of, user_code
from roundoff.workload.file import check_defined, execute_module
from roundoff.workload.outputs import Judged

__all__ = ["Workload", "describe", "preserve"]

#: What a workload's file may define.
_PARTS = (
    "model",
    "batches",
    "forward",
    "loss",
    "metric",
    "optimizer",
    "step",
    "held_out",
)
#: Those that are functions, and need not be there.
_FUNCTIONS = {"forward", "loss", "metric", "optimizer", "step"}


class Workload:
    """A model, the batches it is judged on and, where needed, metric, loss and optimizer.

    Everything is called, collected and checked in the constructor, so that a mistake is
    reported before anything is measured; only the forward pass, the metric and the loss
    are first called later.

    Args:
        model: a module, or a callable without arguments that returns one. Its training
            mode is left as it is.
        batches: an iterable of batches that ends, or a callable without arguments that
            returns one. A batch is whatever ``forward`` takes. NaN and Inf in it are
            passed on to the model.
        forward: ``forward(model, batch)`` -> output. By default a mapping becomes
            ``model(**batch)``, a tuple or list ``model(*batch)``, anything else
            ``model(batch)``.
        loss: ``loss(output, batch)`` -> scalar tensor.
        metric: a callable whose parameters are any of ``outputs`` (a list with one
            output per batch), ``batches`` and ``reference`` (the outputs of the
            unrounded model). Returns one finite number; **higher is better**.
        optimizer: ``optimizer(model)`` -> ``torch.optim.Optimizer``.
        step: ``step(model, optimizer, batch)`` -> loss: the whole training step, as
            the user's loop runs it, for ``roundoff.advise``.
        held_out: batches that training never sees, for the metric of
            ``roundoff.bench``; like ``batches``.
        name: for messages and reports.
        path: the file that it came from, if any.

    Raises:
        WorkloadError: a part is missing, empty or of the wrong kind, or its code raised.

    Example:
        >>> batches = [torch.zeros(4, 2)]
        >>> workload = Workload(torch.nn.Linear(2, 1), batches, metric=lambda outputs: 0.5)
        >>> outputs = [workload.run(batch) for batch in workload.batches]
        >>> outputs[0].shape, workload.evaluate(outputs, outputs)
        (torch.Size([4, 1]), 0.5)
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        batches: Iterable[Any] | Callable[[], Iterable[Any]],
        *,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        loss: Callable[[Any, Any], Tensor] | None = None,
        metric: Callable[..., Any] | None = None,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        step: Callable[[nn.Module, torch.optim.Optimizer, Any], Any] | None = None,
        held_out: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
        name: str = "workload",
        path: Path | None = None,
    ) -> None:
        self.name = name
        self.path = path
        self.judged = Judged()
        self.forward = forward
        self.loss = loss
        self.metric = metric
        self.optimizer = optimizer
        self.step = step
        self._where = str(path or name)
        for label, function, parameters in (
            ("forward", forward, ("model", "batch")),
            ("loss", loss, ("output", "batch")),
            ("optimizer", optimizer, ("model",)),
            ("step", step, ("model", "optimizer", "batch")),
        ):
            if function is not None:
                check_call(function, label, parameters, self._where)
        self._metric_arguments = (
            [] if metric is None else metric_arguments(metric, self._where)
        )
        self.make = None if isinstance(model, nn.Module) else model
        self.model: nn.Module = self._build_model(model)
        #: what the batches came from, to be gone through again
        self.source = batches
        self.batches: list[Any] = self._collect_batches(batches, "batches")
        self.held_out: list[Any] = (
            [] if held_out is None else self._collect_batches(held_out, "held_out")
        )

    @classmethod
    def load(
        cls, source: str | Path, *, batches: Iterable[Any] | None = None
    ) -> Workload:
        r"""The workload that a Python file, or a module given by its dotted name, defines.

        It defines ``model`` and ``batches`` and, optionally, ``forward``, ``loss``,
        ``metric``, ``optimizer`` and ``held_out``: the arguments of this class. A file
        is executed afresh on each call, as a module of its own. Its folder can be
        imported from until ``load`` returns (so import helpers at the top, not inside
        ``metric``), and data beside it is found through ``Path(__file__).parent``. A
        dotted name is imported as usual. ``batches`` stand for those of a source that
        defines none: another workload's. A number under the name of an optional function,
        as ``step = 2`` for a width of a grid, is none of them.

        Raises:
            WorkloadError: no such file or module, not Python, its code raised (with its
                line), or a part is missing.

        Example:
            >>> import tempfile
            >>> text = "import torch\nmodel = torch.nn.Linear(2, 1)\nbatches = [torch.ones(4, 2)]"
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     _ = Path(folder, "tiny.py").write_text(text)
            ...     Workload.load(Path(folder, "tiny.py"))
            Workload(name='tiny', model=Linear, batches=1, metric=None)
        """
        with execute_module(source) as module:
            path = module.path
            given = {} if batches is None else {"batches": batches}
            defined = given | dict(module.namespace)
            check_defined(defined, str(path or source))
            parts: dict[str, Any] = {
                name: None if _is_other_number(name, defined) else defined.get(name)
                for name in _PARTS
            }
            return cls(**parts, name=path.stem if path else str(source), path=path)

    def __repr__(self) -> str:
        return (
            f"Workload(name={self.name!r}, model={type(self.model).__name__}, "
            f"batches={len(self.batches)}, metric={self.metric_name})"
        )

    @property
    def metric_name(self) -> str | None:
        """The name of the metric function; ``None`` without a metric."""
        return None if self.metric is None else name_of(self.metric)

    def fresh_model(self) -> nn.Module | None:
        """Another model from ``model()``, with the random state as it is now; None
        where a module was given.

        Raises:
            WorkloadError: ``model()`` raised, or returned no model.
        """
        return None if self.make is None else self._build_model(self.make)

    def with_model(self, model: nn.Module) -> Workload:
        """The same workload with another model in the place of its own."""
        twin = copy.copy(self)
        twin.model = model
        return twin

    def judging(self, part: str | None = None, apart: Iterable[str] = ()) -> Workload:
        """The same workload, judged by a part of the output or with outputs ``apart``:
        see ``Judged``.
        """
        twin = copy.copy(self)
        twin.judged = Judged(part, tuple(apart))
        return twin

    def run(self, batch: Any) -> Any:
        """The output of one batch. Grad mode, training mode and device are the caller's affair.

        ``forward`` gets a copy of the batch's tensors (in nests of tuples, lists and
        dicts), so that a model that writes into its input leaves the workload as it
        was.

        Raises:
            WorkloadError: the forward pass raised; names the batch by number and
                shapes, and the user's line.
        """
        call = f"model({_stars(batch)}batch)"
        do = "if the model is called in another way, define forward(model, batch)"
        if self.forward is not None:
            call = "forward(model, batch)"
            do = "call it by itself on this batch to debug it"
        with torch._C.DisableTorchFunction():  # the copy is no operator of the model
            copied = tree_map(_copied, batch)

        def what() -> str:
            return f"{call} on {self._number_of(batch)}, {describe(batch)},"

        with user_code(what, self._where, path=self.path, do=do):
            if self.forward is not None:
                return self.forward(self.model, copied)
            stars = _stars(copied)
            if stars == "**":
                return self.model(**copied)
            return self.model(*copied) if stars == "*" else self.model(copied)

    def _number_of(self, batch: Any) -> str:
        for number, other in enumerate(self.batches):
            if other is batch:
                return f"batch {number}"
        return "a batch that is not the workload's own"

    def evaluate(
        self, outputs: Sequence[Any], reference: Sequence[Any]
    ) -> float | None:
        """The metric of ``outputs``, one per batch in order; ``None`` without a metric.

        Raises:
            WorkloadError: the metric raised or returned no finite number, or a list has
                not one output per batch.
        """
        if self.metric is None:
            return None
        self._check_length(outputs, "outputs")
        self._check_length(reference, "reference")
        offered = {"outputs": outputs, "batches": self.batches, "reference": reference}
        arguments = {name: offered[name] for name in self._metric_arguments}
        with user_code("the metric", self._where, path=self.path):
            value = self.metric(**arguments)
        is_scalar = isinstance(value, (Tensor, np.ndarray)) and value.ndim == 0
        number = value.item() if is_scalar else value
        if not isinstance(number, (Real, np.bool_)) or not math.isfinite(number):
            got = describe(value) + _forgotten_return(value)
            raise WorkloadError(
                f"the metric {self.metric_name} returned no finite number",
                where=self._where,
                expected="one finite number, higher is better",
                got=str(number) if isinstance(number, Real) else got,
            )
        return float(number)

    def _check_length(self, per_batch: Sequence[Any], label: str) -> None:
        if len(per_batch) != len(self.batches):
            raise WorkloadError(
                f"the metric needs one of {label} for every batch",
                where=self._where,
                expected=f"{len(self.batches)} elements",
                got=f"{len(per_batch)}",
            )

    def _build_model(self, model: object) -> nn.Module:
        if not isinstance(model, nn.Module) and callable(model):
            check_call(model, "model", (), self._where)
            with user_code("model()", self._where, path=self.path):
                model = model()
        if not isinstance(model, nn.Module):
            is_state = isinstance(model, Mapping)
            do = "load a state_dict into its module" if is_state else None
            raise WorkloadError(
                "model is not a module",
                where=self._where,
                expected="a torch.nn.Module, or a function without arguments that returns one",
                got=describe(model) + _forgotten_return(model),
                do=do,
            )
        self._check_values(model)
        return model

    def _check_values(self, model: nn.Module) -> None:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            is_lazy = nn.parameter.is_lazy(tensor)
            if is_lazy or tensor.is_meta:
                raise WorkloadError(
                    f"{name} of the model has no values yet",
                    where=self._where,
                    expected="a model that is ready to run",
                    got="a lazy parameter"
                    if is_lazy
                    else "a tensor on the meta device",
                    do="run one batch or load the weights inside model()",
                )

    def _collect_batches(self, batches: object, label: str) -> list[Any]:
        if callable(batches) and not isinstance(batches, (Iterable, nn.Module)):
            check_call(batches, label, (), self._where)
            with user_code(f"{label}()", self._where, path=self.path):
                batches = batches()
        self._check_collection(batches, label)
        with user_code(f"iterating over {label}", self._where, path=self.path):
            collected: list[Any] = list(batches)  # type: ignore[call-overload]
        if not collected:
            raise WorkloadError(
                f"{label} is empty",
                where=self._where,
                expected="one or more",
                got="0 batches",
            )
        for number, batch in enumerate(collected):
            if _is_empty(batch):
                place = "" if label == "batches" else f" in {label}"
                raise WorkloadError(
                    f"batch {number} of {len(collected)} is empty{place}",
                    where=self._where,
                    expected="one or more samples in every batch",
                    got=describe(batch),
                    do="leave it out; with a DataLoader, check its dataset",
                )
        return collected

    def _check_collection(self, batches: object, label: str) -> None:
        is_one_batch = isinstance(batches, (Tensor, np.ndarray, Mapping))
        is_text = isinstance(batches, (str, bytes))
        if isinstance(batches, Iterable) and not is_one_batch and not is_text:
            return
        what = f"{label} is not a collection of batches"
        do = "wrap a Dataset in torch.utils.data.DataLoader"
        if is_one_batch:
            what = f"{label} is one batch"
            do = "put it in a list"
        raise WorkloadError(
            what,
            where=self._where,
            expected="a list, a DataLoader or another iterable, or a function that returns one",
            got=describe(batches) + _forgotten_return(batches),
            do=do,
        )


def as_workload(workload: Workload | str | Path) -> Workload:
    """Return a workload, or the one that a file defines.

    Raises ``ArgumentError`` for anything else, and what ``Workload.load`` raises.
    """
    if isinstance(workload, Workload):
        return workload
    if isinstance(workload, str | Path):
        return Workload.load(workload)
    raise wrong_type(
        "workload",
        workload,
        "a roundoff.Workload, or the Python file that defines one",
        do="roundoff.Workload(model, batches): a model and a list of its inputs",
    )


def describe(value: object) -> str:
    """The type, and of tensors the dtype and shape, of a batch or an output; never the values.

    Example:
        >>> describe({"ids": torch.zeros(2, 3, dtype=torch.int64), "mask": None})
        '{ids: int64[2, 3], mask: None}'
    """
    if value is None:
        return "None"
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        items = [f"{key}: {describe(item)}" for key, item in value.items()]
        return "{" + ", ".join(items) + "}"
    if isinstance(value, (tuple, list)):
        parts = [describe(item) for item in value[:8]]
        if len(value) > 8:
            parts.append("...")
        shown = ", ".join(parts)
        return f"({shown})" if isinstance(value, tuple) else f"[{shown}]"
    return type(value).__qualname__


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _forgotten_return(value: object) -> str:
    return " (was a `return` forgotten?)" if value is None else ""


def _stars(batch: object) -> str:
    if isinstance(batch, Mapping):
        return "**"
    return "*" if isinstance(batch, (tuple, list)) else ""


def _is_empty(value: object) -> bool:
    """Return True if no part of a batch has an element: an empty tensor beside a full
    one is fine.
    """
    if isinstance(value, (Tensor, np.ndarray)):
        return math.prod(value.shape) == 0
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(_is_empty, value))
    return value is None or (isinstance(value, Sized) and len(value) == 0)


def _is_other_number(name: str, defined: Mapping[str, Any]) -> bool:
    """Return True where a file has a number of its own under the name of a function."""
    return name in _FUNCTIONS and isinstance(defined.get(name), int | float)
