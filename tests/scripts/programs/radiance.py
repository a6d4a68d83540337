"""A radiance field of two balls from a ring of photographs: hashed grids, a proposal where to look, one resume."""

import itertools
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call


@dataclass(frozen=True)
class Config:
    seed: int = 40
    views: int = 6
    pixels: int = 12
    fov: float = 0.9
    near: float = 1.0
    far: float = 3.2
    proposed: int = 10
    samples: int = 8
    levels: int = 4
    features: int = 2
    slots: int = 512
    bands: int = 3
    width: int = 24
    geometry: int = 7
    look: int = 3
    rays: int = 96
    accumulate: int = 2
    steps: int = 3
    grid_lr: float = 2e-2
    lr: float = 4e-3
    decay: float = 1e-2
    warm: int = 2
    clip: float = 0.05
    keep: float = 0.95


class Rays(NamedTuple):
    origin: Tensor
    direction: Tensor
    view: Tensor
    colour: Tensor


def pose_of(angle: float, height: float, distance: float = 2.1) -> Tensor:
    """Camera to world, 3 x 4: the camera looks along its own -z at the middle, y is up."""
    eye = torch.tensor([math.cos(angle), height, math.sin(angle)])
    back = F.normalize(eye, dim=0)
    right = F.normalize(torch.linalg.cross(torch.tensor([0.0, 1.0, 0.0]), back), dim=0)
    return torch.stack([right, torch.linalg.cross(back, right), back, distance * back], dim=1)


def photograph(cfg: Config, pose: Tensor, oversample: int = 4) -> Tensor:
    """Bytes of red, green, blue and coverage by row and column, as a studio hands them over."""
    fine = cfg.pixels * oversample
    half = math.tan(cfg.fov / 2) * (1 - 1 / fine)
    right, up, back, eye = pose.unbind(1)
    across = torch.linspace(-half, half, fine)[None, :, None] * right
    down = torch.linspace(half, -half, fine)[:, None, None] * up
    d = F.normalize(across + down - back, dim=-1)
    picture, depth = torch.zeros(fine, fine, 4), torch.full((fine, fine), math.inf)
    balls = [([0.3, 0.05, -0.1], 0.45, [0.9, 0.3, 0.1]), ([-0.4, -0.2, 0.3], 0.3, [0.1, 0.5, 0.8])]
    for centre, radius, paint in balls:
        to_eye = eye - torch.tensor(centre)
        b = d @ to_eye
        inner = b**2 - to_eye.dot(to_eye) + radius**2
        t = torch.where(inner > 0, -b - inner.clamp_min(0).sqrt(), math.inf)
        normal = (to_eye + t.nan_to_num(posinf=0.0)[..., None] * d) / radius
        light = 0.3 + 0.7 * (normal @ torch.tensor([0.48, 0.8, 0.36])).clamp_min(0)
        seen = torch.cat([light[..., None] * torch.tensor(paint), torch.ones(fine, fine, 1)], -1)
        picture = torch.where((t < depth)[..., None], seen, picture)
        depth = torch.minimum(depth, t)
    blocks = picture.view(cfg.pixels, oversample, cfg.pixels, oversample, 4).mean((1, 3))
    blocks[..., :3] /= blocks[..., 3:].clamp_min(1e-6)
    return (255 * blocks).round().to(torch.uint8)


def rays_of(cfg: Config, pose: Tensor, picture: Tensor, view: int) -> Rays:
    focal = 0.5 * cfg.pixels / math.tan(0.5 * cfg.fov)
    row, column = torch.meshgrid(torch.arange(cfg.pixels), torch.arange(cfg.pixels), indexing="ij")
    x = (column + 0.5 - cfg.pixels / 2) / focal
    y = -(row + 0.5 - cfg.pixels / 2) / focal
    local = torch.stack([x, y, -torch.ones_like(x)], dim=-1).view(-1, 3)
    direction = F.normalize(local @ pose[:, :3].T, dim=-1)
    rgba = picture.view(-1, 4).float() / 255
    colour = rgba[:, :3] * rgba[:, 3:] + (1 - rgba[:, 3:])
    return Rays(pose[:, 3].expand_as(direction), direction, torch.full((len(colour),), view), colour)


