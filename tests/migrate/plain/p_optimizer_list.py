import torch
from torch import nn


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 2)

    def forward(self, x):
        return self.right(torch.tanh(self.left(x)))


torch.manual_seed(0)
pair = Pair()
optimizers = [
    torch.optim.SGD(pair.left.parameters(), lr=0.1),
    torch.optim.SGD(pair.right.parameters(), lr=0.2),
]
x = torch.randn(40, 4)
y = x[:, :2] * 0.5
losses = []
for _ in range(30):
    for optimizer in optimizers:
        optimizer.zero_grad()
    output = pair(x)
    loss = nn.functional.mse_loss(output, y)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    losses.append(loss.item())
