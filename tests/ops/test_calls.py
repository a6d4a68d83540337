"""CallMode: every torch-level call has a name, and what is no site is counted with a reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

SHAPE = (3, 4)


def test_functions_operators_and_methods_are_named_in_order(seen):
    def f(x):
        y = torch.sin(x) + 1.0
        y = y @ y.T
        y = y.exp().exp()
        return (2.0 / y - y) * y

    assert seen(f, torch.rand(SHAPE)).names == [
        "/sin",
        "/add",
        "/matmul",
        "/exp",
        "/exp#1",
        "/rdiv",
        "/sub",
        "/mul",
    ]


def test_numbers_start_again_with_each_forward_pass(seen):
    found = seen(lambda x: x.sin() + x.sin(), torch.rand(SHAPE))
    assert found.names == ["/sin", "/sin#1", "/add"]
    assert found.mode.calls == 3
    found.mode.begin()
    with found.mode:
        torch.rand(SHAPE).sin()
    assert found.names[3:] == ["/sin"]
    assert found.mode.calls == 1


@pytest.mark.parametrize(
    "softmax",
    [
        lambda x: F.softmax(x, dim=-1),
        lambda x: torch.softmax(x, -1),
        lambda x: x.softmax(-1),
        lambda x: nn.Softmax(-1).forward(x),
        lambda x: torch.nn.functional.softmax(x, -1, dtype=torch.float32),
    ],
)
def test_softmax_is_one_operator_however_it_is_spelt(seen, softmax):
    found = seen(softmax, torch.rand(SHAPE))
    assert found.names == ["/softmax"]
    assert found.calls[0].kind == "softmax"


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: F.relu(x), "/relu"),
        (lambda x: F.relu(x.clone(), inplace=True), "/relu"),
        (lambda x: torch.relu_(x.clone()), "/relu"),
        (lambda x: F.layer_norm(x, (4,)), "/layer_norm"),
        (lambda x: F.gelu(x), "/gelu"),
        (lambda x: F.max_pool1d(x, 2), "/max_pool1d"),
        (lambda x: F.silu(x), "/silu"),
        (lambda x: F.group_norm(x[None], 3), "/group_norm"),
        (lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2])), "/cross_entropy_loss"),
        (lambda x: torch.einsum("ij,kj->ik", x, x), "/einsum"),
    ],
)
def test_functions_written_in_python_show_the_operator_inside(seen, function, expected):
    assert seen(function, torch.rand(SHAPE)).names == [expected]


def test_attention_is_entered(seen):
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.rand(2, 5, 8)
    assert (
        seen(model, x, x, x).names
        == [
            "/linear",
            "/mul",
            "/baddbmm",
            "/softmax",
            "/bmm",
            "/linear#1",
            "/mean",
        ]
        or seen(model, x, x, x).names[-1] == "/mean"
    )
    names = seen(model, x, x, x, need_weights=False).names
    assert names == ["/linear", "/scaled_dot_product_attention", "/linear#1"]


def test_a_shared_module_keeps_one_path_and_counts_on(seen):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = self.first

        def forward(self, x):
            return self.second(torch.tanh(self.first(x)))

    found = seen(Twice(), torch.rand(SHAPE))
    assert found.names == ["first/linear", "/tanh", "first/linear#1"]


def test_the_path_is_that_of_the_module_whose_forward_calls(seen):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4))

        def forward(self, x):
            before = x.sin()
            return self.inner(before) + before

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x.cos()

    names = seen(Net(), torch.rand(SHAPE)).names
    block = ["blocks.{}/sin", "blocks.{}.inner.0/linear", "blocks.{}/add"]
    assert names == [n.format(i) for i in (0, 1) for n in block] + ["/cos"]


def test_the_path_is_restored_after_an_exception_that_the_model_catches(seen):
    class Failing(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.try_ = nn.Sequential(Failing())

        def forward(self, x):
            try:
                return self.try_(x)
            except ValueError:
                return x.cos()

    assert seen(Net(), torch.rand(SHAPE)).names == ["/cos"]


def hooks(model):
    kinds = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_forward_hooks_always_called",
        "_backward_hooks",
    )
    return [dict(getattr(m, kind)) for m in model.modules() for kind in kinds]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_hooks_are_removed_also_after_an_exception(seen, error):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4))
            self.inner.register_forward_hook(lambda *_: None)

        def forward(self, x, stop):
            self.inner(x)
            if stop:
                raise error("stop")
            return x

    model = Net()
    before = hooks(model)
    seen(model, torch.rand(SHAPE), False)
    assert hooks(model) == before
    with pytest.raises(error, match="stop"):
        seen(model, torch.rand(SHAPE), True)
    assert hooks(model) == before
    assert seen(model, torch.rand(SHAPE), False).names == ["inner.0/linear"]


@pytest.mark.parametrize(
    ("function", "operator", "reason"),
    [
        (lambda x: x.view(4, 3), "view", "moves"),
        (lambda x: x.T, "T", "moves"),
        (lambda x: x[:, 1:], "getitem", "moves"),
        (lambda x: torch.cat([x, x]), "cat", "moves"),
        (lambda x: x.masked_fill(x > 0, 0.0), "masked_fill", "moves"),
        (lambda x: x.detach(), "detach", "moves"),
        (lambda x: x.to(torch.float64), "to", "moves"),
        (lambda x: x.chunk(2), "chunk", "moves"),
        (lambda x: torch.zeros_like(x), "zeros_like", "does not depend on values"),
        (lambda x: x.new_ones(2), "new_ones", "does not depend on values"),
        (lambda x: torch.rand_like(x), "rand_like", "random"),
        (lambda x: F.dropout(x, 0.5, training=True), "dropout", "random"),
        (lambda x: F.dropout(x, 0.5, training=False), "dropout", "moves"),
        (lambda x: F.dropout(x, 0.0, training=True), "dropout", "moves"),
        (lambda x: nn.Dropout(0.5).eval()(x), "dropout", "moves"),
        (lambda x: x.argmax(-1), "argmax", "integer or boolean result"),
        (lambda x: x > 0.5, "gt", "integer or boolean result"),
        (
            lambda x: torch.view_as_complex(x.view(3, 2, 2)) * 2,
            "mul",
            "complex numbers",
        ),
    ],
)
def test_what_is_no_site_is_counted_with_its_reason(seen, function, operator, reason):
    found = seen(function, torch.rand(SHAPE))
    assert found.names == []
    ((name, why), count), *rest = [
        e for e in found.excluded.items() if e[0][0] == operator
    ]
    assert not rest
    assert (name, count) == (operator, 1)
    assert why.startswith(reason)


def test_complex_numbers_are_counted_as_such(seen):
    found = seen(lambda x: torch.fft.rfft(x).abs().sin(), torch.rand(SHAPE))
    assert found.names == ["/sin"]
    assert found.excluded == {
        ("fft_rfft", "complex numbers"): 1,
        ("abs", "complex numbers"): 1,
    }


def test_examples_of_excluded_calls_say_where(seen):
    model = nn.Sequential(*(nn.Flatten() for _ in range(5)))
    (row,) = seen(model, torch.rand(SHAPE)).mode.excluded.values()
    assert (row.operator, row.count) == ("flatten", 5)
    assert row.examples == ["0/flatten", "1/flatten", "2/flatten"]


def test_integer_work_is_not_seen_at_all(seen):
    found = seen(lambda i: (i + 1).cumsum(0) * 2, torch.arange(4))
    assert found.names == []
    assert found.excluded == {}


def test_attributes_are_no_sites(seen):
    found = seen(
        lambda x: (x.shape, x.dtype, x.device, x.size(0), len(x), x.is_cuda, x.dim()),
        torch.rand(SHAPE),
    )
    assert found.names == []
    assert found.excluded == {}
    assert found.mode.calls == 0


def test_writes_are_announced_before_they_happen(seen):
    x = torch.ones(2)
    out = torch.full((2,), 7.0)

    def f(x):
        x += 1.0
        x[0] = 5.0
        x.zero_()
        torch.sin(x, out=out)
        return x

    found = seen(f, x)
    assert [t.tolist() for t in found.recorder.written] == [
        [1, 1],
        [2, 2],
        [5, 2],
        [7, 7],
    ]
    assert found.names == ["/add", "/sin"]
