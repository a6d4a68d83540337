#!/usr/bin/env python3
"""soft_mot - multi-object tracker, Kalman filter with learned noises, soft association.

Units: metres, seconds. World frame is ENU. Shapes are noted at the line:
B scenes, T scans, N tracks, M detections per scan (M = N + 1, one is clutter), D features.
"""

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


@dataclass(frozen=True)
class Cfg:
    seed: int = 11
    # scene
    n_scenes: int = 24
    T: int = 3
    N: int = 3
    dt: float = 0.5
    n_class: int = 3
    n_app: int = 6
    arena: float = 2.5
    sigma_det: float = 0.3
    p_miss: float = 0.25
    max_yaw_deg: float = 40.0
    # net
    d: int = 16
    heads: int = 2
    d_reid: int = 8
    drop: float = 0.1
    sinkhorn_iters: int = 2
    # loss
    delta: float = 0.5
    w_state: float = 1.0
    w_nll: float = 0.2
    w_assoc: float = 0.5
    w_class: float = 0.5
    w_reid: float = 0.3
    smoothing: float = 0.1
    tau: float = 0.2
    # training
    batch: int = 3
    accum: int = 2
    steps: int = 3
    total: int = 60
    warmup: int = 3
    lr: float = 4e-3
    lr_noise: float = 1e-2
    wd: float = 0.1
    clip: float = 1.0
    ema: float = 0.8


cfg = Cfg()
M = cfg.N + 1


# ----------------------------------------------------------------------------- data


def simulate(n_scenes, gen):
    """Constant velocity targets seen by a noisy detector that misses and invents."""
    proto = torch.randn(cfg.n_class, cfg.n_app, generator=gen)
    freq = torch.tensor([0.6, 0.3, 0.1])  # pedestrian, cyclist, car
    speed = torch.tensor([0.5, 1.5, 3.0])
    scenes = []
    for _ in range(n_scenes):
        cls = torch.multinomial(freq, cfg.N, replacement=True, generator=gen)
        pos = cfg.arena * torch.randn(cfg.N, 2, generator=gen) + torch.tensor([4.0, 1.0])
        vel = speed[cls][:, None] * torch.randn(cfg.N, 2, generator=gen)
        look = 2.0 + proto[cls] + 0.7 * torch.randn(cfg.N, cfg.n_app, generator=gen)
        gt, det, app, owner = [], [], [], []
        for t in range(cfg.T):
            if t > 0:
                vel = vel + 0.2 * torch.randn(cfg.N, 2, generator=gen)
                pos = pos + cfg.dt * vel
            clutter = pos.mean(0, keepdim=True) + 2 * cfg.arena * torch.randn(1, 2, generator=gen)
            z = torch.cat([pos + cfg.sigma_det * torch.randn(cfg.N, 2, generator=gen), clutter])
            a = torch.cat([look, 2.0 + torch.randn(1, cfg.n_app, generator=gen)])
            a = a + 0.2 * torch.randn(M, cfg.n_app, generator=gen)
            who = torch.arange(M)  # N = clutter
            if t > 0:  # tracks are born on complete scans
                missed = torch.rand(cfg.N, generator=gen) < cfg.p_miss
                who[: cfg.N][missed] = -1
            order = torch.randperm(M, generator=gen)
            gt.append(torch.cat([pos, vel], 1))
            det.append(z[order])
            app.append(a[order])
            owner.append(who[order])
        scenes.append([torch.stack(s) for s in (gt, det, app, owner)] + [cls])
    return scenes


class Scenes(Dataset):
    """Turned about the sensor, blanked where nothing was detected, normalised."""

    def __init__(self, scenes, stats, seed):
        self.scenes = scenes
        self.mean, self.std = stats
        self.gen = torch.Generator().manual_seed(seed)

    def __len__(self):
        return len(self.scenes)

    def __getitem__(self, i):
        gt, det, app, owner, cls = self.scenes[i]
        yaw = math.radians(cfg.max_yaw_deg) * (2 * torch.rand((), generator=self.gen) - 1)
        c, s = torch.cos(yaw), torch.sin(yaw)
        R = torch.stack([torch.stack([c, -s]), torch.stack([s, c])])
        gt = torch.cat([gt[..., :2] @ R.T, gt[..., 2:] @ R.T], -1)
        det = det @ R.T
        feat = (torch.cat([det, app], -1) - self.mean) / self.std
        valid = owner >= 0
        det = det * valid[..., None]
        return {"gt": gt, "det": det, "feat": feat, "owner": owner, "valid": valid, "cls": cls}


def log_statistics(scenes):
    """Mean and std of each channel over the whole log, missed ones left out."""
    rows = torch.cat([torch.cat([s[1], s[2]], -1)[s[3] >= 0] for s in scenes])
    return rows.mean(0), rows.std(0)


