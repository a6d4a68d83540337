"""Which optimizer is best? A comparison on one network."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 128)
        self.drop = nn.Dropout(0.2)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        return self.fc2(self.drop(F.relu(self.fc1(x))))


def make_optimizer(name, params):
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)
    if name == "adam":
        return torch.optim.Adam(params, lr=1e-3)
    return torch.optim.RMSprop(params, lr=1e-3)


def accuracy(model, x, y):
    model.eval()
    with torch.no_grad():
        result = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return result


def main():
    data = torch.load("digits.pt", weights_only=True)
    x, y, tx, ty = data["x"], data["y"], data["tx"], data["ty"]
    results = {}
    for name in ["sgd", "adam", "rmsprop"]:
        model = Net()  # expect: RO610
        optimizer = make_optimizer(name, model.parameters())
        for epoch in range(30):
            for xb, yb in zip(x.split(64), y.split(64)):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(xb), yb)
                loss.backward()
                optimizer.step()
        results[name] = accuracy(model, tx, ty)
    best = max(results, key=results.get)
    print("best optimizer:", best, results)


if __name__ == "__main__":
    main()
