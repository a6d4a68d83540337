import torch
from torch import nn

torch.manual_seed(0)
device = torch.device("cpu")
encoder = nn.Linear(6, 8).to(device)
head = nn.Linear(8, 3).to(device)
encoder_optimizer = torch.optim.Adam(encoder.parameters(), lr=0.02)
head_optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
inputs = torch.randn(60, 6)
labels = inputs[:, :3].argmax(1)

losses = []
for step in range(40):
    chosen = torch.randint(0, 60, (20,))
    features = torch.relu(encoder(inputs[chosen].to(device)))
    loss = criterion(head(features), labels[chosen].to(device))
    encoder_optimizer.zero_grad()
    head_optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_([*encoder.parameters(), *head.parameters()], 2.0)
    encoder_optimizer.step()
    head_optimizer.step()
    losses.append(loss.item())
