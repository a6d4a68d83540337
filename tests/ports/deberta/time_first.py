"""Time before the examples, head by head; every pair of tokens looks up its own position."""

import math
from pathlib import Path

import torch
from torch import nn

SPAN, REACH, ROUNDS, N_HEADS = 6, 12, 3, 2


def bucket(distance):
    half = SPAN // 2
    if abs(distance) <= half:
        return distance
    share = math.log(abs(distance) / half) / math.log((REACH - 1) / half)
    return int(math.copysign(half + math.ceil(share * (half - 1)), distance))


def rows_of(length):
    """Rows of the table of positions, for each query and key."""
    rows = [[bucket(q - k) + SPAN for k in range(length)] for q in range(length)]
    return torch.tensor(rows).clamp(0, 2 * SPAN - 1)


def gelu_new(x):
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + torch.tanh(inner))


class LayerNorm(nn.Module):
    def __init__(self, size, eps=1e-7):
        super().__init__()
        self.g, self.b = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        var = (x - mean).pow(2).mean(-1, keepdim=True)
        return (x - mean) / (var + self.eps).sqrt() * self.g + self.b


class Head(nn.Module):
    def __init__(self, width, size):
        super().__init__()
        self.q = nn.Linear(width, size)
        self.k = nn.Linear(width, size)
        self.v = nn.Linear(width, size)
        self.o = nn.Linear(size, width, bias=False)

    def forward(self, x, table, rows, visible):
        q, k, v = self.q(x), self.k(x), self.v(x)
        key_at, query_at = self.k(table)[rows], self.q(table)[rows]
        score = torch.einsum("qbd,kbd->bqk", q, k)
        score = score + torch.einsum("qbd,qkd->bqk", q, key_at)
        score = score + torch.einsum("kbd,qkd->bqk", k, query_at)
        score = score * (3 * q.shape[-1]) ** -0.5
        score = torch.where(visible, score, -1e9)
        power = (score - score.amax(-1, keepdim=True).detach()).exp()
        weight = power / power.sum(-1, keepdim=True) * visible
        return self.o(torch.einsum("bqk,kbd->qbd", weight, v))


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.heads = nn.ModuleList(
            Head(width, width // N_HEADS) for _ in range(N_HEADS)
        )
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x, table, rows, visible):
        return self.bias + sum(head(x, table, rows, visible) for head in self.heads)


class Deberta(nn.Module):
    def __init__(self, vocab=34, narrow=8, width=16, hidden=28):
        super().__init__()
        self.tokens = nn.Parameter(torch.zeros(vocab, narrow))
        self.segments = nn.Parameter(torch.zeros(2, narrow))
        self.norm_in = LayerNorm(narrow)
        self.widen = nn.Linear(narrow, width)
        self.places = nn.Parameter(torch.zeros(2 * SPAN, width))
        self.norm_places = LayerNorm(width)
        self.attention = Attention(width)
        self.norm_1 = LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.norm_2 = LayerNorm(width)
        self.pool = nn.Linear(width, width)
        self.swapped = nn.Linear(width, 2)
        self.narrow = nn.Linear(width, narrow)
        self.norm_out = LayerNorm(narrow)
        self.tokens_bias = nn.Parameter(torch.zeros(vocab))

    def forward(self, tokens, segments, mask):
        tokens, segments, mask = tokens.t(), segments.t(), mask.t()
        known = (tokens != 0).unsqueeze(-1)
        x = self.tokens[tokens] * known + self.segments[segments]
        x = self.widen(self.norm_in(x))
        x = torch.where(mask.unsqueeze(-1), x, 0.0)
        visible = torch.einsum("qb,kb->bqk", mask.float(), mask.float()) > 0
        rows = rows_of(len(tokens))
        table = self.norm_places(self.places)
        for _ in range(ROUNDS):
            x = self.norm_1(x + self.attention(x, table, rows, visible))
            x = self.norm_2(x + self.down(gelu_new(self.up(x))))
        swapped = self.swapped(self.pool(x[0]).tanh())
        x = self.norm_out(gelu_new(self.narrow(x)))
        words = torch.einsum("tbe,ve->btv", x, self.tokens) + self.tokens_bias
        return {"words": words, "order": swapped}


NAMES = {
    "words.weight": "tokens",
    "types.weight": "segments",
    "embed_norm": "norm_in",
    "embed_proj": "widen",
    "rel_embeddings.weight": "places",
    "rel_norm": "norm_places",
    "layer.attention_norm": "norm_1",
    "layer.output_norm": "norm_2",
    "layer.ffn_output": "down",
    "layer.ffn": "up",
    "pooler": "pool",
    "order": "swapped",
    "transform_norm": "norm_out",
    "transform": "narrow",
    "words_bias": "tokens_bias",
}


def renamed(name):
    for old, new in NAMES.items():
        if name == old:
            return new
        if name.startswith(old + "."):
            name = new + name[len(old) :]
            if "norm" in new:
                name = name.replace(".weight", ".g").replace(".bias", ".b")
            return name
    raise KeyError(name)


def load(net, weights):
    state = {}
    for name, value in weights.items():
        if not name.startswith("layer.attention."):
            state[renamed(name)] = value
    parts = {"q": "query", "k": "key", "v": "value"}
    for kind in ("weight", "bias"):
        for short, long in parts.items():
            rows = weights[f"layer.attention.{long}.{kind}"].chunk(N_HEADS)
            for i, part in enumerate(rows):
                state[f"attention.heads.{i}.{short}.{kind}"] = part
    columns = weights["layer.attention.dense.weight"].chunk(N_HEADS, dim=1)
    for i, part in enumerate(columns):
        state[f"attention.heads.{i}.o.weight"] = part
    state["attention.bias"] = weights["layer.attention.dense.bias"]
    net.load_state_dict(state)
    return net


def model():
    return load(Deberta(), torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["words"], batch["types"], batch["mask"])


def loss(output, batch):
    labels = batch["labels"]
    scored = labels >= 0
    logs = output["words"].log_softmax(-1)
    each = logs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    words = -(each * scored).sum() / scored.sum()
    logs = output["order"].log_softmax(-1)
    order = -logs[torch.arange(len(logs)), batch["order"]].mean()
    return words + order


def optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-6)
