import torch
from torch import nn, optim

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
criterion = nn.MSELoss()
optimizer = optim.RMSprop(model.parameters(), lr=1e-2)
x = torch.randn(32, 4)
y = x.prod(dim=1, keepdim=True) + 1

losses = []
for _ in range(30):
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
    with torch.no_grad():
        losses.append(criterion(model(x), y).item())
