"""Six-hourly forecasts on a coarse globe by a small Fourier neural operator."""

import argparse
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

VARIABLES = ("z500", "t850", "u10", "q700")
LAST_YEAR = ("u10", "q700", "t850", "z500")  # the order in last year's run
USUAL, SIZE = (54000.0, 278.0, 0.5, 0.004), (1200.0, 9.0, 4.0, 0.0015)
WEIGHT = torch.tensor([1.0, 1.5, 0.6, 0.3])[:, None, None]
STEPS_A_DAY = 4
OPTIONS = {
    "seed": 2031, "lat": 14, "lon": 28, "times": 90, "held_out": 24, "width": 10, "depth": 3,
    "rows": 4, "cols": 6, "batch": 4, "updates": 5, "lr": 6e-3, "weight_decay": 0.05,
    "warmup": 3, "total": 30, "clip": 0.06, "ema": 0.8, "noise": 0.04, "discount": 0.7,
}
parser = argparse.ArgumentParser(description=__doc__)
for name, value in OPTIONS.items():
    parser.add_argument(f"--{name}", type=type(value), default=value)
args = parser.parse_args()


class Grid:
    def __init__(self, lat, lon):
        edges = torch.linspace(90, -90, lat + 1)
        self.lat = torch.deg2rad((edges[1:] + edges[:-1]) / 2)[:, None]
        self.lon = 2 * math.pi * torch.arange(lon) / lon
        area = self.lat.cos()
        self.area = area / area.mean()

    def forcing(self, time):
        """Sunshine and season at these times, [times, 2, lat, lon]."""
        day = time.float()[:, None, None] / STEPS_A_DAY
        season = torch.cos(2 * math.pi * day / 365)
        decline, hour = -0.41 * season, 2 * math.pi * day + self.lon
        height = self.lat.sin() * decline.sin()
        height = height - self.lat.cos() * decline.cos() * hour.cos()
        return torch.stack([height.relu(), (season * self.lat.sin()).expand_as(height)], 1)


def simulate(grid, times, gen):
    """Waves that travel eastwards, and weather upon them: [times, variables, lat, lon]."""
    t = torch.arange(times)[:, None, None, None]
    fields = torch.zeros(times, len(VARIABLES), len(grid.lat), len(grid.lon))
    for k in range(1, 7):
        size, start, speed, tilt = torch.rand(4, len(VARIABLES), 1, 1, generator=gen)
        place = k * grid.lon + 2 * math.pi * start + 3 * tilt * grid.lat
        moved = k * (0.05 + 0.25 * speed) * grid.lat.cos() * t
        fields += (0.3 + size) / k**0.7 * grid.lat.cos() ** 2 * torch.cos(place - moved)
    fields += 1.2 * torch.cos(2 * grid.lat) - 0.3 * torch.sin(grid.lat)
    fields += 0.4 * grid.forcing(torch.arange(times))[:, :1]
    fields += 0.1 * torch.randn(fields.shape, generator=gen)
    return torch.tensor(USUAL)[:, None, None] + torch.tensor(SIZE)[:, None, None] * fields


def statistics(fields, grid):
    """Mean and deviation of each variable over the globe, and how much a step changes it."""
    mean = (grid.area * fields).mean((0, 2, 3), keepdim=True)
    std = (grid.area * (fields - mean).square()).mean((0, 2, 3), keepdim=True).sqrt()
    change = (grid.area * fields.diff(dim=0).square()).mean((0, 2, 3), keepdim=True)
    return mean[0], std[0], (change.sqrt() / std)[0]


def windows(fields, size, gen):
    """Endless batches of three fields in a row, and the times of the first."""
    while True:
        order = torch.randperm(len(fields) - 2, generator=gen)
        for first in order.split(size)[: len(order) // size]:
            yield fields[first[:, None] + torch.arange(3)], first


class ModeMix(torch.autograd.Function):
    """Channels of each mode times its matrix: [b, i, x, y], [i, o, x, y] -> [b, o, x, y]"""

    @staticmethod
    def forward(ctx, modes, weight):
        ctx.save_for_backward(modes, weight)
        return torch.einsum("bixy,ioxy->boxy", modes, weight)

    @staticmethod
    def backward(ctx, grad):
        modes, weight = ctx.saved_tensors
        by_modes = torch.einsum("boxy,ioxy->bixy", grad, weight.conj())
        by_weight = torch.einsum("bixy,boxy->ioxy", modes.conj(), grad)
        return by_modes, by_weight


class GlobeLoss(torch.autograd.Function):
    """Mean square error under the areas of the cells and weights of the variables."""

    @staticmethod
    def forward(ctx, told, truth, area, weight):
        error = told - truth
        ctx.save_for_backward(error, area, weight)
        return (area * weight * error.square()).mean()

    @staticmethod
    def backward(ctx, grad):
        error, area, weight = ctx.saved_tensors
        return grad * 2 * area * weight * error / error.numel(), None, None, None


class SpectralConv(nn.Module):
    """Products with few modes; those with negative numbers along the meridian come last."""

    def __init__(self, width, modes):
        super().__init__()
        self.rows, self.cols = modes
        shape = (width, width, *modes)
        self.first = nn.Parameter(0.5 / width * torch.randn(shape, dtype=torch.cfloat))
        self.last = nn.Parameter(0.5 / width * torch.randn(shape, dtype=torch.cfloat))

    def forward(self, x):
        rows, cols = self.rows, self.cols
        spectrum = torch.fft.rfft2(x, norm="ortho")
        out = torch.zeros_like(spectrum)
        out[:, :, :rows, :cols] = ModeMix.apply(spectrum[:, :, :rows, :cols], self.first)
        out[:, :, -rows:, :cols] = ModeMix.apply(spectrum[:, :, -rows:, :cols], self.last)
        return torch.fft.irfft2(out, s=x.shape[-2:], norm="ortho")


class GlobeNorm(nn.Module):
    """Each channel by its mean and deviation over the globe."""

    def __init__(self, width, area):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width, 1, 1))
        self.shift = nn.Parameter(torch.zeros(width, 1, 1))
        self.register_buffer("area", area, persistent=False)

    def forward(self, x):
        centred = x - (self.area * x).mean((2, 3), keepdim=True)
        var = (self.area * centred.square()).mean((2, 3), keepdim=True)
        return self.gain * centred / torch.sqrt(var + 1e-5) + self.shift


