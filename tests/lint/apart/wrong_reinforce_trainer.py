import torch
import torch.nn as nn
import torch.nn.functional as F


class Agent(nn.Module):
    def __init__(self, obs, acts):
        super().__init__()
        self.body = nn.Linear(obs, 64)
        self.actor = nn.Linear(64, acts)
        self.critic = nn.Linear(64, 1)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return F.softmax(self.actor(h), dim=-1), self.critic(h)


class Learner:
    def __init__(self, agent, lr=7e-4):
        self.agent = agent
        self.opt = torch.optim.RMSprop(agent.parameters(), lr=lr, eps=1e-5)
        self.losses = []

    def normalise(self, returns):
        return (returns - returns.mean()) / returns.std()  # expect: RO411

    def learn(self, states, actions, returns):
        probs, values = self.agent(states)
        returns = self.normalise(returns)
        adv = returns - values.squeeze(-1).detach()
        logp = probs.log().gather(1, actions[:, None]).squeeze(1)  # expect: RO404
        entropy = -(probs * torch.log(probs + 1e-10)).sum(-1).mean()
        loss = -(logp * adv).mean() + 0.5 * F.mse_loss(values.squeeze(-1), returns) - 0.01 * entropy
        self.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.agent.parameters(), 0.5)
        self.opt.step()
        self.losses.append(loss)  # expect: RO602
        return loss.item()


def rollout(env, agent, steps):
    states, actions, rewards = [], [], []
    state = env.reset()
    for _ in range(steps):
        with torch.no_grad():
            probs, _ = agent(state)
        action = torch.multinomial(probs, 1).item()
        states.append(state)
        actions.append(action)
        state, reward, done = env.step(action)
        rewards.append(reward)
        if done:
            state = env.reset()
    return torch.stack(states), torch.tensor(actions), torch.tensor(rewards)


def train(env, updates):
    torch.manual_seed(0)
    agent = Agent(env.obs, env.acts)
    learner = Learner(agent)
    for update in range(updates):
        states, actions, rewards = rollout(env, agent, 128)
        returns = torch.flip(torch.cumsum(torch.flip(rewards, [0]), 0), [0])
        loss = learner.learn(states, actions, returns)
        if update % 100 == 0:
            print(update, loss)
