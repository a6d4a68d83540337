import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Churn(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(n, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))

    def forward(self, x):
        return self.layers(x)


def load(path):
    table = torch.load(path, weights_only=True)
    x, y = table[:, :-1].float(), table[:, -1:].float()
    x = (x - x.mean(0)) / (x.std(0) + 1e-6)
    return TensorDataset(x, y)


train_loader = DataLoader(load("train.pt"), batch_size=256, shuffle=True)
test_set = load("test.pt")
model = Churn(19)
criterion = nn.BCELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for epoch in range(30):
    for x, y in train_loader:
        out = model(x)
        loss = criterion(out, y)  # expect: RO504
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    model.eval()  # expect: RO605
    x, y = test_set.tensors
    with torch.no_grad():
        accuracy = ((model(x) > 0.5) == y.bool()).float().mean()
    print(f"epoch {epoch}: loss {loss.item():.3f} accuracy {accuracy.item():.3f}")

torch.save(model.state_dict(), "churn.pt")
