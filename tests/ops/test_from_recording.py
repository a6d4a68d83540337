"""Calls that a recording names: which are run again, and where."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

from roundoff.ops import (
    Reason,
    RepeatedCall,
    base,
    calls_of_others,
    operators_that,
    run_recorded,
)
from roundoff.ops.other_process import _limit

X = torch.linspace(-1, 1, 12).reshape(3, 4)
CHANNELS = torch.ones(1, 2, 4, 4)


def call(overload, *args, tensors=(), dtype=torch.float64, **kwargs):
    """Run a call whose arguments are as JSON has them."""
    text = json.dumps([list(args), kwargs])
    return run_recorded(overload, text, lambda record: tensors[record], dtype=dtype)


def record(number):
    return {"record": number}


SAFE = operators_that("are safe from a recording")


def test_no_operator_of_the_list_draws_reads_files_or_keeps_memory():
    """torch's own schemas and tags say what an operator does beside computing."""
    harmful = {"Generator", "Storage", "Stream"}
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if space != "aten" or base(packet) not in SAFE:
            continue
        func = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
        if func is None:
            continue
        schema = func._schema
        assert not {str(a.type) for a in schema.arguments} & harmful, name
        assert not any(a.name in ("filename", "url") for a in schema.arguments), name
    assert not SAFE & operators_that("draw")
    assert not SAFE & operators_that("leave memory unwritten")


REFUSED = {
    "a file": ("aten.from_file.default", ["{file}", True, 8]),
    "another's memory": ("aten.set_.source_Tensor", [record(0), record(0)]),
    "a size": ("aten.resize_.default", [record(0), [2**40]]),
    "sparse indices": ("aten.sparse_coo_tensor.indices", [record(1), record(0)]),
    "a collective": ("c10d.barrier.default", [record(0), None, [0], -1]),
    "attributes": ("__class__.mro.default", []),
    "a library": ("load_library.x.y", []),
    "no name": ("", []),
    "a quantized tensor": ("quantized.linear.default", [record(0), 1.0, 0]),
    "an index of a gradient": (
        "aten.embedding_dense_backward.default",
        [record(0), record(1), 2, -1, False],
    ),
    "too few channels": (
        "aten.native_batch_norm.default",
        [record(2), record(0), None, None, None, True, 0.1, 1e-5],
    ),
    "a norm without statistics": (
        "aten.native_batch_norm.default",
        [record(2), None, None, None, None, False, 0.1, 1e-5],
    ),
    "a norm without statistics of its own": (
        "aten._native_batch_norm_legit.no_stats",
        [record(2), None, None, False, 0.1, 1e-5],
    ),
    "an update of no statistics": (
        "aten._batch_norm_no_update.default",
        [record(2), None, None, None, None, 0.1, 1e-5],
    ),
    "no groups": (
        "aten.native_group_norm.default",
        [record(2), None, None, 1, 2, 16, 0, 1e-5],
    ),
    "sizes of a norm": (
        "aten.native_layer_norm.default",
        [record(0), [400], None, None, 1e-5],
    ),
    "a pool's index": (
        "aten.max_pool2d_with_indices_backward.default",
        [record(2), record(2), [1, 1], [1, 1], [0, 0], [1, 1], False, record(3)],
    ),
    "axes of a transform": ("aten._fft_r2c.default", [record(0), [7], 0, True]),
    "an axis from the end": ("aten._fft_r2c.default", [record(0), [-1], 0, True]),
    "too large a number": ("aten.add.Scalar", [record(0), 2**70]),
    "another type": ("aten.sum.dim_IntList", [record(0), "everything"]),
    "arguments that are none": ("aten.add.Tensor", ["x", "y"]),
    "too many arguments": ("aten.relu.default", [record(0)] * 9),
}
TENSORS = [
    X,
    torch.tensor([[0, 1, 2**40, -5]] * 3),
    CHANNELS,
    torch.full((1, 2, 4, 4), 2**40),
]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_run(name, tmp_path):
    overload, args = REFUSED[name]
    file = tmp_path / "written"
    args = [str(file) if arg == "{file}" else arg for arg in args]
    results = call(overload, *args, tensors=TENSORS)
    assert isinstance(results, Reason), results
    assert results.text
    assert not results.is_exact
    assert list(tmp_path.iterdir()) == []


