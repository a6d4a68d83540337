"""What AMCT's configuration files ask for: layers, bits and algorithms, in our terms.

AMCT's names → ours: ``ifmr_quantize`` ``ifmr``, ``hfmg_quantize`` ``hfmg`` and, in
training, ``ulq_quantize`` ``ulq`` (observers of activations); ``arq_quantize`` and
``arq_retrain`` ``arq``, ``ada_quantize`` ``adaround``, ``ulq_retrain`` ``ulq``
(weights); ``dmq_balancer`` is ``dmq_alpha``. Parameters keep AMCT's names and defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

from roundoff.errors import QuantizationError, examples
from roundoff.export.amct.read_record import OPERATORS
from roundoff.plan import place

IFMR: dict[str, Any] = {
    "search_range": (0.7, 1.3),
    "search_step": 0.01,
    "max_percentile": 0.999999,
    "min_percentile": 0.999999,
}
HFMG: dict[str, Any] = {"num_of_bins": 4096}
ADAROUND: dict[str, Any] = {
    "num_iteration": 10000,
    "reg_param": 0.01,
    "beta_range": (20.0, 2.0),
    "warm_start": 0.2,
}
#: Layers with a scale for each output channel, unless the file says otherwise
CHANNEL_WISE = tuple(kind for kind in OPERATORS if kind.startswith("Conv"))
T = TypeVar("T")


@dataclass(frozen=True)
class LayerConfig:
    """How one layer is quantized; the defaults are AMCT's.

    Two fields may be None, but only before :meth:`QuantizeConfig.for_layers`:
    ``per_channel`` (convolutions then have a scale for each output channel, others one)
    and ``symmetric`` (as the next wider level says).

    Attributes:
        skip: stay in high precision.
        weight_bits, weight_algorithm, weight_parameters: of the weight.
        per_channel: the weight has a scale for each output channel.
        activation_bits, symmetric: of the input.
        observer, observer_parameters: of the input, which
            ``make_observer(observer, granularity, **observer_parameters)`` observes.
        dmq_alpha: balance the input's channels against the weight's with this exponent;
            None: don't.
        cache_per_channel: of a ``kv_cache`` file: a scale for each channel of keys and
            values.
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
    """How one layer is pruned.

    Attributes:
        ratio: share of its filters; None: the 2 smallest of each 4 weights instead.
        multiple_of_16: keep as many filters as the device computes at once.
        update_freq: batches between two choices of the pruned weights; 0: one choice.
    """

    ratio: float | None = None
    multiple_of_16: bool = True
    update_freq: int = 0


