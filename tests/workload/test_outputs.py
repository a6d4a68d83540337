"""roundoff.workload.outputs: which tensors of an output count, and what the user reads when there are none."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from roundoff.errors import WorkloadError
from roundoff.workload.outputs import named_tensors, target_tensors

Pair = namedtuple("Pair", "hidden ids")
T, I = torch.ones(2, 3), torch.arange(3)  # noqa: E741


@dataclass
class Output:
    logits: torch.Tensor
    states: tuple


@pytest.mark.parametrize(
    ("output", "names"),
    [
        (T, ["output"]),
        ((T, I, T), ["0", "2"]),
        ([T, (T, [T])], ["0", "1.0", "1.1.0"]),
        ({"logits": T, "ids": I, "none": None}, ["logits"]),
        (OrderedDict(a={"b": T}), ["a.b"]),
        (Pair(T, I), ["0"]),
        (Output(T, (T, I)), ["logits", "states.0"]),
        ({1: T}, ["1"]),
        ((T, torch.zeros(0, 3)), ["0"]),  # a tensor without elements is left out
        ((T.half(), T.double(), T.bfloat16()), ["0", "1", "2"]),
    ],
)
def test_names(output, names):
    assert list(named_tensors(output)) == names


@pytest.mark.parametrize(
    "output",
    [
        I,
        (I, I > 1),
        {},
        None,
        "text",
        (T > 0,),
        torch.zeros(0),
        T.to(torch.complex64),
        Output,
    ],
)
def test_an_output_without_numbers(output):
    with pytest.raises(WorkloadError) as error:
        target_tensors(output, None)
    assert "no floating-point tensor" in str(error.value)
    assert "before argmax" in str(error.value)


def test_the_dtype_of_an_integer_output_is_named():
    with pytest.raises(WorkloadError, match="Tensor of torch.int64"):
        target_tensors(I, None)


def test_a_part_by_name_or_by_its_beginning():
    output = {"hidden": (T, 2 * T), "hidden_last": 3 * T}
    assert list(target_tensors(output, None)) == ["hidden.0", "hidden.1", "hidden_last"]
    assert list(target_tensors(output, "hidden")) == ["hidden.0", "hidden.1"]
    assert torch.equal(target_tensors(output, "hidden.1")["hidden.1"], 2 * T)
    assert list(target_tensors(output, "hidden_last")) == ["hidden_last"]


def test_a_part_that_is_not_there():
    with pytest.raises(WorkloadError) as error:
        target_tensors({"logits": T, "aux": T}, "logit")
    text = str(error.value)
    assert "no part named 'logit'" in text
    assert "logits, aux, 'loss', or the name of a site" in text
