"""Right ports are not called wrong, and what a wrong one does is named."""

from __future__ import annotations

import pytest

import roundoff
from roundoff.plan import Variant, variant
from roundoff.verbs.diagnose_candidate import record
from roundoff.workload import Workload

from . import Port, faults, ports, written

RIGHT = (
    "cnn/nhwc",
    "gpt/split_heads",
    "lstm/tf_cell",
    "mixer/einsums",
    "wavenet/taps",
    "seq2seq/by_time",
)
#: One for each thing to name: an operator, a constant, a parameter; and a constant that does
#: less than the rounding of a network in fp32.
WRONG = (
    "cnn/functional: stride after",
    "cnn/folded: average for maximum",
    "unet/flat: one group",
    "gpt/conv1d: square weight is not transposed",
    "vit/paddle_like: epsilon of another library",
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """``recorded(port)``: the runs of its reference and its own, once for both ways."""
    folders = {}

    def record_both(port: Port):
        if port.title not in folders:
            folder = tmp_path_factory.mktemp("port")
            reference, candidate = written(port, folder / "files")
            workload = Workload.load(reference)
            record(Variant("reference", workload), folder / "reference", port.steps)
            record(variant(workload, candidate), folder / "candidate", port.steps)
            folders[port.title] = folder
        folder = folders[port.title]
        return {"reference": folder / "reference", "candidate": folder / "candidate"}

    return record_both


@pytest.mark.parametrize("tensors", [True, False], ids=["tensors", "statistics"])
@pytest.mark.parametrize("title", RIGHT)
def test_a_right_port_is_not_called_wrong(title, tensors, recorded):
    [port] = [port for port in ports() if port.title == title]
    comparison = roundoff.compare(**recorded(port), tensors=tensors)
    assert comparison.agrees
    assert not comparison.culprits()


@pytest.mark.parametrize("title", WRONG)
def test_the_wrong_line_or_parameter_is_named_first(title, recorded):
    [port] = [port for port in faults() if port.title == title]
    comparison = roundoff.compare(**recorded(port), tensors=True)
    assert port.names_truth(comparison.culprits()[0])
