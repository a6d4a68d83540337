# Density of a pumping station's readings: a RealNVP with a learned prior, warm from the
# flow of another station. What it samples is held against readings that it has not seen.
import torch
import torch.nn as nn
import torch.nn.functional as F

SEED = 31
COLUMNS = ("level", "flow", "valve", "starts", "east", "north")
D = len(COLUMNS)
WIDTH, BLOCKS, PARTS = 24, 4, 3
MICRO, ACCUMULATE, STEPS = 32, 2, 3
LR_NET, LR_NORM, LR_PRIOR = 8e-3, 2e-2, 3e-2
DECAY, CLIP, LIMIT = 0.3, 0.5, 0.8
HELD_OUT, DRAWN, DIRECTIONS = 96, 128, 16


# ---- readings


def readings(n, gen):
    """Raw: a level, a flow (skew), a valve (share), starts (a count), a bent pair."""
    z = torch.randn(n, 4, generator=gen)
    level = 12 + 3 * z[:, 0]
    flow = torch.exp(1.5 + 0.6 * z[:, 1] + 0.4 * z[:, 0])
    valve = torch.sigmoid(0.8 * z[:, 2] - 0.5 * z[:, 1])
    starts = torch.poisson(torch.exp(0.7 + 0.3 * z[:, 0]), generator=gen)
    side = (torch.rand(n, generator=gen) < 0.5).float()
    angle = torch.pi * (torch.rand(n, generator=gen) + side)
    east = angle.cos() + side + 0.1 * z[:, 3]
    north = angle.sin() + 0.4 * side + 0.1 * torch.randn(n, generator=gen)
    return torch.stack([level, flow, valve, starts, east, north], 1)


def prepare(raw, gen):
    """Columns without bounds; counts are spread over their interval."""
    level, flow, valve, starts, east, north = raw.unbind(1)
    starts = starts + torch.rand(len(raw), generator=gen)
    open_ = valve.clamp(1e-3, 1 - 1e-3)
    columns = [level, flow.log(), open_.logit(), starts.log1p(), east, north]
    return torch.stack(columns, 1)


class Readings:
    """Micro-batches without end, drawn with replacement and standardised."""

    def __init__(self, raw, gen):
        self.raw, self.gen = raw, gen
        known = prepare(raw, gen)
        self.mean, self.std = known.mean(0), known.std(0)

    def standard(self, raw, gen):
        return (prepare(raw, gen) - self.mean) / self.std

    def __next__(self):
        rows = torch.randint(len(self.raw), (MICRO,), generator=self.gen)
        return self.standard(self.raw[rows], self.gen)


# ---- flow


class Affine(torch.autograd.Function):
    """x exp(s) + t where the mask is nought, x where it is one; and log |det|."""

    @staticmethod
    def forward(ctx, x, s, t, mask):
        free = 1 - mask
        grown = s.exp()
        ctx.save_for_backward(x, grown, free)
        return mask * x + free * (x * grown + t), (s * free).sum(1)

    @staticmethod
    def backward(ctx, grad_y, grad_det):
        x, grown, free = ctx.saved_tensors
        grad_x = grad_y * (1 - free + free * grown)
        grad_s = free * (grad_y * x * grown + grad_det[:, None])
        return grad_x, grad_s, free * grad_y, None


