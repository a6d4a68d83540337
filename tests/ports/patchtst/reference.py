"""A small PatchTST: patches of each channel of a series, a transformer with batch norm."""

import math

import torch
from torch import nn
from torch.nn import functional as F

CHANNELS, CONTEXT, HORIZON = 5, 62, 16
PATCH_LEN, STRIDE = 12, 6
D_MODEL, N_HEADS, D_FF, N_LAYERS = 32, 4, 64, 3
# Of the training part of the data.
TRAIN_MEAN = (18.0, 52.0, 1013.0, 3.5, 240.0)
TRAIN_STD = (6.0, 15.0, 9.0, 1.6, 110.0)
MAE_WEIGHT = 0.1
MAX_LR, TOTAL_STEPS, PCT_START, DIV, FINAL_DIV = 1e-2, 12, 0.4, 5.0, 1e3
WEIGHT_DECAY, MAX_NORM = 0.1, 0.5


class RevIN(nn.Module):
    """Reversible instance normalisation of (batch, time, channels)."""

    def __init__(self, channels, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.affine_weight = nn.Parameter(torch.ones(channels))
        self.affine_bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x, mode):
        if mode == "norm":
            self.mean = x.mean(dim=1, keepdim=True).detach()
            var = x.var(dim=1, keepdim=True, unbiased=False)
            self.stdev = torch.sqrt(var + self.eps).detach()
            x = (x - self.mean) / self.stdev
            return x * self.affine_weight + self.affine_bias
        x = (x - self.affine_bias) / (self.affine_weight + self.eps**2)
        return x * self.stdev + self.mean


class TokenNorm(nn.BatchNorm1d):
    """Batch norm of (series, patches, features)."""

    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class ResidualAttention(nn.Module):
    """Scores of the layer before are added to those of this one.

    Softmax forgets a bias of the keys, and the norm behind forgets one of the values.
    """

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.scale = (d_model // n_heads) ** -0.5
        self.W_Q = nn.Linear(d_model, d_model)
        self.W_K = nn.Linear(d_model, d_model, bias=False)
        self.W_V = nn.Linear(d_model, d_model, bias=False)
        self.to_out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, prev=None):
        b, n, d = x.shape
        q = self.W_Q(x).view(b, n, self.n_heads, -1).transpose(1, 2)
        k = self.W_K(x).view(b, n, self.n_heads, -1).permute(0, 2, 3, 1)
        v = self.W_V(x).view(b, n, self.n_heads, -1).transpose(1, 2)
        scores = torch.matmul(q, k) * self.scale
        if prev is not None:
            scores = scores + prev
        weights = F.softmax(scores, dim=-1)
        out = torch.matmul(weights, v)
        out = out.transpose(1, 2).reshape(b, n, d)
        return self.to_out(out), scores


