# %% [markdown]
# House prices with a small MLP.
# %%
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)

# %%
frame = pd.read_csv("houses.csv")
features = torch.tensor(frame.drop(columns="price").values, dtype=torch.float32)
target = torch.log1p(torch.tensor(frame["price"].values, dtype=torch.float32))
mean, std = features.mean(0), features.std(0).clamp_min(1e-6)
features = (features - mean) / std
dataset = TensorDataset(features, target[:, None])
train_set, valid_set = random_split(dataset, [0.8, 0.2])

# %%
model = nn.Sequential(nn.Linear(features.size(1), 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loss_fn = nn.MSELoss()
train_loader = DataLoader(train_set, batch_size=128, shuffle=True)
valid_loader = DataLoader(valid_set, batch_size=512)

# %%
history = {"train": [], "valid": []}
for epoch in range(50):
    model.train()
    running = 0.0
    for x, y in train_loader:
        loss = loss_fn(model(x), y)
        for param in model.parameters():
            param.grad = None
        loss.backward()
        optimizer.step()
        running += float(loss) * len(x)
    history["train"].append(running / len(train_set))

    model.eval()
    with torch.no_grad():
        total = sum(loss_fn(model(x), y).item() * len(x) for x, y in valid_loader)
    history["valid"].append(total / len(valid_set))
    print(epoch, history["train"][-1], history["valid"][-1])

# %%
model.eval()
with torch.inference_mode():
    predicted = torch.expm1(model(features[:5]))
print(predicted.flatten().tolist(), frame["price"][:5].tolist())

# %%
rmse = history["valid"][-1] ** 0.5
print(f"final RMSE of log prices: {rmse:.4f}")
torch.save({"model": model.state_dict(), "mean": mean, "std": std}, "houses.pt")
