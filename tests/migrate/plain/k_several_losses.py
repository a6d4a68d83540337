import torch
import torch.nn.functional as F
from torch import nn


class Multitask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 16)
        self.kind = nn.Linear(16, 3)
        self.value = nn.Linear(16, 1)

    def forward(self, x):
        hidden = torch.tanh(self.trunk(x))
        return {"kind": self.kind(hidden), "value": self.value(hidden)}


torch.manual_seed(0)
device = "cpu"
model = Multitask().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
x = torch.randn(64, 6)
kind = x[:, :3].argmax(1)
value = x.mean(1, keepdim=True)

losses = []
for step in range(40):
    outputs = model(x.to(device))
    loss_kind = F.cross_entropy(outputs["kind"], kind.to(device))
    loss_value = F.mse_loss(outputs["value"], value.to(device))
    penalty = sum(p.pow(2).sum() for p in model.parameters())
    loss = loss_kind + 0.5 * loss_value + 1e-4 * penalty

    model.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(float(loss.detach()))
