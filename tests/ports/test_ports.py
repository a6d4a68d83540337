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


def compared(port: Port, folder, *, tensors: bool):
    reference, candidate = written(port, folder / "files")
    workload = Workload.load(reference)
    record(Variant("reference", workload), folder / "reference", port.steps)
    record(variant(workload, candidate), folder / "candidate", port.steps)
    return roundoff.compare(
        reference=folder / "reference", candidate=folder / "candidate", tensors=tensors
    )


@pytest.mark.parametrize("tensors", [True, False], ids=["tensors", "statistics"])
@pytest.mark.parametrize("title", RIGHT)
def test_a_right_port_is_not_called_wrong(title, tensors, tmp_path):
    [port] = [port for port in ports() if port.title == title]
    comparison = compared(port, tmp_path, tensors=tensors)
    assert comparison.agrees
    assert not comparison.culprits()


@pytest.mark.parametrize("title", WRONG)
def test_the_wrong_line_or_parameter_is_named_first(title, tmp_path):
    [port] = [port for port in faults() if port.title == title]
    comparison = compared(port, tmp_path, tensors=True)
    assert port.names_truth(comparison.culprits()[0])
