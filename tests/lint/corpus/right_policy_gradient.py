"""REINFORCE with a baseline on CartPole."""
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions import Categorical

EPS = np.finfo(np.float32).eps.item()


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine = nn.Linear(4, 128)
        self.action_head = nn.Linear(128, 2)
        self.value_head = nn.Linear(128, 1)

    def forward(self, x):
        x = torch.relu(self.affine(x))
        return torch.softmax(self.action_head(x), dim=-1), self.value_head(x)


def select_action(policy, state):
    probs, value = policy(torch.from_numpy(state).float())
    m = Categorical(probs)
    action = m.sample()
    return action.item(), m.log_prob(action), value


def finish_episode(optimizer, log_probs, values, rewards, gamma=0.99):
    ret = 0.0
    returns = []
    for r in rewards[::-1]:
        ret = r + gamma * ret
        returns.insert(0, ret)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + EPS)
    policy_losses = []
    value_losses = []
    for log_prob, value, ret in zip(log_probs, values, returns):
        advantage = ret - value.item()
        policy_losses.append(-log_prob * advantage)
        value_losses.append(nn.functional.smooth_l1_loss(value, ret.view(1)))
    optimizer.zero_grad()
    loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
    loss.backward()
    optimizer.step()


def main():
    torch.manual_seed(543)
    env = gym.make("CartPole-v1")
    policy = Policy()
    optimizer = optim.Adam(policy.parameters(), lr=3e-2)
    running_reward = 10
    for episode in range(1000):
        state, _ = env.reset(seed=episode)
        log_probs, values, rewards = [], [], []
        for _ in range(1, 10000):
            action, log_prob, value = select_action(policy, state)
            state, reward, done, truncated, _ = env.step(action)
            log_probs.append(log_prob)
            values.append(value)
            rewards.append(reward)
            if done or truncated:
                break
        finish_episode(optimizer, log_probs, values, rewards)
        running_reward = 0.05 * sum(rewards) + 0.95 * running_reward
        if episode % 10 == 0:
            print(episode, running_reward)


if __name__ == "__main__":
    main()
