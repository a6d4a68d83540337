"""Outlier channels of values kept in full precision beside the codes.

LLM.int8() (Dettmers et al., arXiv:2208.07339, equation 8): ``y = x_O W_O + x̂ Ŵ``, O
the channels whose magnitude reaches a threshold; scales are chosen without them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from roundoff.errors import QuantizationError
from roundoff.quantize.calibration import MEASURED_BATCHES, Calibration
from roundoff.quantize.channels.input_statistics import (
    InputStatistics,
    input_statistics,
)
from roundoff.quantize.channels.smooth import simulated_db
from roundoff.quantize.graph import Graph
from roundoff.quantize.model import QuantizedModel
from roundoff.quantize.weights.output_error import Gain
from roundoff.workload import Workload


@dataclass(frozen=True)
class OutlierColumns:
    """Channels of one value that stay in full precision beside its codes.

    Attributes:
        value: its name in the graph.
        readers: the sites that read it, whose weights keep these columns too.
        columns: the channels, ascending.
        channels: how many the value has.
    """

    value: str
    readers: tuple[str, ...]
    columns: tuple[int, ...]
    channels: int


def split_outliers_(
    model: QuantizedModel,
    graph: Graph,
    workload: Workload,
    *,
    threshold: float = 6.0,
    share: float = 0.05,
    batches: Iterable[Any] | None = None,
    measured: int = MEASURED_BATCHES,
) -> tuple[list[OutlierColumns], Gain]:
    """Keep outlier channels of values, and the columns that read them, exact, in place.

    Args:
        model: not calibrated yet.
        graph: of the model.
        workload: whose model it is.
        threshold: of magnitudes; 6.0 in the paper, for values behind a LayerNorm.
        share: at most so many of a value's channels, those with the largest magnitude.
        batches: that magnitudes are taken from; by default the workload's.
        measured: batches of which the output's SQNR is measured, as in ``smooth_``.

    Returns:
        One row for each value with outliers, and the gain of the output, as simulated.

    Raises:
        QuantizationError: a threshold that is not positive, or a share outside [0, 1].
    """
    if not threshold > 0 or not 0 <= share <= 1:
        raise QuantizationError(
            "no outliers can be found so",
            where="split_outliers_",
            got=f"{threshold}, {share}",
            expected="threshold > 0 and share in [0, 1]",
        )
    calibration = Calibration.of(model, workload, batches, graph)
    before = simulated_db(calibration, measured)
    rows = []
    for inputs in input_statistics(calibration):
        columns = _outliers(inputs, threshold, share)
        row = _keep_exact_(model, inputs, columns)
        if row.columns and row.readers:
            rows.append(row)
    after = simulated_db(calibration, measured) if rows else before
    count = sum(len(row.columns) for row in rows)
    note = f"{count} channels of {len(rows)} values"
    return rows, Gain("outliers", before, after, note)


def _outliers(inputs: InputStatistics, threshold: float, share: float) -> Tensor:
    """The channels that reach the threshold, ascending, at most ``share`` of all."""
    order = inputs.largest.argsort(descending=True)
    order = order[: int(share * len(inputs.largest))]
    return order[inputs.largest[order] >= threshold].sort().values


def _keep_exact_(
    model: QuantizedModel, inputs: InputStatistics, columns: Tensor
) -> OutlierColumns:
    """Keep these channels of a value exact where no grouped convolution reads it."""
    readers = [reader for reader in inputs.readers if reader.groups == 1]
    for reader in readers if len(columns) else ():
        value = model.routes[reader.site].uses.get(reader.place)
        for name in (reader.weight, value):
            if name is not None:
                model.quantizer(name).exact = columns.clone()
    sites = tuple(reader.site for reader in readers)
    kept = tuple(columns.tolist())
    return OutlierColumns(inputs.value, sites, kept, len(inputs.largest))
