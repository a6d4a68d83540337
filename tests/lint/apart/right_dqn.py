import random
from collections import deque, namedtuple

import torch
import torch.nn as nn

Transition = namedtuple("Transition", "state action reward next_state done")


class QNet(nn.Module):
    def __init__(self, n_obs, n_act):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_obs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, n_act))

    def forward(self, x):
        return self.net(x)


class Agent:
    def __init__(self, n_obs, n_act, device):
        self.device = device
        self.policy = QNet(n_obs, n_act).to(device)
        self.target = QNet(n_obs, n_act).to(device)
        self.target.load_state_dict(self.policy.state_dict())
        self.opt = torch.optim.AdamW(self.policy.parameters(), lr=1e-4, amsgrad=True)
        self.memory = deque(maxlen=10000)
        self.n_act = n_act

    def act(self, state, eps):
        if random.random() < eps:
            return random.randrange(self.n_act)
        with torch.no_grad():
            return self.policy(state.to(self.device)).argmax().item()

    def learn(self, batch_size=128, gamma=0.99, tau=0.005):
        if len(self.memory) < batch_size:
            return
        batch = Transition(*zip(*random.sample(self.memory, batch_size)))
        state = torch.stack(batch.state).to(self.device)
        action = torch.tensor(batch.action, device=self.device)
        reward = torch.tensor(batch.reward, device=self.device)
        next_state = torch.stack(batch.next_state).to(self.device)
        done = torch.tensor(batch.done, device=self.device, dtype=torch.float32)
        q = self.policy(state).gather(1, action[:, None]).squeeze(1)
        with torch.no_grad():
            best = self.target(next_state).amax(1)
            expected = reward + gamma * (1 - done) * best
        loss = nn.functional.smooth_l1_loss(q, expected)
        self.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(self.policy.parameters(), 100)
        self.opt.step()
        with torch.no_grad():
            for t, p in zip(self.target.parameters(), self.policy.parameters()):
                t.lerp_(p, tau)


def train(env, agent, episodes):
    random.seed(0)
    torch.manual_seed(0)
    for episode in range(episodes):
        state, done, steps = env.reset(), False, 0
        while not done:
            action = agent.act(state, max(0.05, 0.9 - episode / 200))
            next_state, reward, done = env.step(action)
            agent.memory.append(Transition(state, action, reward, next_state, done))
            state = next_state
            agent.learn()
            steps += 1
        print(episode, steps)
