"""A small Temporal Fusion Transformer: sales of several stores, quantiles of the next days."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

HISTORY, HORIZON = 14, 5
STORES, REGIONS, EVENTS = 6, 3, 4
DIM, HEADS, LSTM_LAYERS, BLOCKS = 16, 4, 2, 2
QUANTILES = (0.1, 0.5, 0.9)
YEAR = 365.25
TEMPERATURE, PRICE = (14.0, 8.0), (3.2, 0.9)
LR, LR_DECAY, WEIGHT_DECAY, MAX_NORM = 4e-3, 0.8, 0.05, 0.5
BETAS, EPS = (0.9, 0.98), 1e-6


class GLU(nn.Module):
    def __init__(self, inp, out):
        super().__init__()
        self.fc = nn.Linear(inp, 2 * out)

    def forward(self, x):
        return F.glu(self.fc(x), dim=-1)


class AddNorm(nn.Module):
    """Gate what is new, add what was there."""

    def __init__(self, inp, out):
        super().__init__()
        self.glu = GLU(inp, out)
        self.norm = nn.LayerNorm(out)

    def forward(self, x, skip):
        return self.norm(skip + self.glu(x))


class GRN(nn.Module):
    """Gated residual network."""

    def __init__(self, inp, hidden, out, context=False):
        super().__init__()
        self.fc1 = nn.Linear(inp, hidden)
        self.context = nn.Linear(DIM, hidden, bias=False) if context else None
        self.fc2 = nn.Linear(hidden, hidden)
        self.gate = AddNorm(hidden, out)
        self.skip = nn.Linear(inp, out) if inp != out else nn.Identity()

    def forward(self, x, context=None):
        h = self.fc1(x)
        if self.context is not None:
            h = h + self.context(context)
        h = self.fc2(F.elu(h))
        return self.gate(h, self.skip(x))


class VariableSelection(nn.Module):
    def __init__(self, count, context=False):
        super().__init__()
        self.weights = GRN(count * DIM, DIM, count, context)
        self.variables = nn.ModuleList([GRN(DIM, DIM, DIM) for _ in range(count)])

    def forward(self, x, context=None):
        """x: (..., count, dim)"""
        weights = self.weights(x.flatten(-2), context).softmax(dim=-1)
        x = torch.stack(
            [grn(x[..., i, :]) for i, grn in enumerate(self.variables)], dim=-2
        )
        return (weights.unsqueeze(-1) * x).sum(dim=-2)


class InterpretableAttention(nn.Module):
    """All heads share their values, so the mean of their weights says it all.

    Keys have no bias: softmax forgets it.
    """

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(DIM, DIM)
        self.k = nn.Linear(DIM, DIM, bias=False)
        self.v = nn.Linear(DIM, DIM // HEADS)
        self.out = nn.Linear(DIM // HEADS, DIM, bias=False)

    def forward(self, x, mask):
        b, n, _ = x.shape
        q = self.q(x).view(b, n, HEADS, -1).transpose(1, 2)
        k = self.k(x).view(b, n, HEADS, -1).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(DIM // HEADS)
        attn = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        heads = attn @ self.v(x).unsqueeze(1)
        return self.out(heads.mean(dim=1)), attn.mean(dim=1)


class FusionBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = InterpretableAttention()
        self.gate = AddNorm(DIM, DIM)
        self.grn = GRN(DIM, DIM, DIM)

    def forward(self, x, mask):
        h, attn = self.attention(x, mask)
        return self.grn(self.gate(h, x)), attn


class TemporalFusionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.store = nn.Embedding(STORES, DIM)
        self.region = nn.Embedding(REGIONS, DIM)
        self.size = nn.Linear(1, DIM)
        self.scale = nn.Linear(1, DIM)
        self.sales = nn.Linear(1, DIM)
        self.temperature = nn.Linear(1, DIM)
        self.price = nn.Linear(1, DIM)
        self.time = nn.Linear(1, DIM)
        self.season = nn.Linear(2, DIM)
        self.weekday = nn.Embedding(7, DIM)
        self.event = nn.Embedding(EVENTS, DIM, padding_idx=0)

        self.static_selection = VariableSelection(4)
        self.past_selection = VariableSelection(7, context=True)
        self.future_selection = VariableSelection(5, context=True)
        self.context_selection = GRN(DIM, DIM, DIM)
        self.context_enrichment = GRN(DIM, DIM, DIM)
        self.context_hidden = GRN(DIM, DIM, DIM)
        self.context_cell = GRN(DIM, DIM, DIM)

        self.encoder = nn.LSTM(DIM, DIM, LSTM_LAYERS, batch_first=True)
        self.decoder = nn.LSTM(DIM, DIM, LSTM_LAYERS, batch_first=True)
        self.lstm_gate = AddNorm(DIM, DIM)
        self.enrichment = GRN(DIM, DIM, DIM, context=True)
        self.blocks = nn.ModuleList([FusionBlock() for _ in range(BLOCKS)])
        self.final_gate = AddNorm(DIM, DIM)
        self.head = nn.Linear(DIM, len(QUANTILES))

    def run_lstms(self, past, future, static, length):
        state = (
            self.context_hidden(static).expand(LSTM_LAYERS, -1, -1).contiguous(),
            self.context_cell(static).expand(LSTM_LAYERS, -1, -1).contiguous(),
        )
        packed = pack_padded_sequence(
            past, length, batch_first=True, enforce_sorted=False
        )
        encoded, state = self.encoder(packed, state)
        encoded = pad_packed_sequence(encoded, batch_first=True, total_length=HISTORY)[
            0
        ]
        decoded, _ = self.decoder(future, state)
        return torch.cat([encoded, decoded], dim=1)

    def forward(self, x):
        static = torch.stack(
            [
                self.store(x["store"]),
                self.region(x["region"]),
                self.size(x["size"]),
                self.scale(x["log_scale"]),
            ],
            dim=-2,
        )
        known = torch.stack(
            [
                self.price(x["price"]),
                self.time(x["time"]),
                self.season(x["season"]),
                self.weekday(x["weekday"]),
                self.event(x["event"]),
            ],
            dim=-2,
        )
        observed = torch.stack(
            [self.sales(x["sales"]), self.temperature(x["temperature"])], dim=-2
        )

        static = self.static_selection(static)
        context = self.context_selection(static).unsqueeze(1)
        past = torch.cat([observed, known[:, :HISTORY]], dim=-2)
        past = self.past_selection(past, context)
        future = self.future_selection(known[:, HISTORY:], context)

        h = self.run_lstms(past, future, static, x["length"])
        temporal = self.lstm_gate(h, torch.cat([past, future], dim=1))

        h = self.enrichment(temporal, self.context_enrichment(static).unsqueeze(1))
        mask = attention_mask(x["length"])
        for block in self.blocks:
            h, attn = block(h, mask)
        h = self.final_gate(h[:, HISTORY:], temporal[:, HISTORY:])
        return self.head(h), attn[:, HISTORY:]


def attention_mask(length):
    """Nobody looks ahead, nor at days before the history that there are not."""
    steps = HISTORY + HORIZON
    causal = torch.ones(steps, steps, dtype=torch.bool).tril()
    index = torch.arange(steps)
    valid = (index < length.unsqueeze(1)) | (index >= HISTORY)
    return (causal & valid.unsqueeze(1)).unsqueeze(1)


def model():
    """What nn.LSTM adds a second time stays zero and does not learn."""
    torch.manual_seed(1912)
    net = TemporalFusionTransformer()
    with torch.no_grad():
        for name, module in net.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight, gain=1.2)
                if name.endswith((".q", ".k")):
                    module.weight.mul_(1.5)
                if module.bias is not None:
                    module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.LSTM):
                for key, p in module.named_parameters():
                    p.uniform_(-0.4, 0.4)
                    if key.startswith("bias_hh"):
                        p.zero_().requires_grad_(False)
        net.head.weight.mul_(0.2)
        net.head.bias.copy_(torch.tensor([0.6, 1.0, 1.3]))
    return net


def batches():
    """Weeks and years in the sales; dear goods sell less, events lift them.

    A history stands at the front of its row; zeros follow where it is shorter.
    """
    generator = torch.Generator().manual_seed(1913)
    made = []
    for size in (6, 5):
        length = torch.randint(6, 15, (size,), generator=generator)
        length[0] = 14
        origin = torch.randint(0, 1000, (size,), generator=generator)
        past = torch.arange(14) - length.unsqueeze(1)
        future = torch.arange(5).expand(size, -1)
        day = origin.unsqueeze(1) + torch.cat([past, future], dim=1)

        store = torch.randint(0, 6, (size,), generator=generator)
        event = torch.randint(0, 8, (size, 19), generator=generator)
        event = event.where(event < 4, 0)
        noise = torch.randn(4, size, 19, generator=generator)
        price = 3.2 + 0.9 * noise[0]
        turn = 2 * math.pi * day / 365.25
        temperature = 14 - 9 * torch.cos(turn) + 2 * noise[1]
        surface = 200 + 80.0 * store + 50 * torch.rand(size, generator=generator)
        level = surface.unsqueeze(1) / 20
        week = 1 + 0.4 * torch.sin(2 * math.pi * day / 7 + store.unsqueeze(1))
        sales = level * week * (1 - 0.12 * (price - 3.2) + 0.2 * event)
        sales = (sales * (1 + 0.15 * noise[2]) + 0.1 * temperature).clamp(min=0)

        valid = torch.ones(size, 19, dtype=torch.bool)
        valid[:, :14] = past < 0
        made.append(
            {
                "store": store,
                "region": store % 3,
                "surface": surface,
                "length": length,
                "origin": origin,
                "sales": (sales * valid)[:, :14],
                "temperature": (temperature * valid)[:, :14],
                "price": price * valid,
                "event": event * valid,
                "target": sales[:, 14:],
                "counted": noise[3, :, 14:] > -1.0,
            }
        )
    return made


def features(batch):
    """Sales are in units of a series' own mean, days are counted from the forecast."""
    length = batch["length"]
    scale = 1 + batch["sales"].sum(dim=1) / length
    past = torch.arange(HISTORY) - length.unsqueeze(1)
    future = torch.arange(HORIZON).expand(len(length), -1)
    time = torch.cat([past, future], dim=1)
    day = batch["origin"].unsqueeze(1) + time
    turn = 2 * math.pi * day / YEAR
    return {
        "store": batch["store"],
        "region": batch["region"],
        "size": torch.log(batch["surface"] / 400).unsqueeze(1),
        "log_scale": torch.log(scale).unsqueeze(1),
        "length": length,
        "sales": (batch["sales"] / scale.unsqueeze(1)).unsqueeze(-1),
        "temperature": ((batch["temperature"] - TEMPERATURE[0]) / TEMPERATURE[1])[
            ..., None
        ],
        "price": ((batch["price"] - PRICE[0]) / PRICE[1]).unsqueeze(-1),
        "time": (time / HISTORY).unsqueeze(-1),
        "season": torch.stack([torch.sin(turn), torch.cos(turn)], dim=-1),
        "weekday": day % 7,
        "event": batch["event"],
        "units": scale,
    }


