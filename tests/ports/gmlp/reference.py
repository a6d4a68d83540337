"""A small gMLP language model: causal spatial gating with a tiny attention (aMLP)."""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, PAD = 37, 0
DIM, FFN, TINY = 24, 48, 12
DEPTH, HEADS, SEQ_LEN = 3, 2, 16
LABEL_SMOOTHING, Z_WEIGHT = 0.1, 5e-3
LR, BETAS, EPS, WEIGHT_DECAY = 3e-3, (0.9, 0.98), 1e-8, 0.1


class TinyAttention(nn.Module):
    """One small head, whose output is added to the gate."""

    def __init__(self, dim_in, dim_out, dim_inner):
        super().__init__()
        self.scale = dim_inner**-0.5
        self.to_qkv = nn.Linear(dim_in, 3 * dim_inner, bias=False)
        self.to_out = nn.Linear(dim_inner, dim_out)

    def forward(self, x, pad):
        n = x.shape[1]
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) * self.scale
        future = torch.ones(n, n, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
        scores = scores.masked_fill(pad[:, None, :], -torch.inf)
        return self.to_out(scores.softmax(dim=-1) @ v)


class SpatialGatingUnit(nn.Module):
    """Mixes the positions of one half of the channels and multiplies with the other."""

    def __init__(self, dim, seq_len, heads, init_eps=1e-3):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim // 2)
        self.weight = nn.Parameter(torch.empty(heads, seq_len, seq_len))
        self.bias = nn.Parameter(torch.ones(heads, seq_len))
        bound = init_eps / seq_len
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x, gate_res):
        n = x.shape[1]
        res, gate = x.chunk(2, dim=-1)
        gate = self.norm(gate)

        weight = self.weight[:, :n, :n].tril()
        gate = gate.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        gate = weight @ gate + self.bias[:, :n, None]
        gate = gate.transpose(1, 2).flatten(2)

        gate = gate + gate_res
        return res * gate


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attn = TinyAttention(DIM, FFN // 2, TINY)
        self.proj_in = nn.Linear(DIM, FFN)
        self.sgu = SpatialGatingUnit(FFN, SEQ_LEN, HEADS)
        self.proj_out = nn.Linear(FFN // 2, DIM)

    def forward(self, x, pad):
        shortcut = x
        x = self.norm(x)
        gate_res = self.attn(x, pad)
        x = F.gelu(self.proj_in(x))
        x = self.sgu(x, gate_res)
        return shortcut + self.proj_out(x)


class GMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, padding_idx=PAD)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(DIM)
        self.out_bias = nn.Parameter(torch.zeros(VOCAB))
        nn.init.normal_(self.embed.weight, std=DIM**-0.5)

    def forward(self, tokens):
        pad = tokens == PAD
        x = self.embed(tokens) * DIM**0.5
        for block in self.blocks:
            x = block(x, pad)
        return F.linear(self.norm(x), self.embed.weight, self.out_bias)


def model():
    """As after some steps: weights in space are small, norms and biases have moved."""
    torch.manual_seed(3105)
    net = GMLP()
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name.endswith("sgu.weight"):
                p.add_(0.12 * torch.randn_like(p))
            elif name.endswith("bias") or "norm" in name:
                p.add_(0.15 * torch.randn_like(p))
            elif name.endswith("to_qkv.weight"):
                p.mul_(2.0)
    return net


def batches():
    """Two turns a row, each begun by 1 and padded by 0 to its own half of the row."""
    generator = torch.Generator().manual_seed(3106)
    made = []
    for size, half in ((5, 8), (4, 7)):
        tokens = torch.zeros(size, 2, half, dtype=torch.long)
        for row in tokens.flatten(0, 1):
            length = int(torch.randint(4, half + 1, (), generator=generator))
            start = int(torch.randint(2, 37, (), generator=generator))
            stride = int(torch.randint(1, 6, (), generator=generator))
            row[0] = 1
            row[1:length] = 2 + (start + stride * torch.arange(length - 1)) % 35
        made.append({"tokens": tokens.flatten(1)})
    return made


def forward(net, batch):
    return net(batch["tokens"][:, :-1])


def loss(output, batch):
    target = batch["tokens"][:, 1:]
    real = target != PAD
    nll = F.cross_entropy(
        output.flatten(0, 1),
        target.flatten(),
        ignore_index=PAD,
        label_smoothing=LABEL_SMOOTHING,
    )
    log_z = torch.logsumexp(output, dim=-1)
    return nll + Z_WEIGHT * log_z[real].square().mean()


def optimizer(net):
    """Matrices decay, those over positions too; embedding, norms and biases do not."""
    decayed, kept = [], []
    for name, p in net.named_parameters():
        matrix = name.endswith("weight") and "norm" not in name and "embed" not in name
        (decayed if matrix else kept).append(p)
    groups = [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {"params": kept, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
