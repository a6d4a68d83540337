"""Small discrete Dreamer on the ferry toy, trained offline from a random-policy replay.

World model: encoder (from the jax run of last spring), GRU + categorical state, decoder, two-hot
reward, continue. Behaviour: imagination, lambda returns, REINFORCE, slow target critic.
Time runs along dim 0 everywhere after Replay.sample: [T, B, ...].
"""

import copy

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

SEED, STEPS = 5, 3
PREFILL, BATCH, LENGTH, HORIZON = 240, 4, 6, 4
OBS, ACTIONS = 5, 3
GROUPS, CLASSES, HIDDEN = 4, 4, 24
STATE = GROUPS * CLASSES
BINS, BIN_LIMIT = 17, 5.0
GAMMA, LAMBDA, ENTROPY = 0.95, 0.9, 3e-3
UNIMIX, FREE_NATS, KL_DYN, KL_REP = 0.01, 0.3, 0.5, 0.1
LR = {"world": 4e-3, "actor": 2e-3, "critic": 3e-3}
CLIP = {"world": 2.0, "actor": 0.1, "critic": 1.0}
WARMUP, SLOW_RATE, SCALE_RATE, SCALE_FLOOR = 4, 0.2, 0.3, 0.1


# ---- environment and replay


class Ferry:
    """Bring a ferry to the dock, slowly enough. Actions: astern, idle, ahead."""

    TIME_LIMIT = 6

    def __init__(self, rng):
        self.rng = rng

    def reset(self):
        self.gap = self.rng.uniform(5.0, 12.0)
        self.speed = self.rng.normal(1.0, 0.5)
        self.current = self.rng.normal(0.0, 0.4)
        self.fuel, self.t = 100.0, 0
        return self.observe()

    def observe(self):
        wave = np.sin(0.7 * self.t)
        return np.array([self.gap, self.speed, self.current, self.fuel, wave], np.float32)

    def step(self, action):
        thrust = 1.2 * (action - 1)
        self.current = 0.9 * self.current + self.rng.normal(0.0, 0.2)
        self.speed = 0.8 * self.speed + thrust + self.current
        self.gap -= self.speed
        self.fuel -= 2.0 + 5.0 * abs(thrust)
        self.t += 1
        arrived = self.gap < 1.0
        lost = self.gap > 18.0
        reward = self.speed - 0.5 * abs(thrust)
        if arrived:
            reward += 40.0 if self.speed < 2.0 else -15.0
        if lost:
            reward -= 15.0
        terminal = arrived or lost
        return self.observe(), reward, terminal, terminal or self.t >= self.TIME_LIMIT


class Replay:
    """action is the one taken at obs; reward and terminal came with obs."""

    def __init__(self, capacity):
        self.obs = torch.zeros(capacity, OBS)
        self.action = torch.zeros(capacity, ACTIONS)
        self.reward = torch.zeros(capacity)
        self.first = torch.zeros(capacity)
        self.terminal = torch.zeros(capacity)
        self.size = 0

    def add(self, obs, action, reward, first, terminal):
        i = self.size
        self.obs[i] = torch.from_numpy(obs)
        self.action[i, action] = 1.0
        self.reward[i], self.first[i], self.terminal[i] = float(reward), first, terminal
        self.size += 1

    def finish(self):
        self.mean, self.std = self.obs.mean(0), self.obs.std(0)

    def sample(self, gen):
        start = torch.randint(1, self.size - LENGTH + 1, (BATCH,), generator=gen)
        index = torch.arange(LENGTH)[:, None] + start  # [T, B]
        first = self.first[index].clone()
        first[0] = 1.0  # nothing is known of what came before the window
        return {
            "obs": (self.obs[index] - self.mean) / self.std,
            "prev_action": self.action[index - 1],
            "reward": self.reward[index],
            "first": first,
            "cont": 1.0 - self.terminal[index],
        }


