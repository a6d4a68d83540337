"""What AMCT's configuration files ask for, in our terms: which layers, how many bits, which algorithms.

AMCT's names → ours: ``ifmr_quantize`` ``ifmr``, ``hfmg_quantize`` ``hfmg`` and, in training, ``ulq_quantize`` ``ulq``
(observers of activations); ``arq_quantize`` and ``arq_retrain`` ``arq``, ``ada_quantize`` ``adaround``,
``ulq_retrain`` ``ulq`` (weights); ``dmq_balancer`` is ``dmq_alpha``. Parameters keep AMCT's names and defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from roundoff.errors import QuantizationError, examples
from roundoff.export.amct.read_record import OPERATORS
from roundoff.plan import place

IFMR = {
    "search_range": (0.7, 1.3),
    "search_step": 0.01,
    "max_percentile": 0.999999,
    "min_percentile": 0.999999,
}
HFMG = {"num_of_bins": 4096}
ADAROUND = {
    "num_iteration": 10000,
    "reg_param": 0.01,
    "beta_range": (20.0, 2.0),
    "warm_start": 0.2,
}
#: layers with a scale for each output channel, unless the file says otherwise
CHANNEL_WISE = tuple(kind for kind in OPERATORS if kind.startswith("Conv"))
T = TypeVar("T")


@dataclass(frozen=True)
class LayerConfig:
    """How one layer is quantized; the defaults are AMCT's.

    Attributes:
        skip: stay in high precision.
        weight_bits, per_channel, weight_algorithm, weight_parameters: of the weight; ``per_channel=None`` (only before
            :meth:`QuantizeConfig.for_layers`): convolutions have a scale for each output channel, others one.
        activation_bits, symmetric, observer, observer_parameters: of the input; ``symmetric=None`` (only before): as the
            next wider level says. The observer is ``make_observer(observer, granularity, **observer_parameters)``.
        dmq_alpha: balance the input's channels against the weight's with this exponent; ``None``: don't.
        cache_per_channel: of a ``kv_cache`` file: a scale for each channel of keys and values.
    """

    skip: bool = False
    weight_bits: int = 8
    per_channel: bool | None = None
    weight_algorithm: str = "arq"
    weight_parameters: Mapping[str, Any] = field(default_factory=dict)
    activation_bits: int = 8
    symmetric: bool | None = None
    observer: str = "ifmr"
    observer_parameters: Mapping[str, Any] = field(default_factory=lambda: dict(IFMR))
    dmq_alpha: float | None = None
    cache_per_channel: bool = False


@dataclass(frozen=True)
class Pruning:
    """How one layer is pruned: a share of its filters, or (``ratio=None``) the 2 smallest of each 4 weights.

    ``multiple_of_16``: as many filters are kept as the device computes at once. ``update_freq``: batches between two
    choices of the weights that are pruned; 0: one choice.
    """

    ratio: float | None = None
    multiple_of_16: bool = True
    update_freq: int = 0


@dataclass(frozen=True)
class Levels(Generic[T]):
    """What is said for one layer, for a type of layers, and for all; the first that says something decides, whole.

    >>> levels = Levels("all", {"Linear": "linear ones"}, {"head": "the head"})
    >>> levels.of("head", "Linear"), levels.of("fc", "Linear"), levels.of("c1", "Conv2d")
    ('the head', 'linear ones', 'all')
    """

    common: T | None = None
    types: Mapping[str, T] = field(default_factory=dict)
    layers: Mapping[str, T] = field(default_factory=dict)

    def of(self, layer: str, kind: str) -> T | None:
        if layer in self.layers:
            return self.layers[layer]
        return self.types.get(kind, self.common)


@dataclass(frozen=True)
class QuantizeConfig:
    """One configuration file.

    Attributes:
        kind: ``calibration``, ``retrain`` (training, pruning too) or ``kv_cache``.
        batch_num: batches for calibration.
        symmetric: of activations, where no level says.
        quantize, prune: what the levels say.
        only: the layers of a ``kv_cache`` file; all others are skipped.
        fold: fold BatchNorm into the layer before, except in ``skip_fold``.
        fp16_scales: scales of activations are rounded to fp16 (``FORCE_FP16_QUANT``).
    """

    kind: str = "calibration"
    batch_num: int = 1
    symmetric: bool = False
    quantize: Levels[LayerConfig] = field(default_factory=lambda: Levels[LayerConfig]())
    prune: Levels[Pruning] = field(default_factory=lambda: Levels[Pruning]())
    skip_layers: tuple[str, ...] = ()
    skip_types: tuple[str, ...] = ()
    prune_skip_layers: tuple[str, ...] = ()
    prune_skip_types: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    fold: bool = True
    skip_fold: tuple[str, ...] = ()
    fp16_scales: bool = False

    def for_layers(self, layers: Mapping[str, str]) -> dict[str, LayerConfig]:
        """The configuration of each layer (module path → class name) that AMCT quantizes, nothing left open.

        A layer's own configuration goes before that of its type, and that before the common one, each as a whole: what
        the first of them leaves out has its default, not the wider level's value. Only ``symmetric`` is handed down.

        Raises:
            QuantizationError: the file names a layer that is not there, or a type that AMCT doesn't quantize, with
                its line and the nearest names.

        Example:
            >>> config = QuantizeConfig(quantize=Levels(LayerConfig(weight_bits=4)), skip_types=("Linear",))
            >>> of = config.for_layers({"c1": "Conv2d", "r1": "ReLU", "fc": "Linear"})
            >>> [(name, c.skip, c.weight_bits, c.per_channel, c.symmetric) for name, c in of.items()]
            [('c1', False, 4, True, False), ('fc', True, 4, False, False)]
        """
        self._check_names(layers)
        found = {}
        common = (
            self.quantize.common.symmetric if self.quantize.common is not None else None
        )
        for name, kind in layers.items():
            if kind not in OPERATORS:
                continue
            own = self.quantize.of(name, kind) or LayerConfig()
            skip = own.skip or name in self.skip_layers or kind in self.skip_types
            skip = skip or bool(
                self.only and name not in (*self.only, *self.quantize.layers)
            )
            symmetric = next(
                (s for s in (own.symmetric, common) if s is not None), self.symmetric
            )
            channels = (
                kind in CHANNEL_WISE if own.per_channel is None else own.per_channel
            )
            found[name] = replace(
                own, skip=skip, symmetric=symmetric, per_channel=channels
            )
        return found

    def pruning(self, layers: Mapping[str, str]) -> dict[str, Pruning]:
        """How each layer is pruned, those alone that are; errors as of :meth:`for_layers`."""
        self._check_names(layers)
        found = {}
        for name, kind in layers.items():
            own = self.prune.of(name, kind)
            left_alone = name in self.prune_skip_layers or kind in self.prune_skip_types
            if own is not None and kind in OPERATORS and not left_alone:
                found[name] = own
        return found

    def _check_names(self, layers: Mapping[str, str]) -> None:
        skipped = (*self.skip_layers, *self.prune_skip_layers, *self.skip_fold)
        _known(
            (*skipped, *self.only, *self.quantize.layers, *self.prune.layers),
            layers,
            "the model has no layer",
        )
        types = (
            *self.skip_types,
            *self.prune_skip_types,
            *self.quantize.types,
            *self.prune.types,
        )
        _known(types, OPERATORS, "AMCT quantizes no layers of type")


@dataclass(frozen=True)
class AutoPrune:
    """Search of pruning ratios: how many times fewer bit operations, and at most what share of one layer's filters."""

    compress_ratio: float
    multiple_of_16: bool = True
    max_prune_ratio: float = 1.0
    test_iteration: int = 1
    override_prune_cfg: str = ""


