"""Channels first, but depthwise kernels as sums of shifted images and one table of layers."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

# prefix, kernel, stride, kind, activation
LAYERS = [
    ("features.0", 3, 2, "full", "swish"),
    ("features.1.block.0", 3, 1, "depth", "relu"),
    ("features.1.block.1", 0, 0, "squeeze", None),
    ("features.1.block.2", 1, 1, "point", None),
    ("features.2.block.0", 1, 1, "point", "relu"),
    ("features.2.block.1", 3, 2, "depth", "relu"),
    ("features.2.block.2", 1, 1, "point", None),
    ("features.3.block.0", 1, 1, "point", "swish"),
    ("features.3.block.1", 5, 1, "depth", "swish"),
    ("features.3.block.2", 0, 0, "squeeze", None),
    ("features.3.block.3", 1, 1, "point", None),
    ("features.4", 1, 1, "point", "swish"),
]
SHORTCUTS = {1: 3, 7: 10}


class Net(nn.Module):
    def __init__(self, state):
        super().__init__()
        self.weights = nn.ParameterDict()
        for prefix, _, _, kind, _ in LAYERS:
            name = prefix.replace(".", "_")
            if kind == "squeeze":
                for part in ("fc1", "fc2"):
                    self.weights[f"{name}_{part}_w"] = state[
                        f"{prefix}.{part}.weight"
                    ].squeeze((2, 3))
                    self.weights[f"{name}_{part}_b"] = state[f"{prefix}.{part}.bias"]
                continue
            w = state[prefix + ".0.weight"]
            if kind == "depth":
                w = w.flatten(1).t().contiguous()
            if kind == "point":
                w = w[:, :, 0, 0]
            self.weights[name + "_w"] = w
            self.weights[name + "_scale"] = state[prefix + ".1.weight"]
            self.weights[name + "_shift"] = state[prefix + ".1.bias"]
            for stat in ("running_mean", "running_var"):
                self.register_buffer(
                    f"{name}_{stat}", state[f"{prefix}.1.{stat}"].clone()
                )
        for i in (0, 2):
            self.weights[f"fc{i}_w"] = state[f"classifier.{i}.weight"]
            self.weights[f"fc{i}_b"] = state[f"classifier.{i}.bias"]

    def conv(self, x, name, kernel, stride, kind):
        w = self.weights[name + "_w"]
        if kind == "point":
            n, c, height, width = x.shape
            flat = torch.baddbmm(x.new_zeros(()), w.expand(n, -1, -1), x.flatten(2))
            return flat.view(n, -1, height, width)
        if kind == "full":
            return F.conv2d(x, w, stride=stride, padding=1)
        border = kernel // 2
        rows, columns = x.shape[2:]
        padded = F.pad(x, [border] * 4)
        total = 0
        for i in range(kernel):
            for j in range(kernel):
                moved = padded[:, :, i : i + rows : stride, j : j + columns : stride]
                total = total + moved * w[i * kernel + j].view(-1, 1, 1)
        return total

    def norm(self, x, name):
        var, mean = torch.var_mean(x, (0, 2, 3), unbiased=False)
        if self.training:
            n = x.numel() / x.shape[1]
            running_mean = getattr(self, name + "_running_mean")
            running_var = getattr(self, name + "_running_var")
            running_mean.lerp_(mean.detach(), 0.01)
            running_var.lerp_(var.detach() * n / (n - 1), 0.01)
        std = (var + 1e-3).sqrt()
        x = (x - mean[:, None, None]) / std[:, None, None]
        scale = self.weights[name + "_scale"][:, None, None]
        return torch.addcmul(self.weights[name + "_shift"][:, None, None], x, scale)

    def gate(self, x, name):
        w = self.weights
        mean = x.mean((2, 3))
        hidden = F.relu(F.linear(mean, w[name + "_fc1_w"], w[name + "_fc1_b"]))
        scale = F.linear(hidden, w[name + "_fc2_w"], w[name + "_fc2_b"])
        return x * (F.relu6(scale + 3) / 6)[:, :, None, None]

    def act(self, x, kind):
        if kind == "relu":
            return x.clamp(min=0)
        if kind == "swish":
            return x * F.relu6(x + 3) / 6
        return x

    def forward(self, x):
        shortcut, until = None, None
        for i, (prefix, kernel, stride, kind, activation) in enumerate(LAYERS):
            name = prefix.replace(".", "_")
            if i in SHORTCUTS:
                shortcut, until = x, SHORTCUTS[i]
            if kind == "squeeze":
                x = self.gate(x, name)
                continue
            x = self.norm(self.conv(x, name, kernel, stride, kind), name)
            x = self.act(x, activation)
            if i == until:
                x = shortcut + x
        x = x.flatten(2).mean(2)
        x = self.act(F.linear(x, self.weights.fc0_w, self.weights.fc0_b), "swish")
        return F.linear(x, self.weights.fc2_w, self.weights.fc2_b)


def model():
    state = torch.load(Path(__file__).with_name("weights.pt"))
    return Net({name: value.clone() for name, value in state.items()})


def forward(net, batch):
    return net(batch["image"])


def loss(output, batch):
    log_share = output.log_softmax(1)
    hit = log_share.gather(1, batch["label"][:, None]).mean()
    return -(0.9 * hit + 0.1 * log_share.mean())


def optimizer(net):
    return torch.optim.RMSprop(
        net.parameters(), 0.002, 0.9, 0.002, weight_decay=1e-4, momentum=0.9
    )
