"""A small xLSTM: blocks of a matrix memory, read in parallel, and of a scalar one, by steps."""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, PAD, WIDTH = 43, 0, 40
BLOCKS = ("matrix", "scalar", "matrix")
KERNEL, NORM_EPS, HEAD_EPS = 4, 1e-5, 5e-3
# Matrix memory
INNER, M_HEADS, QKV_BLOCK = 72, 3, 6
M_DIM = INNER // M_HEADS
GATE_CAP, MEMORY_EPS = 5.0, 1e-6
# Scalar memory
S_HEADS, S_DIM, HIDDEN = 5, 8, 52
# Training
LR, BETAS, ADAM_EPS, WEIGHT_DECAY = 4e-3, (0.9, 0.95), 1e-5, 0.1


class LayerNorm(nn.Module):
    """The weight is what is added to one; there is no bias."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return F.layer_norm(x, (WIDTH,), 1 + self.weight, None, NORM_EPS)


class MultiHeadNorm(nn.Module):
    """Each head of each token by itself."""

    def __init__(self, heads, width):
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        rows = x.flatten(0, 1)
        rows = F.group_norm(rows, self.heads, 1 + self.weight, None, HEAD_EPS)
        return rows.view_as(x)


class HeadwiseLinear(nn.Module):
    """A weight for each block of the features."""

    def __init__(self, blocks, width):
        super().__init__()
        size = width // blocks
        self.weight = nn.Parameter(torch.zeros(blocks, size, size))

    def forward(self, x):
        x = x.unflatten(-1, (self.weight.shape[0], -1))
        return torch.einsum("nlbi,boi->nlbo", x, self.weight).flatten(2)


class CausalConv(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv1d(width, width, KERNEL, groups=width, padding=KERNEL - 1)

    def forward(self, x):
        return self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


def read_memory(q, k, v, i, f):
    """q, k and v [n, h, l, d], gates before their activations [n, h, l]."""
    length = q.shape[2]
    kept = F.logsigmoid(f).cumsum(-1)
    log_d = kept.unsqueeze(-1) - kept.unsqueeze(-2) + i.unsqueeze(-2)
    past = torch.ones(length, length, dtype=torch.bool).tril()
    log_d = log_d.masked_fill(~past, -torch.inf)
    m = log_d.amax(dim=-1, keepdim=True)
    scores = q @ k.transpose(-2, -1) * M_DIM**-0.5
    scores = scores * torch.exp(log_d - m)
    norm = torch.maximum(scores.sum(dim=-1, keepdim=True).abs(), torch.exp(-m))
    return scores @ v / (norm + MEMORY_EPS)


class MatrixLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj_up = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.conv = CausalConv(INNER)
        self.q_proj = HeadwiseLinear(INNER // QKV_BLOCK, INNER)
        self.k_proj = HeadwiseLinear(INNER // QKV_BLOCK, INNER)
        self.v_proj = HeadwiseLinear(INNER // QKV_BLOCK, INNER)
        self.igate = nn.Linear(3 * INNER, M_HEADS)
        self.fgate = nn.Linear(3 * INNER, M_HEADS)
        self.norm = MultiHeadNorm(M_HEADS, INNER)
        self.skip = nn.Parameter(torch.ones(INNER))
        self.proj_down = nn.Linear(INNER, WIDTH, bias=False)

    def memory(self, q, k, v):
        qkv = torch.cat([q, k, v], dim=-1)
        i = GATE_CAP * torch.tanh(self.igate(qkv) / GATE_CAP)
        f = GATE_CAP * torch.tanh(self.fgate(qkv) / GATE_CAP)
        q, k, v = (t.unflatten(-1, (M_HEADS, M_DIM)).transpose(1, 2) for t in (q, k, v))
        h = read_memory(q, k, v, i.transpose(1, 2), f.transpose(1, 2))
        return h.transpose(1, 2).flatten(2)

    def forward(self, x):
        inner, z = self.proj_up(x).chunk(2, dim=-1)
        conv = F.silu(self.conv(inner))
        h = self.memory(self.q_proj(conv), self.k_proj(conv), self.v_proj(inner))
        h = self.norm(h) + self.skip * conv
        return self.proj_down(h * F.silu(z))


class ScalarLSTM(nn.Module):
    """Gates stand in the order i, f, z, o."""

    def __init__(self):
        super().__init__()
        self.conv = CausalConv(WIDTH)
        self.igate = HeadwiseLinear(S_HEADS, WIDTH)
        self.fgate = HeadwiseLinear(S_HEADS, WIDTH)
        self.zgate = HeadwiseLinear(S_HEADS, WIDTH)
        self.ogate = HeadwiseLinear(S_HEADS, WIDTH)
        self.recurrent = nn.Parameter(torch.zeros(4, S_HEADS, S_DIM, S_DIM))
        self.bias = nn.Parameter(torch.zeros(4, WIDTH))
        self.norm = MultiHeadNorm(S_HEADS, WIDTH)

    def gates(self, x):
        conv = F.silu(self.conv(x))
        gates = [self.igate(conv), self.fgate(conv), self.zgate(x), self.ogate(x)]
        raw = torch.stack(gates, dim=2) + self.bias
        return raw.unflatten(-1, (S_HEADS, S_DIM))

    def forward(self, x):
        h = c = n = x.new_zeros(x.shape[0], S_HEADS, S_DIM)
        m = torch.full_like(h, -torch.inf)
        outs = []
        for raw in self.gates(x).unbind(dim=1):
            raw = raw + torch.einsum("ghoi,nhi->ngho", self.recurrent, h)
            i, f, z, o = raw.unbind(dim=1)
            log_f = F.logsigmoid(f) + m
            m = torch.maximum(log_f, i)
            i, f = torch.exp(i - m), torch.exp(log_f - m)
            c = f * c + i * torch.tanh(z)
            n = f * n + i
            h = torch.sigmoid(o) * c / n
            outs.append(h)
        return self.norm(torch.stack(outs, dim=1).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.proj_down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        gate, up = self.proj_up(x).chunk(2, dim=-1)
        return self.proj_down(F.gelu(gate) * up)


class MatrixBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = LayerNorm()
        self.cell = MatrixLSTM()

    def forward(self, x):
        return x + self.cell(self.norm(x))


class ScalarBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = LayerNorm()
        self.cell = ScalarLSTM()
        self.ff_norm = LayerNorm()
        self.ff = FeedForward()

    def forward(self, x):
        x = x + self.cell(self.norm(x))
        return x + self.ff(self.ff_norm(x))


class XLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        kinds = {"matrix": MatrixBlock, "scalar": ScalarBlock}
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([kinds[kind]() for kind in BLOCKS])
        self.norm = LayerNorm()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def fill_cell(cell):
    """Forget gates of the heads begin from short to long."""
    if isinstance(cell, MatrixLSTM):
        cell.skip.normal_(0.8, 0.4)
        cell.q_proj.weight.mul_(1.2)
        cell.k_proj.weight.mul_(1.2)
        cell.v_proj.weight.mul_(0.3)
        cell.igate.bias.normal_(0.0, 0.6)
        cell.fgate.bias.copy_(torch.linspace(0.5, 3.0, M_HEADS))
    else:
        cell.recurrent.normal_(0, 0.9 * S_DIM**-0.5)
        cell.bias.normal_(0, 0.3)
        cell.bias[1].add_(torch.linspace(0.0, 2.5, WIDTH))


def model():
    torch.manual_seed(2405)
    net = XLSTM()
    with torch.no_grad():
        net.embed.weight.normal_(0, 0.5)
        for module in net.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, module.in_features**-0.5)
            elif isinstance(module, HeadwiseLinear):
                module.weight.normal_(0, 1.3 * module.weight.shape[-1] ** -0.5)
            elif isinstance(module, nn.Conv1d):
                module.weight.normal_(0, 0.6)
                module.bias.normal_(0, 0.3)
            elif isinstance(module, LayerNorm | MultiHeadNorm):
                module.weight.normal_(0, 0.3)
        for module in net.modules():
            if isinstance(module, MatrixLSTM | ScalarLSTM):
                fill_cell(module)
    return net


def batches():
    """Rows that repeat a phrase with some noise; the rest of a row is padding."""
    generator = torch.Generator().manual_seed(2406)
    made = []
    for size, length in ((7, 19), (2, 23)):
        phrases = torch.randint(1, 43, (size, 9), generator=generator)
        periods = torch.randint(4, 10, (size, 1), generator=generator)
        tokens = phrases.gather(1, torch.arange(length) % periods)
        noise = torch.randint(1, 43, (size, length), generator=generator)
        noisy = torch.rand(size, length, generator=generator) < 0.2
        tokens = torch.where(noisy, noise, tokens)
        lengths = length - torch.arange(size) * 2
        padding = torch.arange(length) >= lengths[:, None]
        made.append({"tokens": tokens.masked_fill(padding, 0), "length": lengths})
    return made


def forward(net, batch):
    return net(batch["tokens"])


def loss(output, batch):
    """Each token from those before it."""
    logits, target = output[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten()
    return F.cross_entropy(logits, target, ignore_index=PAD)


def optimizer(net):
    """What multiplies features decays; norms, biases and the skips do not."""
    named = dict(net.named_parameters())
    decay = [p for n, p in named.items() if p.ndim > 1 and not n.endswith("bias")]
    rest = [p for n, p in named.items() if p.ndim == 1 or n.endswith("bias")]
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=ADAM_EPS)
