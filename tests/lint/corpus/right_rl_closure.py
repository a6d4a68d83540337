import copy
import random
from collections import deque

import gymnasium as gym
import torch
import torch.nn.functional as F
from torch import nn


class Q(nn.Module):
    def __init__(self, o, a):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(o, 128), nn.ReLU(), nn.Linear(128, a))

    def forward(self, s):
        return self.net(s)


class SAC:
    def __init__(self, o, a):
        self.q = Q(o, a)
        self.target = copy.deepcopy(self.q).requires_grad_(False)
        self.opt = torch.optim.Adam(self.q.parameters(), 3e-4, eps=1e-5)
        self.buffer = deque(maxlen=10000)
        self.log_alpha = nn.Parameter(torch.zeros(()))
        self.alpha_opt = torch.optim.Adam([self.log_alpha], 3e-4)

    @torch.no_grad()
    def act(self, s, eps):
        if random.random() < eps:
            return random.randrange(2)
        return int(self.q(torch.as_tensor(s, dtype=torch.float32)).argmax())

    def learn(self, batch):
        s, a, r, s2, d = batch
        with torch.no_grad():
            y = r + 0.99 * (1 - d) * self.target(s2).max(1).values
        td = self.q(s).gather(1, a[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(td, y)
        self.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.q.parameters(), 10)
        self.opt.step()
        ent = torch.distributions.Categorical(logits=self.q(s).detach()).entropy().mean()
        alpha_loss = (self.log_alpha.exp() * (ent - 0.5))
        self.alpha_opt.zero_grad()
        alpha_loss.backward()
        self.alpha_opt.step()
        with torch.no_grad():
            for p, t in zip(self.q.parameters(), self.target.parameters()):
                t.lerp_(p, 0.005)
        return loss.item()


def main():
    env = gym.make("CartPole-v1")
    agent = SAC(4, 2)
    s, _ = env.reset(seed=1)
    for step in range(10000):
        a = agent.act(s, max(0.05, 1 - step / 5000))
        s2, r, term, trunc, _ = env.step(a)
        agent.buffer.append((s, a, r, s2, term))
        s = s2 if not (term or trunc) else env.reset()[0]
        if len(agent.buffer) > 64:
            agent.learn(agent.sample(64))


main()