class Block(nn.Module):
    def __init__(self, width, modes, area):
        super().__init__()
        self.spectral = SpectralConv(width, modes)
        self.skip = nn.Conv2d(width, width, 1)
        self.norm = GlobeNorm(width, area)

    def forward(self, x):
        y = self.norm(x)
        return x + F.gelu(self.spectral(y) + self.skip(y))


class Forecaster(nn.Module):
    def __init__(self, grid, change):
        super().__init__()
        count, width = len(VARIABLES), args.width
        land = torch.sin(3 * grid.lon) * torch.cos(2 * grid.lat) > 0.3
        still = torch.stack([grid.lat.sin().expand(land.shape), land.float()])
        self.register_buffer("still", still, persistent=False)
        self.register_buffer("change", change)
        self.lift = nn.Conv2d(count + 4, width, 1)
        blocks = (Block(width, (args.rows, args.cols), grid.area) for _ in range(args.depth))
        self.blocks = nn.ModuleList(blocks)
        convs = nn.Conv2d(width, 2 * width, 1), nn.Conv2d(2 * width, count, 1)
        self.head = nn.Sequential(convs[0], nn.GELU(), convs[1])

    def forward(self, state, forcing):
        still = self.still.expand(len(state), -1, -1, -1)
        x = self.lift(torch.cat([state, still, forcing], 1))
        for block in self.blocks:
            x = block(x)
        return state + self.change * self.head(x)


def saved_last_year(modes=(3, 4)):
    """That run had fewer modes; complex numbers are pairs of real ones."""
    gen = torch.Generator().manual_seed(2030)
    width, saved = args.width, {}
    saved["lift"] = 0.4 * torch.randn(width, len(VARIABLES), generator=gen)
    for number in range(args.depth):
        for part in ("first", "last"):
            pairs = torch.randn(width, width, *modes, 2, generator=gen)
            saved[f"{number}.{part}"] = 0.6 / width * pairs
    return saved


@torch.no_grad()
def take_over(model, saved):
    places = [LAST_YEAR.index(name) for name in VARIABLES]
    model.lift.weight[:, : len(places), 0, 0] = saved["lift"][:, places]
    for number, block in enumerate(model.blocks):
        first, last = (torch.view_as_complex(saved[f"{number}.{p}"]) for p in ("first", "last"))
        rows, cols = first.shape[2:]
        block.spectral.first[:, :, :rows, :cols] = first
        block.spectral.last[:, :, -rows:, :cols] = last


def groups_of(model):
    bare = [p for name, p in model.named_parameters() if name.endswith(("bias", "gain", "shift"))]
    rest = [p for p in model.parameters() if all(p is not other for other in bare)]
    return [{"params": rest, "weight_decay": args.weight_decay}, {"params": bare}]


def rate(step):
    if step < args.warmup:
        return (step + 1) / (args.warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - args.warmup) / (args.total - args.warmup)))


torch.manual_seed(args.seed)
gen = torch.Generator().manual_seed(args.seed + 1)
grid = Grid(args.lat, args.lon)
fields = simulate(grid, args.times, gen)
cut = args.times - args.held_out
mean, std, change = statistics(fields[:cut], grid)
fields = (fields - mean) / std

model = Forecaster(grid, change)
take_over(model, saved_last_year())
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(groups_of(model), args.lr, (0.9, 0.95), 1e-6, weight_decay=0.0)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
feed = windows(fields[:cut], args.batch, gen)
for step in range(args.updates):
    window, time = next(feed)
    state = window[:, 0] + args.noise * torch.randn(window[:, 0].shape, generator=gen)
    loss = 0.0
    for lead in (1, 2):
        state = model(state, grid.forcing(time + lead - 1))
        error = GlobeLoss.apply(state, window[:, lead], grid.area, WEIGHT)
        loss = loss + args.discount ** (lead - 1) * error
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    scheduler.step()
    with torch.no_grad():
        for ours, theirs in zip(average.parameters(), model.parameters()):
            ours.mul_(args.ema).add_(theirs, alpha=1 - args.ema)
    print(f"{step}: loss {loss.item():.5f} norm {norm.item():.4f}")

first = torch.arange(cut, args.times - 4)
state = fields[first]
with torch.no_grad():
    for lead in range(4):
        state = average(state, grid.forcing(first + lead))
        square = (state - fields[first + lead + 1]) ** 2
        rmse = std.flatten() * (grid.area * square).mean((0, 2, 3)).sqrt()
        words = [f"{name} {value:.3g}" for name, value in zip(VARIABLES, rmse.tolist())]
        print(f"{24 // STEPS_A_DAY * (lead + 1)} h:", *words)