class EncoderLayer(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.attn = ResidualAttention(d_model, n_heads)
        self.norm_attn = TokenNorm(d_model)
        self.ff = nn.Sequential(
            nn.Linear(d_model, d_ff), nn.GELU(), nn.Linear(d_ff, d_model, bias=False)
        )
        self.norm_ff = TokenNorm(d_model)

    def forward(self, x, prev=None):
        out, scores = self.attn(x, prev)
        x = self.norm_attn(x + out)
        x = self.norm_ff(x + self.ff(x))
        return x, scores


class PatchTST(nn.Module):
    def __init__(self):
        super().__init__()
        self.revin = RevIN(CHANNELS)
        self.pad = nn.ReplicationPad1d((0, STRIDE))
        num_patches = (CONTEXT - PATCH_LEN) // STRIDE + 2
        self.W_P = nn.Linear(PATCH_LEN, D_MODEL)
        self.W_pos = nn.Parameter(torch.empty(num_patches, D_MODEL))
        self.layers = nn.ModuleList(
            [EncoderLayer(D_MODEL, N_HEADS, D_FF) for _ in range(N_LAYERS)]
        )
        self.head = nn.Linear(D_MODEL * num_patches, HORIZON)

    def forward(self, x):
        """(batch, context, channels) -> (batch, horizon, channels)."""
        x = self.revin(x, "norm")
        x = self.pad(x.transpose(1, 2))
        x = x.unfold(dimension=-1, size=PATCH_LEN, step=STRIDE)
        b, c = x.shape[:2]

        x = self.W_P(x.flatten(0, 1)) + self.W_pos
        scores = None
        for layer in self.layers:
            x, scores = layer(x, scores)

        x = x.transpose(1, 2).flatten(1)
        x = self.head(x).view(b, c, HORIZON)
        return self.revin(x.transpose(1, 2), "denorm")


def model():
    torch.manual_seed(2211)
    net = PatchTST()
    with torch.no_grad():
        net.revin.affine_weight.uniform_(0.6, 1.5)
        net.revin.affine_bias.normal_(0, 0.3)
        net.W_pos.uniform_(-0.5, 0.5)
        for layer in net.layers:
            layer.attn.W_Q.weight.mul_(2.5)
            layer.attn.W_Q.bias.normal_(0, 0.8)
            layer.attn.W_K.weight.mul_(2.5)
            layer.attn.W_V.weight.mul_(1.5)
            layer.attn.to_out.weight.mul_(1.5)
            layer.ff[0].weight.mul_(2)
            for norm in (layer.norm_attn, layer.norm_ff):
                norm.weight.uniform_(0.6, 1.4)
                norm.bias.normal_(0, 0.2)
                norm.running_mean.normal_(0, 0.2)
                norm.running_var.uniform_(0.5, 1.5)
    return net


def batches():
    """Weather by the hour: days and a shorter wave, a drift, noise with a memory.

    Here and there a sensor hardly moves, or jumps to another level.
    """
    generator = torch.Generator().manual_seed(1473)
    mean = torch.tensor([18.0, 52.0, 1013.0, 3.5, 240.0])
    std = torch.tensor([6.0, 15.0, 9.0, 1.6, 110.0])
    time = torch.arange(78.0).view(1, 78, 1)
    made = []
    for size in (4, 3, 4):
        level, drift, day, short, phase, turn = torch.randn(
            6, size, 1, 5, generator=generator
        )
        x = 0.7 * level + 0.012 * drift * (time - 39)
        x = x + (0.7 + 0.3 * day) * torch.sin(6.2831853 * time / 24 + 2 * phase)
        x = x + 0.4 * short * torch.sin(6.2831853 * time / 9.5 + 2 * turn)
        noise = torch.randn(size, 78, 5, generator=generator)
        for t in range(1, 78):
            noise[:, t] += 0.6 * noise[:, t - 1]
        x = x + 0.25 * noise
        x[0, :, 3] = 0.05 * x[0, :, 3]
        jump = int(torch.randint(20, 60, (), generator=generator))
        x[1, jump:, 2] += 1.2
        x = x * std + mean
        made.append({"past": x[:, :62].clone(), "future": x[:, 62:].clone()})
    return made


def scaled(x):
    """As StandardScaler does it."""
    return (x - torch.tensor(TRAIN_MEAN)) / torch.tensor(TRAIN_STD)


def forward(net, batch):
    return net(scaled(batch["past"]))


def loss(output, batch):
    target = scaled(batch["future"])
    return F.mse_loss(output, target) + MAE_WEIGHT * F.l1_loss(output, target)


class OneCycleAdamW(torch.optim.AdamW):
    """Clips the gradient; the rate goes up and down again, both as half a cosine."""

    done = 0

    def rate(self):
        peak = PCT_START * TOTAL_STEPS - 1
        if self.done <= peak:
            start, end, passed = MAX_LR / DIV, MAX_LR, self.done / peak
        else:
            start, end = MAX_LR, MAX_LR / DIV / FINAL_DIV
            passed = (self.done - peak) / (TOTAL_STEPS - 1 - peak)
        return end + (start - end) / 2 * (1 + math.cos(math.pi * passed))

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = self.rate()
        self.done += 1
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        return super().step(closure)


def optimizer(net):
    """Matrices decay; biases, norms and the table of positions don't."""
    decay, rest = [], []
    for name, p in net.named_parameters():
        (decay if p.ndim > 1 and name != "W_pos" else rest).append(p)
    groups = [{"params": decay}, {"params": rest, "weight_decay": 0.0}]
    return OneCycleAdamW(groups, lr=MAX_LR, weight_decay=WEIGHT_DECAY)
