# Feudal agents in three rooms: the manager points, the worker walks.
# The manager ticks every `horizon` moves; walking where it points is paid too.
from collections import defaultdict, deque
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

cfg = SimpleNamespace(
    seed=23, walkers=10, moves=12, horizon=3, cores=2, limit=10, coins=0.25, view=5, wide=32,
    place=16, hidden=24, mix=6, gamma=0.95, gamma_manager=0.98, inner=0.6, entropy=0.05, value=0.5,
    lr=3e-3, lr_manager=2e-3, alpha=0.97, eps=1e-4, clip=0.4, clip_manager=0.05, updates=3, total=6,
)  # fmt: skip
MAP = "######### #....#..# #....#..# #.......# #....#..# ##.###### #.......# #...#...# #########"
WALLS = torch.tensor([[cell == "#" for cell in row] for row in MAP.split()])
FREE = (~WALLS).nonzero()
MOVES = torch.tensor([[-1, 0], [0, 1], [1, 0], [0, -1]])


class Rooms:
    def __init__(self, walkers, gen):
        self.gen = gen
        self.all = torch.arange(walkers)
        self.at, self.exit, self.coins = self.draw()
        self.clock = torch.randint(cfg.limit - 2, (walkers,), generator=gen)
    def draw(self):
        picks = torch.randint(len(FREE), (2, len(self.all)), generator=self.gen)
        chance = torch.rand(len(self.all), *WALLS.shape, generator=self.gen)
        return FREE[picks[0]], FREE[picks[1]], (chance < cfg.coins) & ~WALLS
    def look(self):
        exits = torch.zeros_like(self.coins)
        exits[self.all, *self.exit.T] = True
        planes = torch.stack([WALLS.expand_as(exits), self.coins, exits], 1).float()
        planes = F.pad(planes, (cfg.view // 2,) * 4)
        around = self.at[:, :, None] + torch.arange(cfg.view)
        rows, cols = around[:, 0, :, None], around[:, 1, None, :]
        view = planes[self.all[:, None, None], :, rows, cols]
        return view.permute(0, 3, 1, 2), (self.exit - self.at) / len(WALLS)
    def move(self, action):
        to = self.at + MOVES[action]
        bump = WALLS[*to.T]
        self.at = torch.where(bump[:, None], self.at, to)
        found = self.coins[self.all, *self.at.T]
        self.coins[self.all, *self.at.T] = False
        self.clock += 1
        out = (self.at == self.exit).all(1)
        reward, done = found + 4.0 * out - 0.2 * bump - 0.05, out | (self.clock >= cfg.limit)
        at, exits, coins = self.draw()
        self.at[done], self.exit[done], self.coins[done] = at[done], exits[done], coins[done]
        self.clock[done] = 0
        return reward, 1.0 - done.float()


class Gates(torch.autograd.Function):
    """What an LSTM does with the sums before its gates (in, forget, new, out)."""
    @staticmethod
    def forward(ctx, sums, cell):
        i, f, g, o = sums.chunk(4, 1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        fresh = f * cell + i * g
        squashed = fresh.tanh()
        ctx.save_for_backward(i, f, g, o, cell, squashed)
        return o * squashed, fresh
    @staticmethod
    def backward(ctx, grad_h, grad_c):
        i, f, g, o, cell, squashed = ctx.saved_tensors
        grad = grad_c + grad_h * o * (1 - squashed.square())
        d_in = grad * g * i * (1 - i)
        d_forget = grad * cell * f * (1 - f)
        d_new = grad * i * (1 - g.square())
        d_out = grad_h * squashed * o * (1 - o)
        return torch.cat([d_in, d_forget, d_new, d_out], 1), grad * f


class Towards(torch.autograd.Function):
    """Cosine of a way gone and a goal; only the goal learns from it."""
    @staticmethod
    def forward(ctx, way, goal):
        way = way / way.norm(dim=-1, keepdim=True).clamp(min=1e-6)
        length = goal.norm(dim=-1, keepdim=True).clamp(min=1e-6)
        cosine = (way * goal / length).sum(-1)
        ctx.save_for_backward(way, goal / length, length, cosine)
        return cosine
    @staticmethod
    def backward(ctx, grad):
        way, unit, length, cosine = ctx.saved_tensors
        across = way - cosine[..., None] * unit
        return None, grad[..., None] * across / length


class Cell(nn.Module):
    def __init__(self, inputs, width):
        super().__init__()
        self.inlet = nn.Linear(inputs, 4 * width)
        self.back = nn.Linear(width, 4 * width, bias=False)
    def forward(self, x, state):
        h, c = state
        return Gates.apply(self.inlet(x) + self.back(h), c)


class Percept(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3)
        self.full = nn.Linear(12 * (cfg.view - 2) ** 2 + 2, cfg.wide)
    def forward(self, view, compass):
        seen = F.elu(self.conv(view)).flatten(1)
        return F.elu(self.full(torch.cat([seen, compass], 1)))


class Manager(nn.Module):
    def __init__(self):
        super().__init__()
        self.space = nn.Linear(cfg.wide, cfg.place)
        self.cell = Cell(cfg.place, cfg.place)
        self.aim = nn.Linear(cfg.place, cfg.place)
        self.value = nn.Linear(cfg.place, 1)
    def forward(self, place, memory, tick):
        memory, core = list(memory), tick % cfg.cores
        memory[core] = self.cell(place, memory[core])
        told = torch.stack([h for h, _ in memory]).mean(0)
        goal = F.normalize(self.aim(told), dim=1)
        return goal, self.value(told).squeeze(1), memory


class Worker(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = Cell(cfg.wide, cfg.hidden)
        self.embed = nn.Linear(cfg.place, cfg.mix, bias=False)
        self.out = nn.Linear(cfg.hidden, len(MOVES) * cfg.mix)
        self.values = nn.Linear(cfg.hidden, 2)  # of what the rooms pay, of the goals
    def forward(self, z, goals, state):
        h, c = self.cell(z, state)
        table = self.out(h).view(-1, len(MOVES), cfg.mix)
        logits = (table @ self.embed(goals)[:, :, None]).squeeze(2)
        return logits, self.values(h), (h, c)


class RewardScale(nn.Module):
    """Divides by the running deviation of discounted sums."""
    def __init__(self):
        super().__init__()
        self.register_buffer("sums", torch.zeros(cfg.walkers))
        for name in ("mean", "var", "count"):
            self.register_buffer(name, torch.zeros(()))

    @torch.no_grad()
    def forward(self, reward, alive):
        seen = []
        for r, a in zip(reward, alive, strict=True):
            self.sums.mul_(cfg.gamma).add_(r)
            seen.append(self.sums.clone())
            self.sums.mul_(a)
        seen = torch.cat(seen)
        gap, total = seen.mean() - self.mean, self.count + len(seen)
        spread = self.var * self.count + seen.var(correction=0) * len(seen)
        spread += gap.square() * self.count * len(seen) / total
        self.mean += gap * len(seen) / total
        self.var.copy_(spread / total)
        self.count.copy_(total)
        return (reward / (self.var + 1e-6).sqrt()).clamp(-5, 5)


class Mind:
    def __init__(self):
        self.tick, self.trail = 0, deque(maxlen=cfg.horizon)
        self.worker = (torch.zeros(cfg.walkers, cfg.hidden),) * 2
        self.memory = [(torch.zeros(cfg.walkers, cfg.place),) * 2] * cfg.cores
        self.goal = torch.zeros(cfg.walkers, cfg.place)
    def change(self, how):
        self.worker = tuple(how(x) for x in self.worker)
        self.memory = [(how(h), how(c)) for h, c in self.memory]
        self.goal = how(self.goal)
        self.trail = deque(((s, how(goal)) for s, goal in self.trail), cfg.horizon)


def keep(log, **values):
    for key, x in values.items():
        log[key].append(x)


def see(percept, manager, rooms):
    z = percept(*rooms.look())
    return z, manager.space(z).tanh()


def rollout(percept, manager, worker, rooms, mind, gen):
    log = defaultdict(list)
    mind.change(lambda x: x.detach())
    z, place = see(percept, manager, rooms)
    for t in range(cfg.moves):
        if t % cfg.horizon == 0:
            mind.goal, value, mind.memory = manager(place, mind.memory, mind.tick)
            mind.tick += 1
            keep(log, goal=mind.goal, told=value, place=place)
        mind.trail.append((place.detach(), mind.goal))
        goals = torch.stack([goal for _, goal in mind.trail]).sum(0).detach()
        logits, values, mind.worker = worker(z, goals, mind.worker)
        logp = logits.log_softmax(1)
        noise = torch.empty_like(logp).exponential_(generator=gen).log()
        action = (logp.detach() - noise).argmax(1)
        reward, alive = rooms.move(action)
        z, place = see(percept, manager, rooms)
        with torch.no_grad():
            ways = [Towards.apply(place - then, goal) for then, goal in mind.trail]
            paid = alive * torch.stack(ways).mean(0)
        mind.change(alive[:, None].mul)
        picked = logp.gather(1, action[:, None]).squeeze(1)
        keep(log, picked=picked, logp=logp, values=values, reward=reward, paid=paid, alive=alive)
    keep(log, place=place)
    log = {key: torch.stack(xs) for key, xs in log.items()}
    with torch.no_grad():
        log["told_last"] = manager(place, mind.memory, mind.tick)[1]
        log["values_last"] = worker(z, goals, mind.worker)[1]
    return log


def returns(reward, alive, last, gamma):
    total = []
    for r, a in zip(reward.flip(0), alive.flip(0), strict=True):
        last = r + gamma * a * last
        total.insert(0, last)
    return torch.stack(total)


def manager_loss(log, reward):
    sums = returns(reward, log["alive"], log["told_last"], cfg.gamma_manager)
    gain = sums[:: cfg.horizon] - log["told"]
    way = log["place"][1:] - log["place"][:-1]
    whole = log["alive"].unflatten(0, (-1, cfg.horizon)).prod(1)
    policy = -(whole * gain.detach() * Towards.apply(way, log["goal"])).mean()
    return policy + cfg.value * gain.square().mean()


def worker_loss(log, reward, weight):
    last, alive = log["values_last"], log["alive"]
    outer = returns(reward, alive, last[:, 0], cfg.gamma) - log["values"][..., 0]
    inner = returns(log["paid"], alive, last[:, 1], cfg.gamma) - log["values"][..., 1]
    gain = (outer + cfg.inner * inner).detach()
    policy = -(gain * log["picked"]).mean()
    entropy = -(log["logp"].exp() * log["logp"]).sum(-1).mean()
    value = F.huber_loss(outer, torch.zeros_like(outer)) + inner.square().mean()
    return policy + cfg.value * value - weight * entropy, entropy


def cloned():
    """From the imitation of a planner, saved by the other framework."""
    gen = torch.Generator().manual_seed(404)
    return {
        "conv/kernel": 0.3 * torch.randn(3, 3, 3, 12, generator=gen),  # row, column, in, out
        "dense/kernel": 0.13 * torch.randn(110, cfg.wide, generator=gen),  # of rows, columns, channels
        "lstm/kernel": 0.2 * torch.randn(cfg.wide + cfg.hidden, 4 * cfg.hidden, generator=gen),  # i, g, f, o
        "lstm/bias": 0.2 * torch.randn(4 * cfg.hidden, generator=gen),
        "reward/moments": torch.tensor([1.3, 3.2, 150.0]),  # of x, of x^2, how many
    }


@torch.no_grad()
def adopt(percept, worker, scale, saved):
    percept.conv.weight.copy_(saved["conv/kernel"].permute(3, 2, 0, 1))
    dense, side = saved["dense/kernel"].T, cfg.view - 2
    seen = dense[:, :-2].unflatten(1, (side, side, 12)).permute(0, 3, 1, 2)
    percept.full.weight.copy_(torch.cat([seen.flatten(1), dense[:, -2:]], 1))
    order = torch.arange(4 * cfg.hidden).view(4, -1)[[0, 2, 1, 3]].flatten()
    inlet, back = saved["lstm/kernel"].T[order].split([cfg.wide, cfg.hidden], 1)
    worker.cell.inlet.weight.copy_(inlet)
    worker.cell.back.weight.copy_(back)
    worker.cell.inlet.bias.copy_(saved["lstm/bias"][order])
    first, second, count = saved["reward/moments"]
    scale.mean.copy_(first)
    scale.var.copy_(second - first.square())
    scale.count.copy_(count)


torch.manual_seed(cfg.seed)
rooms = Rooms(cfg.walkers, torch.Generator().manual_seed(cfg.seed))
luck = torch.Generator().manual_seed(cfg.seed + 1)
percept, manager, worker, scale = Percept(), Manager(), Worker(), RewardScale()
adopt(percept, worker, scale, cloned())
walking, pointing = [*percept.parameters(), *worker.parameters()], [*manager.parameters()]
opt_w = torch.optim.RMSprop(walking, cfg.lr, alpha=cfg.alpha, eps=cfg.eps)
opt_m = torch.optim.RMSprop(pointing, cfg.lr_manager, alpha=cfg.alpha, eps=cfg.eps)
sched_w = torch.optim.lr_scheduler.LinearLR(opt_w, 1.0, 0.1, cfg.total)
sched_m = torch.optim.lr_scheduler.LinearLR(opt_m, 1.0, 0.1, cfg.total)
mind = Mind()
for update in range(cfg.updates):
    weight = cfg.entropy * (1 - update / cfg.total)
    log = rollout(percept, manager, worker, rooms, mind, luck)
    reward = scale(log["reward"], log["alive"])
    points = manager_loss(log, reward)
    walks, entropy = worker_loss(log, reward, weight)
    opt_w.zero_grad()
    opt_m.zero_grad()
    (points + walks).backward()
    nn.utils.clip_grad_norm_(walking, cfg.clip)
    nn.utils.clip_grad_norm_(pointing, cfg.clip_manager)
    for one in (opt_w, opt_m, sched_w, sched_m):
        one.step()
    print(f"update {update} manager {points:.4f} worker {walks:.4f} H {entropy:.3f}")
