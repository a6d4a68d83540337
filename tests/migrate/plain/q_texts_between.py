import torch
from torch import nn

torch.manual_seed(0)
device = torch.device("cpu")
model = nn.Linear(3, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for epoch in range(10):
    for _ in range(3):
        x = torch.randn(16, 3)
        """targets are
  sums"""
        y = x.sum(1, keepdim=True)
        out = model(x)
        # between
        message = """two
lines"""
        loss = (out - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
