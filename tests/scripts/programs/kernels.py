"""Trains on kernels of its own: blocks as a GPU would run them, numpy, operators of a library."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 16


def blocks(count):
    return range((count + BLOCK - 1) // BLOCK)


def gate_kernel(out, a, b, program, count):
    first = program * BLOCK
    last = min(first + BLOCK, count)
    x = a[first:last]
    out[first:last] = x * torch.sigmoid(1.702 * x) * b[first:last]


def gate_backward_kernel(grad_a, grad_b, grad, a, b, program, count):
    first = program * BLOCK
    last = min(first + BLOCK, count)
    x, y, g = a[first:last], b[first:last], grad[first:last]
    gate = torch.sigmoid(1.702 * x)
    grad_a[first:last] = g * y * gate * (1 + 1.702 * x * (1 - gate))
    grad_b[first:last] = g * x * gate


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        flat_a, flat_b = a.reshape(-1), b.reshape(-1)
        out = torch.empty_like(flat_a)
        for program in blocks(out.numel()):
            gate_kernel(out, flat_a, flat_b, program, out.numel())
        ctx.save_for_backward(flat_a, flat_b)
        return out.view(a.shape)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        grad_a, grad_b = torch.zeros_like(a), torch.zeros_like(b)
        flat = grad.reshape(-1)
        for program in blocks(a.numel()):
            gate_backward_kernel(grad_a, grad_b, flat, a, b, program, a.numel())
        return grad_a.view(grad.shape), grad_b.view(grad.shape)


@torch.library.custom_op("mine::rms", mutates_args=())
def rms(x: Tensor, weight: Tensor) -> Tensor:
    scale = (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    return x * scale * weight


@rms.register_fake
def _(x, weight):
    return torch.empty_like(x)


@torch.library.custom_op("mine::rms_backward", mutates_args=())
def rms_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    normal = x * scale
    reach = grad * weight
    along = (reach * normal).mean(-1, keepdim=True)
    return (reach - normal * along) * scale, (grad * normal).sum((0, 1))


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _back(ctx, grad):
    return rms_backward(grad.contiguous(), *ctx.saved_tensors)


rms.register_autograd(_back, setup_context=_keep)


@torch.library.custom_op("mine::scan_", mutates_args=("out",))
def scan_(out: Tensor, x: Tensor, decay: float) -> None:
    state = np.zeros_like(x[:, 0].detach().numpy())
    for step in range(x.shape[1]):
        state = decay * state + x[:, step].detach().numpy()
        out[:, step] = torch.from_numpy(state)


class Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, decay):
        out = torch.empty_like(x)
        scan_(out, x, decay)
        ctx.decay = decay
        return out

    @staticmethod
    def backward(ctx, grad):
        back = torch.empty_like(grad)
        scan_(back, grad.flip(1), ctx.decay)
        return back.flip(1), None


class Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order):
        ctx.save_for_backward(order)
        out = torch.empty_like(x)
        out.numpy()[:] = x.detach().numpy()[:, order.numpy()]
        return out

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        back = torch.zeros_like(grad)
        back.index_add_(1, order, grad)
        return back, None


class Net(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.norm = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.left = nn.Linear(width, 18)
        self.right = nn.Linear(width, 18)
        self.down = nn.Linear(18, width)
        self.head = nn.Linear(width, 20)
        self.register_buffer("order", torch.arange(6).flip(0))

    def forward(self, tokens):
        x = self.embed(tokens)
        y = rms(x, self.norm)
        y = Gate.apply(self.left(y), self.right(y))
        x = x + Scan.apply(self.down(y), 0.8)
        x = x + 0.5 * Spread.apply(x, self.order)
        return self.head(x)


torch.manual_seed(4)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(8)
for step in range(2):
    tokens = torch.randint(20, (5, 7), generator=generator)
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
