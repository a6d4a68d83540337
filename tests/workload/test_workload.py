"""workload.py, user_file.py and user_code.py: what is accepted, and what the user reads otherwise."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections import UserDict
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from roundoff.errors import NonFiniteError, WorkloadError
from roundoff.workload.workload import Workload, describe

X = torch.ones(4, 2)


def linear():
    return nn.Linear(2, 1)


def write(folder: Path, text: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


GOOD = """\
    import torch
    def model():
        return torch.nn.Linear(2, 1)
    def batches():
        return [torch.ones(4, 2)]
    """


def message_of(function, *args, **kwargs) -> str:
    with pytest.raises(WorkloadError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


# What is accepted


@pytest.mark.parametrize(
    "model",
    [nn.Linear(2, 1), linear, lambda: nn.Linear(2, 1)],
    ids=["module", "function", "lambda"],
)
@pytest.mark.parametrize(
    "batches",
    [[X, X], (X, X), lambda: [X, X], lambda: (X for _ in range(2)), iter([X, X])],
    ids=["list", "tuple", "function", "generator function", "iterator"],
)
def test_model_and_batches_as_value_or_function(model, batches):
    if not isinstance(batches, (list, tuple)) and not callable(batches):
        batches = iter(
            [X, X]
        )  # a parametrised iterator would be used up by the first test
    workload = Workload(model, batches)
    assert isinstance(workload.model, nn.Linear)
    assert len(workload.batches) == 2
    assert workload.run(workload.batches[1]).shape == (4, 1)


def test_dataloader_is_collected_once():
    dataset = torch.utils.data.TensorDataset(torch.randn(10, 2))
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True)
    workload = Workload(linear, loader)
    assert [len(batch[0]) for batch in workload.batches] == [4, 4, 2]
    assert isinstance(workload.batches, list)


class Recorder(nn.Module):
    def forward(self, *args, **kwargs):
        return args, kwargs


class Encoding(UserDict):
    """A mapping that is no dict, as tokenizers return."""


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (X, ((X,), {})),
        ((X, 1), ((X, 1), {})),
        ([X, 2], ((X, 2), {})),
        ({"x": X, "mask": None}, ((), {"x": X, "mask": None})),
        (Encoding(x=X), ((), {"x": X})),
        ("a sentence", (("a sentence",), {})),
    ],
)
def test_default_forward(batch, expected):
    args, kwargs = Workload(Recorder(), [batch]).run(batch)
    if isinstance(batch, str):
        assert (args, kwargs) == expected
    else:
        torch.testing.assert_close((args, kwargs), expected, rtol=0, atol=0)


def test_a_model_may_write_into_what_it_gets():
    batch = {"x": torch.ones(2)}
    workload = Workload(
        Recorder(), [batch], forward=lambda model, batch: batch["x"].zero_()
    )
    assert workload.run(batch).tolist() == [0.0, 0.0]
    assert batch["x"].tolist() == [1.0, 1.0]


def test_forward_replaces_the_default():
    workload = Workload(
        linear, [(X, "label")], forward=lambda model, batch: model(batch[0]) * 0
    )
    assert torch.equal(workload.run(workload.batches[0]), torch.zeros(4, 1))


def test_run_leaves_grad_and_training_mode_to_the_caller():
    workload = Workload(linear, [X])
    assert workload.model.training
    assert workload.run(X).requires_grad
    with torch.no_grad():
        assert not workload.run(X).requires_grad


def test_nan_in_a_batch_reaches_the_model():
    batch = torch.full((4, 2), torch.nan)
    assert Workload(linear, [batch]).run(batch).isnan().all()


def test_empty_part_beside_a_full_one_is_not_an_empty_batch():
    cache = torch.zeros(1, 0, 8)
    assert (
        len(Workload(Recorder(), [{"ids": X, "cache": cache, "mask": None}]).batches)
        == 1
    )


def test_repr():
    assert repr(Workload(linear, [X], metric=len_metric)) == (
        "Workload(name='workload', model=Linear, batches=1, metric=len_metric)"
    )


# Metric


def len_metric(outputs):
    return len(outputs)


def test_no_metric_is_none():
    workload = Workload(linear, [X])
    assert workload.metric_name is None
    assert workload.evaluate([X], [X]) is None


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (lambda outputs: outputs[0], 1.0),
        (lambda reference: reference[0], 2.0),
        (lambda batches: batches[0].numel(), 8.0),
        (lambda reference, outputs: reference[0] - outputs[0], 1.0),
        (lambda outputs, *, batches, reference, k=3: k + len(batches), 4.0),
        (lambda **given: len(given), 3.0),
    ],
)
def test_metric_gets_what_its_parameters_name(metric, expected):
    assert Workload(linear, [X], metric=metric).evaluate([1.0], [2.0]) == expected


@pytest.mark.parametrize(
    "value",
    [
        *(
            1,
            1.0,
            True,
            np.float32(1),
            np.float64(1),
            np.int64(1),
            np.bool_(True),
            np.array(1.0),
        ),
        *(torch.tensor(1.0), torch.tensor(1, dtype=torch.bfloat16), torch.tensor(True)),
    ],
    ids=lambda value: f"{type(value).__name__} {getattr(value, 'dtype', '')}",
)
def test_metric_may_return_any_kind_of_number(value):
    got = Workload(linear, [X], metric=lambda: value).evaluate([X], [X])
    assert type(got) is float
    assert got == 1.0


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (torch.tensor(torch.nan), "nan"),
        (np.float32("-inf"), "-inf"),
        (None, "None (was a `return` forgotten?)"),
        ("0.5", "str"),
        (1j, "complex"),
        (torch.ones(3), "float32[3]"),
        (torch.ones(1), "float32[1]"),
        (np.ones(2), "float64[2]"),
        ({"accuracy": 1.0}, "{accuracy: float}"),
    ],
    ids=str,
)
def test_metric_without_a_finite_number(value, shown):
    def score():
        return value

    workload = Workload(linear, [X], metric=score)
    assert message_of(workload.evaluate, [X], [X]) == (
        "workload: the metric score returned no finite number\n"
        "  expected: one finite number, higher is better\n"
        f"  got: {shown}"
    )


def test_metric_that_raises_names_its_line():
    def score(outputs):
        return outputs[7]

    message = message_of(Workload(linear, [X], metric=score).evaluate, [X], [X])
    line = score.__code__.co_firstlineno + 1
    assert message.startswith(f"{__file__}:{line}: the metric raised IndexError\n")
    assert "got: IndexError: list index out of range, at `return outputs[7]`" in message


def test_metric_with_unknown_parameter_names_the_nearest():
    def accuracy(output, batches):
        return 0.0

    assert message_of(Workload, linear, [X], metric=accuracy) == (
        "workload: the metric accuracy has an unknown parameter\n"
        "  expected: parameters among outputs, batches, reference\n"
        "  got: accuracy(output, batches)\n"
        "  do: rename 'output' to 'outputs'"
    )


def test_metric_with_parameter_like_none():
    message = message_of(Workload, linear, [X], metric=lambda outputs, xyz: 0)
    assert "do: take the targets from `batches`" in message


def test_metric_with_positional_only_parameter():
    def accuracy(outputs, /):
        return 0.0

    assert "got: accuracy(outputs, /)" in message_of(
        Workload, linear, [X], metric=accuracy
    )


def test_metric_of_some_outputs_only():
    workload = Workload(linear, [X, X], metric=len_metric)
    assert message_of(workload.evaluate, [X], [X, X]) == (
        "workload: the metric needs one of outputs for every batch\n  expected: 2 elements\n  got: 1"
    )
    assert "one of reference" in message_of(workload.evaluate, [X, X], [])


@pytest.mark.parametrize("part", ["forward", "loss", "metric", "optimizer"])
def test_part_that_is_not_callable(part):
    message = message_of(Workload, linear, [X], **{part: 3})
    assert message.startswith(f"workload: {part} is not callable")
    assert "got: int" in message


@pytest.mark.parametrize("part", ["forward", "loss", "metric", "optimizer", "step"])
def test_number_of_the_files_own_under_the_name_of_a_function(part, tmp_path):
    text = "import torch\nmodel = torch.nn.Linear(2, 1)\nbatches = [torch.ones(4, 2)]\n"
    (tmp_path / "grid.py").write_text(f"{text}{part} = 2\n")
    workload = Workload.load(tmp_path / "grid.py")
    assert getattr(workload, part) is None
    (tmp_path / "grid.py").write_text(f"{text}{part} = 'adam'\n")
    message = message_of(Workload.load, tmp_path / "grid.py")
    assert f"{part} is not callable" in message


def test_forward_with_wrong_parameters():
    message = message_of(Workload, linear, [X], forward=lambda batch: batch)
    assert "forward cannot be called: too many positional arguments" in message
    assert "expected: forward(model, batch)\n  got: forward(batch)" in message


# Bad models


@pytest.mark.parametrize(
    ("model", "got"),
    [
        (lambda: None, "None (was a `return` forgotten?)"),
        (lambda: nn.Linear, "type"),
        (
            lambda: nn.Linear(2, 1).state_dict(),
            "{weight: float32[1, 2], bias: float32[1]}",
        ),
        (3, "int"),
        (None, "None (was a `return` forgotten?)"),
    ],
)
def test_model_that_is_no_module(model, got):
    message = message_of(Workload, model, [X])
    assert message.startswith(
        "workload: model is not a module\n  expected: a torch.nn.Module"
    )
    assert f"got: {got}" in message
    assert ("do: load a state_dict into its module" in message) == ("weight" in got)


def test_model_that_needs_arguments():
    message = message_of(Workload, nn.Linear, [X])
    assert (
        "model cannot be called: missing a required argument: 'in_features'" in message
    )
    assert "expected: model()" in message


def test_model_function_that_raises():
    def model():
        raise OSError("no weights")

    message = message_of(Workload, model, [X])
    assert message.startswith(
        f"{__file__}:{model.__code__.co_firstlineno + 1}: model() raised OSError"
    )
    assert 'got: OSError: no weights, at `raise OSError("no weights")`' in message


@pytest.mark.parametrize(
    ("model", "got"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(3)), "a lazy parameter"),
        (
            lambda: nn.Sequential(nn.Linear(2, 1, device="meta")),
            "a tensor on the meta device",
        ),
    ],
    ids=["lazy", "meta"],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_model_without_values(model, got):
    message = message_of(Workload, model, [X])
    assert message == (
        "workload: 0.weight of the model has no values yet\n"
        "  expected: a model that is ready to run\n"
        f"  got: {got}\n"
        "  do: run one batch or load the weights inside model()"
    )


# Bad batches


@pytest.mark.parametrize(
    ("batches", "what", "got"),
    [
        (X, "batches is one batch", "float32[4, 2]"),
        ({"x": X}, "batches is one batch", "{x: float32[4, 2]}"),
        (lambda: X, "batches is one batch", "float32[4, 2]"),
        (
            lambda: None,
            "batches is not a collection of batches",
            "None (was a `return` forgotten?)",
        ),
        ("data.csv", "batches is not a collection of batches", "str"),
        (
            torch.utils.data.TensorDataset(X),
            "batches is not a collection of batches",
            "TensorDataset",
        ),
    ],
)
def test_batches_of_the_wrong_kind(batches, what, got):
    message = message_of(Workload, linear, batches)
    assert message.startswith(f"workload: {what}\n")
    assert f"got: {got}" in message
    if what.endswith("one batch"):
        assert message.endswith("do: put it in a list")
    else:
        assert message.endswith("do: wrap a Dataset in torch.utils.data.DataLoader")


def test_no_batches():
    assert message_of(Workload, linear, []) == (
        "workload: batches is empty\n  expected: one or more\n  got: 0 batches"
    )


@pytest.mark.parametrize(
    ("batch", "got"),
    [
        (torch.zeros(0, 2), "float32[0, 2]"),
        (torch.zeros(4, 0), "float32[4, 0]"),
        (
            (torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)),
            "(float32[0, 2], int64[0])",
        ),
        ({"ids": torch.zeros(0, 3), "mask": None}, "{ids: float32[0, 3], mask: None}"),
        (np.zeros((0, 2), dtype=np.float32), "float32[0, 2]"),
        ((), "()"),
        ([], "[]"),
        ({}, "{}"),
        ("", "str"),
        (None, "None"),
    ],
    ids=str,
)
def test_empty_batch(batch, got):
    assert message_of(Workload, linear, [X, batch]) == (
        "workload: batch 1 of 2 is empty\n"
        "  expected: one or more samples in every batch\n"
        f"  got: {got}\n"
        "  do: leave it out; with a DataLoader, check its dataset"
    )


def test_generator_that_raises_on_the_way():
    def batches():
        yield X
        raise ValueError("row 7 is broken")

    message = message_of(Workload, linear, batches)
    assert message.startswith(
        f"{__file__}:{batches.__code__.co_firstlineno + 2}: iterating over batches raised ValueError"
    )


# Running


def test_forward_that_raises_inside_torch_names_batch_and_shapes():
    workload = Workload(linear, [X, torch.ones(4, 3)], name="tiny")
    message = message_of(workload.run, workload.batches[1])
    assert message.startswith(
        "tiny: model(batch) on batch 1, float32[4, 3], raised RuntimeError\n"
    )
    assert (
        "got: RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x3 and 2x1)"
        in message
    )
    assert re.search(r"raised at .*torch.*\.py:\d+", message)
    assert "define forward(model, batch)" in message


def test_forward_that_raises_keeps_the_cause():
    def forward(model, batch):
        raise KeyError("labels")

    workload = Workload(linear, [{"x": X}], forward=forward)
    with pytest.raises(WorkloadError) as caught:
        workload.run(workload.batches[0])
    assert isinstance(caught.value.__cause__, KeyError)
    line = forward.__code__.co_firstlineno + 1
    assert caught.value.where == f"{__file__}:{line}"
    assert caught.value.what == (
        "forward(model, batch) on batch 0, {x: float32[4, 2]}, raised KeyError"
    )


def test_batch_that_is_not_the_workloads_own():
    message = message_of(Workload(linear, [X]).run, torch.ones(4, 3))
    assert "on a batch that is not the workload's own, float32[4, 3]," in message


def test_labels_in_a_tuple_batch_are_explained():
    workload = Workload(linear, [(X, torch.zeros(4))])
    message = message_of(workload.run, workload.batches[0])
    assert (
        "model(*batch) on batch 0, (float32[4, 2], float32[4]), raised TypeError"
        in message
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt, NonFiniteError("overflow")])
def test_interrupts_and_our_own_errors_pass_unchanged(error):
    def forward(model, batch):
        raise error

    with pytest.raises(error if isinstance(error, type) else type(error)) as caught:
        Workload(linear, [X], forward=forward).run(X)
    assert isinstance(error, type) or caught.value is error


# Files


def test_load_gives_every_part(tmp_path):
    path = write(
        tmp_path,
        GOOD
        + """
    def forward(model, batch):
        return model(batch) + 1
    def loss(output, batch):
        return output.sum()
    def accuracy(outputs, reference):
        return 0.5
    metric = accuracy
    def optimizer(model):
        return torch.optim.SGD(model.parameters(), 0.1)
    """,
    )
    workload = Workload.load(path)
    assert (workload.name, workload.path, workload.metric_name) == (
        "mine",
        path,
        "accuracy",
    )
    assert workload.loss(workload.run(workload.batches[0]), X).ndim == 0
    assert workload.evaluate([X], [X]) == 0.5
    assert isinstance(workload.optimizer(workload.model), torch.optim.SGD)


def test_load_takes_relative_and_text_paths(tmp_path, monkeypatch):
    write(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    for source in ("mine.py", "./mine.py", Path("mine.py")):
        assert Workload.load(source).path == tmp_path / "mine.py"


def test_load_dotted_name(tmp_path, monkeypatch):
    package = tmp_path / "pkg_of_test"
    package.mkdir()
    write(package, "SIZE = 2", "__init__.py")
    write(
        package,
        GOOD.replace("import torch\n", "import torch\n    from . import SIZE\n"),
    )
    monkeypatch.chdir(tmp_path)
    workload = Workload.load("pkg_of_test.mine")
    assert (workload.name, workload.path) == ("mine", package / "mine.py")


def test_load_runs_the_current_text_and_leaves_no_files(tmp_path):
    # An edit of the same length within the same second: a bytecode cache would serve the old text.
    for width in (1, 3):
        path = write(tmp_path, GOOD.replace("Linear(2, 1)", f"Linear(2, {width})"))
        assert Workload.load(path).model.out_features == width
    assert [file.name for file in tmp_path.iterdir()] == ["mine.py"]


def test_two_workloads_of_one_name_do_not_clash(tmp_path):
    loaded = []
    for width in (1, 3):
        folder = tmp_path / str(width)
        folder.mkdir()
        write(folder, f"WIDTH = {width}", "helper_of_test.py")
        write(folder, str(width), "data.txt")
        text = """\
            import torch
            from pathlib import Path
            from dataclasses import dataclass
            import helper_of_test
            @dataclass
            class Config:
                width: "int" = int(Path(__file__).with_name("data.txt").read_text())
            def model():
                assert helper_of_test.WIDTH == Config().width
                return torch.nn.Linear(2, helper_of_test.WIDTH)
            batches = [torch.ones(4, 2)]
            def metric():
                return Config().width + helper_of_test.WIDTH
            """
        loaded.append(Workload.load(write(folder, text)))
    assert [workload.model.out_features for workload in loaded] == [1, 3]
    assert [workload.evaluate([0], [0]) for workload in loaded] == [2.0, 6.0]
    assert loaded[0].metric.__module__ != loaded[1].metric.__module__
    assert sys.modules[loaded[0].metric.__module__].metric is loaded[0].metric


@pytest.mark.parametrize(
    "text", [GOOD, GOOD + "\n    1 / 0\n", "import sys; sys.path.append('x')"]
)
def test_sys_path_and_modules_are_restored(tmp_path, text):
    path, before = list(sys.path), set(sys.modules)
    with suppress(WorkloadError):
        Workload.load(write(tmp_path, text))
    assert sys.path == path
    left = {name for name in set(sys.modules) - before if "workload" in name}
    assert len(left) == (0 if "1 / 0" in text else 1)


READS_ARGUMENTS = """\
    import sys, torch
    SEEN = [("file", sys.argv)]
    def model():
        SEEN.append(("model", sys.argv))
        return torch.nn.Linear(2, 1)
    def batches():
        for number in range(2):
            SEEN.append(("batches", sys.argv))
            yield torch.ones(4, 2)
    def forward(model, batch):
        SEEN.append(("forward", sys.argv))
        return model(batch)
    def metric(outputs):
        SEEN.append(("metric", sys.argv))
        return 1.0
    """


@pytest.mark.parametrize("is_dotted", [False, True])
def test_a_file_sees_its_own_name_alone(tmp_path, monkeypatch, is_dotted):
    ours = ["roundoff", "budget", "mine.py", "--formats", "bf16"]
    monkeypatch.setattr(sys, "argv", ours)
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, READS_ARGUMENTS, "reads_arguments.py")
    workload = Workload.load("reads_arguments" if is_dotted else path)
    with torch.no_grad():
        outputs = [workload.run(batch) for batch in workload.batches]
    workload.evaluate(outputs, outputs)
    workload.fresh_model()
    seen = sys.modules[workload.metric.__module__].SEEN
    assert {place for place, _ in seen} == {
        "file",
        "model",
        "batches",
        "forward",
        "metric",
    }
    assert [words for place, words in seen if place != "file"] == [
        [str(path)] for place, _ in seen if place != "file"
    ]
    assert seen[0][1] == ["reads_arguments" if is_dotted else str(path)]
    assert sys.argv is ours


@pytest.mark.parametrize(
    "text", ["sys.argv.append('x'); sys.argv = []", "parse_args(['--no'])", "1 / 0"]
)
def test_arguments_are_restored(tmp_path, monkeypatch, text):
    ours = ["roundoff", "budget"]
    monkeypatch.setattr(sys, "argv", ours)
    head = "import argparse, sys; parse_args = argparse.ArgumentParser().parse_args; "
    with suppress(WorkloadError):
        Workload.load(write(tmp_path, head + text))
    assert sys.argv is ours
    assert ours == ["roundoff", "budget"]


def test_a_parser_of_the_file_takes_its_defaults(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["roundoff", "budget", "--formats", "bf16"])
    text = """\
        import argparse, torch
        parser = argparse.ArgumentParser()
        parser.add_argument("--width", type=int, default=3)
        width = parser.parse_args().width
        model = torch.nn.Linear(width, 1)
        batches = [torch.ones(4, width)]
        """
    assert Workload.load(write(tmp_path, text)).model.in_features == 3


# Bad files


def test_file_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, GOOD, "bert_base.py")
    assert message_of(Workload.load, "bert_bsae.py") == (
        "bert_bsae.py: no such file\n"
        "  expected: a Python file or the dotted name of a module\n"
        "  do: did you mean bert_base.py?"
    )
    assert message_of(Workload.load, "no/such/thing.py").endswith(
        f"do: check the path; the current folder is {tmp_path}"
    )


def test_module_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, GOOD)
    assert message_of(Workload.load, "mine_") == (
        "mine_: no such file or module\n"
        "  expected: a Python file, ending in .py, or the dotted name of a module\n"
        "  got: no module named 'mine_'\n"
        f"  do: check the name; the current folder is {tmp_path}"
    )
    write(tmp_path, "", "other.py")
    assert "model() and batches() missing" in message_of(Workload.load, "other")
    (tmp_path / "sub").mkdir()
    assert "got: a folder" in message_of(Workload.load, tmp_path / "sub")
    assert "no module named 'nothing_here'" in message_of(
        Workload.load, "nothing_here.workload"
    )


@pytest.mark.parametrize(("name", "got"), [("mine.ipynb", "'.ipynb'"), ("mine", "''")])
def test_file_that_is_not_python(tmp_path, name, got):
    path = write(tmp_path, "{}", name)
    assert message_of(Workload.load, path) == (
        f"{path}: not a Python file\n"
        "  expected: a file ending in .py\n"
        f"  got: a file ending in {got}"
    )


def test_syntax_error_shows_line(tmp_path):
    path = write(tmp_path, "import torch\n\ndef model(:\n    pass\n")
    assert message_of(Workload.load, path) == (
        f"{path}:3: the file raised SyntaxError\n  got: invalid syntax, at `def model(:`"
    )


@pytest.mark.parametrize(
    "content", [b"x = '\xff'", b"x = 1\0"], ids=["not UTF-8", "NUL byte"]
)
def test_bytes_that_are_not_source(tmp_path, content):
    path = tmp_path / "mine.py"
    path.write_bytes(content)
    message = message_of(Workload.load, path)
    assert str(path) in message.splitlines()[0]
    assert "the file raised " in message


def test_file_that_raises_shows_file_and_line(tmp_path):
    path = write(tmp_path, "import torch\nx = {}\ny = x['key']\n")
    assert message_of(Workload.load, path) == (
        f"{path}:3: the file raised KeyError\n  got: KeyError: 'key', at `y = x['key']`"
    )


def test_file_whose_helper_raises_shows_both_lines(tmp_path):
    helper = write(
        tmp_path,
        "def build():\n    raise ValueError('bad size')\n",
        "helper_that_raises.py",
    )
    path = write(
        tmp_path,
        "from helper_that_raises import build\nbatches = [1]\ndef model():\n    return build()\n",
    )
    assert message_of(Workload.load, path) == (
        f"{path}:4: model() raised ValueError\n"
        f"  got: ValueError: bad size, at `return build()`, raised at {helper}:2"
    )


def test_file_that_imports_what_is_not_installed(tmp_path):
    path = write(tmp_path, "import torch\nimport not_installed_pkg\n")
    message = message_of(Workload.load, path)
    assert message.startswith(f"{path}:2: the file raised ModuleNotFoundError\n")
    assert "do: install the package that provides 'not_installed_pkg'" in message


def test_script_that_exits(tmp_path):
    path = write(tmp_path, "import sys\nsys.exit(2)\n")
    message = message_of(Workload.load, path)
    assert message.startswith(f"{path}:2: the file raised SystemExit\n")
    assert 'under `if __name__ == "__main__":`' in message


def test_interrupt_while_loading_passes_and_cleans_up(tmp_path):
    before = list(sys.path)
    with pytest.raises(KeyboardInterrupt):
        Workload.load(write(tmp_path, "raise KeyboardInterrupt"))
    assert sys.path == before


@pytest.mark.parametrize(
    ("text", "what", "got", "do"),
    [
        (
            "from __future__ import annotations\nimport torch\ndef modle(): pass\nbatches = [1]\n",
            "model() missing",
            "it defines modle, batches",
            "rename 'modle' to 'model'",
        ),
        (
            "from torch import nn\nmodel = nn.Linear(2, 1)\n_batches = []\n",
            "batches() missing",
            "it defines model",
            "add `def batches(): ...`",
        ),
        (
            "",
            "model() and batches() missing",
            "it defines nothing",
            "add `def model(): ...` and add `def batches(): ...`",
        ),
        (
            "def get_model(): pass\ndef batch(): pass\n",
            "model() and batches() missing",
            "it defines get_model, batch",
            "rename 'get_model' to 'model', rename 'batch' to 'batches'",
        ),
    ],
)
def test_missing_parts_and_the_nearest_names(tmp_path, text, what, got, do):
    path = write(tmp_path, text)
    assert message_of(Workload.load, path) == (
        f"{path}: {what}\n"
        "  expected: a file that defines model() and batches()\n"
        f"  got: {got}\n"
        f"  do: {do}"
    )


def test_loading_does_not_import_heavy_packages():
    code = (
        "import sys, roundoff.workload; "
        "print([m for m in ('transformers', 'sklearn', 'scipy', 'polars') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_describe_never_shows_values_and_shortens_long_lists():
    assert describe([torch.ones(2)] * 9).endswith("float32[2], ...]")
    assert describe("secret") == "str"
    assert describe((np.zeros(3), None, {"a": 1})) == "(float64[3], None, {a: int})"
