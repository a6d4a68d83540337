"""QuantizedModel: a copy of the user's model in which values and weights pass through quantizers."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from roundoff.ops import Call, execute, float_tensors, watch
from roundoff.quantize.graph import Graph
from roundoff.quantize.layout import Route
from roundoff.quantize.quantizer import Quantizer, on_sums
from roundoff.quantize.record import Entry, Record, Step, fingerprint
from roundoff.quantize.schemes import Row, Scheme
from roundoff.train import straight


class Passing:
    """What happens to a value that has a quantizer, and to a bias that is added to integer sums: they are quantized."""

    def value(self, _name: str, quantizer: Any, value: Tensor) -> Tensor:
        """A value or weight behind its quantizer."""
        found: Tensor = quantizer(value)
        return found

    def bias(self, _site: str, bias: Tensor, quantizers: list[Quantizer]) -> Tensor:
        """A bias on the grid of the sums."""
        return on_sums(bias, quantizers)

    def result(self, _site: str, result: Any) -> Any:
        """What a call with quantized operands returned."""
        return result

    def unknown(self, model: QuantizedModel, site: str) -> None:
        """A call that the model was not laid out for was made."""
        model.missed(site)


class Unquantized(Passing):
    """Nothing happens to them."""

    def value(self, _name: str, _quantizer: Any, value: Tensor) -> Tensor:
        """The value itself."""
        return value

    def bias(self, _site: str, bias: Tensor, _quantizers: list[Quantizer]) -> Tensor:
        """The bias itself."""
        return bias

    def unknown(self, model: QuantizedModel, site: str) -> None:
        """Calibration will say so."""


class QuantizedModel(nn.Module):
    """The simulation of a quantized model: called as the model is, it returns what the artefact will return.

    Attributes:
        model: the copy of the user's model; its weights are floating point, after repairs on the grid of their scales.
        quantizers: by name with dots as ``__dot__``, see ``quantizer(name)`` and ``named()``.
        rows: one for each site, with the reason where it is not quantized.
        graph: the calls that calibration saw.
        steps: what calibration did and what it gained.
        unseen: calls that calibration did not see, which run as they are.
        remarks: what else a report should say.
        folded: whether BatchNorm was folded first.
        moves: channel groups that were divided by factors, in order, and whether clips were passed (``unrounded``).
    """

    def __init__(
        self, model: nn.Module, laid_out: Scheme, graph: Graph | None = None
    ) -> None:
        super().__init__()
        self.model, self.graph, self.training = model, graph or Graph(), model.training
        self.routes: dict[str, Route] = laid_out.routes
        self.rows: list[Row] = laid_out.rows
        self.quantizers = nn.ModuleDict(
            {_key(name): q for name, q in laid_out.quantizers.items()}
        )
        self.factors = nn.ParameterDict()  # of Route.divided
        self.steps: list[Step] = []
        self.remarks: list[str] = []
        self.folded = False
        self.moves: list[tuple[Any, Tensor, bool]] = []
        self.unseen: Counter[str] = Counter()
        self.known = frozenset(row.site for row in self.rows)
        self.off: set[str] = set()
        self.passing = Passing()
        self.within = False  # a block of ``quantized()``

    def quantizer(self, name: str) -> Quantizer:
        """The quantizer with this name. Raises ``KeyError``."""
        found: Quantizer = self.quantizers[_key(name)]  # type: ignore[assignment]
        return found

    def replace_(self, name: str, module: nn.Module) -> None:
        """Let another module stand where this quantizer stands."""
        self.quantizers[_key(name)] = module

    def add_(self, name: str, quantizer: Quantizer) -> None:
        """One more quantizer."""
        self.quantizers[_key(name)] = quantizer

    def drop_(self, name: str) -> None:
        """A quantizer that nothing reads through any more."""
        del self.quantizers[_key(name)]

    def named(self) -> Iterator[tuple[str, Quantizer]]:
        """Names and quantizers, weights and values."""
        for key, module in self.quantizers.items():
            quantizer: Any = module
            yield key.replace("__dot__", "."), quantizer

    def weight_names(self) -> list[str]:
        """The names of the quantizers of weights."""
        return [name for name, quantizer in self.named() if quantizer.weight]

    def record(self) -> Record:
        """What was chosen for this model: qparams of weights and values, what was skipped and why, and the steps."""
        entries = [
            Entry.of(
                name,
                "weight" if q.weight else "activation",
                q.fmt,
                None if q.dynamic else q.qparams(),
                granularity=q.granularity,
                sites=q.sites,
                observer=q.observer,
                dynamic=q.dynamic,
            )
            for name, q in self.named()
        ]
        skipped = tuple(
            (row.site, row.reason)
            for row in self.rows
            if row.reason and row.format == "fp32"
        )
        return Record(
            fingerprint(self.model),
            tuple(entries),
            skipped,
            tuple(self.steps),
            self._divisors(),
        )

    def _divisors(self) -> dict[str, tuple[float, ...]]:
        """By weight, the factors that its input is divided by before it is read."""
        return {
            weight: tuple(self.factors[_key(name)].detach().double().flatten().tolist())
            for route in self.routes.values()
            for name in route.divided.values()
            for weight in route.uses.values()
            if self.quantizer(weight).weight
        }

    @contextmanager
    def through(self, passing: Passing) -> Iterator[None]:
        """Let something else happen to values inside the block: ``Unquantized()``, observers, ONNX's operators."""
        before, self.passing = self.passing, passing
        try:
            yield
        finally:
            self.passing = before

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the mode that sees the calls cannot be compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, with every value that has a quantizer on its grid. In ``torch.compile`` it runs eagerly."""
        if self.within:
            return self.model(*args, **kwargs)
        handler = _Handler(self)
        with watch(self.model, handler) as mode:
            mode.begin()
            with mode:
                return self.model(*args, **kwargs)

    @contextmanager
    def quantized(self) -> Iterator[nn.Module]:
        """Inside the block ``model`` itself, which is yielded, runs quantized: for its methods, such as ``generate``.

        Each call of the model is a forward pass of its own. What runs outside such calls (sampling) stays as it is.
        A cache of keys and values holds them as they were made; they pass through their quantizers where attention reads
        them. With a scale for each token (``Options.kv_cache``) that is what a cache of codes would give back, in every
        step the same.
        """
        handler = _Handler(self)
        with watch(self.model, handler) as mode:
            entered: list[ExitStack] = []

            def begin(*_: Any) -> None:
                if not entered:
                    mode.begin()
                    handler.done = WeakIdKeyDictionary()
                entered.append(ExitStack())
                if len(entered) == 1:
                    entered[0].enter_context(mode)

            def end(*_: Any) -> None:
                entered.pop().close()

            handles = [
                self.model.register_forward_pre_hook(begin, prepend=True),
                self.model.register_forward_hook(end, always_call=True),
            ]
            before, self.within = self.within, True
            try:
                yield self.model
            finally:
                self.within = before
                for handle in handles:
                    handle.remove()

    def divided(
        self, route: Route, leaves: list[Any], done: WeakIdKeyDictionary
    ) -> list[Any]:
        """The arguments of a call, those with factors divided by them: once for all readers, as ``done`` remembers."""
        found = list(leaves)
        for place, name in route.divided.items():
            value = leaves[place]
            if value not in done:
                done[value] = {}
            known: dict[str, Tensor] = done[value]
            if f"/{name}" not in known:
                known[f"/{name}"] = value / self.factors[_key(name)]
            found[place] = known[f"/{name}"]
        return found

    def divide_(
        self, name: str, factors: Tensor, places: Iterable[tuple[str, int]]
    ) -> None:
        """From now on these places of these sites read values divided by ``factors``, which broadcast to them."""
        self.factors[_key(name)] = nn.Parameter(
            factors.detach().clone(), requires_grad=False
        )
        for site, place in places:
            self.routes[site].divided[place] = name

    @property
    def notes(self) -> dict[str, str]:
        """What could not be scaled as it should, by the quantizer's name: constant values, scales that are too small."""
        return {
            name: quantizer.note for name, quantizer in self.named() if quantizer.note
        }

    def settle_(self) -> None:
        """After calibration: what it never reached runs in fp32, and its row says so."""
        never = {n for n, q in self.named() if not q.dynamic and q.scale is None}
        for site, route in list(self.routes.items()):
            if not never & {*route.uses.values(), route.output}:
                continue
            del self.routes[site]
            reason = "calibration never reached it"
            self.rows[:] = [
                Row(r.site, "fp32", reason) if r.site == site else r for r in self.rows
            ]
        for name in never:
            del self.quantizers[_key(name)]

    def missed(self, site: str) -> None:
        """A call that calibration did not see was made: it is counted, and said once."""
        self.unseen[site] += 1
        if self.unseen[site] == 1:
            text = f"{site} was never called while the model was calibrated: it runs in fp32"
            warnings.warn(text, RuntimeWarning, stacklevel=8)


