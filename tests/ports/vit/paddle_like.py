"""Linear layers as x @ w + b with their own weight order, own attention and layer norm."""

from pathlib import Path

import torch
from torch import nn


class Linear(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(cin, cout))
        self.bias = nn.Parameter(torch.empty(cout))

    def forward(self, x):
        return torch.matmul(x, self.weight) + self.bias


class LayerNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(dim))
        self.shift = nn.Parameter(torch.empty(dim))

    def forward(self, x):
        mu = x.mean(-1, keepdim=True)
        var = ((x - mu) ** 2).mean(-1, keepdim=True)
        return (x - mu) / torch.sqrt(var + 1e-6) * self.scale + self.shift


class SelfAttention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.query = Linear(dim, dim)
        self.key = Linear(dim, dim)
        self.value = Linear(dim, dim)
        self.out = Linear(dim, dim)

    def split(self, x):
        return x.reshape(x.shape[0], x.shape[1], self.num_heads, self.head_dim)

    def forward(self, x):
        q = self.split(self.query(x))
        k = self.split(self.key(x))
        v = self.split(self.value(x))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.head_dim**-0.5
        scores = scores - scores.amax(-1, keepdim=True)
        weights = torch.exp(scores)
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.einsum("bhqk,bkhd->bqhd", weights, v)
        return self.out(y.reshape(x.shape))


class Layer(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.ln_before = LayerNorm(dim)
        self.attention = SelfAttention(dim, num_heads)
        self.ln_after = LayerNorm(dim)
        self.up = Linear(dim, 3 * dim)
        self.down = Linear(3 * dim, dim)

    def forward(self, x):
        x = x + self.attention(self.ln_before(x))
        y = self.up(self.ln_after(x))
        y = 0.5 * y * (1 + torch.erf(y / 2**0.5))
        return x + self.down(y)


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embedding = Linear(48, 24)
        self.class_token = nn.Parameter(torch.empty(24))
        self.position_embedding = nn.Parameter(torch.empty(10, 24))
        self.layers = nn.ModuleList([Layer(24, 3), Layer(24, 3)])
        self.final_norm = LayerNorm(24)
        self.classifier = Linear(24, 10)

    def forward(self, images):
        n = images.shape[0]
        x = images.reshape(n, 3, 3, 4, 3, 4)
        x = x.permute(0, 2, 4, 1, 3, 5).reshape(n, 9, 48)
        x = self.patch_embedding(x)
        tokens = torch.zeros(n, 10, 24) + 0
        tokens[:, 0] = self.class_token
        tokens[:, 1:] = x
        x = tokens + self.position_embedding
        for layer in self.layers:
            x = layer(x)
        x = self.final_norm(x[:, 0])
        return self.classifier(x)


def set_linear(layer, weight, bias):
    layer.weight.copy_(weight.t())
    layer.bias.copy_(bias)


def set_norm(layer, w, name):
    layer.scale.copy_(w[name + ".weight"])
    layer.shift.copy_(w[name + ".bias"])


def load(net, w):
    set_linear(net.patch_embedding, w["patch.weight"].reshape(24, 48), w["patch.bias"])
    net.class_token.copy_(w["cls"][0, 0])
    net.position_embedding.copy_(w["pos"][0])
    for i, layer in enumerate(net.layers):
        name = f"blocks.{i}."
        set_norm(layer.ln_before, w, name + "norm1")
        set_norm(layer.ln_after, w, name + "norm2")
        weights = w[name + "attn.qkv.weight"].chunk(3)
        biases = w[name + "attn.qkv.bias"].chunk(3)
        attention = layer.attention
        set_linear(attention.query, weights[0], biases[0])
        set_linear(attention.key, weights[1], biases[1])
        set_linear(attention.value, weights[2], biases[2])
        set_linear(
            attention.out, w[name + "attn.proj.weight"], w[name + "attn.proj.bias"]
        )
        set_linear(layer.up, w[name + "fc1.weight"], w[name + "fc1.bias"])
        set_linear(layer.down, w[name + "fc2.weight"], w[name + "fc2.bias"])
    set_norm(net.final_norm, w, "norm")
    set_linear(net.classifier, w["head.weight"], w["head.bias"])


def model():
    net = VisionTransformer()
    with torch.no_grad():
        load(net, torch.load(Path(__file__).with_name("weights.pt")))
    return net


def forward(net, batch):
    return net(batch["x"])


def loss(output, batch):
    picked = output.log_softmax(-1)[torch.arange(len(output)), batch["labels"]]
    return -picked.mean()
