"""Recording real training steps: numbers untouched, everything seen, everything restored."""

from __future__ import annotations

import math
import shutil
import warnings

import polars as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import optimizer as optim_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

import roundoff
from roundoff.compare.nonfinite.overflow import trace_overflow
from roundoff.errors import RoundoffError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(8 * 36, 5)

    def forward(self, x):
        return self.head(self.act(self.norm(self.conv(x))).flatten(1))


X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(3))


def train(steps=2, run=None, optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    net = Net()
    opt = optimizer(net.parameters(), lr=1e-2, **options)
    numbers = []
    for _ in range(steps):
        loss = F.cross_entropy(F.dropout(net(X), 0.1), torch.tensor([0, 1, 2, 3]))
        opt.zero_grad()
        loss.backward()
        opt.step()
        numbers += [loss.detach().clone(), *(p.grad.clone() for p in net.parameters())]
        if run is not None:
            run.step(loss=loss.item())
    return numbers + [t.clone() for t in net.state_dict().values()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


def rows(path, **filters):
    table = roundoff.load(path).ops.collect()
    return table.filter(**filters) if filters else table


@pytest.mark.parametrize("keep", ["stats", "tensors", "sample", "hash"])
@pytest.mark.parametrize("level", ["op", "module"])
def test_numbers_are_bit_identical(path, keep, level):
    plain = train()
    with roundoff.capture(path, keep=keep, level=level) as run:
        recorded = train(run=run)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert roundoff.load(path).steps == [0, 1]


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"fused": True}, {"foreach": False}]
)
def test_numbers_with_the_shadow_and_each_adamw(path, options):
    plain = train(**options)
    with roundoff.capture(path, shadow="fp64") as run:
        recorded = train(run=run, **options)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    table = rows(path, step=0)
    updated = table.filter(
        pl.col("name").is_not_null() & (pl.col("phase") == "optimizer")
    )
    assert set(updated["name"]) >= {"conv.weight", "head.bias"}
    judged = table.filter(pl.col("own_l2").is_not_null())
    assert set(judged["phase"]) == {"forward", "backward", "optimizer"}
    conv = judged.row(
        by_predicate=(pl.col("operator") == "convolution")
        & (pl.col("phase") == "forward"),
        named=True,
    )
    # 27 products and a bias in fp32: each result is off by at most 28 half units in the last place of the sum of magnitudes
    assert 0 < conv["own_l2"] < 28 * 2.0**-24 * 10 * conv["l2"]


def test_everything_is_as_before(path):
    before = (
        len(nn.modules.module._global_forward_hooks),
        len(nn.modules.module._global_forward_pre_hooks),
        len(optim_hooks._global_optimizer_post_hooks),
        len(optim_hooks._global_optimizer_pre_hooks),
        torch.amp.GradScaler.update,
        torch.get_rng_state().clone(),
        warnings.filters[:],
    )

    def now():
        return (
            len(nn.modules.module._global_forward_hooks),
            len(nn.modules.module._global_forward_pre_hooks),
            len(optim_hooks._global_optimizer_post_hooks),
            len(optim_hooks._global_optimizer_pre_hooks),
            torch.amp.GradScaler.update,
            torch.get_rng_state(),
            warnings.filters[:],
        )

    net = Net()
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), roundoff.capture(path, net):
        net(X)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), state)
    after = now()
    assert after[:5] == before[:5]
    assert after[6] == before[6]
    assert _get_current_dispatch_mode() is None
    assert not roundoff.load(path).about.complete
    assert roundoff.load(path).about.unfinished == 0
    assert len(rows(path))  # what was recorded before the exception


