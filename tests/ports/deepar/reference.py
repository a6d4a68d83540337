"""A small DeepAR: an LSTM over lagged values, of measures and of counts."""

import torch
from torch import nn
from torch.distributions import NegativeBinomial, StudentT
from torch.nn import functional as F

CONTEXT, HORIZON = 11, 4
STEPS = CONTEXT + HORIZON
LAGS = (1, 2, 5, 7)
HISTORY = CONTEXT + max(LAGS)
CARDINALITIES, EMBED_DIMS = (9, 13, 4), (5, 7, 3)
FEATURE_MEAN, FEATURE_STD = (3.2, 14.0, 0.3), (0.8, 6.0, 0.45)
WEEKDAYS, WEEKDAY_DIM = 7, 2
HIDDEN = 44
# What stands at each step: categories, scale, lags and their masks, features, weekday, age.
INPUT = sum(EMBED_DIMS) + 1 + 2 * len(LAGS) + len(FEATURE_MEAN) + WEEKDAY_DIM + 1
SCALE_FLOOR = 0.4
ACTIVITY, CHANGE = 1.0, 2.0
LR, MOMENTUM, CLIP_NORM = 0.02, 0.9, 1.0


def mean_scale(values, observed):
    """Mean size in the context; that of the batch where a series has no value there."""
    values, observed = (x[:, HISTORY - CONTEXT : HISTORY] for x in (values, observed))
    total = values.abs().sum(dim=1)
    count = observed.sum(dim=1)
    overall = total.sum() / count.sum().clamp(min=1)
    scale = torch.where(count > 0, total / count.clamp(min=1), overall)
    return scale.clamp(min=SCALE_FLOOR)


def lagged(x):
    """[batch, steps, lags] of the values that lie so far back."""
    return torch.stack([x[:, HISTORY - CONTEXT - k : -k] for k in LAGS], dim=-1)


class Recurrence(nn.Module):
    """Two layers, the second with a shortcut; states wait until a series begins."""

    def __init__(self):
        super().__init__()
        self.cell1 = nn.LSTMCell(INPUT, HIDDEN)
        self.cell2 = nn.LSTMCell(HIDDEN, HIDDEN)

    def forward(self, x, valid):
        h1 = c1 = h2 = c2 = x.new_zeros(len(x), HIDDEN)
        outputs = []
        for t in range(STEPS):
            keep = valid[:, t, None]
            h, c = self.cell1(x[:, t], (h1, c1))
            h1, c1 = h.where(keep, h1), c.where(keep, c1)
            h, c = self.cell2(h1, (h2, c2))
            h2, c2 = h.where(keep, h2), c.where(keep, c2)
            outputs.append(h1 + h2)
        return torch.stack(outputs, dim=1)


