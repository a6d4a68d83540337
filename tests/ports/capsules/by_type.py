"""A convolution for each type of capsule, and routing one class's weights at a time."""

import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


class PrimaryType(nn.Module):
    """Capsules of one type: (n, size, h, w) to (n, h * w, size)."""

    def __init__(self, weight, bias):
        super().__init__()
        self.conv = nn.Conv2d(weight.shape[1], weight.shape[0], 5, stride=2)
        self.conv.weight.data.copy_(weight)
        self.conv.bias.data.copy_(bias)

    def forward(self, x):
        return self.conv(x).flatten(2).transpose(1, 2)


def squash(s):
    length = s.pow(2).sum(-1, keepdim=True).add(1e-8).sqrt()
    squared = s.pow(2).sum(-1, keepdim=True)
    return (s / length) * (squared / (squared + 1))


class Class(nn.Module):
    """What each capsule says of one class: kernel (capsules, in, out)."""

    def __init__(self, weight, bias):
        super().__init__()
        self.kernel = nn.Parameter(weight.transpose(1, 2).contiguous())
        self.offset = nn.Parameter(bias.clone())

    def forward(self, u):
        return torch.bmm(u.transpose(0, 1), self.kernel)


class Net(nn.Module):
    def __init__(self, state):
        super().__init__()
        self.stem = nn.Conv2d(1, 10, 5)
        self.stem.weight.data.copy_(state["conv.weight"])
        self.stem.bias.data.copy_(state["conv.bias"])
        weights = state["primary.conv.weight"].chunk(2)
        biases = state["primary.conv.bias"].chunk(2)
        self.types = nn.ModuleList(map(PrimaryType, weights, biases))
        self.classes = nn.ModuleList(
            map(Class, state["digits.weight"].unbind(1), state["digits.bias"])
        )
        self.layers = nn.ModuleList()
        for i in (0, 2, 4):
            weight = state[f"decoder.{i}.weight"]
            layer = nn.Linear(weight.shape[1], weight.shape[0])
            layer.weight.data.copy_(weight)
            layer.bias.data.copy_(state[f"decoder.{i}.bias"])
            self.layers.append(layer)

    def route(self, votes):
        """votes: a list over classes of (capsules, n, size)."""
        held = [vote.detach() for vote in votes]
        scores = [torch.zeros(vote.shape[:2], dtype=vote.dtype) for vote in votes]
        for _ in range(2):
            shares = torch.stack(scores).softmax(0)
            for k, layer in enumerate(self.classes):
                mean = (shares[k, :, :, None] * held[k]).sum(0)
                pose = squash(mean + layer.offset.detach())
                scores[k] = scores[k] + (held[k] * pose).sum(-1)
        shares = torch.stack(scores).softmax(0)
        poses = []
        for k, layer in enumerate(self.classes):
            mean = torch.einsum("cn,cnd->nd", shares[k], votes[k])
            poses.append(squash(mean + layer.offset))
        return torch.stack(poses, 1)

    def forward(self, image, label):
        x = self.stem(image).clamp(min=0)
        u = torch.cat([capsules(x) for capsules in self.types], 1)
        u = squash(u)
        poses = self.route([layer(u) for layer in self.classes])
        chosen = torch.arange(3) == label[:, None]
        h = torch.where(chosen[..., None], poses, 0.0).reshape(len(image), -1)
        for layer in self.layers[:-1]:
            h = F.relu(layer(h))
        picture = torch.sigmoid(self.layers[-1](h))
        return torch.linalg.vector_norm(poses, dim=2), picture


def model():
    return Net(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["image"], batch["label"])


def loss(output, batch):
    lengths, picture = output
    margin = lengths.new_zeros(())
    for n, label in enumerate(batch["label"].tolist()):
        for k in range(3):
            if k == label:
                margin = margin + F.relu(0.9 - lengths[n, k]) ** 2
            else:
                margin = margin + 0.5 * F.relu(lengths[n, k] - 0.1) ** 2
    apart = picture - batch["image"].flatten(1)
    rebuilt = (apart * apart).sum()
    return (margin + 0.0005 * math.isqrt(picture.shape[1]) * rebuilt) / len(lengths)


def optimizer(net):
    return torch.optim.Adam(net.parameters(), 1e-3, (0.9, 0.99), 1e-8)
