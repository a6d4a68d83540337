"""QuantizedModel: a copy of the user's model whose values and weights pass quantizers."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from roundoff.ops import MATRIX_KINDS, Call, execute, float_tensors, watch
from roundoff.quantize.entry import Entry
from roundoff.quantize.graph import Graph, Node, Use
from roundoff.quantize.layout import Route
from roundoff.quantize.quantizer import Quantizer, round_bias
from roundoff.quantize.record import PipelineStep, Record, fingerprint
from roundoff.quantize.schemes import Scheme, SiteFormat
from roundoff.train import straight

if TYPE_CHECKING:
    from roundoff.quantize.channels.groups import ChannelGroup


#: Step of the codes of a sigmoid, which are 0 to 255: 1/255 in fp32.
GATE_STEP = float(torch.tensor(1 / 255, dtype=torch.float32))


class Passing:
    """What happens to values that have quantizers, and to biases of integer sums.

    This one quantizes them; others observe, or run the operators of a file.
    """

    def value(self, _name: str, quantizer: Any, value: Tensor) -> Tensor:
        """Return a value or weight behind its quantizer."""
        quantized: Tensor = quantizer(value)
        return quantized

    def bias(self, _site: str, bias: Tensor, quantizers: list[Quantizer]) -> Tensor:
        """Return a bias on the grid of the sums."""
        return round_bias(bias, quantizers)

    def gate(self, _site: str, gate: Tensor) -> Tensor:
        """Return a sigmoid that a call multiplies codes by (``Route.gated``): as codes."""
        return straight(gate, torch.round(gate.detach() / GATE_STEP) * GATE_STEP)

    def result(self, _site: str, result: Any) -> Any:
        """Return what a call with quantized operands returned."""
        return result

    def unrouted(self, _site: str, result: Any) -> Any:
        """Return what a call without quantizers returned."""
        return result

    def unknown(self, model: QuantizedModel, site: str) -> None:
        """Note a call that the model was not laid out for."""
        model.note_unseen(site)


class Unquantized(Passing):
    """Leaves values and biases as they are."""

    def value(self, _name: str, _quantizer: Any, value: Tensor) -> Tensor:
        """Return the value itself."""
        return value

    def bias(self, _site: str, bias: Tensor, _quantizers: list[Quantizer]) -> Tensor:
        """Return the bias itself."""
        return bias

    def gate(self, _site: str, gate: Tensor) -> Tensor:
        """Return the sigmoid itself."""
        return gate

    def unknown(self, model: QuantizedModel, site: str) -> None:
        """Say nothing: calibration will."""


@dataclass(frozen=True, slots=True)
class Rescaling:
    """A channel group that was divided by factors; ``clips``: bounds of clips moved too."""

    group: ChannelGroup
    factors: Tensor
    clips: bool


class QuantizedModel(nn.Module):
    """The simulation of a quantized model: called like it, it returns what the file will.

    Attributes:
        model: the copy of the user's model; its weights are floating point, after
            rounding on the grid of their scales.
        routes: what each call reads and writes through which quantizer, by site.
        quantizers: by name with dots as ``__dot__``, see ``quantizer(name)`` and
            ``named()``.
        factors: what values are divided by before they are read (``Route.divided``).
        rows: one for each site, with the reason where it is not quantized.
        graph: the calls that calibration saw.
        steps: what calibration did and what it gained.
        unseen: calls that calibration did not see, which run as they are.
        remarks: what else a report should say.
        folded: True where BatchNorm was folded first.
        rescalings: channel groups that were divided by factors, in order.
        passing: what happens to values and weights now (``through``).
    """

    def __init__(
        self, model: nn.Module, laid_out: Scheme, graph: Graph | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.graph = graph or Graph()
        self.training = model.training
        self.routes: dict[str, Route] = laid_out.routes
        self.rows: list[SiteFormat] = laid_out.rows
        self.quantizers = nn.ModuleDict(
            {_key(name): q for name, q in laid_out.quantizers.items()}
        )
        self.factors = nn.ParameterDict()
        self.steps: list[PipelineStep] = []
        self.remarks: list[str] = []
        self.folded = False
        self.rescalings: list[Rescaling] = []
        self.unseen: Counter[str] = Counter()
        self.passing = Passing()
        self._known_sites = {row.site for row in self.rows}
        self._quantized_inside = False  # in a block of ``quantized()``

    def quantizer(self, name: str) -> Quantizer:
        """Return the quantizer with this name. Raises ``KeyError``."""
        quantizer: Quantizer = self.quantizers[_key(name)]  # type: ignore[assignment]
        return quantizer

    def put_(self, name: str, module: nn.Module) -> None:
        """Let a quantizer, or a learner, stand under this name."""
        self.quantizers[_key(name)] = module

    def drop_(self, name: str) -> None:
        """Delete a quantizer that nothing reads through any more."""
        del self.quantizers[_key(name)]

    def named(self) -> Iterator[tuple[str, Quantizer]]:
        """Yield names and quantizers, of weights and values."""
        for key, module in self.quantizers.items():
            quantizer: Any = module
            yield key.replace("__dot__", "."), quantizer

    def weight_names(self) -> list[str]:
        """Return the names of the quantizers of weights."""
        return [name for name, quantizer in self.named() if quantizer.weight]

    def readers(self, route: Route) -> list[Quantizer]:
        """Return the quantizers that a call reads through."""
        return [self.quantizer(name) for name in route.uses.values()]

    @property
    def notes(self) -> dict[str, str]:
        """What could not be scaled as it should, by the quantizer's name.

        That is constant values, and scales that are too small.
        """
        return {
            name: quantizer.note for name, quantizer in self.named() if quantizer.note
        }

    def record(self) -> Record:
        """Return what was chosen: qparams, what was skipped and why, and the steps."""
        entries = [_entry(name, quantizer) for name, quantizer in self.named()]
        skipped = [
            (row.site, row.reason)
            for row in self.rows
            if row.reason and row.format == "fp32"
        ]
        return Record(
            fingerprint(self.model),
            tuple(entries),
            tuple(skipped),
            tuple(self.steps),
            self._divisors(),
        )

    def _divisors(self) -> dict[str, tuple[float, ...]]:
        """Return, by weight, the factors that its input is divided by before it is read."""
        divisors: dict[str, tuple[float, ...]] = {}
        for route in self.routes.values():
            weights = [n for n in route.uses.values() if self.quantizer(n).weight]
            for name in route.divided.values():
                factors = self.factors[_key(name)].detach().double().flatten()
                divisors |= dict.fromkeys(weights, tuple(factors.tolist()))
        return divisors

    @contextmanager
    def through(self, passing: Passing) -> Iterator[None]:
        """Let something else happen to values inside the block.

        That is ``Unquantized()``, observers, or the operators of a file.
        """
        before = self.passing
        self.passing = passing
        try:
            yield
        finally:
            self.passing = before

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the mode that sees the calls cannot be compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, with every value that has a quantizer on its grid.

        In ``torch.compile`` it runs eagerly.
        """
        if self._quantized_inside:
            return self.model(*args, **kwargs)
        with watch(self.model, RoutedCalls(self)) as mode:
            mode.begin()
            with mode:
                return self.model(*args, **kwargs)

    @contextmanager
    def quantized(self) -> Iterator[nn.Module]:
        """Let ``model`` itself, which is yielded, run quantized inside the block.

        This is for its methods, such as ``generate``. Each call of the model is a forward
        pass of its own. What runs outside such calls (sampling) stays as it is. A cache
        of keys and values holds them as they were made; they pass through their
        quantizers where attention reads them. With a scale for each token
        (``Options.kv_cache``) that is what a cache of codes would give back, in every
        step the same.
        """
        handler = RoutedCalls(self)
        with watch(self.model, handler) as mode:
            entered: list[ExitStack] = []

            def begin(*_: Any) -> None:
                stack = ExitStack()
                if not entered:
                    mode.begin()
                    handler.begin()
                    stack.enter_context(mode)
                entered.append(stack)

            def end(*_: Any) -> None:
                entered.pop().close()

            handles = [
                self.model.register_forward_pre_hook(begin, prepend=True),
                self.model.register_forward_hook(end, always_call=True),
            ]
            before = self._quantized_inside
            self._quantized_inside = True
            try:
                yield self.model
            finally:
                self._quantized_inside = before
                for handle in handles:
                    handle.remove()

    def divided(
        self, route: Route, leaves: list[Any], passed: WeakIdKeyDictionary
    ) -> list[Any]:
        """Return the arguments of a call, those with factors divided by them.

        A value is divided once for all readers, as ``passed`` remembers.
        """
        divided = list(leaves)
        for place, name in route.divided.items():
            value = leaves[place]
            quotients = passed_on(passed, value)
            if f"/{name}" not in quotients:
                quotients[f"/{name}"] = value / self.factors[_key(name)]
            divided[place] = quotients[f"/{name}"]
        return divided

    def divide_(
        self, name: str, factors: Tensor, places: Iterable[tuple[str, int]]
    ) -> None:
        """Let places of sites read values divided by ``factors``, which broadcast."""
        frozen = nn.Parameter(factors.detach().clone(), requires_grad=False)
        self.factors[_key(name)] = frozen
        for site, place in places:
            self.routes[site].divided[place] = name

    def drop_unreached_(self, reasons: Mapping[str, str] | None = None) -> None:
        """Let what calibration never reached run in fp32; its rows say so.

        ``reasons``: by quantizer, why it has no scale where calibration did reach it.
        """
        unreached = {n for n, q in self.named() if not q.dynamic and q.scale is None}
        for site, route in list(self.routes.items()):
            self._drop_from_route_(site, route, unreached, reasons or {})
        for name in unreached:
            self.drop_(name)

    def _drop_from_route_(
        self, site: str, route: Route, unreached: set[str], reasons: Mapping[str, str]
    ) -> None:
        """Let a call do without quantizers that have no scale."""
        if route.output in unreached:
            route.output = ""
        without = [name for name in route.uses.values() if name in unreached]
        if without:
            self._leave_(site, without, reasons)
        elif not (route.uses or route.output or route.executes):
            del self.routes[site]

    def _leave_(
        self, site: str, without: Sequence[str], reasons: Mapping[str, str]
    ) -> None:
        """Let a call run in fp32, since it reads these values that have no scale."""
        del self.routes[site]
        texts = [f"{name}: {reasons[name]}" for name in without if name in reasons]
        reason = "; ".join(texts) or "calibration never reached it"
        row = SiteFormat(site, "fp32", reason)
        self.rows[:] = [row if r.site == site else r for r in self.rows]

    def add_late_(self, node: Node, reason: str) -> None:
        """Add a call that the graph was not traced on: it runs in fp32, with a reason."""
        self.rows.append(SiteFormat(node.site, "fp32", reason))
        self.graph.nodes[node.site] = node
        self._known_sites.add(node.site)

    def knows(self, site: str) -> bool:
        """Return True for a site that calibration saw."""
        return site in self._known_sites

    def note_unseen(self, site: str) -> None:
        """Count a call that calibration did not see, and warn of it once."""
        self.unseen[site] += 1
        if self.unseen[site] == 1:
            text = f"{site} was never called while the model was calibrated: it runs in fp32"
            warnings.warn(text, RuntimeWarning, stacklevel=9)


