"""preserve: any sequence of changes to model and process is undone, however the block ends."""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

from roundoff.preserve import preserve


class Net(nn.Module):
    """Shared weights, a frozen parameter, buffers of several kinds, hooks, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 3)
        self.tied = nn.Linear(3, 4)
        self.tied.weight = self.body.get_parameter("0.weight")
        self.head.bias.requires_grad_(False)
        self.register_buffer("table", torch.tensor([0.0, -0.0, torch.nan, torch.inf]))
        self.register_buffer("scalar", torch.tensor(3))
        self.register_buffer("flag", torch.tensor([True, False]), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.calls = 0
        self.body[2].eval()
        self.register_forward_hook(lambda module, args, output: None)
        self.head.weight.register_hook(lambda grad: grad)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.body(x))


def bits(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def state_of(model: nn.Module) -> dict[str, object]:
    """Everything that is promised to be restored, as comparable values and identities."""
    state: dict[str, object] = {}
    for name, module in model.named_modules():
        state[f"{name} training"] = (type(module), module.training)
        state[f"{name} children"] = [
            (key, id(child)) for key, child in module._modules.items()
        ]
        state[f"{name} attributes"] = {
            key: id(value) for key, value in vars(module).items()
        }
        for key, value in vars(module).items():
            if key.endswith("_hooks") and isinstance(value, dict):
                state[f"{name} {key}"] = list(value.items())
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None:
                state[f"{name}.{key}"] = None
                continue
            state[f"{name}.{key}"] = (
                id(tensor),
                tensor.dtype,
                tuple(tensor.shape),
                bits(tensor),
            )
            state[f"{name}.{key} grad"] = (
                tensor.requires_grad,
                id(tensor.grad),
                None if tensor.grad is None else bits(tensor.grad),
                list((tensor._backward_hooks or {}).items()),
            )
        state[f"{name} persistent"] = set(module._non_persistent_buffers_set)
    state["global hooks"] = list(nn.modules.module._global_forward_hooks.items())
    state["python random"] = random.getstate()
    state["numpy random"] = repr(np.random.get_state())
    state["torch random"] = bits(torch.get_rng_state())
    return {**state, **flags()}


def flags() -> dict[str, object]:
    backends: Any = torch.backends  # torch's stubs lack conv and mkldnn.matmul
    return {
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "matmul precision": torch.get_float32_matmul_precision(),
        "tf32": (backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32),
        "fp32_precision": (
            backends.fp32_precision,
            backends.cudnn.fp32_precision,
            backends.cuda.matmul.fp32_precision,
            backends.cudnn.conv.fp32_precision,
            backends.mkldnn.matmul.fp32_precision,
            backends.mkldnn.conv.fp32_precision,
        )
        if hasattr(backends, "fp32_precision")
        else (),
        "reduced": (
            backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            backends.cuda.matmul.allow_fp16_accumulation,
        ),
        "cudnn": (
            backends.cudnn.enabled,
            backends.cudnn.benchmark,
            backends.cudnn.deterministic,
        ),
        "mkldnn": (backends.mkldnn.enabled, backends.mkldnn.deterministic),
        "attention": (
            backends.mha.get_fastpath_enabled(),
            backends.cuda.flash_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.math_sdp_enabled(),
            backends.cuda.cudnn_sdp_enabled(),
            backends.cuda.fp16_bf16_reduction_math_sdp_allowed(),
        ),
        "nnpack": torch._C._get_nnpack_enabled(),
        "einsum": (backends.opt_einsum.enabled, backends.opt_einsum.strategy),
    }


def backward(model):
    with torch.enable_grad():
        model.requires_grad_(True)
        model(torch.randn(5, 3).to(model.head.weight.dtype)).float().sum().backward()


def set_backend(owner, name, value):
    return lambda model: setattr(owner, name, value)


CHANGES = {
    "train": lambda m: m.train(),
    "eval": lambda m: m.eval(),
    "one child in eval": lambda m: m.body.eval(),
    "freeze": lambda m: m.requires_grad_(False),
    "thaw": lambda m: m.requires_grad_(True),
    "backward": backward,
    "zero_grad": lambda m: m.zero_grad(set_to_none=False),
    "grad to None": lambda m: m.zero_grad(),
    "forward": lambda m: m(torch.randn(5, 3).to(m.head.weight.dtype)),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "buffer in place": lambda m: m.table.mul_(-1.0),
    "buffer data": lambda m: m.table.data.fill_(-0.0),
    "buffer replaced": lambda m: setattr(m, "table", torch.ones(7)),
    "buffer zero to minus zero": lambda m: m.table.copy_(
        torch.tensor([-0.0, 0.0, torch.nan, 1.0])
    ),
    "buffer none to tensor": lambda m: setattr(m, "nothing", torch.ones(1)),
    "buffer flags": lambda m: m.flag.logical_not_(),
    "sparse buffer": lambda m: m.sparse.mul_(2),
    "buffer added": lambda m: m.register_buffer(
        "extra", torch.ones(1), persistent=False
    ),
    "parameter replaced": lambda m: setattr(
        m.head, "weight", nn.Parameter(torch.ones(3, 4))
    ),
    "child added": lambda m: m.add_module("extra_child", nn.Linear(1, 1)),
    "child removed and readded": lambda m: m.add_module("body", m._modules.pop("body")),
    "forward patched": lambda m: setattr(m.head, "forward", lambda x: x[..., :3] * 1.0),
    "attribute": lambda m: setattr(m, "calls", -1),
    "hook": lambda m: m.head.register_forward_hook(lambda *args: None),
    "hook with kwargs": lambda m: m.register_forward_pre_hook(
        lambda *args: None, with_kwargs=True
    ),
    "backward hook": lambda m: m.head.register_full_backward_hook(lambda *args: None),
    "hooks removed": lambda m: m._forward_hooks.clear(),
    "global hook": lambda m: nn.modules.module.register_module_forward_hook(
        lambda *args: None
    ),
    "parameter hook": lambda m: m.head.weight.requires_grad_().register_hook(
        lambda g: g * 2
    ),
    "weight parametrized": lambda m: (
        parametrize.register_parametrization(m.head, "weight", nn.Tanh())
        if isinstance(m.head, nn.Linear) and not parametrize.is_parametrized(m.head)
        else None
    ),
    "torch seed": lambda m: torch.manual_seed(1),
    "torch draw": lambda m: torch.rand(3),
    "numpy seed": lambda m: np.random.seed(1),
    "numpy draw": lambda m: np.random.randn(3),
    "python seed": lambda m: random.seed(1),
    "python draw": lambda m: random.gauss(0, 1),
    "no grad": lambda m: torch.set_grad_enabled(False),
    "default dtype": lambda m: torch.set_default_dtype(torch.float64),
    "deterministic": lambda m: torch.use_deterministic_algorithms(True, warn_only=True),
    "autocast": lambda m: torch.set_autocast_enabled("cpu", True),
    "autocast dtype": lambda m: torch.set_autocast_dtype("cpu", torch.float16),
    "matmul precision": lambda m: torch.set_float32_matmul_precision("medium"),
    "tf32 matmul": set_backend(torch.backends.cuda.matmul, "allow_tf32", True),
    "tf32 cudnn": set_backend(torch.backends.cudnn, "allow_tf32", False),
    "cudnn benchmark": set_backend(torch.backends.cudnn, "benchmark", True),
    "cudnn deterministic": set_backend(torch.backends.cudnn, "deterministic", True),
    "cudnn off": set_backend(torch.backends.cudnn, "enabled", False),
    "mkldnn off": set_backend(torch.backends.mkldnn, "enabled", False),
    "mkldnn deterministic": set_backend(torch.backends.mkldnn, "deterministic", True),
    "fp16 accumulation": set_backend(
        torch.backends.cuda.matmul, "allow_fp16_accumulation", True
    ),
    "bf16 reduction": set_backend(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
    ),
    "fastpath off": lambda m: torch.backends.mha.set_fastpath_enabled(False),
    "flash off": lambda m: torch.backends.cuda.enable_flash_sdp(False),
    "math attention off": lambda m: torch.backends.cuda.enable_math_sdp(False),
    "nnpack off": lambda m: torch.backends.nnpack.set_flags(False),
}
if hasattr(torch.backends, "fp32_precision"):
    backends: Any = torch.backends
    # Only where torch's legacy flags stay readable: once both kinds are mixed, reading them raises.
    CHANGES["new: conv"] = set_backend(backends.cudnn.conv, "fp32_precision", "ieee")
    CHANGES["new: mkldnn"] = set_backend(
        backends.mkldnn.matmul, "fp32_precision", "bf16"
    )
    CHANGES["new: matmul"] = set_backend(
        torch.backends.cuda.matmul, "fp32_precision", "tf32"
    )
    CHANGES["new: generic"] = set_backend(torch.backends, "fp32_precision", "ieee")


if torch.backends.opt_einsum.is_available():
    CHANGES["einsum"] = set_backend(torch.backends.opt_einsum, "enabled", False)


def change(model: nn.Module, name: str) -> None:
    """Apply one change; some cannot follow others (a forward pass in float16 of a patched module)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with suppress(RuntimeError, KeyError, TypeError, AttributeError, ValueError):
            CHANGES[name](model)


