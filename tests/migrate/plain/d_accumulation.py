import torch
from torch import nn

torch.manual_seed(0)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
accumulation_steps = 4
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loss_fn = nn.SmoothL1Loss()
data = [(torch.randn(8, 8), torch.randn(8, 1) * 0.1 + 1) for _ in range(8)]

losses = []
for epoch in range(8):
    optimizer.zero_grad()
    for i, (features, target) in enumerate(data):
        prediction = model(features.to(device))
        loss = loss_fn(prediction, target.to(device))
        losses.append(loss.item())
        loss = loss / accumulation_steps
        loss.backward()
        if (i + 1) % accumulation_steps == 0:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
