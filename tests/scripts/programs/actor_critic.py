"""Off-policy control of a swinging pole: twin critics, a replay buffer, slow targets."""

import copy
import random
from collections import deque

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

GAMMA, TAU, NOISE, CLIP, BATCH = 0.97, 0.05, 0.2, 0.5, 16


class Pole:
    """A pole to be held upright; angle, speed and the last action are seen."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def reset(self):
        self.angle, self.speed = self.rng.uniform(-1, 1, 2)
        self.last = 0.0
        return self.seen()

    def seen(self):
        return np.array(
            [np.cos(self.angle), np.sin(self.angle), self.speed, self.last], "f4"
        )

    def step(self, push):
        self.speed += 0.1 * (np.sin(self.angle) * 4.9 + 2 * push) - 0.01 * self.speed
        self.angle += 0.1 * self.speed
        self.last = float(push)
        cost = self.angle**2 + 0.1 * self.speed**2 + 0.001 * push**2
        fell = abs(self.angle) > 1.5
        return self.seen(), -cost, fell


class Replay:
    def __init__(self, size):
        self.rows = deque(maxlen=size)

    def add(self, *row):
        self.rows.append(row)

    def sample(self, count):
        rows = random.sample(self.rows, count)
        state, action, reward, after, done = map(np.array, zip(*rows))
        return (
            torch.as_tensor(state),
            torch.as_tensor(action, dtype=torch.float32)[:, None],
            torch.as_tensor(reward, dtype=torch.float32)[:, None],
            torch.as_tensor(after),
            torch.as_tensor(done, dtype=torch.float32)[:, None],
        )


def mlp(sizes, last=nn.Identity):
    layers = []
    for left, right in zip(sizes, sizes[1:]):
        layers += [nn.Linear(left, right), nn.LayerNorm(right), nn.ELU()]
    return nn.Sequential(*layers[:-2], last())


class Twin(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = mlp([5, 24, 24, 1])
        self.two = mlp([5, 24, 24, 1])

    def forward(self, state, action):
        both = torch.cat([state, action], dim=1)
        return self.one(both), self.two(both)


class Agent:
    def __init__(self):
        self.actor = mlp([4, 24, 24, 1], nn.Tanh)
        self.critic = Twin()
        self.target_actor = copy.deepcopy(self.actor)
        self.target_critic = copy.deepcopy(self.critic)
        self.temper = torch.tensor(0.1, requires_grad=True)
        self.critic_optimizer = torch.optim.AdamW(
            self.critic.parameters(), lr=3e-3, weight_decay=1e-2
        )
        self.actor_optimizer = torch.optim.Adam(
            [{"params": self.actor.parameters()}, {"params": [self.temper], "lr": 1e-2}],
            lr=1e-3,
            betas=(0.8, 0.99),
        )
        self.noise = torch.Generator().manual_seed(8)

    def act(self, state):
        with torch.no_grad():
            return self.actor(torch.as_tensor(state)[None]).item()

    def wanted(self, reward, after, done):
        with torch.no_grad():
            action = self.target_actor(after)
            jitter = NOISE * torch.randn(action.shape, generator=self.noise)
            action = (action + jitter.clamp(-CLIP, CLIP)).clamp(-1, 1)
            value = torch.minimum(*self.target_critic(after, action))
            return reward + GAMMA * (1 - done) * value

    def update(self, batch):
        state, action, reward, after, done = batch
        wanted = self.wanted(reward, after, done)
        one, two = self.critic(state, action)
        critic_loss = F.smooth_l1_loss(one, wanted) + F.smooth_l1_loss(two, wanted)
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        nn.utils.clip_grad_norm_(self.critic.parameters(), 1.0)
        self.critic_optimizer.step()

        move = self.actor(state)
        value, _ = self.critic(state, move)
        size = move.pow(2).mean()
        actor_loss = -value.mean() + self.temper.detach() * size
        temper_loss = -self.temper * (size.detach() - 0.05)
        self.actor_optimizer.zero_grad()
        (actor_loss + temper_loss).backward()
        self.actor_optimizer.step()

        self.follow(self.target_critic, self.critic)
        self.follow(self.target_actor, self.actor)
        return critic_loss.item(), actor_loss.item()

    @torch.no_grad()
    def follow(self, slow, fast):
        for old, new in zip(slow.parameters(), fast.parameters()):
            old.mul_(1 - TAU).add_(new, alpha=TAU)


random.seed(12)
torch.manual_seed(12)
agent = Agent()
pole, replay = Pole(21), Replay(200)
state = pole.reset()
explore = np.random.default_rng(2)
for _ in range(64):
    action = float(np.clip(agent.act(state) + 0.5 * explore.standard_normal(), -1, 1))
    after, reward, fell = pole.step(action)
    replay.add(state, action, reward, after, fell)
    state = pole.reset() if fell else after
for update in range(3):
    losses = agent.update(replay.sample(BATCH))
    print(update, *(f"{loss:.5f}" for loss in losses))
