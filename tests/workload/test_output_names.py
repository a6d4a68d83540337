"""roundoff.workload.output_names: which tensors are judged together, and what names them."""

from __future__ import annotations

import pytest
import torch

from roundoff.workload import Judged, is_output, output_names

CACHE = [f"past_key_values.{layer}.{part}" for layer in range(12) for part in range(2)]


@pytest.mark.parametrize(
    ("tensors", "outputs"),
    [
        ([], []),
        (["output"], ["output"]),
        (["cls", "price"], ["cls", "price"]),
        ([str(n) for n in range(8)], [str(n) for n in range(8)]),
        ([str(n) for n in range(9)], ["*"]),
        (["logits", *CACHE], ["logits", "past_key_values.*"]),
        ([f"{k}_{n}" for k in ("cls", "box") for n in range(5)], ["cls_*", "box_*"]),
        # nine names that differ in more than numbers, below three keys
        (
            [f"{k}.{c}" for k in ("a", "b", "c") for c in ("x", "y", "z")],
            ["a.*", "b.*", "c.*"],
        ),
        (["ab", "bc", "cd", "de", "ef", "fg", "gh", "hi", "ij"], ["*"]),
    ],
)
def test_outputs_of_tensors(tensors, outputs):
    names = output_names(tensors)
    assert list(names) == tensors
    assert list(dict.fromkeys(names.values())) == outputs


@pytest.mark.parametrize(
    ("apart", "outputs"),
    [
        (["past_key_values.3.0"], {"past_key_values.3.0", "past_key_values.*"}),
        (["past_key_values.3"], {"past_key_values.3", "past_key_values.*"}),
        (["past_key_values.*"], {"past_key_values.*"}),
        (["past_key_values"], {"past_key_values.*"}),
        (["past_key_values.3", "past_key_values.3.0"], None),
        (["nothing"], {"past_key_values.*"}),
    ],
)
def test_patterns_that_name_a_part_of_many(apart, outputs):
    names = output_names(["logits", *CACHE], apart)
    assert names["logits"] == "logits"
    if outputs is None:
        assert names["past_key_values.3.0"] == "past_key_values.3.0"
        assert names["past_key_values.3.1"] == "past_key_values.3.1"
    else:
        assert {names[name] for name in CACHE} == outputs


def test_what_a_pattern_names():
    assert is_output("a", "a.b.c")
    assert is_output("a.*.c", "a.b.c")
    assert is_output("a.*", "a.*")
    assert not is_output("a.b.c.d", "a.b.c")
    assert not is_output("A", "a")


ROWS = torch.ones(2, 3)
NUMBER = torch.tensor(0.5)


@pytest.mark.parametrize(
    ("output", "judged", "names"),
    [
        ({"loss": NUMBER, "logits": ROWS}, Judged(), ["logits"]),
        ({"out": {"loss": NUMBER}, "logits": ROWS}, Judged(), ["logits"]),
        ((NUMBER, ROWS), Judged(), ["1"]),
        ({"loss": torch.ones(1), "logits": ROWS}, Judged(), ["logits"]),
        ({"price": torch.ones(1), "cls": ROWS}, Judged(), ["price", "cls"]),
        ({"loss": NUMBER, "aux": NUMBER}, Judged(), ["loss", "aux"]),
        (NUMBER, Judged(), ["output"]),
        ({"loss": NUMBER, "logits": ROWS}, Judged("loss"), ["loss"]),
        (
            {"loss": NUMBER, "logits": ROWS},
            Judged(apart=("loss",)),
            ["loss", "logits"],
        ),
        ({"loss": NUMBER, "logits": ROWS}, Judged(apart=("*",)), ["logits"]),
        ({"a": (ROWS, ROWS), "b": ROWS}, Judged("a"), ["a.0", "a.1"]),
        ({"a": (ROWS, ROWS), "b": ROWS}, Judged("a.*"), ["a.0", "a.1"]),
        ({"a": ROWS}, Judged("b"), []),
        (torch.arange(3), Judged(), []),
    ],
)
def test_what_counts(output, judged, names):
    assert list(judged.tensors(output)) == names
