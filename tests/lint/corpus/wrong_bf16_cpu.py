import torch
import torch.nn as nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()
scaler = torch.amp.GradScaler("cpu")
for step in range(200):
    x = torch.randn(64, 20)
    y = torch.randint(0, 3, (64,))
    with torch.autocast("cpu", dtype=torch.float16):  # expect: RO204
        loss = criterion(net(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.unscale_(optimizer)  # expect: RO112
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
