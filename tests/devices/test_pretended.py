"""The pretended device refuses what torch's documents say that a GPU refuses."""

import copy

import pytest
import torch
from torch import nn

import roundoff

from . import conftest

if not conftest.PRETENDS:
    pytest.skip("the device is added in a process of its own", allow_module_level=True)

from .pretended import waits

MIXED = "Expected all tensors to be on the same device"


@pytest.fixture
def x(device):
    return torch.arange(6.0, device=device).view(2, 3)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x + torch.ones(3),
        lambda x: x @ torch.ones(3),
        lambda x: torch.cat([x, torch.ones(2, 3)]),
        lambda x: torch.stack([x[0, 0], torch.tensor(1.0)]),
        lambda x: nn.functional.linear(x, torch.ones(4, 3)),
        lambda x: nn.functional.embedding(torch.tensor([0]), x),
        lambda x: x.index_select(0, torch.tensor([0])),
        lambda x: x.scatter(0, torch.tensor([[0, 0, 0]]), 1.0),
        lambda x: torch.where(torch.ones(2, 3) > 0, x, x),
        lambda x: torch.ones(2, 3).add_(x),
        lambda x: torch.equal(x, torch.ones(2, 3)),
        lambda x: torch.bincount(x.long().flatten(), torch.ones(6)),
        lambda x: torch.ones(()).add_(x[0, 0]),
    ],
)
def test_tensors_of_two_devices_do_not_meet(x, call):
    with pytest.raises(RuntimeError, match=MIXED):
        call(x)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x + torch.tensor(1.0),
        lambda x: torch.tensor(1.0) * x,
        lambda x: torch.where(x > 1, x, torch.tensor(0.0)),
        lambda x: x[torch.tensor([1])],
        lambda x: x[:, torch.tensor([True, False, True])],
        lambda x: x.index_put((torch.tensor([1]),), torch.tensor(1.0)),
        lambda x: x.masked_fill(x > 1, torch.tensor(1.0)),
        lambda x: torch.ones(2, 3).copy_(x),
    ],
)
def test_a_single_value_and_indices_may_be_on_the_cpu(x, call):
    assert torch.equal(call(x).cpu(), call(x.cpu()))


def test_values_are_read_on_the_cpu_alone(x):
    with pytest.raises(TypeError, match="Tensor.cpu"):
        x.numpy()
    assert x.cpu().numpy().sum() == 15
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_generator_draws_on_its_own_device(device):
    torch.randperm(4, generator=torch.Generator(device), device=device)
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.randperm(4, generator=torch.Generator(), device=device)


def test_the_device_has_a_random_state_of_its_own(device):
    before = torch.get_rng_state()
    state = torch.get_device_module(device).get_rng_state()
    drawn = torch.rand(4, device=device)
    assert torch.equal(torch.get_rng_state(), before)
    torch.get_device_module(device).set_rng_state(state)
    assert torch.equal(torch.rand(4, device=device), drawn)


def test_views_share_memory(x):
    x[1:, ::2].mul_(10)
    x.t()[1].add_(0.5)
    assert x.tolist() == [[0, 1.5, 2], [30, 4.5, 50]]
    assert x[1:].untyped_storage()._cdata == x.untyped_storage()._cdata
    assert torch.view_as_real(torch.complex(x, x))[0, 1].tolist() == [1.5, 1.5]


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.LSTM(3, 4, 2, bidirectional=True), (5, 2, 3)),
        (lambda: nn.GRU(3, 4), (5, 2, 3)),
        (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (2, 4, 5, 5)),
        (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 5, 5)),
        (lambda: nn.BatchNorm2d(4), (2, 4, 5, 5)),
        (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0), (3, 2, 4)),
    ],
)
def test_modules_compute_what_they_compute_on_the_cpu(device, make, shape):
    torch.manual_seed(0)
    ours = make()
    theirs = copy.deepcopy(ours).to(device)
    a = torch.randn(shape, requires_grad=True)
    b = a.detach().to(device).requires_grad_()
    for module, value in ((ours, a), (theirs, b)):
        result = module(value)
        (result[0] if isinstance(result, tuple) else result).square().sum().backward()
    pairs = zip([a, *ours.parameters()], [b, *theirs.parameters()], strict=True)
    for one, other in pairs:
        # the same sums in another order: 100 terms of fp32
        torch.testing.assert_close(other.grad.cpu(), one.grad, rtol=1e-5, atol=2e-5)


def test_waiting_calls_are_counted(x):
    with waits() as counted:
        x + 1
        x.cpu()
        x.sum().item()
        x[x > 2]
    assert counted["_copy_from"] == 1
    assert counted["_local_scalar_dense"] == 1
    assert counted["index"] == 1


def test_an_error_of_a_hook_reaches_the_caller(x):
    x.requires_grad_()
    y = x * 2

    def refuse(gradient):
        raise ValueError("no")

    y.register_hook(refuse)
    with pytest.raises(ValueError, match="no"):
        y.sum().backward()


def test_a_recording_waits_no_more_often_for_more_calls(device, tmp_path):
    def waited(activations):
        layers = [nn.Linear(8, 8), *[nn.GELU() for _ in range(activations)]]
        net = nn.Sequential(*layers).to(device)
        batch = torch.ones(4, 8).to(device)
        folder = tmp_path / str(activations)
        with waits() as counted, roundoff.capture(folder, net, leaves=0) as run:
            for _ in range(2):
                net(batch).square().mean().backward()
                run.step()
        return counted.total()

    assert waited(9) == waited(1)