class DeepAR(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = zip(CARDINALITIES, EMBED_DIMS)
        self.embeds = nn.ModuleList([nn.Embedding(n, dim) for n, dim in sizes])
        self.weekday = nn.Embedding(WEEKDAYS, WEEKDAY_DIM)
        self.rnn = Recurrence()
        self.student_head = nn.Linear(HIDDEN, 3)
        self.count_head = nn.Linear(HIDDEN, 2)

    def inputs(self, batch, values, observed, scale):
        categories = batch["categories"].unbind(dim=1)
        embedded = [embed(c) for embed, c in zip(self.embeds, categories)]
        static = torch.cat([*embedded, scale.log().unsqueeze(1)], dim=1)
        static = static.unsqueeze(1).expand(-1, STEPS, -1)
        place = torch.arange(HISTORY - CONTEXT, HISTORY + HORIZON)
        features = batch["features"][:, HISTORY - CONTEXT :]
        features = (features - torch.tensor(FEATURE_MEAN)) / torch.tensor(FEATURE_STD)
        weekday = self.weekday((batch["day"].unsqueeze(1) + place) % WEEKDAYS)
        age = (place - batch["start"].unsqueeze(1)).clamp(min=0)
        lags = lagged(values / scale.unsqueeze(1))
        flags = lagged(observed.float())
        age = torch.log1p(age.float()).unsqueeze(-1)
        return torch.cat([static, lags, flags, features, weekday, age], dim=-1)

    def student(self, h, scale):
        df, loc, sigma = self.student_head(h).unbind(dim=-1)
        return StudentT(2 + F.softplus(df), loc * scale, F.softplus(sigma) * scale)

    def counts(self, h, scale):
        mu, alpha = F.softplus(self.count_head(h)).unbind(dim=-1)
        mu, alpha = mu * scale, alpha / scale.sqrt()
        return NegativeBinomial(1 / alpha, logits=(alpha * mu).log())

    def forward(self, batch):
        observed = batch["observed"]
        values = batch["values"].where(observed, 0.0)
        scale = mean_scale(values, observed)
        valid = torch.arange(HISTORY + HORIZON) >= batch["start"].unsqueeze(1)
        valid = valid[:, HISTORY - CONTEXT :]
        h = self.rnn(self.inputs(batch, values, observed, scale), valid)

        target, counted = values[:, -STEPS:], observed[:, -STEPS:]
        scale, is_count = scale.unsqueeze(1), batch["is_count"].unsqueeze(1)
        student = self.student(h, scale).log_prob(target)
        counts = self.counts(h, scale).log_prob(target.where(is_count, 0.0))
        nll = -torch.where(is_count, counts, student)
        nll = nll[counted].mean()

        activity = h[valid].square().mean()
        both = valid[:, 1:] & valid[:, :-1]
        change = (h[:, 1:] - h[:, :-1])[both].square().mean()
        return nll + ACTIVITY * activity + CHANGE * change


def model():
    """What the cells add a second time stays zero and does not learn."""
    torch.manual_seed(1704)
    net = DeepAR()
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name.endswith("bias_hh"):
                p.zero_().requires_grad_(False)
            elif name.startswith("rnn."):
                p.uniform_(-0.35, 0.35)
            elif p.ndim == 1:
                p.normal_(0.3, 0.4)
            else:
                p.normal_(0, 0.3 if "head" in name else 0.7)
    return net


def batches():
    """Measures and counts with weeks in them; -9 stands where nobody looked."""
    generator = torch.Generator().manual_seed(1705)
    made = []
    for size in (8, 6):
        place = torch.arange(22)
        day = torch.randint(0, 7, (size,), generator=generator)
        start = torch.randint(4, 15, (size,), generator=generator)
        start[:3] = torch.tensor([0, 12, 3])
        is_count = torch.arange(size) % 2 == 1
        sizes = (9, 13, 4)
        categories = [torch.randint(0, n, (size,), generator=generator) for n in sizes]
        noise = torch.randn(5, size, 22, generator=generator)
        features = torch.stack(
            [3.2 + 0.8 * noise[0], 14 + 6 * noise[1], (noise[2] > 0.6).float()], dim=-1
        )
        week = torch.sin(2 * torch.pi * (day[:, None] + place) / 7)
        level = torch.exp(2.5 * torch.rand(size, 1, generator=generator))
        level[2] = 0.1
        rise = 1 + 0.4 * week - 0.3 * noise[0] + 0.5 * features[..., 2]
        measures = level * (rise + 0.3 * noise[3])
        counts = torch.poisson(level * rise.clamp(min=0.1), generator=generator)
        values = torch.where(is_count[:, None], counts, measures)
        observed = (noise[4] > -0.9) & (place >= start[:, None])
        # The last series was not looked at before the forecast.
        observed[-1, :18] = False
        made.append(
            {
                "values": values.where(observed, -9.0),
                "observed": observed,
                "start": start,
                "day": day,
                "features": features,
                "categories": torch.stack(categories, dim=1),
                "is_count": is_count,
            }
        )
    return made


def forward(net, batch):
    return net(batch)


def loss(output, batch):
    """The network gives its loss itself."""
    return output


class ClippedSGD(torch.optim.SGD):
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, CLIP_NORM)
        return super().step(closure)


def optimizer(net):
    learned = [p for p in net.parameters() if p.requires_grad]
    return ClippedSGD(learned, lr=LR, momentum=MOMENTUM)