def prefill():
    rng = np.random.default_rng(SEED)
    env, replay = Ferry(rng), Replay(PREFILL)
    obs, reward, terminal, done = env.reset(), 0.0, False, False
    first = True
    while replay.size < PREFILL:
        action = int(rng.choice(ACTIONS, p=[0.15, 0.35, 0.5]))
        replay.add(obs, action, reward, first, terminal)
        first = done
        if done:
            obs, reward, terminal, done = env.reset(), 0.0, False, False
        else:
            obs, reward, terminal, done = env.step(action)
    replay.finish()
    return replay


# ---- pieces


class OneHotSample(torch.autograd.Function):
    """Sample from softmax with a bit of uniform; the gradient is that of the probabilities."""

    @staticmethod
    def forward(ctx, logits, gumbel):
        soft = logits.softmax(-1)
        probs = (1 - UNIMIX) * soft + UNIMIX / CLASSES
        ctx.save_for_backward(soft)
        index = (probs.log() + gumbel).argmax(-1)
        return F.one_hot(index, CLASSES).to(logits.dtype)

    @staticmethod
    def backward(ctx, grad):
        (soft,) = ctx.saved_tensors
        grad = (1 - UNIMIX) * grad
        return soft * (grad - (grad * soft).sum(-1, keepdim=True)), None


def gumbel(*shape, gen):
    return -torch.log(-torch.log(torch.rand(shape, generator=gen).clamp(1e-6, 1 - 1e-6)))


def symlog(x):
    return torch.sign(x) * torch.log1p(x.abs())


def symexp(x):
    return torch.sign(x) * torch.expm1(x.abs())


def kl_div(post, prior):
    p = ((1 - UNIMIX) * post.softmax(-1) + UNIMIX / CLASSES).log()
    q = ((1 - UNIMIX) * prior.softmax(-1) + UNIMIX / CLASSES).log()
    return (p.exp() * (p - q)).sum((-2, -1))


def mlp(n_in, n_out):
    return nn.Sequential(
        nn.Linear(n_in, HIDDEN), nn.LayerNorm(HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, n_out)
    )


class TwoHotHead(nn.Module):
    """A scalar as a distribution over bins that are even in symlog."""

    def __init__(self):
        super().__init__()
        self.net = mlp(HIDDEN + STATE, BINS)
        self.register_buffer("bins", torch.linspace(-BIN_LIMIT, BIN_LIMIT, BINS))

    def forward(self, feat):
        probs = self.net(feat).softmax(-1)
        return symexp((probs * self.bins).sum(-1))

    def loss(self, feat, target):
        y = symlog(target).clamp(-BIN_LIMIT, BIN_LIMIT)
        pos = (y + BIN_LIMIT) / (2 * BIN_LIMIT) * (BINS - 1)
        below = pos.floor().clamp(max=BINS - 2)
        above = pos - below
        below = below.long()[..., None]
        two_hot = torch.zeros(*y.shape, BINS)
        two_hot.scatter_(-1, below, 1 - above[..., None])
        two_hot.scatter_(-1, below + 1, above[..., None])
        return -(two_hot * self.net(feat).log_softmax(-1)).sum(-1)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense0, self.ln0 = nn.Linear(OBS, HIDDEN), nn.LayerNorm(HIDDEN)
        self.dense1, self.ln1 = nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, obs):
        x = F.silu(self.ln0(self.dense0(obs)))
        return F.silu(self.ln1(self.dense1(x)))


def read_checkpoint():
    """What is in ferry_jax_0412.npz: kernels are [in, out], enc_slow is an average of enc."""
    gen = torch.Generator().manual_seed(412)
    ckpt = {}
    for net in ("enc", "enc_slow", "dec"):
        for i, n_in in enumerate((OBS, HIDDEN)):
            kernel = torch.randn(n_in, HIDDEN, generator=gen) / n_in**0.5
            ckpt[f"{net}/dense{i}/kernel"] = kernel
            ckpt[f"{net}/dense{i}/bias"] = 0.1 * torch.randn(HIDDEN, generator=gen)
            ckpt[f"{net}/norm{i}/scale"] = 1 + 0.2 * torch.randn(HIDDEN, generator=gen)
            ckpt[f"{net}/norm{i}/offset"] = 0.1 * torch.randn(HIDDEN, generator=gen)
    return ckpt