def forward(net, batch):
    x = features(batch)
    quantiles, attention = net(x)
    return {
        "quantiles": quantiles * x["units"].view(-1, 1, 1),
        "attention": attention,
    }


def loss(output, batch):
    """Pinball losses of the days that count, as a share of what was sold."""
    q = torch.tensor(QUANTILES)
    error = batch["target"].unsqueeze(-1) - output["quantiles"]
    pinball = torch.maximum(q * error, (q - 1) * error)
    counted = batch["counted"]
    total = (batch["target"].abs() * counted).sum()
    return 2 * (pinball.sum(dim=-1) * counted).sum() / total


class ClippedAdamW(torch.optim.AdamW):
    """Gradients have a largest norm together; the rate falls with each step."""

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        result = super().step(closure)
        for group in self.param_groups:
            group["lr"] *= LR_DECAY
        return result


def optimizer(net):
    """Only matrices decay: no biases, norms or embeddings."""
    tables = {m.weight for m in net.modules() if isinstance(m, nn.Embedding)}
    params = [p for p in net.parameters() if p.requires_grad]
    decay = [p for p in params if p.ndim > 1 and p not in tables]
    rest = [p for p in params if p.ndim == 1 or p in tables]
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]
    return ClippedAdamW(groups, lr=LR, betas=BETAS, eps=EPS)