def _entry(name: str, quantizer: Quantizer) -> Entry:
    """Return what a record holds of a quantizer."""
    return Entry.of(
        name,
        "weight" if quantizer.weight else "activation",
        quantizer.fmt,
        None if quantizer.dynamic else quantizer.qparams(),
        granularity=quantizer.granularity,
        sites=quantizer.sites,
        observer=quantizer.observer,
        dynamic=quantizer.dynamic,
    )


@dataclass(slots=True)
class RoutedCall:
    """A call that a run has reached, its route, and its arguments there.

    ``leaves`` are divided; some or all of them have passed their quantizers.
    """

    call: Call
    route: Route
    leaves: list[Any]

    @property
    def site(self) -> str:
        """The call's site."""
        return str(self.call.site)

    def run(
        self, passing: Passing, readers: list[Quantizer], *, with_bias: bool = True
    ) -> Any:
        """Return the call's result on ``leaves``, writing into none of them.

        Args:
            passing: what happens to the bias and the result.
            readers: the quantizers that the call reads through.
            with_bias: round a bias to the grid of the sums.
        """
        if self.route.executes is not None:
            call = replace(self.call, leaves=self.leaves)
            return execute(call, self.route.executes, straight)
        leaves = self.leaves
        if self.route.bias >= 0 and with_bias:
            leaves = list(leaves)
            bias = leaves[self.route.bias]
            leaves[self.route.bias] = passing.bias(self.site, bias, readers)
        if self.route.gated:
            gate = passing.gate(self.site, torch.sigmoid(leaves[0]))
            return passing.result(self.site, leaves[0] * gate)
        return passing.result(self.site, self.call.again(leaves))


