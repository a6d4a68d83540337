# %% e-nose: new gases each season, keep the old ones
# replay + EWC + LwF + GPM on the adapter + class means. the encoder is Mirja's, from the
# 2021 campaign; hers knows gases 0-3 (= session 0), we add 4-6 and then 7-8.
import copy
import logging

import torch
import torch.nn.functional as F
from torch import nn

logging.basicConfig(level="INFO", format="%(message)s")
torch.manual_seed(23)
rng = torch.Generator().manual_seed(2307)

CH, T, D, R = 8, 16, 24, 10  # sensors, samples of a sniff, width, bottleneck
SPLIT, SNIFFS, STEPS = (4, 3, 2), (48, 18, 12), (0, 2, 1)  # of each session
BS, REPLAY, ROOM = 6, 6, 16
LR, LR_BACKBONE, WD, CLIP, WARM = 0.08, 0.02, 5e-2, 1.0, 4
LAM, ONLINE, LWF, TAU, PULL, PROTO_TAU, KEEP = 60.0, 0.7, 3.0, 2.5, 0.4, 0.2, 0.8
EPS, MIX, BETA, ENERGY, SHRINK, JOLT = 0.1, 0.8, 0.9, 0.9, 0.9, 0.03

# %% sniffs
taste = torch.randn(sum(SPLIT), CH, generator=rng)
tempo = 2 + 6 * torch.rand(sum(SPLIT), generator=rng)


def sniff(session):
    n, first, many = SNIFFS[session], sum(SPLIT[:session]), SPLIT[session]
    common = torch.arange(many, 0, -1).float() ** 1.5
    y = first + torch.multinomial(common, n, replacement=True, generator=rng)
    y[:many] = first + torch.arange(many)  # all of them at least once
    rise = 1 - torch.exp(-tempo[y, None] * torch.linspace(0, 1, T))
    dose = 0.6 + 0.8 * torch.rand(n, 1, 1, generator=rng)
    base = 3.0 + 0.5 * session + 0.3 * torch.randn(n, CH, 1, generator=rng)
    x = base + dose * taste[y, :, None] * rise[:, None]
    return x + 0.25 * torch.randn(x.shape, generator=rng), y  # [n, CH, T], [n]


class Reservoir:  # every sniff ever seen has the same chance to be in here
    def __init__(self):
        self.x, self.y = torch.zeros(ROOM, CH, T), torch.zeros(ROOM, dtype=torch.long)
        self.seen, self.dice = 0, torch.Generator().manual_seed(5)

    def put(self, x, y):
        for xi, yi in zip(x, y, strict=True):
            slot = self.seen
            if self.seen >= ROOM:
                slot = int(torch.randint(self.seen + 1, (), generator=self.dice))
            if slot < ROOM:
                self.x[slot], self.y[slot] = xi, yi
            self.seen += 1

    def draw(self, n):
        pick = torch.randperm(min(self.seen, ROOM), generator=rng)[:n]
        return self.x[pick], self.y[pick]


# %% net
class Cosine(torch.autograd.Function):  # [n, D], [c, D] -> [n, c]
    @staticmethod
    def forward(ctx, z, w):
        nz, nw = z.norm(dim=1, keepdim=True), w.norm(dim=1, keepdim=True)
        uz, uw = z / nz, w / nw
        cos = uz @ uw.T
        ctx.save_for_backward(uz, uw, nz, nw, cos)
        return cos

    @staticmethod
    def backward(ctx, g):
        uz, uw, nz, nw, cos = ctx.saved_tensors
        gc = g * cos
        gz = (g @ uw - gc.sum(1, keepdim=True) * uz) / nz
        gw = (g.T @ uz - gc.sum(0)[:, None] * uw) / nw
        return gz, gw


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(CH, D, 3, padding=1)
        self.conv2 = nn.Conv1d(D, D, 3, padding=1, stride=2)
        self.bn1, self.bn2 = nn.BatchNorm1d(D), nn.BatchNorm1d(D)
        self.look = nn.Linear(D, 1)

    def forward(self, x):
        x = F.gelu(self.bn1(self.conv1(x)))
        x = F.gelu(self.bn2(self.conv2(x))).mT  # [n, T/2, D]
        return (self.look(x).softmax(1) * x).sum(1)


