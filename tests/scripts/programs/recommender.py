"""Predicts clicks from users and items; the interaction is a kernel of its own."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

USERS, ITEMS, DIM = 30, 40, 8


@torch.library.custom_op("shop::pairwise", mutates_args=())
def pairwise(a: Tensor, b: Tensor) -> Tensor:
    rows = a.detach().numpy().repeat(b.shape[1], axis=1)
    columns = b.detach().numpy()
    product = rows.reshape(len(rows), -1, b.shape[1]) * columns[:, None, :]
    return torch.from_numpy(product.sum(2) + product.max(2))


@pairwise.register_fake
def _(a, b):
    return torch.empty_like(a)


@torch.library.custom_op("shop::pairwise_backward", mutates_args=())
def pairwise_backward(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    product = a[:, :, None] * b[:, None, :]
    top = F.one_hot(product.argmax(2), b.shape[1]).to(a.dtype)
    reach = grad[:, :, None] * (1 + top)
    grad_a = (reach * b[:, None, :]).sum(2)
    grad_b = (reach * a[:, :, None]).sum(1)
    return grad_a, grad_b


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _back(ctx, grad):
    return pairwise_backward(grad.contiguous(), *ctx.saved_tensors)


pairwise.register_autograd(_back, setup_context=_save)


class SoftClip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, limit):
        ctx.save_for_backward(x)
        ctx.limit = limit
        return limit * torch.tanh(x / limit)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        slope = 1 - torch.tanh(x / ctx.limit) ** 2
        return grad * slope, None


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(USERS, DIM)
        self.items = nn.Embedding(ITEMS, DIM, padding_idx=0)
        self.bags = nn.EmbeddingBag(ITEMS, DIM, mode="mean")
        self.mix = nn.Linear(3 * DIM, 16)
        self.click = nn.Linear(16, 1)

    def forward(self, user, item, history):
        u, i = self.users(user), self.items(item)
        cross = SoftClip.apply(pairwise(u, i), 3.0)
        past = self.bags(history)
        hidden = F.relu(self.mix(torch.cat([cross, past, u * i], 1)))
        return self.click(hidden).squeeze(1)


def events(count):
    rng = np.random.default_rng(41)
    user = rng.integers(USERS, size=count)
    item = rng.integers(1, ITEMS, size=count)
    item[::7] = 0
    history = rng.integers(1, ITEMS, size=(count, 5))
    click = ((user + item) % 3 == 0).astype("f4")
    return user, item, history, click


def trained():
    torch.manual_seed(19)
    state = Recommender().state_dict()
    for value in state.values():
        value.add_(0.1 * torch.randn(value.shape))
    state["items.weight"][0] = 0
    return state


torch.manual_seed(6)
model = Recommender()
weights = trained()
model.users.weight.data = weights["users.weight"]
model.items.weight.data = weights["items.weight"]
model.bags.weight.data = weights["bags.weight"]
model.mix.load_state_dict(
    {"weight": weights["mix.weight"], "bias": weights["mix.bias"]}
)
model.click.load_state_dict(
    {"weight": weights["click.weight"], "bias": weights["click.bias"]}
)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
data = events(48)
for step in range(2):
    rows = np.arange(24 * step, 24 * step + 24)
    user, item, history, click = (torch.from_numpy(part[rows]) for part in data)
    score = model(user, item, history)
    loss = F.binary_cross_entropy_with_logits(score, click)
    decay = 1e-4 * model.users.weight.pow(2).sum()
    model.zero_grad()
    (loss + decay).backward()
    optimizer.step()
    print(step, loss.item())
