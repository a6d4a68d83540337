# Soft actor-critic on a cart with two thrusters that has to stay near the middle.
# The buffer holds a random policy's episodes before training starts.
import copy
import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

SEED = 23
ENVS, LIMIT, DT = 6, 10, 0.08
OBS, ACT, HIDDEN = 5, 2, 32
LOW, HIGH = torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 3.0])
GAMMA, TAU, REWARD_SCALE = 0.97, 0.05, 4.0
ALPHA, TARGET_ENTROPY = 0.3, -float(ACT)
CAPACITY, BATCH, WARMUP, STEPS = 600, 40, 60, 3
LR_ACTOR, LR_CRITIC, LR_ALPHA, CLIP = 3e-3, 5e-3, 2e-2, 1.0
LOG_STD_MIN, LOG_STD_MAX = -4.0, 1.0


# -- the cart ------------------------------------------------------------------


class Carts:
    """Carts side by side, each begins anew when it is lost or its time is over."""

    def __init__(self, n, gen):
        self.gen, self.n = gen, n
        self.state = self.fresh()
        self.age = torch.zeros(n, dtype=torch.long)

    def fresh(self):
        return torch.randn(self.n, 4, generator=self.gen) * torch.tensor([1.2, 0.8, 0.5, 0.5])

    def observe(self):
        x, v, angle, spin = self.state.unbind(1)
        return torch.stack([10 * x, v, angle.sin(), angle.cos(), 3 * spin], 1)

    def step(self, action):
        """Return reward, what is seen then, whether it is lost, whether time is over."""
        x, v, angle, spin = self.state.unbind(1)
        side, thrust = action.unbind(1)
        v = 0.98 * v + DT * (thrust * angle.sin() + 0.5 * side)
        spin = 0.95 * spin + DT * (2.0 * side - 0.3 * angle)
        state = [x + DT * v, v, angle + DT * spin, spin]
        self.state = torch.stack(state, 1)
        reward = 1.0 - 0.3 * self.state[:, 0] ** 2 - 0.05 * action.square().sum(1)
        lost = self.state[:, 0].abs() > 1.6
        reward = torch.where(lost, reward - 0.4, reward)
        self.age += 1
        over = self.age >= LIMIT
        seen = self.observe()
        again = lost | over
        self.state = torch.where(again[:, None], self.fresh(), self.state)
        self.age[again] = 0
        return reward, seen, lost, over


class Replay:
    """The last transitions; the oldest are written over."""

    def __init__(self, size):
        self.obs, self.next_obs = torch.zeros(2, size, OBS).unbind(0)
        self.action = torch.zeros(size, ACT)
        self.reward, self.done = torch.zeros(2, size).unbind(0)
        self.size, self.at, self.full = size, 0, 0

    def add(self, obs, action, reward, next_obs, done):
        where = (self.at + torch.arange(len(obs))) % self.size
        self.obs[where], self.next_obs[where] = obs, next_obs
        self.action[where] = action
        self.reward[where], self.done[where] = reward, done.float()
        self.at = (self.at + len(obs)) % self.size
        self.full = min(self.full + len(obs), self.size)

    def sample(self, n, gen):
        rows = torch.randint(self.full, (n,), generator=gen)
        reward = REWARD_SCALE * self.reward[rows]
        return self.obs[rows], self.action[rows], reward, self.next_obs[rows], self.done[rows]


# -- kernels -------------------------------------------------------------------


class LogSlope(torch.autograd.Function):
    """log(1 - tanh(u)^2), exact far out as well."""

    @staticmethod
    def forward(ctx, u):
        ctx.save_for_backward(u)
        return 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))

    @staticmethod
    def backward(ctx, grad):
        (u,) = ctx.saved_tensors
        return -2.0 * u.tanh() * grad


