"""As in TensorFlow: channels last, so capsules stand by place and then by type."""

from pathlib import Path

import torch
from torch import nn


def conv2d(x, kernel, bias, stride):
    """x (n, h, w, in), kernel (h, w, in, out), VALID."""
    kh, kw, channels, filters = kernel.shape
    windows = x.unfold(1, kh, stride).unfold(2, kw, stride)
    return torch.einsum("nyxchw,hwcf->nyxf", windows, kernel) + bias


def squash(vectors, axis):
    squared = torch.sum(torch.square(vectors), dim=axis, keepdim=True)
    factor = squared / (1.0 + squared) / torch.sqrt(squared + 1e-8)
    return factor * vectors


class DigitCaps(nn.Module):
    """Weights (classes, capsules, input size, output size)."""

    def __init__(self, weight, bias, routings=3):
        super().__init__()
        # type, y, x -> y, x, type
        weight = weight.view(2, 9, *weight.shape[1:]).transpose(0, 1).flatten(0, 1)
        self.W = nn.Parameter(weight.permute(1, 0, 3, 2).contiguous())
        self.bias = nn.Parameter(bias[:, None, :].clone())
        self.routings = routings

    def forward(self, inputs):
        expanded = inputs[:, None, :, None, :]
        u_hat = torch.matmul(expanded, self.W[None]).squeeze(3)
        u_stopped = u_hat.detach()
        b = torch.zeros_like(u_hat[..., 0])
        for _ in range(self.routings - 1):
            c = torch.softmax(b, dim=1)
            s = torch.einsum("nkc,nkcd->nkd", c, u_stopped)
            v = squash(s + self.bias[:, 0], axis=-1)
            b = b + torch.einsum("nkd,nkcd->nkc", v.detach(), u_stopped)
        c = torch.softmax(b, dim=1)
        s = torch.matmul(c[:, :, None, :], u_hat)
        return squash(s + self.bias, axis=-1).squeeze(2)


class Model(nn.Module):
    def __init__(self, state):
        super().__init__()
        self.conv1_kernel = nn.Parameter(state["conv.weight"].permute(2, 3, 1, 0))
        self.conv1_bias = nn.Parameter(state["conv.bias"].clone())
        primary = state["primary.conv.weight"].permute(2, 3, 1, 0)
        self.primary_kernel = nn.Parameter(primary.contiguous())
        self.primary_bias = nn.Parameter(state["primary.conv.bias"].clone())
        self.caps = DigitCaps(state["digits.weight"], state["digits.bias"])
        self.dense = nn.ParameterDict()
        for new, old in (("fc1", 0), ("fc2", 2), ("fc3", 4)):
            weight = state[f"decoder.{old}.weight"]
            self.dense[new + "_kernel"] = weight.t().contiguous()
            self.dense[new + "_bias"] = state[f"decoder.{old}.bias"].clone()

    def forward(self, image, label):
        x = image.permute(0, 2, 3, 1)
        x = torch.relu(conv2d(x, self.conv1_kernel, self.conv1_bias, 1))
        x = conv2d(x, self.primary_kernel, self.primary_bias, 2)
        capsules = x.reshape(len(x), -1, 4)
        capsules = squash(capsules, axis=-1)
        poses = self.caps(capsules)
        lengths = torch.sqrt(torch.sum(poses * poses, dim=-1))
        hot = torch.eye(3, dtype=poses.dtype)[label]
        masked = torch.einsum("nkd,nk->nkd", poses, hot).reshape(len(x), -1)
        hidden = torch.relu(masked @ self.dense.fc1_kernel + self.dense.fc1_bias)
        hidden = torch.relu(hidden @ self.dense.fc2_kernel + self.dense.fc2_bias)
        pixels = hidden @ self.dense.fc3_kernel + self.dense.fc3_bias
        pixels = 1 / (1 + torch.exp(-pixels))
        return lengths, pixels


def model():
    return Model(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["image"], batch["label"])


def loss(output, batch):
    lengths, pixels = output
    hot = torch.eye(3, dtype=lengths.dtype)[batch["label"]]
    above = torch.clamp(0.9 - lengths, min=0.0).square()
    below = torch.clamp(lengths - 0.1, min=0.0).square()
    margin = torch.sum(hot * above + 0.5 * (1.0 - hot) * below, dim=1)
    error = pixels - batch["image"].permute(0, 2, 3, 1).flatten(1)
    rebuilt = error.square().sum(dim=1)
    return torch.mean(margin + 0.0005 * 13 * rebuilt)


class Adam(torch.optim.Optimizer):
    def __init__(self, params, rate=1e-3, beta_1=0.9, beta_2=0.99, epsilon=1e-8):
        super().__init__(params, {"rate": rate})
        self.betas, self.epsilon = (beta_1, beta_2), epsilon
        self.t = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.t += 1
        one, two = self.betas
        for group in self.param_groups:
            for p in group["params"]:
                slot = self.state[p]
                m = slot.get("m", torch.zeros_like(p))
                v = slot.get("v", torch.zeros_like(p))
                slot["m"] = one * m + (1 - one) * p.grad
                slot["v"] = two * v + (1 - two) * p.grad.square()
                m_hat = slot["m"] / (1 - one**self.t)
                v_hat = slot["v"] / (1 - two**self.t)
                p -= group["rate"] * m_hat / (v_hat.sqrt() + self.epsilon)


def optimizer(net):
    return Adam(net.parameters())