class Nose(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Encoder()
        self.down, self.up = nn.Linear(D, R), nn.Linear(R, D)
        self.drop = nn.Dropout(0.2)
        self.heads = nn.ParameterList(0.1 * torch.randn(c, D) for c in SPLIT)
        self.log_scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("proto", torch.zeros(sum(SPLIT), D))
        self.register_buffer("gpm", torch.zeros(D, 0))

    def body(self):
        mine = ("backbone.", "down.", "up.")
        return [(n, p) for n, p in self.named_parameters() if n.startswith(mine)]

    def embed(self, x):
        h = self.backbone(x)
        return h + self.up(self.drop(F.gelu(self.down(h))))

    def logits(self, z, sessions):
        cos = [Cosine.apply(z, w) for w in self.heads[:sessions]]
        return self.log_scale.exp() * torch.cat(cos, 1)


def campaign_2021():  # mirja_enc_e40.ckpt; her norms keep a std where torch keeps a var
    g, sd = torch.Generator().manual_seed(2021), {}
    for i, c in ((1, CH), (2, D)):
        sd[f"c{i}.w"] = torch.randn(D, c, 3, generator=g) * (2 / (3 * c)) ** 0.5
        sd[f"c{i}.b"] = 0.1 * torch.randn(D, generator=g)
        sd[f"n{i}.gamma"] = 1 + 0.2 * torch.randn(D, generator=g)
        sd[f"n{i}.beta"] = 0.2 * torch.randn(D, generator=g)
        sd[f"n{i}.mu"] = 0.3 * torch.randn(D, generator=g)
        sd[f"n{i}.std"] = 0.8 + 0.8 * torch.rand(D, generator=g)
    pool, clf = torch.randn(1, D, generator=g) / D**0.5, torch.randn(4, D, generator=g)
    return sd | {"pool.w": pool, "pool.b": torch.zeros(1), "clf.w": clf}


def rename(sd):
    layers = {"c1": "conv1", "n1": "bn1", "c2": "conv2", "n2": "bn2", "pool": "look"}
    leaves = {"w": "weight", "b": "bias", "gamma": "weight", "beta": "bias"}
    leaves |= {"mu": "running_mean", "std": "running_var"}
    out = {}
    for name, v in sd.items():
        layer, leaf = name.split(".")
        if layer in layers:
            out[f"{layers[layer]}.{leaves[leaf]}"] = v.square() if leaf == "std" else v
    return out


# %% not forgetting
@torch.no_grad()
def imprint(net, session, x, y):
    z = F.normalize(net.embed(x), dim=1)
    for j in range(SPLIT[session]):
        k = sum(SPLIT[:session]) + j
        net.heads[session][j] = z[y == k].mean(0)
        net.proto[k] = F.normalize(z[y == k].mean(0), dim=0)


def fisher_diag(net, x, y, sessions):
    out = {n: torch.zeros_like(p) for n, p in net.body()}
    for i in range(len(x)):
        net.zero_grad()
        logp = net.logits(net.embed(x[i : i + 1]), sessions).log_softmax(1)
        (-logp[0, y[i]]).backward()
        for n, p in net.body():
            out[n] += p.grad**2
    return {n: f / len(x) for n, f in out.items()}


@torch.no_grad()
def gpm_basis(net, x):
    _, s, vh = torch.linalg.svd(net.backbone(x), full_matrices=False)
    part = s.square().cumsum(0) / s.square().sum()
    return vh[: int((part < ENERGY).sum()) + 1].T


@torch.no_grad()
def follow(net, z, y):
    for k in y.unique():
        mean = F.normalize(z[y == k], dim=1).mean(0)
        net.proto[k] = F.normalize(KEEP * net.proto[k] + (1 - KEEP) * mean, dim=0)


# %% session 0 is over, we only need what it left
nose, memory = Nose(), Reservoir()
nose.backbone.load_state_dict(rename(campaign_2021()))
x, y = sniff(0)
mu, sd = x.mean((0, 2), keepdim=True), x.std((0, 2), keepdim=True)
x = (x - mu) / sd
memory.put(x, y)
count = torch.bincount(y, minlength=sum(SPLIT))
nose.eval()
imprint(nose, 0, x, y)
nose.gpm = gpm_basis(nose, x)
fisher = fisher_diag(nose, x[:16], y[:16], 1)

# %% go
for session in (1, 2):
    seen = sum(SPLIT[: session + 1])
    x, y = sniff(session)
    x = (x - mu) / sd
    imprint(nose, session, x, y)
    count += torch.bincount(y, minlength=sum(SPLIT))
    weight = (1 - BETA) / (1 - BETA ** count[:seen].float())  # Cui et al. 2019
    weight = weight / weight.mean()
    nose.train()
    nose.backbone.eval()  # her statistics stay
    teacher = copy.deepcopy(nose).eval()
    anchor = {n: p.detach().clone() for n, p in nose.body()}
    with torch.no_grad():  # shrink and perturb
        for _, p in nose.body():
            p.mul_(SHRINK).add_(JOLT * torch.randn(p.shape, generator=rng))
    slow = [p for p in nose.backbone.parameters() if p.ndim > 1]
    fast = [nose.down.weight, nose.up.weight, *nose.heads[: session + 1]]
    bare = [p for _, p in nose.body() if p.ndim == 1] + [nose.log_scale]
    groups = [{"params": slow, "lr": LR_BACKBONE}, {"params": fast}]
    groups += [{"params": bare, "weight_decay": 0.0}]
    opt = torch.optim.SGD(groups, LR, momentum=0.9, weight_decay=WD, nesterov=True)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: min(1, (i + 1) / WARM))

    order = torch.randperm(len(x), generator=rng)
    for i in range(STEPS[session]):
        now = order[i * BS : (i + 1) * BS]
        old_x, old_y = memory.draw(REPLAY)
        bx, by = torch.cat([x[now], old_x]), torch.cat([y[now], old_y])
        # mixup of everything with everything
        lam = torch.distributions.Beta(MIX, MIX).sample()
        mate = torch.randperm(len(bx), generator=rng)
        q = F.one_hot(by, seen).float()
        q = lam * q + (1 - lam) * q[mate]
        q = (1 - EPS) * q + EPS / seen
        z_mix = nose.embed(lam * bx + (1 - lam) * bx[mate])
        logp = nose.logits(z_mix, session + 1).log_softmax(1)
        ce = -(weight * q * logp).sum(1).mean()
        # and the sniffs as they are
        z = nose.embed(bx)
        with torch.no_grad():
            told = (teacher.logits(teacher.embed(bx), session) / TAU).softmax(1)
        mine = (nose.logits(z, session) / TAU).log_softmax(1)
        kd = TAU**2 * (told * (told.log() - mine)).sum(1).mean()
        near = F.normalize(z, dim=1) @ nose.proto[:seen].T
        pull = F.cross_entropy(near / PROTO_TAU, by)
        stay = sum((fisher[n] * (p - anchor[n]) ** 2).sum() for n, p in nose.body()) / 2
        loss = ce + LWF * kd + PULL * pull + LAM * stay
        opt.zero_grad()
        loss.backward()
        g = nose.down.weight.grad
        g -= g @ nose.gpm @ nose.gpm.T
        norm = nn.utils.clip_grad_norm_(nose.parameters(), CLIP)
        opt.step()
        sched.step()
        follow(nose, z.detach(), by)
        memory.put(x[now], y[now])
        logging.info("%d.%d loss %.4f norm %.3f", session, i, loss.item(), norm.item())

    nose.eval()
    nose.gpm = gpm_basis(nose, memory.x)
    new = fisher_diag(nose, x[:8], y[:8], session + 1)
    fisher = {n: ONLINE * f + new[n] for n, f in fisher.items()}
