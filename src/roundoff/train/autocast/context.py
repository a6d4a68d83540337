"""``roundoff.autocast``: forward and loss in the formats that a plan gives; everything
is undone on exit.
"""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ContextDecorator, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch._functorch.config
from torch import nn

from roundoff.errors import PlanError, wrong_type
from roundoff.foreign import read_text
from roundoff.formats import parse_format
from roundoff.ops import AUTOCAST_KEYS, SLOW_FP16, CallMode, Place, slow_in_fp16, watch
from roundoff.plan import Plan, explain
from roundoff.train.autocast.mode import LOCAL, SiteMode
from roundoff.train.autocast.overrides import overridden
from roundoff.train.autocast.recorded import Recorded
from roundoff.train.autocast.region import REGIONS, checkpoints, hooked, mode_of
from roundoff.train.autocast.rules import HALF, Rules


class autocast(ContextDecorator):  # noqa: N801
    """Run what is inside in the formats of a plan, forward; the backward pass follows
    each operator's own format.

    Use it around forward and loss, like ``torch.autocast``; call ``backward`` outside. One
    object may be entered again and again, from several threads, and inside another region,
    whose plan it replaces meanwhile. Sites in fp32, bf16, fp16 and fp64 run with real
    casts; a site in any other format (fp8, HiF8, int8 ...) is simulated: operands rounded,
    gradients rounded at its output, straight-through (slow, and compiled modules run
    uncompiled). In-place operators stay in the format of what they write into. fp64 tensors
    are never cast down.

    Args:
        what: a ``Plan``; the path of a plan or of another tool's operator lists (see
            docs/train.md); or a format: bf16 and fp16 mean torch.autocast's own lists, any
            other that every site runs in it.
        model: the model whose sites the plan names; needed as soon as a rule names more
            than operators.
        device: where it runs, ``cpu``, ``cuda`` ...; by default that of the model's first
            parameter.
        policy: the device whose built-in lists apply, if other than ``device``: ``"cuda"``
            on a CPU gives CUDA's casts.
        record: keep what ran in which format, see ``report``. Slower; not for training.

    Raises:
        PlanError: the plan names modules that the model does not have, or needs a model and
            has none.

    Warns:
        RuntimeWarning: fp16 on a CPU without arithmetic for it; rules that named no site in
            the first pass; a plan inside another one that contradicts it.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
        >>> plan = Plan.from_formats({"0/linear": "bf16"}, {})
        >>> with autocast(plan, model):
        ...     output = model(torch.zeros(2, 4))
        >>> output.dtype  # the plan's default is fp32: so does softmax run, and gives
        torch.float32
    """

    def __init__(
        self,
        what: Plan | str | Path | Mapping[str, Any],
        model: nn.Module | None = None,
        *,
        device: str | torch.device | None = None,
        policy: str | None = None,
        record: bool = False,
    ) -> None:
        if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
            raise PlanError(
                "DataParallel runs copies of the model on threads of its own, which no plan reaches",
                where="model",
                got=f"DataParallel on {len(model.device_ids)} devices",
                do="use DistributedDataParallel",
            )
        self.model = None if model is None else unwrapped(model)
        self.device = _device_type(device, self.model)
        self.rules = _rules(
            read_plan(what, self.model), self.model, self.device, policy
        )
        self._record = record
        self._entered = threading.local()
        self.recorded = Recorded(self.rules, record)
        if self.rules.simulated and self.model is None:
            raise PlanError(
                f"{self.rules.simulated[0]} is simulated, which needs the model",
                where="plan",
                do="give the model too: roundoff.autocast(plan, model)",
            )
        is_half = self.rules.dtype == torch.float16
        if is_half and slow_in_fp16(torch.device(self.device)):
            warnings.warn(SLOW_FP16, RuntimeWarning, stacklevel=2)

    @property
    def report(self) -> Any:
        """What ran in which format since the region was made, one row per call.

        A polars table with the columns of ``recorded.RanCall``: the rule, the formats of
        inputs, kernels and output, the casts and their bytes, and, once ``backward`` ran,
        the format of the gradient and its casts. Needs ``record=True``.
        """
        if not self._record:
            raise PlanError(
                "nothing was recorded",
                where="report",
                do="give record=True to roundoff.autocast",
            )
        return self.recorded.table

    def explain(self, site: str) -> str:
        """Say in a sentence which rule decides at a site (``roundoff plan explain`` in code)."""
        (decision,) = explain(
            self.rules.plan, [site], model=self.model, device=self.rules.lists
        )
        return f"{site} runs in {decision.format}: {decision.why}"

    def __enter__(self) -> autocast:
        outer = active()
        if outer is not None and outer is not self:
            _warn_of_contradictions(outer.rules, self.rules)
        stacks: list[ExitStack] = self._entered.__dict__.setdefault("stacks", [])
        with ExitStack() as stack:
            self._enter(stack, None)
            stacks.append(stack.pop_all())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered.stacks.pop().__exit__(kind, error, trace)
        if kind is not None or self.rules.told or not self.rules.seen:
            return
        self.rules.told = True
        unused = self.rules.unused()
        if unused:
            names = ", ".join(unused[:5]) + (" ..." if len(unused) > 5 else "")
            warnings.warn(
                f"{len(unused)} of the plan's patterns named no site in the first forward pass: {names}",
                RuntimeWarning,
                stacklevel=2,
            )

    @contextmanager
    def again(self, place: Place | None = None) -> Iterator[None]:
        """Enter the same region for a part that is run again (activation
        checkpointing), from ``place``.
        """
        with ExitStack() as stack:
            self._enter(stack, place)
            yield

    def _enter(self, stack: ExitStack, place: Place | None) -> None:
        rules = self.rules
        if rules.dtype is None:
            stack.enter_context(torch.autocast(self.device, enabled=False))
        else:
            stack.enter_context(torch.autocast(self.device, dtype=rules.dtype))
        stack.enter_context(overridden(rules.operators, self.device))
        _push(stack, LOCAL.keys, rules.key)
        has_rules = bool(rules.lines) or rules.default is not None
        if not has_rules and not self._record:
            # autocast's own lists: nothing else to do
            _push(stack, REGIONS.inside, (self, None))
            return
        if has_rules:
            # compiled backward passes would be traced under autocast; eager ones never
            # run so
            stack.enter_context(
                torch._functorch.config.patch(backward_pass_autocast="off")
            )
        mode = self._enter_mode(stack, place)
        stack.enter_context(checkpoints())
        _push(stack, LOCAL.modes, mode)
        _push(stack, REGIONS.inside, (self, mode))
        stack.enter_context(mode)

    def _enter_mode(self, stack: ExitStack, place: Place | None) -> CallMode | SiteMode:
        """Prepare the mode that decides, at ``place`` of the forward pass."""
        rules = self.rules
        mode: CallMode | SiteMode
        if self.model is not None and (self._record or rules.simulated):
            mode = stack.enter_context(watch(self.model, self.recorded))
        else:
            mode = mode_of(rules, self.model)
        stack.callback(mode.position.go_to, mode.position.place())
        mode.position.go_to(place or Place())
        if isinstance(mode, CallMode):
            mode.position.period = rules.forwards
        elif self.model is not None and rules.sites:
            stack.enter_context(hooked(self.model))
        return mode


