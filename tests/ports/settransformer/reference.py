"""A small Set Transformer that reads sets of points and gives mixtures of Gaussians."""

import math

import torch
from torch import nn
from torch.nn import functional as F

POINT_DIM, DIM, HEADS, HIDDEN = 3, 24, 3, 40
BLOCKS, INDUCING, COMPONENTS = 2, 6, 4
STD_EPS, MAX_LOG_VAR = 1e-4, 2.5
ENTROPY_WEIGHT = 0.3
LR, BETAS, EPS, WEIGHT_DECAY = 4e-3, (0.9, 0.98), 1e-4, 0.2


class MultiheadAttention(nn.Module):
    """Keys have no bias: softmax forgets it."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)

    def split(self, x):
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def forward(self, query, key, key_padding_mask=None):
        q = self.split(self.q_proj(query))
        k = self.split(self.k_proj(key))
        v = self.split(self.v_proj(key))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None], -math.inf)
        out = scores.softmax(dim=-1) @ v
        return self.out_proj(out.transpose(1, 2).flatten(2))


class MAB(nn.Module):
    """Attention of x to y, then a feed-forward of each row."""

    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.attn = MultiheadAttention(dim, heads)
        self.ln0 = nn.LayerNorm(dim)
        self.ff = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)
        )
        self.ln1 = nn.LayerNorm(dim)

    def forward(self, x, y, mask=None):
        h = self.ln0(x + self.attn(x, y, mask))
        return self.ln1(h + self.ff(h))


class SAB(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.mab = MAB(dim, heads, hidden)

    def forward(self, x):
        return self.mab(x, x)


class ISAB(nn.Module):
    def __init__(self, dim, heads, hidden, inducing):
        super().__init__()
        self.inducing = nn.Parameter(torch.randn(1, inducing, dim))
        self.mab0 = MAB(dim, heads, hidden)
        self.mab1 = MAB(dim, heads, hidden)

    def forward(self, x, mask):
        h = self.mab0(self.inducing.expand(len(x), -1, -1), x, mask)
        return self.mab1(x, h)


class PMA(nn.Module):
    def __init__(self, dim, heads, hidden, seeds):
        super().__init__()
        self.seeds = nn.Parameter(torch.randn(1, seeds, dim))
        self.rff = nn.Linear(dim, dim)
        self.mab = MAB(dim, heads, hidden)

    def forward(self, x, mask):
        return self.mab(self.seeds.expand(len(x), -1, -1), F.relu(self.rff(x)), mask)


class MixtureDecoder(nn.Module):
    """Logits of the weights have no bias: softmax forgets it."""

    def __init__(self, dim, point_dim):
        super().__init__()
        self.weight = nn.Linear(dim, 1, bias=False)
        self.mean = nn.Linear(dim, point_dim)
        self.log_var = nn.Linear(dim, point_dim)

    def forward(self, x):
        log_weights = self.weight(x).squeeze(-1).log_softmax(dim=-1)
        log_vars = MAX_LOG_VAR * torch.tanh(self.log_var(x) / MAX_LOG_VAR)
        return log_weights, self.mean(x), log_vars


class SetTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(POINT_DIM, DIM)
        self.encoder = nn.ModuleList(
            [ISAB(DIM, HEADS, HIDDEN, INDUCING) for _ in range(BLOCKS)]
        )
        self.pool = PMA(DIM, HEADS, HIDDEN, COMPONENTS)
        self.sab = SAB(DIM, HEADS, HIDDEN)
        self.decoder = MixtureDecoder(DIM, POINT_DIM)

    def forward(self, points, sizes):
        mask = padding_mask(points, sizes)
        x, center, std = normalize(points, mask)
        x = self.embed(x)
        for block in self.encoder:
            x = block(x, mask)
        x = self.sab(self.pool(x, mask))
        log_weights, means, log_vars = self.decoder(x)
        return {
            "log_weights": log_weights,
            "means": means * std + center,
            "log_vars": log_vars + 2 * std.log(),
        }


def padding_mask(points, sizes):
    """True where nothing is."""
    return torch.arange(points.shape[1]) >= sizes[:, None]


def normalize(points, mask):
    """Every set has mean 0 and deviation 1 in each direction."""
    real = (~mask).unsqueeze(-1).to(points.dtype)
    count = real.sum(dim=1, keepdim=True)
    center = (points * real).sum(dim=1, keepdim=True) / count
    away = (points - center) * real
    std = (away.square().sum(dim=1, keepdim=True) / count + STD_EPS).sqrt()
    return away / std, center, std


def model():
    torch.manual_seed(1810)
    net = SetTransformer()
    with torch.no_grad():
        for name, module in net.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                if name.endswith(("q_proj", "k_proj")):
                    module.weight.mul_(1.2)
                if module.bias is not None:
                    module.bias.normal_(0, 0.2)
        net.decoder.weight.weight.mul_(0.6)
        net.decoder.log_var.weight.mul_(0.6)
    return net


def batches():
    """Sets of some clusters each, with zeros behind the last point."""
    generator = torch.Generator().manual_seed(1811)
    made = []
    for sizes, length in (((9, 14, 6, 11), 14), ((12, 7, 10), 13)):
        points = torch.zeros(len(sizes), length, 3)
        for i, size in enumerate(sizes):
            shift = 2 * torch.randn(1, 3, generator=generator)
            centers = 1.5 * torch.randn(3, 3, generator=generator)
            spread = 0.2 + 0.5 * torch.rand(3, 3, generator=generator)
            member = torch.randint(0, 3, (size,), generator=generator)
            noise = torch.randn(size, 3, generator=generator)
            points[i, :size] = shift + centers[member] + spread[member] * noise
        made.append({"points": points, "sizes": torch.tensor(sizes)})
    return made


def forward(net, batch):
    return net(batch["points"], batch["sizes"])


def loss(output, batch):
    """Mean over the points of a set, then over the sets; even weights are liked."""
    points = batch["points"][:, :, None]
    log_weights = output["log_weights"]
    means, log_vars = output["means"][:, None], output["log_vars"][:, None]
    log_probs = -0.5 * (
        math.log(2 * math.pi) + log_vars + (points - means) ** 2 / log_vars.exp()
    )
    log_probs = log_probs.sum(dim=-1) + log_weights[:, None]
    log_likelihood = torch.logsumexp(log_probs, dim=-1)
    mask = padding_mask(batch["points"], batch["sizes"])
    per_set = log_likelihood.masked_fill(mask, 0.0).sum(dim=1) / batch["sizes"]
    entropy = -(log_weights.exp() * log_weights).sum(dim=-1)
    return -per_set.mean() - ENTROPY_WEIGHT * entropy.mean()


def optimizer(net):
    """Only matrices decay: no bias, no norm, no learned point."""
    decay = [p for p in net.parameters() if p.ndim == 2]
    rest = [p for p in net.parameters() if p.ndim != 2]
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