def test_deep_arguments_are_no_arguments():
    text = "[" * 100_000 + "]" * 100_000
    results = run_recorded("aten.relu.default", text, lambda _: X, dtype=None)
    assert isinstance(results, Reason)
    assert "cannot be read" in results.text


def same(one, other):
    return [
        a is b is None or (a.stride() == b.stride() and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    ]


CALLS = [
    ("aten.mm.default", [record(0), record(1)], [X, X.T]),
    ("aten.add.Tensor", [record(0), record(0)], [X.T]),
    ("aten.native_layer_norm.default", [record(0), [4], None, None, 1e-5], [X]),
    ("aten.t.default", [record(0)], [X]),
    ("aten.sum.dim_IntList", [record(0), [0], False], [X]),
    (
        "aten._softmax_backward_data.default",
        [record(0), record(0), -1, {"dtype": "float32"}],
        [X],
    ),
    ("aten.abs.default", [record(0)], [X.to(torch.complex64)]),
    ("aten.cat.default", [[record(0), record(1)]], [X, torch.zeros(0)]),
]


def run(overload, args, tensors):
    text = json.dumps([args, {}])
    return run_recorded(
        overload, text, tensors.__getitem__, dtype=torch.float64, exact_as_is=True
    )


def test_another_process_gives_the_same_and_harms_nothing():
    expected = [run(*call) for call in CALLS]
    with calls_of_others():
        for call, results in zip(CALLS, expected, strict=True):
            assert all(same(results, run(*call))), call
        too_large = run("aten.zeros.default", [[2**40]], [])
        assert isinstance(too_large, Reason)
        assert not isinstance(run(*CALLS[0]), Reason)  # it goes on


def others(code):
    """Another process that begins well, and then does what ``code`` says."""
    return f"""
import json, os, sys, time
def read(count):
    return sys.stdin.buffer.read(count)
read(int.from_bytes(read(8), "little"))
text = json.dumps({{"tensors": []}}).encode()
def answer(text):
    sys.stdout.buffer.write(len(text).to_bytes(8, "little") + text)
    sys.stdout.buffer.flush()
answer(text)
{code}
"""


ENDS = {
    "a crash": ("os.kill(os.getpid(), 11)", "ended the process (exit code -11)"),
    "a loop": ("time.sleep(60)", "took more than 0 s"),
    "half an answer": ("sys.stdout.buffer.write(b'x' * 9); sys.exit(3)", "code 3"),
    "a long header": (
        "sys.stdout.buffer.write(b'y' * 99); sys.stdout.flush(); time.sleep(60)",
        "gave an answer that is none",
    ),
    "no tensors": ("answer(b'[]'); time.sleep(60)", "an answer that is none"),
}


@pytest.mark.parametrize("name", ENDS)
def test_after_a_crash_or_a_long_call_nothing_of_the_recording_is_run(
    name, monkeypatch
):
    code, reason = ENDS[name]
    monkeypatch.setattr("roundoff.ops.other_process._CHILD", others(code))
    if name == "a loop":
        monkeypatch.setattr("roundoff.ops.other_process.SECONDS", 0.2)
    with calls_of_others():
        first = run(*CALLS[0])
        assert reason in first.text
        assert run(*CALLS[1]) == first


def test_the_other_process_may_write_no_file(tmp_path):
    """The limit is the system's: whatever a kernel would write."""
    pytest.importorskip("resource")
    place = tmp_path / "written"
    if (child := os.fork()) == 0:
        try:
            _limit(2**30)
            place.write_bytes(b"x")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert not place.exists() or not place.stat().st_size


# -- a call that runs many times ---------------------------------------------------------


def test_a_repeated_call_gives_what_torch_does():
    text = json.dumps([[record(3), 2.0], {}])
    call = RepeatedCall("aten.mul.Tensor", text)
    assert call.records == (3,)
    for tensor in (X, CHANNELS, X.double()):
        [result] = call.run({3: tensor}.__getitem__)
        assert torch.equal(result, tensor * 2)


def test_a_repeated_call_copies_what_it_writes():
    call = RepeatedCall("aten.add_.Tensor", json.dumps([[record(0), 1.0], {}]))
    before = X.clone()
    [result] = call.run({0: X}.__getitem__)
    assert torch.equal(result, before + 1)
    assert torch.equal(X, before)


def test_indices_and_new_sizes_of_a_repeated_call_are_checked_each_time():
    arguments = [[record(0), record(1), 3, -1, False], {}]
    name = "aten.embedding_dense_backward.default"
    call = RepeatedCall(name, json.dumps(arguments))
    grad = torch.ones(2, 4)
    tensors = {0: grad, 1: torch.tensor([0, 2])}
    assert not isinstance(call.run(tensors.__getitem__), Reason)
    tensors[1] = torch.tensor([0, 3])
    assert isinstance(call.run(tensors.__getitem__), Reason)

    norm = json.dumps([[record(0), [4], record(1), None, 1e-5], {}])
    call = RepeatedCall("aten.native_layer_norm.default", norm)
    tensors = {0: X, 1: torch.ones(4)}
    assert not isinstance(call.run(tensors.__getitem__), Reason)
    tensors[1] = torch.ones(2)
    assert isinstance(call.run(tensors.__getitem__), Reason)


def test_a_repeated_call_that_no_recording_may_name_is_not_run():
    call = RepeatedCall("aten.from_file.default", json.dumps([["x", True, 8], {}]))
    assert isinstance(call.run({}.__getitem__), Reason)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_norms_of_another_axis_are_refused(axis):
    """The kernel reads one norm for each place of its axis, and does not count them."""
    overload = "aten._weight_norm_interface.default"
    norms = X.norm(dim=1, keepdim=True)
    text = json.dumps([[record(0), record(1), axis], {}])
    results = RepeatedCall(overload, text).run([X, norms].__getitem__)
    if axis == 0:
        torch.testing.assert_close(results[0], X)
    else:
        assert isinstance(results, Reason)
        assert "its arguments do not fit" in str(results)


FOLD = [[4, 5], [2, 3], [1, 1], [0, 1], [1, 2]]
#: What of the sizes is replaced, by place; torch's kernel crashes on some of these.
UNFIT_FOLDS = [(0, [4]), (0, [0, 5]), (1, [2, 3, 1]), (1, [0, 3]), (2, [0, 1])]
UNFIT_FOLDS += [
    (3, [-1, 1]),
    (4, [0, 2]),
    (4, [2, 2]),
    (0, [5, 5]),
    (1, [3, 4]),
    (2, [9, 9]),
]


def test_columns_are_folded_where_windows_have_places_for_them():
    image = torch.arange(40.0).reshape(1, 2, 4, 5)
    size, *windows = FOLD
    columns = torch.nn.functional.unfold(image, *windows)
    text = json.dumps([[record(0), *FOLD], {}])
    [result] = RepeatedCall("aten.col2im.default", text).run([columns].__getitem__)
    assert torch.equal(result, torch.nn.functional.fold(columns, size, *windows))
    for place, other in UNFIT_FOLDS:
        sizes = [*FOLD[:place], other, *FOLD[place + 1 :]]
        text = json.dumps([[record(0), *sizes], {}])
        refused = RepeatedCall("aten.col2im.default", text).run([columns].__getitem__)
        assert isinstance(refused, Reason), (place, other)


TABLE = torch.arange(10.0).reshape(5, 2)
INDICES = torch.tensor([4, 0, 1, 1])
LOG_PROBS = torch.linspace(-2.0, 0.0, 60).reshape(5, 2, 6).log_softmax(-1)
LABELS = torch.tensor([[1, 2, 2], [5, -1, -1]])
LENGTHS = [[5, 4], [3, 1]]
LOSSES, ALPHAS = torch.ops.aten._ctc_loss(LOG_PROBS, LABELS, *LENGTHS)
BAGS = [False, 0, False, None, False, -1]
#: Operators that do not check what they are given: what fits, and what does not.
SEQUENCES: dict[str, tuple[list[Any], list[list[Any]]]] = {
    "_pack_padded_sequence.default": (
        [X, torch.tensor([4, 2, 1]), True],
        [
            [X, torch.tensor([5, 2, 1]), True],
            [X, torch.tensor([4, 2]), True],
            [X, torch.tensor([4, 2, 0]), True],
            [X[0], torch.tensor([1]), True],
        ],
    ),
    "_embedding_bag.default": (
        [TABLE, INDICES, torch.tensor([0, 3]), *BAGS],
        [
            [TABLE, INDICES + 1, torch.tensor([0, 3]), *BAGS],
            [TABLE, INDICES - 1, torch.tensor([0, 3]), *BAGS],
            [TABLE, INDICES, torch.tensor([0, 3, 2]), *BAGS],
            [TABLE, INDICES, torch.tensor([0, 9]), *BAGS],
            [TABLE, INDICES, torch.tensor([1, 3]), *BAGS],
            [TABLE, INDICES, torch.tensor([0]), False, 0, False, X[0, :2], False, -1],
        ],
    ),
    "_embedding_bag_dense_backward.default": (
        [TABLE[:2], INDICES, torch.tensor([0, 0, 0, 1]), torch.tensor([3, 1])]
        + [torch.tensor([]), 5, False, 0, None, -1],
        [
            [TABLE[:2], INDICES, torch.tensor([0, 0, 0, 2]), torch.tensor([3, 1])]
            + [torch.tensor([]), 5, False, 0, None, -1],
            [TABLE[:2], INDICES, torch.tensor([0, 0, 0, 1]), torch.tensor([3, 1])]
            + [torch.tensor([]), 4, False, 0, None, -1],
            [TABLE[:2], INDICES, torch.tensor([0, 0, 1]), torch.tensor([3, 1])]
            + [torch.tensor([]), 5, False, 0, None, -1],
        ],
    ),
    "_ctc_loss.default": (
        [LOG_PROBS, LABELS, [5, 4], [3, 1], 0, False],
        [
            [LOG_PROBS, LABELS, [5, 4], [3, 2], 0, False],
            [LOG_PROBS, LABELS + 1, [5, 4], [3, 1], 0, False],
            [LOG_PROBS, LABELS, [5, 6], [3, 1], 0, False],
            [LOG_PROBS, LABELS, [5, 4], [4, 1], 0, False],
            [LOG_PROBS, LABELS, [5, 4], [3, 1], 6, False],
            [LOG_PROBS, LABELS, [5], [3, 1], 0, False],
            [LOG_PROBS, torch.tensor([1, 2, 2]), [5, 4], [3, 1], 0, False],
        ],
    ),
    "_ctc_loss_backward.default": (
        [LOSSES, LOG_PROBS, LABELS, *LENGTHS, LOSSES, ALPHAS, 0],
        [
            [LOSSES, LOG_PROBS, LABELS, *LENGTHS, LOSSES, ALPHAS[..., :5], 0],
            [LOSSES, LOG_PROBS, LABELS, *LENGTHS, LOSSES[:1], ALPHAS, 0],
            [LOSSES, LOG_PROBS, LABELS + 1, *LENGTHS, LOSSES, ALPHAS, 0],
        ],
    ),
}


def with_records(arguments):
    """Return what stands in a recording for a call, and its tensors."""
    tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
    numbers = iter(range(len(tensors)))
    named = [
        record(next(numbers)) if isinstance(each, torch.Tensor) else each
        for each in arguments
    ]
    return json.dumps([named, {}]), tensors


@pytest.mark.parametrize("name", SEQUENCES)
def test_lengths_bags_and_labels_have_to_fit(name):
    right, wrong = SEQUENCES[name]
    overload = f"aten.{name}"
    text, tensors = with_records(right)
    results = RepeatedCall(overload, text).run(tensors.__getitem__)
    wanted = getattr(torch.ops.aten, name.partition(".")[0])(*right)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    # the same kernel on the same tensors gives the same bits
    assert torch.equal(results[0], wanted[0])
    for arguments in wrong:
        text, tensors = with_records(arguments)
        refused = RepeatedCall(overload, text).run(tensors.__getitem__)
        assert isinstance(refused, Reason), arguments
        assert "do not fit" in refused.text
