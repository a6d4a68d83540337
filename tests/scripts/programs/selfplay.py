"""Four in a line on a board of five by six, learnt from games against oneself.

A small tree search plays; its visits are what the policy learns. Positions are drawn by
how wrong the value was; an averaged network says what those three plies later are worth.
"""

import copy
import math
import sys
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

args = SimpleNamespace(seed=11, rows=5, cols=6, run=4, steps=4)
args.simulations, args.explore, args.opening, args.temperature = 40, 1.4, 4, 1.25
args.first_games, args.capacity, args.plies, args.discount = 9, 110, 3, 0.97
args.batch, args.alpha, args.beta, args.trust = 26, 0.8, 0.5, 0.4
args.channels, args.blocks, args.squeeze, args.planes, args.hidden = 14, 2, 3, 2, 17
args.delta, args.value_share, args.reply_share, args.l2 = 0.6, 1.5, 0.25, 2e-3
args.lr, args.warmup, args.clip, args.keep = 8e-3, 4, 0.7, 0.8
CELLS = args.rows * args.cols
DIRECTIONS = ((0, 1), (1, 0), (1, 1), (1, -1))
PLANES = ("own", "other", "own_threat", "other_threat", "last", "age", "reach")


def all_lines():
    lines = []
    for place in range(CELLS * 4):
        (r, c), (dr, dc) = divmod(place // 4, args.cols), DIRECTIONS[place % 4]
        rs, cs = r + dr * np.arange(args.run), c + dc * np.arange(args.run)
        if rs[-1] < args.rows and 0 <= cs[-1] < args.cols:
            lines.append(np.zeros((args.rows, args.cols), np.float32))
            lines[-1][rs, cs] = 1
    return np.stack(lines).reshape(-1, CELLS)


G = np.arange(CELLS).reshape(args.rows, args.cols)
SYMMETRIES = np.stack([G, G[:, ::-1], G[::-1], G[::-1, ::-1]]).reshape(4, CELLS)
LINES = all_lines()
THROUGH = LINES.sum(0)
REACH = (THROUGH - THROUGH.mean()) / THROUGH.std()
BITS = [sum(1 << int(cell) for cell in np.flatnonzero(line)) for line in LINES]
BITS_AT = [[b for b in BITS if b >> cell & 1] for cell in range(CELLS)]


def won(stones, cell):
    return any(stones & b == b for b in BITS_AT[cell])


def free_cells(own, other):
    return [cell for cell in range(CELLS) if not (own | other) >> cell & 1]


def rollout(own, other, rng):
    sign = 1.0
    for cell in rng.permutation(free_cells(own, other)).tolist():
        own |= 1 << cell
        if won(own, cell):
            return sign
        own, other, sign = other, own, -sign
    return 0.0


def simulate(tree, own, other, rng):
    free = free_cells(own, other)
    if not free or (own, other) not in tree:
        tree[own, other] = np.zeros(CELLS), np.zeros(CELLS)
        return rollout(own, other, rng)
    visits, worth = tree[own, other]
    bonus = args.explore * math.sqrt(visits.sum() + 1) / len(free) / (1 + visits)
    score = np.full(CELLS, -np.inf)
    score[free] = (worth / np.maximum(visits, 1) + bonus)[free]
    cell = int(score.argmax())
    mine = own | 1 << cell
    gain = 1.0 if won(mine, cell) else -simulate(tree, other, mine, rng)
    visits[cell] += 1
    worth[cell] += gain
    return gain


def play(rng):
    """One game: boards, last moves, shares of the visits, and the result for the first."""
    own, other, last, record = 0, 0, -1, []
    for ply in range(CELLS):
        if ply < args.opening:
            cell = int(rng.choice(free_cells(own, other)))
        else:
            tree = {}
            for _ in range(args.simulations):
                simulate(tree, own, other, rng)
            visits = tree[own, other][0] ** (1 / args.temperature)
            share = visits / visits.sum()
            board = [[b >> c & 1 for c in range(CELLS)] for b in (own, other)]
            record.append((board, last, share))
            cell = int(rng.choice(CELLS, p=share))
        own, last = own | 1 << cell, cell
        if won(own, cell):
            return record, 1.0 if ply % 2 == 0 else -1.0
        own, other = other, own
    return record, 0.0


NAMES = "board last share reply result later later_last goes_on priority".split()
FORMATS = f"(2,{CELLS})f4 i8 {CELLS}f4 {CELLS}f4 f4 (2,{CELLS})f4 i8 f4 f8".split()
POSITION = np.dtype(list(zip(NAMES, FORMATS, strict=True)))


def store(replay, written, record, result):
    for t, (board, last, share) in enumerate(record):
        left = len(record) - t
        sign = 1.0 if (args.opening + t) % 2 == 0 else -1.0
        z = sign * result * args.discount**left
        reply = record[t + 1][2] if left > 1 else np.zeros(CELLS)
        goes_on = left > args.plies
        later = record[t + args.plies] if goes_on else (np.zeros((2, CELLS)), -1)
        row = (board, last, share, reply, z, *later[:2], goes_on, 0.5 + 1 / left)
        replay[(written + t) % args.capacity] = row
    return written + len(record)


def draw(replay, written, step, rng):
    """Rows by priority, one from each equal part of the sum, and their weights."""
    size = min(written, args.capacity)
    chance = replay["priority"][:size] ** args.alpha
    chance = chance / chance.sum()
    spots = (np.arange(args.batch) + rng.random(args.batch)) / args.batch
    rows = np.searchsorted(chance.cumsum(), spots).clip(max=size - 1)
    beta = args.beta + (1 - args.beta) * step / args.steps
    weight = (size * chance[rows]) ** -beta
    return rows, torch.from_numpy(weight / weight.max()).float()


def observe(board, last):
    own, other = board[:, 0], board[:, 1]
    empty = 1 - own - other
    mine, yours = own @ LINES.T, other @ LINES.T
    own_threat = ((mine == args.run - 1) & (yours == 0)) @ LINES > 0
    other_threat = ((yours == args.run - 1) & (mine == 0)) @ LINES > 0
    marked = np.arange(CELLS) == last[:, None]
    age = np.repeat(1 - empty.mean(1, keepdims=True), CELLS, 1)
    reach = np.broadcast_to(REACH, own.shape)
    planes = [own, other, own_threat * empty, other_threat * empty, marked, age, reach]
    return np.stack(planes, 1).astype(np.float32)


def batch_of(replay, rows, rng):
    turn = SYMMETRIES[rng.integers(len(SYMMETRIES), size=len(rows))]
    planes = observe(replay["board"][rows], replay["last"][rows])
    planes = np.take_along_axis(planes, turn[:, None], 2)
    share = np.take_along_axis(replay["share"][rows], turn, 1)
    reply = np.take_along_axis(replay["reply"][rows], turn, 1)
    later = observe(replay["later"][rows], replay["later_last"][rows])
    told = [
        planes,
        later,
        share,
        reply,
        replay["result"][rows],
        replay["goes_on"][rows],
    ]
    return map(torch.from_numpy, told)


class ValueLoss(torch.autograd.Function):  # Huber after tanh
    @staticmethod
    def forward(ctx, raw, goal, weight, delta):
        value = raw.tanh()
        off = value - goal
        ctx.save_for_backward(value, off, weight)
        ctx.delta = delta
        far = delta * (off.abs() - 0.5 * delta)
        return (weight * torch.where(off.abs() <= delta, 0.5 * off**2, far)).mean()

    @staticmethod
    def backward(ctx, grad):
        value, off, weight = ctx.saved_tensors
        slope = off.clamp(-ctx.delta, ctx.delta) * (1 - value**2)
        return grad * weight * slope / len(off), None, None, None


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, shift):
        open_ = gate.sigmoid()[:, :, None, None]  # one for a channel
        ctx.save_for_backward(x, open_)
        return x * open_ + shift[:, :, None, None]

    @staticmethod
    def backward(ctx, grad):
        x, open_ = ctx.saved_tensors
        to_gate = (grad * x * open_ * (1 - open_)).sum((2, 3))
        return grad * open_, to_gate, grad.sum((2, 3))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.squeeze = nn.Linear(width, args.squeeze)
        self.excite = nn.Linear(args.squeeze, 2 * width)

    def forward(self, x):
        h = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        pooled = F.relu(self.squeeze(h.mean((2, 3))))
        gate, shift = self.excite(pooled).chunk(2, 1)
        return F.relu(x + Gate.apply(h, gate, shift))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        width = args.channels
        self.stem = nn.Conv2d(len(PLANES), width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.tower = nn.Sequential(*(Block(width) for _ in range(args.blocks)))
        self.moves = nn.Conv2d(width, 2, 1, bias=False)
        self.square = nn.Parameter(torch.zeros(2, CELLS))
        self.look = nn.Conv2d(width, args.planes, 1)
        self.judge = nn.Linear(args.planes * CELLS, args.hidden)
        self.value = nn.Linear(args.hidden, 1)

    def forward(self, x):
        x = x.unflatten(2, (args.rows, args.cols))
        h = self.tower(F.relu(self.norm(self.stem(x))))
        logits = self.moves(h).flatten(2) + self.square
        taken = (x[:, 0] + x[:, 1]).flatten(1) > 0
        logits = logits.masked_fill(taken[:, None], -1e4)
        v = F.relu(self.judge(F.relu(self.look(h)).flatten(1)))
        return logits.log_softmax(2), self.value(v).squeeze(1)


@torch.no_grad()
def adopt(net, rng):
    """Begin at last year's program: filters [height, width, in, out] and moves counted."""
    for p in net.parameters():
        if p.ndim == 1:  # no two channels start alike
            p.add_(0.1 * torch.randn(p.shape))
    planes = sorted(PLANES)
    saved = 0.13 * rng.normal(size=(3, 3, len(planes), args.channels))
    filters = torch.from_numpy(saved[:, :, [planes.index(name) for name in PLANES]])
    net.stem.weight.copy_(filters.permute(3, 2, 0, 1))
    deviation = torch.from_numpy(rng.uniform(0.4, 1.6, args.channels))
    net.norm.running_var.copy_(deviation.square())
    counts = 1 + rng.poisson(np.stack([3 * THROUGH, 2 * THROUGH[::-1] + 2]))
    shares = counts / counts.sum(1, keepdims=True)
    net.square.copy_(torch.from_numpy(np.log(shares)))


@torch.no_grad()
def follow(target, net):
    pairs = zip(target.state_dict().values(), net.state_dict().values(), strict=True)
    for ours, theirs in pairs:
        if ours.is_floating_point():
            ours.mul_(args.keep).add_(theirs, alpha=1 - args.keep)


def main():
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    replay, written = np.zeros(args.capacity, POSITION), 0
    for _ in range(args.first_games):
        written = store(replay, written, *play(rng))
    net = Net()
    adopt(net, rng)
    target = copy.deepcopy(net).eval().requires_grad_(False)
    decayed = [p for p in net.parameters() if p.ndim > 1 and p is not net.square]
    opt = torch.optim.Adam(net.parameters(), args.lr, betas=(0.9, 0.98), eps=1e-5)
    warm = LambdaLR(opt, lambda step: min(1.0, (step + 1) / args.warmup))
    for step in range(args.steps):
        written = store(replay, written, *play(rng))
        rows, weight = draw(replay, written, step, rng)
        x, later, share, reply, result, goes_on = batch_of(replay, rows, rng)
        with torch.no_grad():
            ahead = (-args.discount) ** args.plies * target(later)[1].tanh()
        goal = torch.lerp(result, ahead, args.trust * goes_on)
        logp, raw = net(x)
        policy = -(weight * (share * logp[:, 0]).sum(1)).mean()
        value = ValueLoss.apply(raw, goal, weight, args.delta)
        answer = -(weight * (reply * logp[:, 1]).sum(1)).sum() / reply.any(1).sum()
        l2 = args.l2 * sum(p.square().sum() for p in decayed)
        loss = policy + args.value_share * value + args.reply_share * answer + l2
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), args.clip)
        opt.step()
        warm.step()
        follow(target, net)
        replay["priority"][rows] = 0.05 + (raw.detach().tanh() - goal).abs().numpy()
        sys.stdout.write(f"{step}: policy {policy:.4f} value {value:.4f} l2 {l2:.4f}\n")


if __name__ == "__main__":
    main()
