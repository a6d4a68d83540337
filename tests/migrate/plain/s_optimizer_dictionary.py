"""Two parts of one network, whose optimizers stand in a dictionary."""

import torch
from torch import nn


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 4)
        self.decoder = nn.Linear(4, 6)

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


torch.manual_seed(0)
coder = Coder()
optimizers = {
    "encoder": torch.optim.SGD(coder.encoder.parameters(), lr=0.1),
    "decoder": torch.optim.Adam(coder.decoder.parameters(), lr=0.02),
}
x = torch.randn(40, 6)
losses = []
for _ in range(30):
    for part in optimizers.values():
        part.zero_grad()
    loss = nn.functional.mse_loss(coder(x), x)
    loss.backward()
    for _name, part in optimizers.items():
        part.step()
    losses.append(loss.item())
