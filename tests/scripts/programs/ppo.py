"""Proximal policies: rollouts of several worlds, advantages over time, epochs of shuffled minibatches."""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical

WORLDS, HORIZON, SEEN, ACTIONS = 4, 12, 6, 3
GAMMA, LAMBDA, CLIP, EPOCHS, MINIBATCHES = 0.95, 0.9, 0.02, 2, 2
VALUE_WEIGHT, ENTROPY_WEIGHT = 0.5, 0.01


class Corridor:
    """Walk left, stay, or walk right; the goal's place is seen, noisily."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.reset()

    def reset(self):
        self.place, self.goal, self.time = 0.0, self.rng.choice([-2.0, 2.0]), 0
        return self.seen()

    def seen(self):
        noise = 0.3 * self.rng.standard_normal(3)
        known = [self.place, self.goal - self.place, self.time / 6]
        return np.concatenate([known, noise]).astype("f4")

    def step(self, action):
        self.place += action - 1
        self.time += 1
        reward = 1.0 if self.place == self.goal else -0.1 * abs(self.goal - self.place)
        done = self.time == 6 or self.place == self.goal
        return (self.reset() if done else self.seen()), reward, done


class RunningNorm:
    """Mean and variance of all that was seen so far."""

    def __init__(self, shape):
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, x):
        mean, var, count = x.mean(0), x.var(0), len(x)
        delta, total = mean - self.mean, self.count + count
        self.mean = self.mean + delta * count / total
        spread = self.var * self.count + var * count
        self.var = (spread + delta**2 * self.count * count / total) / total
        self.count = total

    def __call__(self, x):
        return np.clip((x - self.mean) / np.sqrt(self.var + 1e-8), -5, 5).astype("f4")


def orthogonal(layer, gain=2**0.5, bias=0.0):
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.constant_(layer.bias, bias)
    return layer


class Agent(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.body = nn.Sequential(
            orthogonal(nn.Linear(SEEN, width)), nn.Tanh(), orthogonal(nn.Linear(width, width)), nn.Tanh()
        )
        self.policy = orthogonal(nn.Linear(width, ACTIONS), gain=0.1)
        self.critic = orthogonal(nn.Linear(width, 1), gain=1.0, bias=0.5)

    def forward(self, seen):
        hidden = self.body(seen)
        return Categorical(logits=self.policy(hidden)), self.critic(hidden).squeeze(-1)


class Rollout(NamedTuple):
    seen: torch.Tensor
    action: torch.Tensor
    log_prob: torch.Tensor
    value: torch.Tensor
    advantage: torch.Tensor
    returns: torch.Tensor


def advantages(reward, value, done, last_value):
    """Generalised advantages; ``done[t]`` says that the step t ended its episode."""
    advantage = torch.zeros_like(reward)
    after, running = last_value, torch.zeros_like(last_value)
    for t in reversed(range(len(reward))):
        alive = 1.0 - done[t]
        delta = reward[t] + GAMMA * after * alive - value[t]
        running = delta + GAMMA * LAMBDA * alive * running
        advantage[t] = running
        after = value[t]
    return advantage


class Worlds:
    def __init__(self):
        self.worlds = [Corridor(50 + i) for i in range(WORLDS)]
        self.norm = RunningNorm(SEEN)
        self.choice = torch.Generator().manual_seed(6)
        self.now = np.stack([world.reset() for world in self.worlds])

    @torch.no_grad()
    def play(self, agent):
        rows = []
        for _ in range(HORIZON):
            self.norm.update(self.now)
            seen = torch.from_numpy(self.norm(self.now))
            policy, value = agent(seen)
            action = torch.multinomial(policy.probs, 1, generator=self.choice)[:, 0]
            moved = [w.step(a) for w, a in zip(self.worlds, action.tolist())]
            after, reward, done = map(np.array, zip(*moved))
            reward, done = torch.tensor(reward).float(), torch.tensor(done).float()
            rows.append((seen, action, policy.log_prob(action), value, reward, done))
            self.now = after
        seen, action, log_prob, value, reward, done = map(torch.stack, zip(*rows))
        _, last_value = agent(torch.from_numpy(self.norm(self.now)))
        advantage = advantages(reward, value, done, last_value)
        columns = (seen, action, log_prob, value, advantage, advantage + value)
        return Rollout(*(column.flatten(0, 1) for column in columns))


def losses(agent, part):
    policy, value = agent(part.seen)
    log_ratio = policy.log_prob(part.action) - part.log_prob
    ratio = log_ratio.exp()
    advantage = (part.advantage - part.advantage.mean()) / (part.advantage.std() + 1e-8)
    policy_loss = -torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
    near = part.value + (value - part.value).clamp(-CLIP, CLIP)
    value_loss = 0.5 * torch.max((value - part.returns) ** 2, (near - part.returns) ** 2).mean()
    return policy_loss, value_loss, policy.entropy().mean()


def learn(agent, optimizer, rollout, shuffle):
    for _ in range(EPOCHS):
        order = torch.randperm(len(rollout.seen), generator=shuffle)
        for chosen in order.chunk(MINIBATCHES):
            part = Rollout(*(column[chosen] for column in rollout))
            policy_loss, value_loss, entropy = losses(agent, part)
            loss = policy_loss + VALUE_WEIGHT * value_loss - ENTROPY_WEIGHT * entropy
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    return policy_loss.item(), value_loss.item(), entropy.item()


def main():
    torch.manual_seed(8)
    agent, worlds = Agent(), Worlds()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2, eps=1e-5)
    shuffle = torch.Generator().manual_seed(60)
    for update in range(2):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - update / 4)
        print(update, *(f"{x:.5f}" for x in learn(agent, optimizer, worlds.play(agent), shuffle)))


main()
