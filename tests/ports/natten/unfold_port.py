"""Neighbourhood attention with nothing but unfold; all maps are [batch, channels, h, w].

The windows that lie inside of the map are unfolded; those of queries near the border repeat
the outermost. A dilated layer does this on each of its interleaved grids.
"""

import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

RGB_MEAN = [123.7, 116.3, 103.5]
RGB_STD = [58.4, 57.1, 57.4]


class ChannelNorm(nn.Module):
    """Layer norm of each pixel's channels."""

    def __init__(self, channels, eps=1e-5):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels, 1, 1))
        self.shift = nn.Parameter(torch.zeros(channels, 1, 1))
        self.eps = eps

    def forward(self, x):
        centred = x - x.mean(1, keepdim=True)
        power = centred.pow(2).mean(1, keepdim=True)
        return centred / torch.sqrt(power + self.eps) * self.gain + self.shift


class Stem(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv_a = nn.Conv2d(3, width // 2, 3, 2, 1)
        self.conv_b = nn.Conv2d(width // 2, width, 3, 2, 1)
        self.ln = ChannelNorm(width)

    def forward(self, img):
        return self.ln(self.conv_b(self.conv_a(img)))


class Shrink(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width * 2, 3, 2, bias=False)
        self.ln = ChannelNorm(width * 2)

    def forward(self, x):
        x = F.pad(x, (1, 1, 1, 1))
        return self.ln(self.conv(x))


def unfold_windows(x, k):
    """[b, c, h, w] -> [b, c, k * k, h, w]: the window of every pixel."""
    b, c, h, w = x.shape
    patches = F.unfold(x, k).view(b, c * k * k, h - k + 1, w - k + 1)
    r = k // 2
    patches = F.pad(patches, (r, r, r, r), mode="replicate")
    return patches.view(b, c, k * k, h, w)


def repeat_middle(t, dim, length):
    """Queries away from both borders are all in the middle of their window."""
    k = t.shape[dim]
    counts = torch.ones(k, dtype=torch.long)
    counts[k // 2] = length - k + 1
    return t.repeat_interleave(counts, dim)


def bias_windows(table, k, h, w):
    """table [2k-1, 2k-1, heads] of key minus query -> [heads, k * k, h, w]."""
    # The first query of a map sees the last k offsets of the table.
    windows = table.unfold(0, k, 1).unfold(1, k, 1).flip(0, 1)
    windows = repeat_middle(repeat_middle(windows, 0, h), 1, w)
    return windows.flatten(3).permute(2, 3, 0, 1)


class WindowAttention(nn.Module):
    """The channels of qkv are, head by head, its query, key and value."""

    def __init__(self, width, n_head, k, step):
        super().__init__()
        self.n_head, self.k, self.step = n_head, k, step
        self.qkv = nn.Conv2d(width, 3 * width, 1, bias=False)
        self.query_bias = nn.Parameter(torch.zeros(n_head, width // n_head, 1, 1))
        self.value_bias = nn.Parameter(torch.zeros(n_head, width // n_head, 1, 1))
        self.table = nn.Parameter(torch.zeros(2 * k - 1, 2 * k - 1, n_head))
        self.out = nn.Conv2d(width, width, 1)

    def attend(self, q, k, v):
        """Each is [b, heads, d, h, w], one grid without gaps."""
        b, n, d, h, w = q.shape
        k_win = unfold_windows(k.flatten(1, 2), self.k)
        v_win = unfold_windows(v.flatten(1, 2), self.k)
        k_win = k_win.view(b, n, d, self.k**2, h, w)
        v_win = v_win.view(b, n, d, self.k**2, h, w)
        logits = (q.unsqueeze(3) * k_win).sum(2) / d**0.5
        logits = logits + bias_windows(self.table, self.k, h, w)
        weights = F.softmax(logits, dim=2)
        return (weights.unsqueeze(2) * v_win).sum(3)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(x).view(b, self.n_head, 3, -1, h, w).unbind(2)
        q, v = q + self.query_bias, v + self.value_bias
        s = self.step
        mixed = torch.zeros_like(q)
        for i in range(s):
            for j in range(s):
                grid = (..., slice(i, None, s), slice(j, None, s))
                mixed[grid] = self.attend(q[grid], k[grid], v[grid])
        return self.out(mixed.view(b, c, h, w))


class Layer(nn.Module):
    def __init__(self, width, n_head, k, step, expand=3):
        super().__init__()
        self.ln_a = ChannelNorm(width)
        self.att = WindowAttention(width, n_head, k, step)
        self.scale_a = nn.Parameter(torch.ones(width, 1, 1))
        self.ln_f = ChannelNorm(width)
        self.grow = nn.Conv2d(width, width * expand, 1)
        self.back = nn.Conv2d(width * expand, width, 1)
        self.scale_f = nn.Parameter(torch.ones(width, 1, 1))

    def forward(self, x):
        x = x + self.att(self.ln_a(x)) * self.scale_a
        hidden = F.gelu(self.grow(self.ln_f(x)))
        return x + self.back(hidden) * self.scale_f


class NeighbourNet(nn.Module):
    def __init__(self, classes=7):
        super().__init__()
        self.stem = Stem(16)
        self.fine = nn.Sequential(Layer(16, 2, 5, 1), Layer(16, 2, 5, 2))
        self.shrink = Shrink(16)
        self.coarse = nn.Sequential(Layer(32, 4, 3, 1), Layer(32, 4, 3, 2))
        self.ln = ChannelNorm(32)
        self.classify = nn.Linear(32, classes)

    def forward(self, img):
        x = self.fine(self.stem(img))
        x = self.ln(self.coarse(self.shrink(x)))
        return self.classify(x.mean((2, 3)))


KEYS = [
    (r"^patch_embed\.proj\.0\.", "stem.conv_a."),
    (r"^patch_embed\.proj\.1\.", "stem.conv_b."),
    (r"^patch_embed\.norm\.", "stem.ln."),
    (r"^levels\.0\.downsample\.reduction\.", "shrink.conv."),
    (r"^levels\.0\.downsample\.norm\.", "shrink.ln."),
    (r"^levels\.0\.blocks\.", "fine."),
    (r"^levels\.1\.blocks\.", "coarse."),
    (r"^norm\.", "ln."),
    (r"^head\.", "classify."),
    (r"\.norm1\.", ".ln_a."),
    (r"\.norm2\.", ".ln_f."),
    (r"\.gamma1$", ".scale_a"),
    (r"\.gamma2$", ".scale_f"),
    (r"\.mlp\.fc1\.", ".grow."),
    (r"\.mlp\.fc2\.", ".back."),
    (r"\.attn\.proj\.", ".att.out."),
    (r"\.attn\.rpb$", ".att.table"),
    (r"\.attn\.q_bias$", ".att.query_bias"),
    (r"\.attn\.v_bias$", ".att.value_bias"),
    (r"\.attn\.", ".att."),
    (r"((?:^|\.)ln(?:_\w)?)\.weight$", r"\1.gain"),
    (r"((?:^|\.)ln(?:_\w)?)\.bias$", r"\1.shift"),
]


def convert(name, value, n_head):
    """The network's own shapes; n_head is that of the layer."""
    if name.endswith("qkv.weight"):
        by_head = value.view(3, n_head, -1, value.shape[1]).transpose(0, 1)
        return by_head.reshape(value.shape)
    if name.endswith("table"):
        return value.permute(1, 2, 0)
    return value


def model():
    checkpoint = torch.load(Path(__file__).parent / "weights.pt")
    net = NeighbourNet()
    mine = net.state_dict()
    for key in checkpoint:
        value = checkpoint[key]
        for pattern, name in KEYS:
            key = re.sub(pattern, name, key)
        n_head = 2 if key.startswith("fine") else 4
        mine[key] = convert(key, value, n_head).reshape(mine[key].shape)
    net.load_state_dict(mine)
    return net


def forward(net, batch):
    img = batch["image"].permute(0, 3, 1, 2).float()
    mean = torch.tensor(RGB_MEAN).view(3, 1, 1)
    std = torch.tensor(RGB_STD).view(3, 1, 1)
    return net((img - mean) / std)


def loss(output, batch, smooth=0.1):
    logp = F.log_softmax(output, dim=1)
    hard = F.nll_loss(logp, batch["label"])
    uniform = -logp.mean(1).mean()
    return (1 - smooth) * hard + smooth * uniform


def optimizer(net):
    """Only the kernels of convolutions and of the classifier decay."""
    kernels = [p for name, p in net.named_parameters() if name.endswith(".weight")]
    others = [p for name, p in net.named_parameters() if not name.endswith(".weight")]
    return torch.optim.AdamW(
        [{"params": kernels}, {"params": others, "weight_decay": 0.0}],
        lr=0.003,
        betas=(0.9, 0.99),
        weight_decay=0.1,
    )
