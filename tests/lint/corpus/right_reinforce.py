import torch
import torch.nn as nn


class Policy(nn.Module):
    def __init__(self):
        super(Policy, self).__init__()
        self.affine1 = nn.Linear(4, 128)
        self.action_head = nn.Linear(128, 2)
        self.value_head = nn.Linear(128, 1)

    def forward(self, x):
        x = torch.relu(self.affine1(x))
        return torch.softmax(self.action_head(x), dim=-1), self.value_head(x)


model = Policy()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
eps = 1e-7


def select_action(state):
    probs, v = model(torch.from_numpy(state).float())
    m = torch.distributions.Categorical(probs)
    a = m.sample()
    return a.item(), m.log_prob(a), v


def finish(rewards, log_probs, values):
    R, returns = 0, []
    for r in rewards[::-1]:
        R = r + 0.99 * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    loss = sum(-lp * (r - v.item()) for lp, v, r in zip(log_probs, values, returns))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
