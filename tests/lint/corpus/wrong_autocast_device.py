import torch
import torch.nn as nn

device = torch.device("cpu")
torch.manual_seed(3)

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loss_fn = nn.MSELoss()

x = torch.randn(4096, 20)
w = torch.randn(20, 1)
y = x @ w + 0.1 * torch.randn(4096, 1)

for epoch in range(50):
    order = torch.randperm(4096)
    for start in range(0, 4096, 128):
        index = order[start : start + 128]
        xb = x[index].to(device)
        yb = y[index].to(device)
        with torch.autocast("cuda", dtype=torch.bfloat16):  # expect: RO203
            pred = model(xb)
            loss = loss_fn(pred, yb)
        loss.backward()  # expect: RO601
        optimizer.step()
    if epoch % 10 == 0:
        print(epoch, loss.item())

model.eval()
with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
    final = loss_fn(model(x), y)
print("final", final.item())