@pytest.fixture(autouse=True)
def process_state():
    before = flags()
    yield
    assert flags() == before, "the test itself leaked global state"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    net = Net()
    with torch.enable_grad():
        net(torch.randn(5, 3)).sum().backward()
    return net


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_seen_by_the_test_and_undone(model, name):
    before = state_of(model)
    with preserve(model):
        inside = state_of(model)
        # The one difference that preserve itself makes: gradients are put aside.
        assert {k for k in before if before[k] != inside[k]} <= {
            k for k in before if "grad" in k
        }
        CHANGES[name](model)
        if name not in ("hooks removed", "grad to None", "zero_grad", "thaw"):
            changed = _state_or_error(model)
            assert changed != inside, (
                f"{name} changed nothing: this test would not see a failure"
            )
    assert state_of(model) == before


def _state_or_error(model):
    try:
        return state_of(model)
    except (
        RuntimeError
    ) as error:  # torch refuses to read legacy TF32 flags after new ones
        return str(error)


@settings(max_examples=60, deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(CHANGES)), min_size=2, max_size=8),
    ending=st.sampled_from([None, ValueError, KeyboardInterrupt, SystemExit]),
)
def test_any_sequence_is_undone_however_the_block_ends(model, names, ending):
    before = state_of(model)
    with suppress(ending) if ending else nullcontext(), preserve(model):
        for name in names:
            change(model, name)
        if ending is not None:
            raise ending
    assert state_of(model) == before