class Trace(TorchDispatchMode):
    """What really runs: the reference for coverage."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(
            f"aten.{func.__name__}" if func.namespace == "aten" else str(func)
        )
        return func(*args, **kwargs or {})


VIEWS = "t view detach expand transpose permute select slice unsqueeze _unsafe_view alias split".split()


@pytest.mark.parametrize(
    "make",
    [
        Net,
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(192, 8), nn.GELU(), nn.LayerNorm(8)
        ),
    ],
)
def test_every_compute_call_is_a_row(path, make):
    torch.manual_seed(0)
    net = make()
    net(X).square().mean().backward()
    with Trace() as trace:
        net(X).square().mean().backward()
    with roundoff.capture(path, net):
        net(X).square().mean().backward()
    table = rows(path)
    called = (
        table.filter(pl.col("call") >= 0)
        .unique(["call"], maintain_order=True)
        .sort("call")
    )
    recorded = called["overload"].to_list()
    compute = [c for c in trace.calls if c.split(".")[1] not in VIEWS]
    assert [c for c in recorded if c.split(".")[1] not in VIEWS] == compute
    assert (
        table.filter(pl.col("min").is_null() & (pl.col("numel") > 0))[
            "reason"
        ].null_count()
        == 0
    )


def test_backward_calls_have_the_module_and_line_of_their_forward(path):
    net = Net()
    with roundoff.capture(path, net):
        net(X).sum().backward()
    found = {(r["phase"], r["operator"]): r for r in rows(path).iter_rows(named=True)}
    assert (
        found["forward", "convolution"]["module"]
        == found["backward", "convolution_backward"]["module"]
        == "conv"
    )
    assert found["backward", "threshold_backward"]["module"] == "act"
    assert (
        found["forward", "addmm"]["module"]
        == found["backward", "mm"]["module"]
        == "head"
    )
    assert found["forward", "addmm"]["line"].startswith("tests/record/test_capture.py:")
    assert found["backward", "mm"]["line"] == found["forward", "addmm"]["line"]
    named = rows(path).filter(pl.col("name").str.ends_with(".grad"))
    assert set(named["name"]) == {f"{n}.grad" for n, _ in net.named_parameters()}


def test_clipping_is_a_part_of_the_optimizer(path):
    clip = nn.utils.clip_grad_norm_  # as a script has it that imports it by name
    with roundoff.capture(path) as run:
        net = nn.Linear(3, 2)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        loss = net(torch.ones(4, 3)).norm().exp()
        loss.backward()
        nn.utils.clip_grad_value_(net.parameters(), 0.5)
        total = clip(net.parameters(), 1e-3)
        total.sqrt()
        opt.step()
        run.step()
    phases = rows(path).filter(pl.col("call") >= 0).select("operator", "phase").rows()
    assert {phase for name, phase in phases if name.startswith("clamp")} == {
        "optimizer"
    }
    norms = [phase for name, phase in phases if "norm" in name]
    assert norms[0] == "forward"  # the loss's own
    assert {*norms[1:]} == {"optimizer"}
    assert ("sqrt", "forward") in phases  # what the script computes itself


def test_inputs_name_the_records_that_made_them(path):
    net = Net()
    with roundoff.capture(path, net):
        net(X)
    table = {r["record"]: r for r in rows(path).iter_rows(named=True)}
    addmm = next(r for r in table.values() if r["operator"] == "addmm")
    bias, activation, weight = (table[i] for i in addmm["inputs"])
    assert (bias["operator"], bias["name"]) == ("parameter", "head.bias")
    assert table[weight["view_of"]]["name"] == "head.weight"
    assert table[activation["view_of"]]["operator"] == "relu_"
    assert activation["l2"] == table[activation["view_of"]]["l2"]
    relu = table[activation["view_of"]]
    assert relu["inplace"]
    assert table[relu["inputs"][0]]["operator"] == "native_batch_norm"


def test_an_empty_tensor_in_new_memory_is_a_view_of_no_record(path):
    with roundoff.capture(path):
        made = torch.zeros(0, 3)
        made.view(3, 0) + 1
    zeros, view, added = rows(path).iter_rows(named=True)
    assert zeros["operator"] == "zeros"
    assert zeros["view_of"] is None
    assert view["operator"] == "view"
    assert view["view_of"] == zeros["record"]
    assert added["operator"] == "add"
    assert added["view_of"] is None
    assert [row["numel"] for row in (zeros, view, added)] == [0, 0, 0]


def test_writing_through_a_view_is_seen(path):
    x = torch.zeros(4, 6)
    with roundoff.capture(path, keep="tensors"):
        x[1:3].add_(1.0)
        y = x * 2.0
    run = roundoff.load(path)
    table = run.ops.collect()
    row = table.row(by_predicate=pl.col("operator") == "mul", named=True)
    assert row["max"] == 2.0
    assert torch.equal(run.tensor(record=row["record"]), y)
    source = table.row(row["inputs"][0], named=True)
    assert source["max"] == 1.0
    assert torch.equal(run.tensor(record=source["record"]), x)


def test_kept_tensors_are_the_tensors_views_and_strides_included(path):
    torch.manual_seed(0)
    made = {}

    def keep(name, tensor):
        made[name] = (
            tensor.clone(memory_format=torch.preserve_format),
            tensor.stride(),
        )
        return tensor

    base = torch.randn(4, 6, 5)
    with roundoff.capture(path, keep="tensors"):
        keep("transpose", base.transpose(0, 2))
        keep("slice", base[:, 1:4])
        keep("permute", (base.permute(2, 0, 1) + 1.0).permute(1, 2, 0))
        keep("clone", base.to(torch.bfloat16).expand(2, 4, 6, 5))
    run = roundoff.load(path)
    table = run.ops.collect()
    for name, (tensor, stride) in made.items():
        operator = {"clone": "expand"}.get(name, name)
        record = table.filter(operator=operator)["record"].max()
        found = run.tensor(record=record)
        assert torch.equal(found, tensor)
        assert found.stride() == stride
    # the input and its views; the sum and its copy; the cast; and the copies that have other elements: slice and expand
    assert table["blob"].n_unique() == 5


@pytest.mark.parametrize("keep", ["stats", "tensors"])
def test_naming_the_parameters_of_a_new_model_is_no_call(path, keep):
    with roundoff.capture(path, keep=keep):
        model = torch.nn.Linear(3, 2)
        model(torch.ones(4, 3))
    assert "weight" in rows(path)["name"].to_list()
    assert rows(path, operator="detach").is_empty()


def test_sample_and_hash(path, tmp_path):
    x = torch.randn(100, 100)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        with roundoff.capture(tmp_path / name, keep="sample", seed=seed):
            x.exp()
    a, b, c = (roundoff.load(tmp_path / n).tensor("/exp") for n in "abc")
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.isin(a, x.exp()).all()
    hashes = []
    for value in (x, x.clone(), torch.where(x == x[3, 4], -x, x)):
        with roundoff.capture(path, keep="hash", overwrite=True):
            value.mul(1.0)
        hashes.append(rows(path, operator="mul")["hash"][0])
    assert hashes[0] == hashes[1] != hashes[2]


def test_steps_that_are_not_chosen_run_without_a_mode(path):
    inside = []
    with roundoff.capture(path, steps="1,3-4") as run:
        for _ in range(6):
            inside.append(_get_current_dispatch_mode() is not None)
            torch.ones(3) + 1
            run.step()
    assert inside == [False, True, False, True, True, False]
    assert roundoff.load(path).steps == [1, 3, 4]


def direct_aten():
    return torch.ops.aten.mul.Tensor(torch.ones(3), torch.ones(3)), "mul"


def from_import():
    from torch import relu

    return relu(torch.ones(3)), "relu"


def autocast():
    with torch.autocast("cpu", torch.bfloat16):
        return nn.Linear(4, 4)(torch.ones(2, 4)), "_to_copy"


def recomputed():
    layer = nn.Linear(4, 4)
    checkpoint(
        lambda x: layer(x).tanh(),
        torch.ones(2, 4, requires_grad=True),
        use_reentrant=False,
    ).sum().backward()
    return None, "tanh"


def functional_gradient():
    return torch.func.vmap(torch.func.grad(lambda x: x.sin().sum()))(
        torch.ones(3, 2)
    ), "cos"


def nested():
    tensor = torch.nested.nested_tensor(
        [torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged
    )
    return tensor * 2.0, "mul"


def sparse():
    return torch.eye(3).to_sparse() * 2.0, "mul"


def sparse_product():
    return torch.sparse.mm(
        torch.eye(3).to_sparse_csr(), torch.ones(3, 3)
    ), "_sparse_addmm"


@torch.library.custom_op("roundoff_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0


def custom():
    return double(torch.ones(3)), "roundoff_test::double"


def recurrent():
    return nn.GRU(3, 4, 2)(torch.ones(5, 2, 3))[0], "addmm"


def complex_numbers():
    return torch.fft.fft(torch.ones(8)), "_fft_r2c"


def quantized():
    return torch.quantize_per_tensor(
        torch.ones(3), 0.1, 0, torch.qint8
    ), "quantize_per_tensor"


def zeros_without_memory():
    return torch._efficientzerotensor((2000,)) + torch.ones(2000), "prims::add"


def freed():
    x = torch.randn(3000)
    x.untyped_storage().resize_(0)
    return x.view(3, 1000), "view"


def forward_mode():
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(torch.randn(2000), torch.randn(2000))
        return torch.autograd.forward_ad.unpack_dual(x * torch.randn(2000)), "mul"


def batched():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    values = dict(net.named_parameters())
    one = torch.func.grad(lambda x: torch.func.functional_call(net, values, (x,)).sum())
    return torch.func.vmap(one)(torch.randn(5, 4)), "mm"


def meta():
    return torch.ones(3, device="meta") + 1, "add"


def no_gradient():
    with torch.inference_mode():
        return torch.ones(3).exp(), "exp"


def gates_under_no_grad():
    packed = nn.Parameter(torch.zeros(6, 2))
    with torch.no_grad():
        # after the first, torch forbids to ask the others who made them
        for gate in packed.chunk(3):
            nn.init.orthogonal_(gate)
    return packed, "copy_"


@pytest.mark.parametrize(
    "function",
    [
        direct_aten,
        from_import,
        autocast,
        recomputed,
        functional_gradient,
        nested,
        sparse,
        sparse_product,
        custom,
        recurrent,
        complex_numbers,
        quantized,
        meta,
        no_gradient,
        gates_under_no_grad,
        zeros_without_memory,
        freed,
        forward_mode,
        batched,
    ],
    ids=lambda f: f.__name__,
)
def test_what_is_not_plain_is_recorded_or_has_a_reason(path, function):
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", category=UserWarning
        )  # torch: sparse and quantized tensors are beta
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        with roundoff.capture(path) as run:
            _, operator = function()
    assert run.stopped is None
    table = rows(path)
    found = table.filter(operator=operator)
    assert len(found), table["operator"].to_list()
    unread = table.filter(
        pl.col("min").is_null()
        & (pl.col("numel") > 0)
        & (pl.col("nan").fill_null(0) == 0)
    )
    assert unread["reason"].null_count() == 0


def test_a_reentrant_checkpoint_of_a_function_computes_again(path):
    x = torch.ones(2, 4, requires_grad=True)
    with roundoff.capture(path):
        checkpoint(lambda x: (x + 1).tanh(), x, use_reentrant=True).sum().backward()
    found = rows(path).filter(pl.col("operator").is_in(["add", "tanh"]))
    assert found.filter("recomputed")["operator"].to_list() == ["add", "tanh"]
    assert set(found.filter("recomputed")["phase"]) == {"backward"}
    backward = rows(path, operator="tanh_backward")
    assert not backward["recomputed"].any()


def test_recomputed_calls_are_of_the_backward(path):
    with roundoff.capture(path):
        recomputed()
    found = rows(path, operator="tanh")
    assert found["phase"].to_list() == ["forward", "backward"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_a_compiled_region_is_seen_at_its_boundary_and_whole_when_eager(path, tmp_path):
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    with warnings.catch_warnings(
        action="ignore", category=DeprecationWarning
    ):  # torch's own, when Inductor is imported
        import torch._inductor.compile_fx
    compiled = torch.compile(
        net
    )  # fused by Inductor, with buffers that it writes unseen
    x = torch.ones(3, 6)
    plain = compiled(x)
    with roundoff.capture(path, net) as run:
        seen = compiled(x)
    assert run.stopped is None
    assert torch.equal(plain, seen)
    region = rows(path).filter(pl.col("call") >= 0)
    assert region.select("module", "operator", "max").rows() == [
        ("", "compiled", plain.max().item())
    ]
    assert "--eager" in region["reason"][0]
    table = rows(path)
    assert table.row(region["inputs"][0][0], named=True)["shape"] == [3, 6]
    with roundoff.capture(tmp_path / "eager", net, eager=True):
        eager = compiled(x)
    # two layers, in each 7 terms added in another order, whose partial sums stay below 4: half an ulp of 4 for each
    assert torch.allclose(plain, eager, rtol=0, atol=2 * 7 * 4 * 2.0**-24)
    assert rows(tmp_path / "eager", operator="tanh")["module"].to_list() == ["1"]


def test_a_fault_of_ours_stops_the_recording_once_and_never_the_program(
    path, monkeypatch
):
    def broken(self, number, tensor):
        raise RuntimeError("no statistics today")

    monkeypatch.setattr("roundoff.record.statistics.Statistics.add", broken)
    with (
        pytest.warns(RuntimeWarning, match="no statistics today") as caught,
        roundoff.capture(path) as run,
    ):
        recorded = train(run=run)
    assert len([w for w in caught if w.category is RuntimeWarning]) == 1
    assert all(torch.equal(a, b) for a, b in zip(train(), recorded, strict=True))
    assert "no statistics today" in run.stopped


def test_warnings_that_are_errors_do_not_end_the_program(path, monkeypatch, capsys):
    def broken(self, number, tensor):
        raise RuntimeError("no statistics today")

    monkeypatch.setattr("roundoff.record.statistics.Statistics.add", broken)
    with warnings.catch_warnings(action="error"), roundoff.capture(path) as run:
        recorded = train(run=run)
    assert all(torch.equal(a, b) for a, b in zip(train(), recorded, strict=True))
    assert capsys.readouterr().err.count("no statistics today") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "kernel"}, "unknown level"),
        ({"keep": "all"}, "unknown keep"),
        ({"shadow": "fp32"}, "unknown shadow"),
        ({"steps": "5-3"}, "not a list of steps"),
        ({"steps": "one"}, "not a list of steps"),
        ({"level": "module", "shadow": "fp64"}, "no fp64 twin"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(path, options, message):
    with pytest.raises(RoundoffError, match=message):
        roundoff.capture(path, **options)
    assert not path.exists()


def test_sites_choose_and_a_pattern_without_a_match_is_an_error(path):
    net = Net()
    with roundoff.capture(path, net, sites=["head/*"]):
        net(X).sum().backward()
    assert set(rows(path).filter(pl.col("call") >= 0)["module"]) == {"head"}
    with (
        pytest.raises(RoundoffError, match="no call matches"),
        roundoff.capture(path, net, sites=["tail/*"], overwrite=True),
    ):
        net(X)


def test_nothing_recorded_is_an_error(path):
    with (
        pytest.raises(RoundoffError, match="nothing was recorded"),
        roundoff.capture(path, steps="7") as run,
    ):
        torch.ones(2) + 1
        run.step()


def test_a_second_run_into_the_same_folder_is_refused(path):
    with roundoff.capture(path):
        torch.ones(2) + 1
    with pytest.raises(RoundoffError), roundoff.capture(path):
        pass
    with roundoff.capture(path, overwrite=True):
        torch.ones(2) * 3
    assert set(rows(path).filter(pl.col("call") >= 0)["operator"]) == {"ones", "mul"}


def test_module_level_has_outputs_and_gradients_of_every_module(path):
    net = Net()
    with roundoff.capture(path, net, level="module"):
        net(X).sum().backward()
    table = rows(path)
    forward = table.filter(phase="forward").filter(pl.col("call") >= 0)
    assert forward["module"].to_list() == ["conv", "norm", "act", "head", ""]
    assert {"conv", "norm", "head"} <= set(table.filter(phase="backward")["module"])


def test_scalars_are_kept(path):
    with roundoff.capture(path) as run:
        train(run=run)
    scalars = roundoff.load(path).scalars.collect()
    assert scalars.filter(name="loss")["step"].to_list() == [0, 1]


def test_list_operators_have_the_inputs_of_each_place(path):
    a, b = (
        [torch.ones(3), torch.ones(2, 2)],
        [torch.full((3,), 2.0), torch.full((2, 2), 5.0)],
    )
    with roundoff.capture(path, keep="tensors"):
        torch._foreach_add_(a, b)
    table = rows(path)
    made = table.filter(operator="_foreach_add_")
    inputs = [
        [table.row(i, named=True)["shape"] for i in each] for each in made["inputs"]
    ]
    assert inputs == [[[3], [3]], [[2, 2], [2, 2]]]
    assert made["max"].to_list() == [3.0, 6.0]
    assert made["arguments"].null_count() == 1  # written once, not for each place


def test_running_statistics_are_rows_of_their_batch_normalisation(path):
    norm = nn.BatchNorm1d(4)
    with roundoff.capture(path, norm):
        norm(torch.full((3, 4), 2.0))
        norm.eval()(torch.full((3, 4), 2.0))
    made = rows(path).filter(pl.col("name") == "running_mean", pl.col("call") >= 0)
    assert made.select("operator", "place", "inplace", "max").rows() == [
        ("native_batch_norm", 3, True, pytest.approx(0.2))
    ]


def test_scalars_of_any_kind(path):
    with roundoff.capture(path) as run:
        x = torch.ones(3, requires_grad=True) * 2.0
        run.step(loss=x.sum(), lr=1e-3)
        x.sum()
        run.step(loss=float("nan"))
    found = roundoff.load(path).scalars.collect()
    assert found["name"].to_list() == ["loss", "lr", "loss"]
    assert found["value"].to_list()[:2] == [6.0, 1e-3]
    assert math.isnan(found["value"][2])


def test_what_a_checkpoint_computes_again_is_no_gradient(path):
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with roundoff.capture(path, net):
        x = torch.full((2, 4), 1e4, requires_grad=True)
        (
            torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False).sum() * 1e-6
        ).backward()
    made = rows(path).filter(pl.col("call") >= 0)
    assert made.filter("recomputed")["operator"].to_list().count("addmm") == 1
    assert not made.filter(pl.col("phase") == "forward")["recomputed"].any()
    scale = trace_overflow(rows(path)).loss_scale
    assert scale.largest <= 2 * 1e4 * 1e-6 * (
        1 + 2**-20
    )  # of a weight's gradient, from two rows of 1e4


def test_module_level_inside_torch_func_and_nothing_while_tracing(path):
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    values, x = dict(net.named_parameters()), torch.randn(5, 4)
    one = torch.func.grad(lambda x: torch.func.functional_call(net, values, (x,)).sum())
    plain = torch.func.vmap(one)(x)
    with roundoff.capture(path, net, level="module"):
        assert torch.equal(torch.func.vmap(one)(x), plain)
    assert rows(path, operator="Linear")["shape"].to_list() == [
        [5, 4],
        [5, 4],
    ]  # and the gradient
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", category=DeprecationWarning
        )  # torch.jit itself is deprecated
        with roundoff.capture(path, net, overwrite=True):
            traced = torch.jit.trace(
                net, x
            )  # sizes that are looked at become part of what is traced: an error here
            net(x)
    assert torch.equal(traced(x), net(x))


@pytest.mark.parametrize("leaves", [1e-5, 0.05, 40, 100])
def test_leaves_are_given_up_where_a_step_has_more(tmp_path, leaves):
    """What was written already is dropped, and nothing of it is named."""
    sizes = (10, 10**4, 10**7)
    batches = [(torch.ones(size), torch.arange(float(size))) for size in sizes]
    with roundoff.capture(tmp_path / "run", leaves=leaves) as run:
        for one, other in batches:
            (one + other).sum()
            run.step()
    read = roundoff.load(tmp_path / "run")
    assert read.verify() == []
    kept = read.ops.filter(pl.col("blob").is_not_null()).collect()
    fits = [8 * size <= leaves * 2**20 for size in sizes]
    assert sorted(set(kept["step"])) == [n for n in range(3) if all(fits[: n + 1])]
    assert set(kept["call"]) <= {-1}
    files = {path.parent.name for path in (tmp_path / "run").rglob("*.safetensors")}
    assert len(files) == len(set(kept["step"]))
    for row in kept.rows(named=True):
        tensor = read.tensor(record=row["record"], step=row["step"])
        assert tensor.numel() == row["numel"]


@pytest.mark.parametrize("leaves", [-1, float("nan"), "all", None])
def test_no_size_of_leaves(tmp_path, leaves):
    with pytest.raises(RoundoffError, match="not a size"):
        roundoff.capture(tmp_path / "run", leaves=leaves)


def test_views_of_other_numbers_are_kept_as_what_they_read(path):
    """Pairs as complex numbers, a conjugate, the parts of a complex number, other bits."""
    pairs = torch.randn(6, 2, generator=torch.Generator().manual_seed(1))
    with roundoff.capture(path, keep="tensors") as run:
        z = torch.view_as_complex(pairs[1:] + 0)
        turned = torch.fft.fft(z)
        opposite = turned.conj()
        imaginary = opposite.imag
        bits = imaginary.contiguous().view(torch.int32)
        (opposite[2:] * 2).real.sum() + (bits & 1).sum()
        run.step()
    recorded = roundoff.load(path)
    for operator, expected in (
        ("view_as_complex", z),
        ("_conj", opposite.resolve_conj()),
        ("view_as_real", torch.view_as_real(turned)),
    ):
        held = recorded.tensor(f"/{operator}")
        assert held.dtype == expected.dtype
        assert torch.equal(held, expected), operator
    table = rows(path)
    assert table.filter(operator="view_as_complex")["inputs"].item().to_list()
    # what is cut out of the conjugate is no view of what that is a view of
    conjugate = table.filter(operator="_conj").to_dicts()[0]
    [cut] = [
        row
        for row in table.filter(operator="slice").to_dicts()
        if row["inputs"] == [conjugate["record"]]
    ]
    assert torch.equal(recorded.tensor(record=cut["record"]), opposite[2:])