def _push(stack: ExitStack, values: list[Any], value: Any) -> None:
    """Append to a list until the stack is left."""
    values.append(value)
    stack.callback(values.pop)


def active() -> autocast | None:
    """Return the innermost region of this thread."""
    return REGIONS.inside[-1][0] if REGIONS.inside else None


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile's, DistributedDataParallel's and
    DataParallel's wrappers.

    Its paths are the sites'.
    """
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, parallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def read_plan(
    what: Plan | str | Path | Mapping[str, Any], model: nn.Module | None = None
) -> Plan:
    """Return the plan that ``what`` stands for: itself, a format's name, or a file."""
    if isinstance(what, Plan):
        return what
    if isinstance(what, torch.dtype):
        return _plan_of_format(str(what))
    if isinstance(what, str) and not Path(what).suffix:
        return _plan_of_format(what)
    if not isinstance(what, str | Path | Mapping):
        raise wrong_type("plan", what, "a Plan, its file, or the name of a format")
    if not isinstance(what, Mapping) and _is_plan(Path(what)):
        path = Path(what)
        if path.is_file():
            return _loaded(path, path.stat().st_mtime_ns)
        return Plan.load(path)
    from roundoff.plan import read_lists

    plan: Plan = read_lists(what, model=model)
    return plan


