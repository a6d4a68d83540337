import torch
import torch.nn as nn
import torch.nn.functional as F


class ActorCritic(nn.Module):
    def __init__(self, obs, actions):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.pi = nn.Linear(64, actions)
        self.v = nn.Linear(64, 1)

    def forward(self, x):
        h = self.body(x)
        return self.pi(h), self.v(h).squeeze(-1)


class PPO:
    def __init__(self, net, lr=3e-4, clip=0.2, epochs=4):
        self.net = net
        self.optimizer = torch.optim.Adam(net.parameters(), lr=lr, eps=1e-5)
        self.clip = clip
        self.epochs = epochs

    def update(self, obs, actions, old_logp, returns, advantages):
        advantages = (advantages - advantages.mean()) / advantages.std()  # expect: RO411
        for _ in range(self.epochs):
            logits, values = self.net(obs)
            probs = F.softmax(logits, dim=-1)
            logp = torch.log(probs.gather(1, actions[:, None]).squeeze(1))  # expect: RO404
            ratio = torch.exp(logp - old_logp)
            surrogate = torch.min(ratio * advantages, ratio.clamp(1 - self.clip, 1 + self.clip) * advantages)
            entropy = -(probs * F.log_softmax(logits, dim=-1)).sum(-1)
            loss = -surrogate.mean() + 0.5 * F.mse_loss(values, returns) - 0.01 * entropy.mean()
            loss.backward()
            self.optimizer.zero_grad()  # expect: RO611
            self.optimizer.step()


def gae(rewards, values, dones, gamma=0.99, lam=0.95):
    adv = torch.zeros_like(rewards)
    last = 0.0
    for t in reversed(range(len(rewards) - 1)):
        delta = rewards[t] + gamma * values[t + 1] * (1 - dones[t]) - values[t]
        last = delta + gamma * lam * (1 - dones[t]) * last
        adv[t] = last
    return adv


def collect(env, net, steps):
    obs_list, logps = [], []
    obs = env.reset()
    with torch.no_grad():
        for _ in range(steps):
            logits, value = net(obs)
            dist = torch.distributions.Categorical(logits=logits)
            action = dist.sample()
            obs_list.append(obs)
            logps.append(dist.log_prob(action))
            obs, reward, done = env.step(action)
    return torch.stack(obs_list), torch.stack(logps)