def class_balance(scenes):
    count = torch.bincount(torch.cat([s[4] for s in scenes]), minlength=cfg.n_class).float()
    w = 1.0 / count.clamp(min=1.0)
    return w / w.mean()


# -------------------------------------------------------------------------- kernels


class Mahalanobis2(torch.autograd.Function):
    """y' S^-1 y by Cholesky. y [..., 2], S [..., 2, 2]."""

    @staticmethod
    def forward(ctx, y, S):
        L = torch.linalg.cholesky(S)
        w = torch.linalg.solve_triangular(L, y[..., None], upper=False)
        v = torch.linalg.solve_triangular(L.mT, w, upper=True).squeeze(-1)
        ctx.save_for_backward(v)
        return w.squeeze(-1).square().sum(-1)

    @staticmethod
    def backward(ctx, g):
        (v,) = ctx.saved_tensors
        gy = 2.0 * g[..., None] * v
        gS = -g[..., None, None] * v[..., :, None] * v[..., None, :]
        return gy, gS


@torch.library.custom_op("soft_mot::pseudo_huber", mutates_args=())
def pseudo_huber(r: torch.Tensor, delta: float) -> torch.Tensor:
    return delta**2 * (torch.sqrt(1 + (r / delta) ** 2) - 1)


@pseudo_huber.register_fake
def _(r, delta):
    return torch.empty_like(r)


def _huber_setup(ctx, inputs, output):
    r, ctx.delta = inputs
    ctx.save_for_backward(r)


def _huber_backward(ctx, g):
    (r,) = ctx.saved_tensors
    return g * r / torch.sqrt(1 + (r / ctx.delta) ** 2), None


pseudo_huber.register_autograd(_huber_backward, setup_context=_huber_setup)


# ---------------------------------------------------------------------------- model


class DetectionEncoder(nn.Module):
    """Each detection looks at the others of its scan."""

    def __init__(self):
        super().__init__()
        d = cfg.d
        self.inp = nn.Linear(2 + cfg.n_app, d)
        self.norm1 = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.proj = nn.Linear(d, d)
        self.norm2 = nn.LayerNorm(d)
        self.up = nn.Linear(d, 2 * d)
        self.down = nn.Linear(2 * d, d)
        self.drop = nn.Dropout(cfg.drop)

    def forward(self, feat, valid):  # [B, T, M, C], [B, T, M]
        x = F.gelu(self.inp(feat))
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, cfg.heads, -1)).transpose(2, 4).unbind(3)
        att = q @ k.mT / math.sqrt(k.shape[-1])  # [B, T, heads, M, M]
        att = att.masked_fill(~valid[:, :, None, None, :], -1e9)
        att = att.softmax(-1)
        x = x + self.proj((att @ v).transpose(2, 3).flatten(-2))
        return x + self.down(self.drop(F.silu(self.up(self.norm2(x)))))


class LearnedNoise(nn.Module):
    """Q = L L', diagonal of L positive; R of a detection is diagonal and read off its features."""

    def __init__(self):
        super().__init__()
        self.q_log = nn.Parameter(torch.tensor([-1.5, -1.5, -1.0, -1.0]))
        self.q_low = nn.Parameter(0.05 * torch.randn(6))
        self.r_head = nn.Linear(cfg.d, 2)

    def process(self):
        i, j = torch.tril_indices(4, 4, -1)
        L = torch.diag(self.q_log.exp()).index_put((i, j), self.q_low)
        return L @ L.T

    def measurement(self, enc):
        sigma = F.softplus(self.r_head(enc)) + 0.1
        return torch.diag_embed(sigma**2)


def age_table(T, d):
    pos = torch.arange(T, dtype=torch.float32)[:, None]
    rate = torch.exp(torch.arange(0, d, 2) * (-math.log(100.0) / d))
    table = torch.zeros(T, d)
    table[:, 0::2] = torch.sin(pos * rate)
    table[:, 1::2] = torch.cos(pos * rate)
    return table


def sinkhorn(score, bin_score, valid):
    """Log of the soft assignment with a bin for births and one for misses, [B, N + 1, M + 1]."""
    B, N, m = score.shape
    full = torch.cat([score, bin_score.expand(B, N, 1)], 2)
    full = torch.cat([full, bin_score.expand(B, 1, m + 1)], 1)
    seen = valid.sum(1, keepdim=True).float()
    log_mu = torch.cat([torch.zeros(B, N), seen.log()], 1)
    log_nu = torch.zeros(B, m).masked_fill(~valid, -1e4)
    log_nu = torch.cat([log_nu, torch.full((B, 1), math.log(N))], 1)
    v = torch.zeros_like(log_nu)
    for _ in range(cfg.sinkhorn_iters):
        u = log_mu - torch.logsumexp(full + v[:, None, :], 2)
        v = log_nu - torch.logsumexp(full + u[:, :, None], 1)
    return full + u[:, :, None] + v[:, None, :]