@dataclass(frozen=True)
class Levels(Generic[T]):
    """Settings for one layer, for a type of layers, and for all.

    The first of these that has a setting decides, as a whole.

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
        quantize, prune: settings of layers, of their types, and of all.
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
        """Return the configuration of each layer that AMCT quantizes, nothing left open.

        A layer's own configuration goes before that of its type, and that before the
        common one, each as a whole: what the first of them leaves out has its default,
        not the wider level's value. Only ``symmetric`` is handed down.

        Args:
            layers: module path → class name.

        Raises:
            QuantizationError: the file names a layer that is not there, or a type that
                AMCT doesn't quantize, with its line and the nearest names.

        Example:
            >>> four = LayerConfig(weight_bits=4)
            >>> config = QuantizeConfig(quantize=Levels(four), skip_types=("Linear",))
            >>> of = config.for_layers({"c1": "Conv2d", "r1": "ReLU", "fc": "Linear"})
            >>> [(name, c.skip, c.per_channel, c.symmetric) for name, c in of.items()]
            [('c1', False, True, False), ('fc', True, False, False)]
            >>> of["c1"].weight_bits, of["fc"].weight_bits
            (4, 4)
        """
        self._check_names(layers)
        return {
            name: self._for_layer(name, kind)
            for name, kind in layers.items()
            if kind in OPERATORS
        }

    def _for_layer(self, name: str, kind: str) -> LayerConfig:
        config = self.quantize.of(name, kind) or LayerConfig()
        per_channel = config.per_channel
        if per_channel is None:
            per_channel = kind in CHANNEL_WISE
        return replace(
            config,
            skip=config.skip or self._is_skipped(name, kind),
            symmetric=self._is_symmetric(config),
            per_channel=per_channel,
        )

    def _is_skipped(self, name: str, kind: str) -> bool:
        if name in self.skip_layers or kind in self.skip_types:
            return True
        return bool(self.only) and name not in (*self.only, *self.quantize.layers)

    def _is_symmetric(self, config: LayerConfig) -> bool:
        """Return the setting of the narrowest level that has one."""
        if config.symmetric is not None:
            return config.symmetric
        common = self.quantize.common
        if common is not None and common.symmetric is not None:
            return common.symmetric
        return self.symmetric

    def pruning(self, layers: Mapping[str, str]) -> dict[str, Pruning]:
        """Return how each pruned layer is pruned; errors as of :meth:`for_layers`."""
        self._check_names(layers)
        pruned = {}
        for name, kind in layers.items():
            pruning = self.prune.of(name, kind)
            is_skipped = name in self.prune_skip_layers or kind in self.prune_skip_types
            if pruning is not None and kind in OPERATORS and not is_skipped:
                pruned[name] = pruning
        return pruned

    def _check_names(self, layers: Mapping[str, str]) -> None:
        names = (
            *self.skip_layers,
            *self.prune_skip_layers,
            *self.skip_fold,
            *self.only,
            *self.quantize.layers,
            *self.prune.layers,
        )
        types = (
            *self.skip_types,
            *self.prune_skip_types,
            *self.quantize.types,
            *self.prune.types,
        )
        _check_known(names, layers, "the model has no layer")
        _check_known(types, OPERATORS, "AMCT quantizes no layers of type")


@dataclass(frozen=True)
class AutoPrune:
    """Search of pruning ratios.

    Attributes:
        compress_ratio: how many times fewer bit operations.
        multiple_of_16: as of :class:`Pruning`.
        max_prune_ratio: largest share of one layer's filters.
        test_iteration: batches of a test.
        override_prune_cfg: file with settings of single layers.
    """

    compress_ratio: float
    multiple_of_16: bool = True
    max_prune_ratio: float = 1.0
    test_iteration: int = 1
    override_prune_cfg: str = ""


def _check_known(names: Iterable[str], choices: Iterable[str], problem: str) -> None:
    choices = list(choices)
    for name in names:
        if name not in choices:
            raise QuantizationError(
                f"{problem} {name}",
                where=place(name) or None,
                expected=f"such as {examples(name, choices)}",
            )


class _Rule(NamedTuple):
    """A bound of AMCT on one value of a configuration."""

    name: str
    holds: bool
    got: Any
    expected: str


def check_ranges(config: LayerConfig, where: str) -> LayerConfig:
    """Return the same configuration.

    Raises:
        QuantizationError: a value that AMCT refuses.
    """
    rules = (
        *_bit_rules(config),
        *_observer_rules(config.observer_parameters),
        _balance_rule(config.dmq_alpha),
        *_adaround_rules(config.weight_parameters),
    )
    for rule in rules:
        if not rule.holds:
            raise QuantizationError(
                f"{rule.name} out of range",
                where=where,
                expected=rule.expected,
                got=str(rule.got),
            )
    return config


def _bit_rules(config: LayerConfig) -> Iterator[_Rule]:
    weight = config.weight_bits
    activation = config.activation_bits
    yield _Rule("weight bits", weight in (4, 6, 7, 8), weight, "4, 6, 7 or 8")
    yield _Rule("activation bits", activation in (4, 8, 16), activation, "4, 8 or 16")


def _observer_rules(parameters: Mapping[str, Any]) -> Iterator[_Rule]:
    values = {**IFMR, **HFMG, **parameters}
    low, high = values["search_range"]
    yield _Rule("search_range", 0 < low < high, (low, high), "0 < start < end")
    step = values["search_step"]
    fits = 0 < step <= high - low + 1e-9
    expected = "above 0 and no more than the search range"
    yield _Rule("search_step", fits, step, expected)
    for name in ("max_percentile", "min_percentile"):
        fits = 0.5 < values[name] <= 1.0
        yield _Rule(name, fits, values[name], "above 0.5, at most 1")
    bins = values["num_of_bins"]
    fits = bins in (1024, 2048, 4096, 8192)
    yield _Rule("num_of_bins", fits, bins, "1024, 2048, 4096 or 8192")


def _balance_rule(alpha: float | None) -> _Rule:
    fits = alpha is None or 0.2 <= alpha <= 0.8
    return _Rule("migration_strength", fits, alpha, "0.2 to 0.8")


def _adaround_rules(parameters: Mapping[str, Any]) -> Iterator[_Rule]:
    values = {**ADAROUND, **parameters}
    start, end = values["beta_range"]
    yield _Rule("beta_range", start > end > 0, (start, end), "start > end > 0")
    for name in ("warm_start", "reg_param"):
        yield _Rule(name, 0 < values[name] < 1, values[name], "between 0 and 1")
