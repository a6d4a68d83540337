"""Kernels (in, out); queries, keys and values in one product, the library's attention."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


class Dense(nn.Module):
    def __init__(self, kernel, bias):
        super().__init__()
        self.kernel = nn.Parameter(kernel)
        self.bias = nn.Parameter(bias)

    def forward(self, x):
        return torch.matmul(x, self.kernel) + self.bias


class Norm(nn.Module):
    def __init__(self, scale, offset, epsilon=1e-5):
        super().__init__()
        self.scale, self.offset = nn.Parameter(scale), nn.Parameter(offset)
        self.epsilon = epsilon

    def forward(self, x):
        var, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
        return (x - mean) * torch.rsqrt(var + self.epsilon) * self.scale + self.offset


class SelfAttention(nn.Module):
    def __init__(self, take, heads=4):
        super().__init__()
        self.heads = heads
        kernels = [take(f"{n}.weight").t() for n in ("query", "key", "value")]
        self.qkv = nn.Parameter(torch.cat(kernels, dim=1))
        self.q_bias = nn.Parameter(take("query.bias"))
        self.v_bias = nn.Parameter(take("value.bias"))
        self.proj = Dense(take("out.weight").t().contiguous(), take("out.bias"))

    def forward(self, x, attn_bias):
        b, n, c = x.shape
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        qkv = torch.addmm(bias, x.reshape(b * n, c), self.qkv)
        qkv = qkv.view(b, n, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_bias)
        return self.proj(y.permute(0, 2, 1, 3).reshape(b, n, c))


class GLU(nn.Module):
    def __init__(self, take):
        super().__init__()
        up, gate = take("wi.weight").t().chunk(2, dim=1)
        up_bias, gate_bias = take("wi.bias").chunk(2)
        self.up = Dense(up.contiguous(), up_bias.clone())
        self.gate = Dense(gate.contiguous(), gate_bias.clone())
        self.down = Dense(take("wo.weight").t().contiguous(), take("wo.bias"))

    def forward(self, x):
        return self.down(F.gelu(self.gate(x)) * self.up(x))


class EncoderBlock(nn.Module):
    def __init__(self, take):
        super().__init__()
        self.ln_attn = Norm(take("norm1.weight"), take("norm1.bias"))
        self.attn = SelfAttention(lambda name: take("attention." + name))
        self.ln_ffn = Norm(take("norm2.weight"), take("norm2.bias"))
        self.ffn = GLU(lambda name: take("mlp." + name))

    def forward(self, x, attn_bias):
        x = x + self.attn(self.ln_attn(x), attn_bias)
        return x + self.ffn(self.ln_ffn(x))


class Encoder(nn.Module):
    def __init__(self, sd):
        super().__init__()
        self.tok = nn.Parameter(sd["words.weight"])
        self.typ = nn.Parameter(sd["shapes.weight"])
        self.ln_emb = Norm(sd["embed_norm.weight"], sd["embed_norm.bias"], 1e-12)
        self.blocks = nn.ModuleList(
            EncoderBlock(lambda name, i=i: sd[f"layers.{i}.{name}"]) for i in range(2)
        )
        self.ln_out = Norm(sd["norm.weight"], sd["norm.bias"])
        self.pre = Dense(sd["dense.weight"].t().contiguous(), sd["dense.bias"])
        self.cls = Dense(sd["tags.weight"].t().contiguous(), sd["tags.bias"])

    def alibi(self, n, heads=4):
        ratio = 2 ** (-8 / heads)
        slope = ratio ** torch.arange(1, heads + 1)
        steps = torch.arange(n, dtype=torch.float32)
        apart = torch.cdist(steps[:, None], steps[:, None], p=1)
        return -(slope.view(1, heads, 1, 1) * apart)

    def forward(self, tokens, types, valid):
        x = F.embedding(tokens, self.tok, padding_idx=0) + F.embedding(types, self.typ)
        x = self.ln_emb(x)
        hide = (~valid).float()[:, None, None] * -1e30
        attn_bias = self.alibi(tokens.shape[1]) + hide
        for block in self.blocks:
            x = block(x, attn_bias)
        x = self.ln_out(x)
        x = torch.tanh(self.pre(x))
        return self.cls(x)


def model():
    return Encoder(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["words"], batch["shapes"], batch["mask"])


def loss(output, batch):
    importance = output.new_tensor([0.4, 1.0, 1.0, 1.0, 1.5, 1.0])
    valid = batch["labels"] >= 0
    logp = F.log_softmax(output[valid], dim=-1)
    gold = batch["labels"][valid]
    weight = importance[gold]
    picked = logp[torch.arange(len(gold)), gold]
    return -(weight * picked).sum() / weight.sum()


def optimizer(net):
    names = ("kernel", "qkv", "tok", "typ")
    decay = [p for n, p in net.named_parameters() if n.split(".")[-1] in names]
    rest = [p for n, p in net.named_parameters() if n.split(".")[-1] not in names]
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0}],
        lr=2e-3,
        betas=(0.9, 0.98),
    )