class ActNorm(nn.Module):
    """Scale and shift of a column; the first batch comes out standardised."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(D))
        self.log_scale = nn.Parameter(torch.zeros(D))
        self.register_buffer("ready", torch.tensor(False))

    @torch.no_grad()
    def start(self, x):
        self.shift.copy_(-x.mean(0))
        self.log_scale.copy_(-(x.std(0) + 1e-6).log())
        self.ready.fill_(True)

    def forward(self, x):
        if not self.ready:
            self.start(x)
        return (x + self.shift) * self.log_scale.exp(), self.log_scale.sum()

    def inverse(self, y):
        return y * (-self.log_scale).exp() - self.shift


class Mirror(nn.Module):
    """Householder reflection: mixes the columns, volume stays, its own inverse."""

    def __init__(self):
        super().__init__()
        self.v = nn.Parameter(torch.randn(D))

    def forward(self, x):
        unit = self.v / self.v.norm()
        return x - 2 * (x @ unit)[:, None] * unit


class Coupling(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.register_buffer("mask", mask)
        self.inlet = nn.Linear(D, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.outlet = nn.Linear(WIDTH, 2 * D)

    def terms(self, x):
        h = F.silu(self.inlet(x * self.mask))
        h = h + F.silu(self.hidden(h))
        s, t = self.outlet(h).chunk(2, 1)
        return LIMIT * torch.tanh(s / LIMIT), t

    def forward(self, x):
        s, t = self.terms(x)
        return Affine.apply(x, s, t, self.mask)

    def inverse(self, y):
        s, t = self.terms(y)
        return self.mask * y + (1 - self.mask) * (y - t) * (-s).exp()


class Mixture(nn.Module):
    """The prior: normal parts, each with its share, centre and spread."""

    def __init__(self):
        super().__init__()
        self.share = nn.Parameter(torch.zeros(PARTS))
        self.centre = nn.Parameter(torch.zeros(PARTS, D))
        self.log_std = nn.Parameter(torch.zeros(PARTS, D))

    def log_prob(self, z):
        away = (z[:, None] - self.centre) * (-self.log_std).exp()
        log_part = -0.5 * away.square() - self.log_std
        log_part = log_part.sum(2) - 0.5 * D * torch.log(torch.tensor(2 * torch.pi))
        return torch.logsumexp(log_part + self.share.log_softmax(0), 1)

    def sample(self, n, gen):
        part = torch.multinomial(self.share.softmax(0), n, replacement=True, generator=gen)
        noise = torch.randn(n, D, generator=gen)
        return self.centre[part] + noise * self.log_std[part].exp()


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        masks = [((torch.arange(D) + i) % 2).float() for i in range(BLOCKS)]
        self.norms = nn.ModuleList(ActNorm() for _ in masks)
        self.mirrors = nn.ModuleList(Mirror() for _ in masks)
        self.couplings = nn.ModuleList(Coupling(mask) for mask in masks)
        self.prior = Mixture()

    def log_prob(self, x):
        total = x.new_zeros(len(x))
        for norm, mirror, coupling in zip(self.norms, self.mirrors, self.couplings):
            x, det = norm(x)
            total = total + det
            x, det = coupling(mirror(x))
            total = total + det
        return total + self.prior.log_prob(x)

    def sample(self, n, gen):
        x = self.prior.sample(n, gen)
        for i in reversed(range(BLOCKS)):
            x = self.mirrors[i](self.couplings[i].inverse(x))
            x = self.norms[i].inverse(x)
        return x


def other_station():
    """Its flow: layers as [in, out], the prior as shares, centres and variances."""
    gen = torch.Generator().manual_seed(77)
    saved = {}
    for i in range(BLOCKS):
        for name, a, b in (("inlet", D, WIDTH), ("hidden", WIDTH, WIDTH), ("outlet", WIDTH, 2 * D)):
            saved[f"{i}/{name}/w"] = torch.randn(a, b, generator=gen) * 0.8 / a**0.5
            saved[f"{i}/{name}/b"] = 0.1 * torch.randn(b, generator=gen)
    saved["prior/share"] = torch.tensor([0.6, 0.3, 0.1])
    saved["prior/centre"] = 0.7 * torch.randn(PARTS, D, generator=gen)
    saved["prior/variance"] = 0.4 + 1.5 * torch.rand(PARTS, D, generator=gen)
    return saved


@torch.no_grad()
def warm_start(flow, saved):
    for i, coupling in enumerate(flow.couplings):
        for name in ("inlet", "hidden", "outlet"):
            layer = getattr(coupling, name)
            kernel = saved[f"{i}/{name}/w"]
            layer.weight.copy_(kernel.T)
            layer.bias.copy_(saved[f"{i}/{name}/b"])
    flow.prior.share.copy_(saved["prior/share"].log())
    flow.prior.centre.copy_(saved["prior/centre"])
    flow.prior.log_std.copy_(0.5 * saved["prior/variance"].log())


# ---- training


def optimizer_of(flow):
    weights = [p for n, p in flow.couplings.named_parameters() if n.endswith("weight")]
    plain = [p for n, p in flow.couplings.named_parameters() if n.endswith("bias")]
    plain += [*flow.norms.parameters(), *flow.mirrors.parameters()]
    groups = [
        {"params": weights, "lr": LR_NET, "weight_decay": DECAY},
        {"params": plain, "lr": LR_NORM},
        {"params": [*flow.prior.parameters()], "lr": LR_PRIOR},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.0)


def warming(step):
    return min(1.0, (step + 1) / 4)


def falling(step):
    return 0.7**step


def late(step):
    return 0.5 if step < 1 else 1.0


@torch.no_grad()
def distance(flow, held_out, gen):
    """Sliced Wasserstein distance between samples and readings, by quantiles."""
    drawn = flow.sample(DRAWN, gen)
    ways = F.normalize(torch.randn(D, DIRECTIONS, generator=gen), dim=0)
    at = torch.linspace(0.05, 0.95, 19)
    ours, theirs = (torch.quantile(x @ ways, at, dim=0) for x in (drawn, held_out))
    return (ours - theirs).abs().mean().item()


torch.manual_seed(SEED)
gen = torch.Generator().manual_seed(SEED + 1)
check = torch.Generator().manual_seed(SEED + 2)
raw = readings(600, gen)
stream = Readings(raw[HELD_OUT:], gen)
held_out = stream.standard(raw[:HELD_OUT], check)
flow = Flow()
warm_start(flow, other_station())
opt = optimizer_of(flow)
sched = torch.optim.lr_scheduler.LambdaLR(opt, [warming, falling, late])
best = float("inf")
for step in range(STEPS):
    opt.zero_grad()
    seen = 0.0
    for _ in range(ACCUMULATE):
        x = next(stream)
        nll = -flow.log_prob(x).mean() / D
        loss = nll / ACCUMULATE
        loss.backward()
        seen += loss.item()
    norm = nn.utils.clip_grad_norm_(flow.parameters(), CLIP)
    opt.step()
    sched.step()
    apart = distance(flow, held_out, check)
    best = min(best, apart)
    print(f"step {step} nats a column {seen:.4f} norm {norm.item():.3f} apart {apart:.4f}")
print(f"best {best:.4f}")