class RoutedCalls:
    """Handler that runs each call as its route says.

    Operands and results pass through their quantizers; a value passes each once, all its
    readers get the same tensor.
    """

    def __init__(self, model: QuantizedModel) -> None:
        self.model = model
        self.begin()

    def begin(self) -> None:
        """Start a forward pass: nothing has passed a quantizer."""
        self.passed: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def before_write(self, tensor: Tensor) -> None:
        """Forget what a tensor, or another view of its memory, became."""
        forget(self.passed, tensor)

    def call(self, call: Call) -> Any:
        """Run one call."""
        route = self.model.routes.get(str(call.site))
        if route is None:
            return self.run_unrouted(call)
        leaves = self.model.divided(route, call.leaves, self.passed)
        inplace = call.operator.inplace
        for place, name in route.uses.items():
            operand = leaves[place]
            if inplace and place == 0:
                # the gradient of its quantizer may need what is about to be written over
                operand = operand.clone()
            leaves[place] = self.pass_on(name, operand)
        result = self.run(RoutedCall(call, route, leaves))
        if route.executes is not None:
            return result
        if route.output:
            result = self.pass_on(route.output, result)
        return call.leaves[0].copy_(result) if inplace else result

    def run_unrouted(self, call: Call) -> Any:
        """Run a call that reads nothing through quantizers."""
        site = str(call.site)
        result = self.model.passing.unrouted(site, call.run())
        if not self.model.knows(site) and float_tensors(result):
            self.model.passing.unknown(self.model, site)
        return result

    def run(self, routed: RoutedCall) -> Any:
        """Run a call whose operands have passed their quantizers."""
        readers = self.model.readers(routed.route) if routed.route.bias >= 0 else []
        return routed.run(self.model.passing, readers)

    def pass_on(self, name: str, value: Tensor) -> Tensor:
        """Return a value behind its quantizer; the same tensor for every reader."""
        quantized = passed_on(self.passed, value)
        if name not in quantized:
            quantized[name] = self.quantize(name, value)
            # codes that are read once more are the same codes
            passed_on(self.passed, quantized[name])[name] = quantized[name]
        return quantized[name]

    def quantize(self, name: str, value: Tensor) -> Tensor:
        """Send a value through its quantizer for the first time."""
        quantizer = self.model.quantizer(name)
        return self.model.passing.value(name, quantizer, value)