@pytest.mark.parametrize("ending", [ValueError, KeyboardInterrupt])
def test_exceptions_come_out_unchanged(model, ending):
    error = ending("mine")
    with pytest.raises(ending) as caught, preserve(model):
        raise error
    assert caught.value is error


def test_nested_blocks(model):
    before = state_of(model)
    with preserve(model):
        model.eval()
        backward(model)
        inner = state_of(model)
        with preserve(model):
            model.train()
            backward(model)
            torch.rand(1)
        assert state_of(model) == inner
    assert state_of(model) == before


def test_gradients_inside_start_from_none_and_are_not_added_to_the_users():
    linear = nn.Linear(2, 1, bias=False)
    linear(torch.full((1, 2), 5.0)).sum().backward()
    users = linear.weight.grad
    with preserve(linear):
        assert linear.weight.grad is None
        linear(torch.ones(1, 2)).sum().backward()
        assert torch.equal(linear.weight.grad, torch.ones(1, 2))
    assert linear.weight.grad is users
    assert torch.equal(users, torch.full((1, 2), 5.0))


def test_handle_of_a_hook_from_inside_can_be_removed_afterwards():
    linear = nn.Linear(2, 1)
    kept = linear.register_forward_hook(lambda *args: None)
    with preserve(linear):
        handle = linear.register_forward_hook(lambda *args: None)
    handle.remove()
    assert list(linear._forward_hooks) == [kept.id]
    kept.remove()
    assert not linear._forward_hooks


def test_random_numbers_continue_as_if_nothing_was_drawn():
    def draw():
        return torch.rand(1).item(), np.random.rand(), random.random()

    with preserve(nn.Dropout()):
        expected = draw()
        draw()
    assert draw() == expected


def test_graph_that_saved_a_buffer_survives():
    # Restoring must not write to buffers that did not change: autograd would refuse the backward.
    norm = nn.BatchNorm1d(2).eval()
    output = norm(torch.randn(3, 2, requires_grad=True))
    with preserve(norm):
        norm(torch.randn(3, 2))
    output.sum().backward()


def test_one_failing_part_does_not_stop_the_others(monkeypatch):
    linear = nn.Linear(2, 1)

    def broken(state):
        raise OSError("cannot restore")

    monkeypatch.setattr(random, "setstate", broken)
    with pytest.raises(OSError, match="cannot restore"), preserve(linear):
        linear.eval()
        torch.set_grad_enabled(False)
    assert linear.training
    assert torch.is_grad_enabled()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_random_state_and_device():
    linear = nn.Linear(2, 1).cuda()
    before = torch.cuda.get_rng_state()
    pointer = linear.weight.data_ptr()
    with preserve(linear):
        torch.rand(4, device="cuda")
        linear.cpu()
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert linear.weight.is_cuda
    assert linear.weight.data_ptr() == pointer
