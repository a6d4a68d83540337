"""One example at a time, one masked time at a time; convolutions as matrix products."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


class Conv(nn.Module):
    """x (channels, time); weight (out, in * kernel)."""

    def __init__(self, w, stride):
        super().__init__()
        self.kernel, self.stride = w.shape[2], stride
        self.matrix = nn.Parameter(w.flatten(1))

    def forward(self, x):
        columns = x.unfold(1, self.kernel, self.stride)
        return self.matrix @ columns.transpose(1, 2).flatten(0, 1)


class Heads(nn.Module):
    def __init__(self, w, at):
        super().__init__()
        self.fused = nn.Linear(12, 36)
        self.fused.weight.data = w[at + "in_proj_weight"]
        self.fused.bias.data = w[at + "in_proj_bias"]
        self.out = linear(w, at + "out_proj")

    def forward(self, x):
        q, k, v = self.fused(x).split(12, 1)
        result = []
        for part in (slice(0, 6), slice(6, 12)):
            scores = q[:, part] @ k[:, part].T / 6**0.5
            result.append(scores.softmax(1) @ v[:, part])
        return self.out(torch.cat(result, 1))


def linear(w, at):
    weight = w[at + ".weight"]
    layer = nn.Linear(*reversed(weight.shape))
    layer.weight.data, layer.bias.data = weight, w[at + ".bias"]
    return layer


def norm(w, at):
    layer = nn.LayerNorm(len(w[at + ".bias"]))
    layer.weight.data, layer.bias.data = w[at + ".weight"], w[at + ".bias"]
    return layer


class Net(nn.Module):
    def __init__(self, w):
        super().__init__()
        at = "feature_extractor.conv_layers."
        self.convs = nn.ModuleList(
            Conv(w[f"{at}{i}.0.weight"], stride) for i, stride in enumerate((5, 2, 2))
        )
        self.gain = nn.Parameter(w[at + "0.1.weight"][:, None])
        self.offset = nn.Parameter(w[at + "0.1.bias"][:, None])
        self.normed = norm(w, "layer_norm")
        self.project = linear(w, "post_extract_proj")
        self.hidden = nn.Parameter(w["mask_emb"])
        at = "pos_conv.conv."
        self.length = nn.Parameter(w[at + "parametrizations.weight.original0"])
        self.direction = nn.Parameter(w[at + "parametrizations.weight.original1"])
        self.pos_bias = nn.Parameter(w[at + "bias"])
        self.first_norm = norm(w, "norm")
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "heads": Heads(w, f"layers.{i}.self_attn."),
                    "norm1": norm(w, f"layers.{i}.norm1"),
                    "fc1": linear(w, f"layers.{i}.fc1"),
                    "fc2": linear(w, f"layers.{i}.fc2"),
                    "norm2": norm(w, f"layers.{i}.norm2"),
                }
            )
            for i in (0, 1)
        )
        self.ask = linear(w, "final_proj")
        self.answer = linear(w, "project_q")

    def features(self, wave):
        x = self.convs[0](wave[None])
        mean = x.mean(1, keepdim=True)
        x = (x - mean) / (x.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
        x = F.gelu(x * self.gain + self.offset)
        x = F.gelu(self.convs[1](x))
        x = F.gelu(self.convs[2](x))
        return x.detach() * 0.9 + x * 0.1

    def positional(self, x):
        size = self.direction.square().sum((0, 1), keepdim=True).sqrt()
        kernel = self.length * self.direction / size
        columns = F.pad(x.T, (2, 1))
        y = F.conv1d(columns[None], kernel, self.pos_bias, groups=3)[0]
        return F.gelu(y).T

    def example(self, wave, mask, negatives):
        features = self.features(wave)
        penalty = features.square().mean()
        features = self.normed(features.T)
        rows = [
            self.hidden if hidden else row
            for row, hidden in zip(self.project(features), mask.tolist())
        ]
        x = torch.stack(rows)
        x = self.first_norm(x + self.positional(x))
        for layer in self.layers:
            x = layer["norm1"](x + layer["heads"](x))
            x = layer["norm2"](x + layer["fc2"](F.gelu(layer["fc1"](x))))
        where = mask.nonzero()[:, 0]
        asked = F.normalize(self.ask(x[where]), dim=1)
        answers = F.normalize(self.answer(features[where]), dim=1)
        costs = []
        for i, drawn in enumerate(negatives.tolist()):
            others = [j for j in drawn if j != i]
            logits = answers[[i, *others]] @ asked[i] / 0.2
            costs.append(logits.logsumexp(0) - logits[0])
        return torch.stack(costs).mean(), penalty

    def forward(self, wave, mask, negatives):
        parts = [self.example(*one) for one in zip(wave, mask, negatives)]
        costs, penalties = zip(*parts)
        return torch.stack(costs).mean(), torch.stack(penalties).mean()


def model():
    return Net(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["wave"], batch["mask"], batch["negatives"])


def loss(output, batch):
    contrast, penalty = output
    return contrast + 10 * penalty


def optimizer(net):
    return torch.optim.AdamW(net.parameters(), 2e-3, (0.9, 0.98), 1e-6, 0.01)