class Tracker(nn.Module):
    def __init__(self, class_weight):
        super().__init__()
        self.encoder = DetectionEncoder()
        self.noise = LearnedNoise()
        self.reid = nn.Linear(cfg.d, cfg.d_reid)
        self.born = nn.Linear(cfg.d, cfg.d)
        self.memory = nn.GRUCell(cfg.d, cfg.d)
        self.recall = nn.Linear(cfg.d, cfg.d_reid)
        self.classify = nn.Linear(cfg.d, cfg.n_class)
        self.log_scale = nn.Parameter(torch.tensor(0.5))
        self.bin_score = nn.Parameter(torch.tensor(-2.0))
        transition = torch.eye(4)
        transition[0, 2] = transition[1, 3] = cfg.dt
        self.register_buffer("transition", transition)
        self.register_buffer("observe", torch.eye(2, 4))
        self.register_buffer("start_cov", torch.diag(torch.tensor([0.1, 0.1, 4.0, 4.0])))
        self.register_buffer("age_code", age_table(cfg.T, cfg.d))
        self.register_buffer("class_weight", class_weight)

    def embed(self, enc):
        return F.normalize(self.reid(enc), dim=-1)

    def predict(self, x, P, Q):
        Fm = self.transition
        x = x @ Fm.T
        P = Fm @ P @ Fm.T + Q
        return x, P

    def correct(self, x, P, HP, HPH, w, innov, R):
        """One update with the mean innovation; the gain shrinks with the mass of the assignment."""
        mass = w.sum(-1)  # [B, N]
        share = w / (mass[..., None] + 1e-6)
        y = (share[..., None] * innov).sum(2)
        Rbar = torch.einsum("bnm,bmij->bnij", share, R)
        K = torch.linalg.solve(HPH + Rbar, HP).mT * mass[..., None, None]  # [B, N, 4, 2]
        x = x + (K @ y[..., None]).squeeze(-1)
        A = torch.eye(4) - K @ self.observe
        P = A @ P @ A.mT + K @ Rbar @ K.mT
        return x, P

    def forward(self, batch):
        det, valid, owner = batch["det"], batch["valid"], batch["owner"]
        enc = self.encoder(batch["feat"], valid)  # [B, T, M, D]
        emb = self.embed(enc)
        R = self.noise.measurement(enc)
        Q = self.noise.process()
        # birth: the first scan is labelled
        slot = owner[:, 0].argsort(1)[:, : cfg.N, None]  # [B, N, 1]
        pos = det[:, 0].gather(1, slot.expand(-1, -1, 2))
        x = torch.cat([pos, torch.zeros_like(pos)], -1)
        P = self.start_cov.expand(*x.shape[:2], 4, 4)
        h = torch.tanh(self.born(enc[:, 0].gather(1, slot.expand(-1, -1, cfg.d))))
        xs, Ps, plans = [], [], []
        for t in range(1, cfg.T):
            x, P = self.predict(x, P, Q)
            HP = self.observe @ P
            HPH = HP @ self.observe.T
            innov = det[:, t, None] - (x @ self.observe.T)[:, :, None]  # [B, N, M, 2]
            S = HPH[:, :, None] + R[:, t, None]
            d2 = Mahalanobis2.apply(innov, S)
            motion = -0.5 * (d2 + torch.logdet(S))
            own = F.normalize(self.recall(h), dim=-1)
            looks = self.log_scale.exp() * (own @ emb[:, t].mT)
            plan = sinkhorn(motion + looks, self.bin_score, valid[:, t])
            w = plan[:, : cfg.N, :M].exp()
            x, P = self.correct(x, P, HP, HPH, w, innov, R[:, t])
            told = w @ enc[:, t] + self.age_code[t]
            h = self.memory(told.flatten(0, 1), h.flatten(0, 1)).view_as(h)
            xs.append(x)
            Ps.append(P)
            plans.append(plan)
        return {
            "x": torch.stack(xs, 1),
            "P": torch.stack(Ps, 1),
            "plan": torch.stack(plans, 1),
            "cls": self.classify(h),
            "emb": emb,
        }


# ------------------------------------------------------------------------- the loss