def load_capture(cfg: Config) -> tuple[Rays, Rays]:
    """The rays to learn from, and those of the photograph that is held out."""
    poses = [pose_of(2 * math.pi * i / cfg.views, 0.3 + 0.1 * (i % 3)) for i in range(cfg.views)]
    rays = [rays_of(cfg, pose, photograph(cfg, pose), i) for i, pose in enumerate(poses)]
    return Rays(*(torch.cat(parts) for parts in zip(*rays[:-1], strict=True))), rays[-1]


class TruncatedExp(torch.autograd.Function):
    """exp(x) whose slope does not grow without bounds."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.clamp(max=15.0).exp()


class Absorb(torch.autograd.Function):
    """The share of a ray's light that comes from each of its intervals."""

    @staticmethod
    def forward(ctx, sigma, span):
        thick = sigma * span
        behind = torch.exp(-thick.cumsum(-1))
        before = torch.cat([torch.ones_like(behind[:, :1]), behind[:, :-1]], dim=-1)
        share = before - behind
        ctx.save_for_backward(span, behind, share)
        return share

    @staticmethod
    def backward(ctx, grad):
        span, behind, share = ctx.saved_tensors
        flow = grad * share
        shaded = flow.flip(-1).cumsum(-1).flip(-1) - flow
        return span * (grad * behind - shaded), None