def load_encoder(encoder, ckpt):
    leaves = {"kernel": "weight", "bias": "bias", "scale": "weight", "offset": "bias"}
    state = {}
    for key, value in ckpt.items():
        net, layer, leaf = key.split("/")
        if net != "enc":
            continue
        layer = layer.replace("norm", "ln")
        state[f"{layer}.{leaves[leaf]}"] = value.T if leaf == "kernel" else value
    encoder.load_state_dict(state)


# ---- agent


class WorldModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.h0 = nn.Parameter(0.3 * torch.randn(HIDDEN))
        self.inp = nn.Linear(STATE + ACTIONS, HIDDEN)
        self.cell = nn.GRUCell(HIDDEN, HIDDEN)
        self.prior = mlp(HIDDEN, STATE)
        self.posterior = mlp(2 * HIDDEN, STATE)
        self.decoder = mlp(HIDDEN + STATE, OBS)
        self.reward = TwoHotHead()
        self.cont = mlp(HIDDEN + STATE, 1)

    def advance(self, h, z, action):
        x = F.silu(self.inp(torch.cat([z.flatten(-2), action], -1)))
        return self.cell(x, h)

    def observe(self, batch, noise):
        embed = self.encoder(batch["obs"])
        h = self.h0.tanh().expand(BATCH, HIDDEN)
        z = torch.zeros(BATCH, GROUPS, CLASSES)
        hs, zs, posts, priors = [], [], [], []
        for t in range(LENGTH):
            keep = 1 - batch["first"][t][:, None]
            h = keep * h + (1 - keep) * self.h0.tanh()
            z = keep[..., None] * z
            h = self.advance(h, z, keep * batch["prev_action"][t])
            prior = self.prior(h).unflatten(-1, (GROUPS, CLASSES))
            post = self.posterior(torch.cat([h, embed[t]], -1)).unflatten(-1, (GROUPS, CLASSES))
            z = OneHotSample.apply(post, noise[t])
            hs.append(h)
            zs.append(z)
            posts.append(post)
            priors.append(prior)
        return torch.stack(hs), torch.stack(zs), torch.stack(posts), torch.stack(priors)

    def loss(self, batch, noise):
        h, z, post, prior = self.observe(batch, noise)
        feat = torch.cat([h, z.flatten(-2)], -1)
        recon = (self.decoder(feat) - batch["obs"]).square().sum(-1).mean()
        reward = self.reward.loss(feat, batch["reward"]).mean()
        cont = F.binary_cross_entropy_with_logits(self.cont(feat).squeeze(-1), batch["cont"])
        dyn = kl_div(post.detach(), prior).clamp(min=FREE_NATS).mean()
        rep = kl_div(post, prior.detach()).clamp(min=FREE_NATS).mean()
        return recon + reward + cont + KL_DYN * dyn + KL_REP * rep, h, z

    @torch.no_grad()
    def dream(self, h, z, action, noise):
        h = self.advance(h, z, action)
        return h, OneHotSample.apply(self.prior(h).unflatten(-1, (GROUPS, CLASSES)), noise)