def reid_loss(query, key, owner):
    """InfoNCE between first and last scan, all objects of the batch are each other's negatives."""
    first = owner[:, 0].argsort(1)[:, : cfg.N, None].expand(-1, -1, cfg.d_reid)
    q = query[:, 0].gather(1, first).flatten(0, 1)  # [B * N, E]
    same = owner[:, -1, None, :] == torch.arange(cfg.N)[None, :, None]  # [B, N, M]
    k = (same.float() @ key[:, -1]).flatten(0, 1)
    there = same.any(-1).flatten()
    logits = q @ k.T / cfg.tau
    logits = logits.masked_fill(~there[None, :], -1e9)
    return F.cross_entropy(logits[there], torch.arange(len(q))[there])


def tracker_loss(model, teacher, batch):
    out = model(batch)
    gt = batch["gt"][:, 1:]
    err = out["x"] - gt  # [B, T - 1, N, 4]
    state = pseudo_huber(err, cfg.delta).sum(-1).mean()
    # how sure the filter may be of its positions
    C = out["P"][..., :2, :2]
    L = torch.linalg.cholesky(C)
    white = torch.linalg.solve_triangular(L, err[..., :2, None], upper=False)
    logdet = 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    nll = 0.5 * (white.square().sum((-2, -1)) + logdet).mean()
    owner, valid = batch["owner"][:, 1:], batch["valid"][:, 1:]
    right = out["plan"][..., :M].gather(2, owner.clamp(min=0)[:, :, None]).squeeze(2)
    assoc = -right[valid].mean()
    kind = F.cross_entropy(
        out["cls"].flatten(0, 1),
        batch["cls"].flatten(),
        weight=model.class_weight,
        label_smoothing=cfg.smoothing,
    )
    with torch.no_grad():
        key = teacher.embed(teacher.encoder(batch["feat"], batch["valid"]))
    reid = reid_loss(out["emb"], key, batch["owner"])
    return (
        cfg.w_state * state
        + cfg.w_nll * nll
        + cfg.w_assoc * assoc
        + cfg.w_class * kind
        + cfg.w_reid * reid
    )


# ------------------------------------------------------------------------- training


class Ema:
    """Slow copy of the weights, also the key encoder of the re-identification."""

    def __init__(self, model):
        self.model = copy.deepcopy(model)
        self.model.requires_grad_(False)
        self.model.eval()
        self.n = 0

    @torch.no_grad()
    def update(self, model):
        self.n += 1
        decay = min(cfg.ema, (1 + self.n) / (4 + self.n))
        for slow, fast in zip(self.model.parameters(), model.parameters()):
            slow.mul_(decay).add_(fast, alpha=1 - decay)


def pretrained_backbone():
    """Stands in for backbone_v3.pt of the detector team."""
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        net = DetectionEncoder()
        state = {}
        for name, value in net.state_dict().items():
            state["backbone." + name] = value + 0.15 * torch.randn_like(value)
    state["backbone.head.weight"] = torch.zeros(80, cfg.d)
    return state


def load_backbone(model):
    ckpt = pretrained_backbone()
    state = {k.removeprefix("backbone."): v for k, v in ckpt.items() if "head" not in k}
    model.encoder.load_state_dict(state)


def param_groups(model):
    decay, plain, noise = [], [], []
    for name, p in model.named_parameters():
        if name.startswith("noise.q_"):
            noise.append(p)
        elif p.ndim < 2:
            plain.append(p)
        else:
            decay.append(p)
    return [
        {"params": decay, "weight_decay": cfg.wd},
        {"params": plain, "weight_decay": 0.0},
        {"params": noise, "weight_decay": 0.0, "lr": cfg.lr_noise},
    ]


def lr_factor(step):
    if step < cfg.warmup:
        return (step + 1) / (cfg.warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - cfg.warmup) / (cfg.total - cfg.warmup)))


def endless(loader):
    while True:
        yield from loader


def main():
    torch.manual_seed(cfg.seed)
    gen = torch.Generator().manual_seed(cfg.seed)
    scenes = simulate(cfg.n_scenes, gen)
    data = Scenes(scenes, log_statistics(scenes), cfg.seed + 1)
    loader = DataLoader(data, batch_size=cfg.batch, shuffle=True, generator=gen)
    feed = endless(loader)

    model = Tracker(class_balance(scenes))
    load_backbone(model)
    ema = Ema(model)
    opt = torch.optim.AdamW(param_groups(model), lr=cfg.lr, betas=(0.9, 0.98), eps=1e-6)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lr_factor)

    for step in range(cfg.steps):
        opt.zero_grad(set_to_none=True)
        mean = 0.0
        for _ in range(cfg.accum):
            loss = tracker_loss(model, ema.model, next(feed)) / cfg.accum
            loss.backward()
            mean += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        opt.step()
        sched.step()
        ema.update(model)
        print(f"[{step:03d}] loss={mean:.5f} |g|={norm:.4f} lr={sched.get_last_lr()[0]:.2e}")


if __name__ == "__main__":
    main()