class PairLinear(torch.autograd.Function):
    """Two linear layers at once: [2, n, i] and [2, i, o] to [2, n, o]."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return torch.baddbmm(bias[:, None, :], x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = torch.bmm(grad, weight.mT)
        grad_weight = torch.bmm(x.mT, grad)
        return grad_x, grad_weight, grad.sum(1)


# -- networks ------------------------------------------------------------------


class Twin(nn.Module):
    """Two critics in one."""

    def __init__(self):
        super().__init__()
        sizes = [OBS + ACT, HIDDEN, HIDDEN, 1]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for a, b in pairwise(sizes):
            self.weights.append(torch.randn(2, a, b) / math.sqrt(a))
            self.biases.append(0.1 * torch.randn(2, b))

    def forward(self, obs, action):
        h = torch.cat([obs, action], 1).expand(2, -1, -1)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            h = PairLinear.apply(h, weight, bias)
            if i < len(self.weights) - 1:
                h = F.silu(h)
        return h.squeeze(2)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("middle", (HIGH + LOW) / 2)
        self.register_buffer("reach", (HIGH - LOW) / 2)
        self.body = nn.Sequential(
            nn.Linear(OBS, HIDDEN), nn.LayerNorm(HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN), nn.SiLU()
        )
        self.mean, self.log_std = nn.Linear(HIDDEN, ACT), nn.Linear(HIDDEN, ACT)

    def forward(self, obs, noise):
        """An action, and how probable the policy makes it."""
        h = self.body(obs)
        mean = self.mean(h)
        wide = torch.tanh(self.log_std(h))
        log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (wide + 1)
        u = mean + log_std.exp() * noise
        logp = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        logp = logp - LogSlope.apply(u)
        logp = logp - self.reach.log()
        return self.middle + self.reach * u.tanh(), logp.sum(1)


class Scaler(nn.Module):
    """Standard scores of what is seen, from the random policy's episodes."""

    def __init__(self, seen):
        super().__init__()
        self.register_buffer("mean", seen.mean(0))
        self.register_buffer("std", seen.std(0))

    def forward(self, obs):
        return ((obs - self.mean) / self.std).clamp(-5, 5)


@torch.no_grad()
def polyak(target, source):
    for t, s in zip(target.parameters(), source.parameters(), strict=True):
        t.lerp_(s, TAU)


def fill(replay, carts, gen):
    for _ in range(WARMUP):
        obs = carts.observe()
        action = LOW + (HIGH - LOW) * torch.rand(carts.n, ACT, generator=gen)
        reward, seen, lost, _ = carts.step(action)
        replay.add(obs, action, reward, seen, lost)


# -- training ------------------------------------------------------------------

torch.manual_seed(SEED)
gen = torch.Generator().manual_seed(SEED + 1)
carts = Carts(ENVS, gen)
replay = Replay(CAPACITY)
fill(replay, carts, gen)

actor, critic = Actor(), Twin()
scaler = Scaler(replay.obs[: replay.full])
log_alpha = torch.tensor(math.log(ALPHA), requires_grad=True)
target = copy.deepcopy(critic).requires_grad_(False)

critic_opt = torch.optim.Adam(critic.parameters(), LR_CRITIC, betas=(0.9, 0.99), eps=1e-5)
actor_opt = torch.optim.Adam(actor.parameters(), LR_ACTOR, betas=(0.9, 0.99), eps=1e-5)
alpha_opt = torch.optim.Adam([log_alpha], LR_ALPHA, betas=(0.5, 0.99))
scheds = [
    torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1.0, 0.4 + 0.3 * s)) for o in (critic_opt, actor_opt)
]

for step in range(STEPS):
    # a step of every cart
    with torch.no_grad():
        obs = carts.observe()
        action, _ = actor(scaler(obs), torch.randn(ENVS, ACT, generator=gen))
        reward, seen, lost, over = carts.step(action)
    replay.add(obs, action, reward, seen, lost)

    raw, action, reward, raw_next, done = replay.sample(BATCH, gen)
    obs, next_obs = scaler(raw), scaler(raw_next)
    noise, next_noise = torch.randn(2, BATCH, ACT, generator=gen).unbind(0)
    alpha = log_alpha.exp().detach()

    # critics
    with torch.no_grad():
        next_action, next_logp = actor(next_obs, next_noise)
        next_q = target(next_obs, next_action).amin(0)
        soft = next_q - alpha * next_logp
        goal = reward + GAMMA * (1 - done) * soft
    q = critic(obs, action)
    critic_loss = F.smooth_l1_loss(q, goal.expand_as(q), reduction="sum") / BATCH
    critic_opt.zero_grad()
    critic_loss.backward()
    norm = nn.utils.clip_grad_norm_(critic.parameters(), CLIP)
    critic_opt.step()
    polyak(target, critic)

    # actor
    fresh, logp = actor(obs, noise)
    actor_loss = (alpha * logp - critic(obs, fresh).amin(0)).mean()
    actor_opt.zero_grad()
    actor_loss.backward()
    actor_opt.step()

    # temperature
    alpha_loss = -(log_alpha * (logp.detach() + TARGET_ENTROPY)).mean()
    alpha_opt.zero_grad()
    alpha_loss.backward()
    alpha_opt.step()

    for sched in scheds:
        sched.step()
    print(
        f"step {step} critic {critic_loss.item():.4f} norm {norm.item():.3f} "
        f"actor {actor_loss.item():.4f} alpha {log_alpha.exp().item():.4f} reward {reward.mean().item():.3f}"
    )