class ReturnScale(nn.Module):
    """Moving range between the 5th and the 95th percentile of the returns."""

    def __init__(self):
        super().__init__()
        self.register_buffer("q", torch.tensor([0.05, 0.95]))
        self.register_buffer("range", torch.zeros(2))

    def forward(self, returns):  # [H, N]
        self.range.lerp_(torch.quantile(returns.flatten(), self.q), SCALE_RATE)
        return (self.range[1] - self.range[0]).clamp(min=SCALE_FLOOR)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.world = WorldModel()
        self.actor = mlp(HIDDEN + STATE, ACTIONS)
        self.critic = TwoHotHead()
        self.slow_critic = copy.deepcopy(self.critic).requires_grad_(False)
        self.scale = ReturnScale()
        self.register_buffer("fade", GAMMA ** torch.arange(HORIZON)[:, None])

    def imagine(self, h, z, gen):
        h, z = h.flatten(0, 1).detach(), z.flatten(0, 1).detach()
        n = len(h)
        act_noise = gumbel(HORIZON, n, ACTIONS, gen=gen)
        noise = gumbel(HORIZON, n, GROUPS, CLASSES, gen=gen)
        feats, logits, actions = [torch.cat([h, z.flatten(-2)], -1)], [], []
        for t in range(HORIZON):
            logit = self.actor(feats[-1])
            action = F.one_hot((logit + act_noise[t]).argmax(-1), ACTIONS).float()
            h, z = self.world.dream(h, z, action, noise[t])
            feats.append(torch.cat([h, z.flatten(-2)], -1))
            logits.append(logit)
            actions.append(action)
        return torch.stack(feats), torch.stack(logits), torch.stack(actions)

    @torch.no_grad()
    def returns(self, feat, cont):
        reward = self.world.reward(feat[1:])
        value = self.slow_critic(feat)
        out = [value[-1]]
        for t in reversed(range(HORIZON)):
            mixed = (1 - LAMBDA) * value[t + 1] + LAMBDA * out[-1]
            out.append(reward[t] + GAMMA * cont[t] * mixed)
        return torch.stack(out[:0:-1])

    def behaviour_loss(self, h, z, gen):
        feat, logits, actions = self.imagine(h, z, gen)
        with torch.no_grad():
            cont = self.world.cont(feat[1:]).squeeze(-1).sigmoid()
            alive = torch.cat([torch.ones_like(cont[:1]), cont[:-1]]).cumprod(0)
            baseline = self.critic(feat[:-1])
        weight = self.fade * alive
        returns = self.returns(feat, cont)
        advantage = (returns - baseline) / self.scale(returns)
        logp = logits.log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        chosen = (logp * actions).sum(-1)
        actor = -(weight * (chosen * advantage + ENTROPY * entropy)).mean()
        critic = (weight * self.critic.loss(feat[:-1], returns)).mean()
        return actor, critic

    @torch.no_grad()
    def update_slow(self):
        for slow, fast in zip(self.slow_critic.parameters(), self.critic.parameters()):
            slow.lerp_(fast, SLOW_RATE)


def warmup(step):
    return min(1.0, (step + 1) / WARMUP)


def main():
    torch.manual_seed(SEED)
    replay = prefill()
    agent = Agent()
    load_encoder(agent.world.encoder, read_checkpoint())

    optims = {
        "world": torch.optim.Adam(agent.world.parameters(), lr=LR["world"], eps=1e-5),
        "actor": torch.optim.Adam(agent.actor.parameters(), lr=LR["actor"], eps=1e-5),
        "critic": torch.optim.Adam(agent.critic.parameters(), lr=LR["critic"], eps=1e-5),
    }
    scheds = [torch.optim.lr_scheduler.LambdaLR(opt, warmup) for opt in optims.values()]
    data_gen = torch.Generator().manual_seed(SEED + 1)
    noise_gen = torch.Generator().manual_seed(SEED + 2)

    for step in range(STEPS):
        batch = replay.sample(data_gen)
        noise = gumbel(LENGTH, BATCH, GROUPS, CLASSES, gen=noise_gen)
        world_loss, h, z = agent.world.loss(batch, noise)
        actor_loss, critic_loss = agent.behaviour_loss(h, z, noise_gen)
        for opt in optims.values():
            opt.zero_grad(set_to_none=True)
        (world_loss + actor_loss + critic_loss).backward()
        norms = {}
        for name, opt in optims.items():
            norms[name] = clip_grad_norm_(getattr(agent, name).parameters(), CLIP[name])
            opt.step()
        for sched in scheds:
            sched.step()
        agent.update_slow()
        print(
            f"{step}: world {world_loss.item():.4f} actor {actor_loss.item():.4f} "
            f"critic {critic_loss.item():.4f} "
            + " ".join(f"|{name}| {norm:.3f}" for name, norm in norms.items())
        )


if __name__ == "__main__":
    main()