class HashGrid(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.sizes = [int(4 * 1.6**level) for level in range(cfg.levels)]
        self.tables = nn.Parameter(torch.empty(cfg.levels, cfg.slots, cfg.features).uniform_(-0.1, 0.1))
        self.register_buffer("corners", torch.tensor(list(itertools.product((0, 1), repeat=3))))
        self.register_buffer("primes", torch.tensor([1, 2_654_435_761, 805_459_861]))

    def forward(self, where: Tensor) -> Tensor:
        found = []
        for table, size in zip(self.tables, self.sizes, strict=True):
            low = (where * size).floor()
            part = (where * size - low)[:, None]
            mixed = (low.long()[:, None] + self.corners) * self.primes
            slot = (mixed[..., 0] ^ mixed[..., 1] ^ mixed[..., 2]) % len(table)
            weight = torch.where(self.corners == 1, part, 1 - part).prod(-1)
            found.append((weight[..., None] * table[slot]).sum(1))
        return torch.cat(found, dim=-1)


def harmonics(d: Tensor) -> Tensor:
    """Real spherical harmonics of degrees 0 to 2."""
    x, y, z = d.unbind(-1)
    first = [torch.full_like(x, 0.28209), -0.48860 * y, 0.48860 * z, -0.48860 * x]
    second = [1.09255 * x * y, -1.09255 * y * z, 0.31539 * (3 * z * z - 1), -1.09255 * x * z]
    return torch.stack([*first, *second, 0.54627 * (x * x - y * y)], dim=-1)


class Proposal(nn.Module):
    """A cheap density from waves of the position."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.register_buffer("bands", math.pi * 2.0 ** torch.arange(cfg.bands))
        self.hidden = nn.Linear(6 * cfg.bands, cfg.width)
        self.out = nn.Linear(cfg.width, 1)

    def forward(self, points: Tensor) -> Tensor:
        waves = (points[..., None] * self.bands).flatten(-2)
        x = F.softplus(self.hidden(torch.cat([waves.sin(), waves.cos()], dim=-1)), beta=10)
        return TruncatedExp.apply(self.out(x)[..., 0])


class Field(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.grid = HashGrid(cfg)
        self.trunk = nn.Sequential(
            nn.Linear(cfg.levels * cfg.features, cfg.width), nn.ReLU(), nn.Linear(cfg.width, 1 + cfg.geometry)
        )
        self.looks = nn.Embedding(cfg.views, cfg.look)
        self.tint = nn.Sequential(nn.Linear(cfg.geometry + 9 + cfg.look, cfg.width), nn.ReLU(), nn.Linear(cfg.width, 3))
        nn.init.normal_(self.looks.weight, std=0.2)
        nn.init.constant_(self.trunk[-1].bias[:1], -1.0)

    def forward(self, points: Tensor, direction: Tensor, look: Tensor) -> tuple[Tensor, Tensor]:
        inside = (points.abs() < 1).all(-1)
        raw = self.trunk(self.grid((points.clamp(-1, 1) + 1) / 2))
        sigma = TruncatedExp.apply(raw[:, 0]) * inside
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rgb = self.tint(torch.cat([raw[:, 1:], harmonics(direction), look], dim=-1))
        return sigma, rgb.float().sigmoid()


def scatter(rays: int, count: int, rng: torch.Generator | None) -> Tensor:
    return torch.full((rays, count), 0.5) if rng is None else torch.rand(rays, count, generator=rng)


def points_on(rays: Rays, edges: Tensor) -> Tensor:
    middle = (edges[:, 1:] + edges[:, :-1]) / 2
    return rays.origin[:, None] + middle[..., None] * rays.direction[:, None]


def resample(edges: Tensor, weights: Tensor, at: Tensor) -> Tensor:
    """Where the cumulated weights reach the given heights; the heights rise."""
    weights = weights + 0.01
    cdf = F.pad((weights / weights.sum(-1, keepdim=True)).cumsum(-1), (1, 0))
    upper = torch.searchsorted(cdf, at, right=True).clamp(1, cdf.shape[1] - 1)
    a, b = cdf.gather(1, upper - 1), cdf.gather(1, upper)
    start, end = edges.gather(1, upper - 1), edges.gather(1, upper)
    return start + (at - a) / (b - a) * (end - start)


class Renderer(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        self.proposal, self.field = Proposal(cfg), Field(cfg)

    def forward(self, rays: Rays, rng: torch.Generator | None = None):
        """Colours, and the edges and weights of both passes; without rng, nothing is jittered."""
        cfg, n = self.cfg, len(rays.origin)
        width = (cfg.far - cfg.near) / cfg.proposed
        jitter = scatter(n, cfg.proposed + 1, rng) - 0.5
        outer_edges = torch.linspace(cfg.near, cfg.far, cfg.proposed + 1) + jitter * width
        outer = Absorb.apply(self.proposal(points_on(rays, outer_edges)), outer_edges.diff())
        heights = (torch.arange(cfg.samples + 1) + scatter(n, cfg.samples + 1, rng)) / (cfg.samples + 1)
        edges = resample(outer_edges, outer.detach(), heights)
        look = self.field.looks(rays.view) if self.training else self.field.looks.weight[:-1].mean(0).expand(n, -1)
        direction = rays.direction.repeat_interleave(cfg.samples, 0)
        look = look.repeat_interleave(cfg.samples, 0)
        sigma, rgb = self.field(points_on(rays, edges).flatten(0, 1), direction, look)
        weights = Absorb.apply(sigma.view(n, -1), edges.diff())
        colour = (weights[..., None] * rgb.view(n, -1, 3)).sum(1)
        colour = colour + (1 - weights.sum(1, keepdim=True))
        return colour, (edges, weights), (outer_edges, outer)


def interlevel(inner: tuple[Tensor, Tensor], outer: tuple[Tensor, Tensor]) -> Tensor:
    """What the field sees and the proposal leaves out."""
    edges, weights = inner[0], inner[1].detach()
    total = F.pad(outer[1].cumsum(-1), (1, 0))
    first = torch.searchsorted(outer[0], edges[:, :-1].contiguous(), right=True) - 1
    last = torch.searchsorted(outer[0], edges[:, 1:].contiguous())
    bound = total.gather(1, last.clamp(max=outer[1].shape[1])) - total.gather(1, first.clamp(min=0))
    return ((weights - bound).clamp_min(0) ** 2 / (weights + 1e-3)).sum(-1).mean()


def distortion(edges: Tensor, weights: Tensor) -> Tensor:
    """Low where the light of a ray comes from one place."""
    middle = (edges[:, 1:] + edges[:, :-1]) / 2
    apart = (middle[:, :, None] - middle[:, None, :]).abs()
    between = (weights[:, :, None] * weights[:, None, :] * apart).sum((1, 2))
    within = (weights**2 * edges.diff()).sum(1) / 3
    return (between + within).mean()


class Trainer:
    def __init__(self, cfg: Config, rays: Rays, held_out: Rays):
        self.cfg, self.rays, self.held_out = cfg, rays, held_out
        self.model = Renderer(cfg)
        field, proposal = self.model.field, self.model.proposal
        layers = nn.ModuleList([field.trunk, field.tint, proposal])
        self.optimizer = torch.optim.Adam(
            [
                {"params": field.grid.parameters(), "lr": cfg.grid_lr, "eps": 1e-15},
                {"params": field.looks.parameters(), "lr": cfg.lr},
                {"params": layers.parameters(), "lr": cfg.lr, "weight_decay": cfg.decay},
            ],
            betas=(0.9, 0.99),
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)
        self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.rng = torch.Generator().manual_seed(cfg.seed + 1)
        self.order = torch.randperm(len(rays.view), generator=self.rng)
        self.done = 0

    def rate(self, step: int) -> float:
        return min(1.0, (step + 1) / self.cfg.warm) * 0.1 ** (step / self.cfg.steps)

    def state_dict(self) -> dict:
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule")}
        return {**parts, "average": self.average, "rng": self.rng.get_state(), "order": self.order, "done": self.done}

    def load_state_dict(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.average = state["average"]
        self.rng.set_state(state["rng"])
        self.order, self.done = state["order"], state["done"]

    def loss_of(self, rays: Rays) -> tuple[Tensor, Tensor]:
        colour, inner, outer = self.model(rays, self.rng)
        photo = ((colour - rays.colour) ** 2 + 1e-6).sqrt().mean()
        return photo, 0.5 * interlevel(inner, outer) + 0.02 * distortion(*inner)

    def step(self) -> tuple[float, float]:
        cfg, size = self.cfg, self.cfg.rays * self.cfg.accumulate
        rows = self.order[self.done * size : (self.done + 1) * size]
        self.optimizer.zero_grad()
        shown = 0.0
        for part in rows.split(cfg.rays):
            photo, side = self.loss_of(Rays(*(of_all[part] for of_all in self.rays)))
            ((photo + side) / cfg.accumulate).backward()
            shown += photo.item() / cfg.accumulate
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), cfg.clip)
        self.optimizer.step()
        self.schedule.step()
        self.done += 1
        self.follow()
        return shown, norm.item()

    @torch.no_grad()
    def follow(self) -> None:
        keep = min(self.cfg.keep, (1 + self.done) / (10 + self.done))
        for name, p in self.model.named_parameters():
            self.average[name].lerp_(p, 1 - keep)

    @torch.no_grad()
    def judge(self) -> float:
        """Signal to noise of the held-out photograph, drawn with the averaged weights."""
        self.model.eval()
        colour, *_ = functional_call(self.model, self.average, (self.held_out,))
        self.model.train()
        return -10 * F.mse_loss(colour, self.held_out.colour).log10().item()


def main() -> None:
    cfg = Config()
    torch.manual_seed(cfg.seed)
    rays, held_out = load_capture(cfg)
    trainer = Trainer(cfg, rays, held_out)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.pt"
        while trainer.done < cfg.steps:
            loss, norm = trainer.step()
            print(f"step {trainer.done}: loss {loss:.6f} norm {norm:.6f} psnr {trainer.judge():.5f}")
            if trainer.done == 1:
                torch.save(trainer.state_dict(), path)
                trainer = Trainer(cfg, rays, held_out)
                trainer.load_state_dict(torch.load(path))


if __name__ == "__main__":
    main()