class _Handler:
    """Passes operands and results of the routed calls through their quantizers, each value once."""

    def __init__(self, owner: QuantizedModel) -> None:
        self.owner = owner
        self.done: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def before_write(self, tensor: Tensor) -> None:
        """What was made of a tensor that is about to change holds no longer, nor of other views of its memory."""
        forget(self.done, tensor)

    def call(self, call: Call) -> Any:
        """Run the call as its route says."""
        site = str(call.site)
        route = self.owner.routes.get(site)
        if route is None or site in self.owner.off:
            result = call.run()
            if site not in self.owner.known and float_tensors(result):
                self.owner.passing.unknown(self.owner, site)
            return result
        leaves, inplace = (
            self.owner.divided(route, call.leaves, self.done),
            call.operator.inplace,
        )
        for place, name in route.uses.items():
            # what is about to be written over may be needed by the gradient of its quantizer
            leaves[place] = self.pass_on(
                name, leaves[place].clone() if inplace and place == 0 else leaves[place]
            )
        if route.executes is not None:
            return execute(replace(call, leaves=leaves), route.executes, straight)
        if route.bias >= 0:
            readers = [self.owner.quantizer(n) for n in route.uses.values()]
            leaves[route.bias] = self.owner.passing.bias(
                site, leaves[route.bias], readers
            )
        result = self.owner.passing.result(site, call.again(leaves))
        if route.output:
            result = self.pass_on(route.output, result)
        return call.leaves[0].copy_(result) if inplace else result

    def pass_on(self, name: str, value: Tensor) -> Tensor:
        """The value behind its quantizer; the same tensor for every reader."""
        if value not in self.done:
            self.done[value] = {}
        known: dict[str, Tensor] = self.done[value]
        if name not in known:
            known[name] = self.owner.passing.value(
                name, self.owner.quantizers[_key(name)], value
            )
        return known[name]


def forget(done: WeakIdKeyDictionary, tensor: Tensor) -> None:
    """Drop what is remembered of tensors in the memory of one that is about to be written."""
    memory = (
        tensor.untyped_storage()._cdata
    )  # also of tensors without data, as torch.export has them
    for known in [t for t in done if t.untyped_storage()._cdata == memory]:
        del done[known]


def _key(name: str) -> str:
    return name.replace(".", "__dot__")