def _plan_of_format(name: str) -> Plan:
    fmt = parse_format(name).name
    if fmt in HALF:
        return Plan((), autocast=fmt)
    return Plan((), default=fmt)


@functools.lru_cache(maxsize=16)
def _loaded(path: Path, _changed: int) -> Plan:
    """Read a plan file once, for regions that are made in every step."""
    return Plan.load(path)


def _is_plan(path: Path) -> bool:
    if path.suffix == ".toml" or not path.is_file():
        return True
    if path.suffix != ".json":
        return False
    try:
        return '"schema"' in read_text(path, errors="replace")
    except (OSError, ValueError):
        return False  # reading its lists says what is wrong with it


_RULES: weakref.WeakKeyDictionary[nn.Module, dict[Any, Rules]] = (
    weakref.WeakKeyDictionary()
)
_RULES_WITHOUT_MODEL: dict[Any, Rules] = {}


def _rules(
    plan: Plan, model: nn.Module | None, device: str, policy: str | None
) -> Rules:
    """Return the one object for a plan, model and device, so that compiled code stays valid."""
    if model is None:
        rules = _RULES_WITHOUT_MODEL
    else:
        rules = _RULES.setdefault(model, {})
    key = (
        plan.rules,
        plan.default,
        plan.autocast,
        plan.figures.forwards,
        device,
        policy,
    )
    if key not in rules:
        rules[key] = Rules(plan, model, device, policy)
    return rules[key]


def _device_type(device: str | torch.device | None, model: nn.Module | None) -> str:
    if device is None:
        device = torch.device("cpu") if model is None else _device_of(model)
    kind = torch.device(device).type
    if kind not in AUTOCAST_KEYS:
        raise PlanError(
            "no autocast on such a device",
            where="device",
            expected=", ".join(AUTOCAST_KEYS),
            got=repr(kind),
        )
    return kind


def _device_of(model: nn.Module) -> torch.device:
    if not isinstance(model, nn.Module):
        raise wrong_type("model", model, "a torch.nn.Module")
    tensors = itertools.chain(model.parameters(), model.buffers())
    first = next(tensors, None)
    return torch.device("cpu") if first is None else first.device


def _warn_of_contradictions(outer: Rules, inner: Rules) -> None:
    """Warn of the first rule of the inner plan that contradicts one of the outer plan
    about the same sites.
    """
    by_source = {line.source: line for line in outer.lines if line.rule is not None}
    for line in inner.lines:
        if line.rule is None:
            continue
        fmt, source = _outer_decision(outer, line.pattern)
        if line.source in by_source:
            fmt = by_source[line.source].format
            source = line.source
        if fmt is not None and fmt != line.format:
            warnings.warn(
                f"two plans contradict each other: inside {line.source} is to run in {line.format} (rule {line.rule}), "
                f"outside in {fmt} ({source}); the inner plan decides",
                RuntimeWarning,
                stacklevel=3,
            )
            return


def _outer_decision(outer: Rules, pattern: str) -> tuple[str | None, str]:
    """Return the format and pattern of the rule that decides at an exact site; (None,
    "") without one.
    """
    is_exact = not any(character in pattern for character in "*?[:")
    if not is_exact:
        return None, ""
    decision = outer.decide(pattern)
    if decision.rule is None:
        return None, ""
    return decision.format, decision.pattern or ""