def passed_on(passed: WeakIdKeyDictionary, value: Tensor) -> dict[str, Tensor]:
    """Return what a value became, by the name of the quantizer or factors."""
    if value not in passed:
        passed[value] = {}
    became: dict[str, Tensor] = passed[value]
    return became


def forget(passed: WeakIdKeyDictionary, tensor: Tensor) -> None:
    """Drop what is remembered of tensors in memory that is about to be written."""
    # also of tensors without data, as torch.export has them
    memory = tensor.untyped_storage()._cdata
    for value in [t for t in passed if t.untyped_storage()._cdata == memory]:
        del passed[value]


def average_bits(model: QuantizedModel) -> tuple[float, float]:
    """Return the bits per weight and per activation of a quantized model.

    They are averages over the weights of all calls that multiply, and over the
    activations that those calls read, of one sample; what has no quantizer counts 32.
    NaN where there are none.
    """
    weights: dict[str, tuple[int, float]] = {}
    activations: list[tuple[int, float]] = []
    multiplying = [n for n in model.graph.nodes.values() if n.kind in MATRIX_KINDS]
    # a weight that some call reads as it is stays quantized for the others: those last
    for node in sorted(multiplying, key=lambda node: node.site in model.routes):
        for use in node.uses:
            bits = _operand_bits(model, node, use)
            if use.weight:
                weights[use.value] = (math.prod(use.shape), bits)
            elif use.operand.role == "activation":
                activations.append((math.prod(use.shape[1:]), bits))
    return _mean_bits(list(weights.values())), _mean_bits(activations)


def _operand_bits(model: QuantizedModel, node: Node, use: Use) -> float:
    """Return the bits that a call reads an operand in; 32 without a quantizer."""
    route = model.routes.get(node.site)
    name = None if route is None else route.uses.get(use.operand.leaf)
    return 32.0 if name is None else float(model.quantizer(name).fmt.bits)


def _mean_bits(pairs: Sequence[tuple[int, float]]) -> float:
    """Return the mean of (elements, bits of each)."""
    total = sum(size for size, _ in pairs)
    return sum(size * bits for size, bits in pairs) / total if total else math.nan


def _key(name: str) -> str:
    """A quantizer's name as a key of modules, which has no dots."""
    return name.replace(".", "__dot__")