def _known(names: Iterable[str], known: Iterable[str], what: str) -> None:
    known = list(known)
    for name in names:
        if name not in known:
            raise QuantizationError(
                f"{what} {name}",
                where=place(name) or None,
                expected=f"such as {examples(name, known)}",
            )


def check_ranges(config: LayerConfig, where: str) -> LayerConfig:
    """The same configuration. Raises ``QuantizationError`` for a value that AMCT refuses."""
    own = config.observer_parameters
    weight = config.weight_parameters
    low, high = own.get("search_range", (0.7, 1.3))
    rules = {
        "weight bits": (
            config.weight_bits in (4, 6, 7, 8),
            config.weight_bits,
            "4, 6, 7 or 8",
        ),
        "activation bits": (
            config.activation_bits in (4, 8, 16),
            config.activation_bits,
            "4, 8 or 16",
        ),
        "search_range": (0 < low < high, (low, high), "0 < start < end"),
        "search_step": (
            0 < own.get("search_step", 0.01) <= high - low + 1e-9,
            own.get("search_step"),
            "above 0 and no more than the search range",
        ),
        **{
            name: (
                0.5 < own.get(name, 1.0) <= 1.0,
                own.get(name),
                "above 0.5, at most 1",
            )
            for name in ("max_percentile", "min_percentile")
        },
        "num_of_bins": (
            own.get("num_of_bins", 4096) in (1024, 2048, 4096, 8192),
            own.get("num_of_bins"),
            "1024, 2048, 4096 or 8192",
        ),
        "migration_strength": (
            config.dmq_alpha is None or 0.2 <= config.dmq_alpha <= 0.8,
            config.dmq_alpha,
            "0.2 to 0.8",
        ),
        "beta_range": (
            weight.get("beta_range", (2, 1))[0]
            > weight.get("beta_range", (2, 1))[1]
            > 0,
            weight.get("beta_range"),
            "start > end > 0",
        ),
        **{
            name: (0 < weight.get(name, 0.5) < 1, weight.get(name), "between 0 and 1")
            for name in ("warm_start", "reg_param")
        },
    }
    for name, (holds, got, expected) in rules.items():
        if not holds:
            raise QuantizationError(
                f"{name} out of range", where=where, expected=expected, got=str(got)
            )
    return config
