"""LeNet-5 on scikit-learn's digits, enlarged to 28 × 28; metric: accuracy."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = x.view(x.size(0), -1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def data():
    digits = load_digits()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order].unsqueeze(1)
    images = F.interpolate(images / 16, size=28, mode="bilinear")
    return images, torch.tensor(digits.target)[order]


def model():
    torch.manual_seed(0)
    images, labels = data()
    net = LeNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(4):
        for index in torch.randperm(1280).split(64):
            optimizer.zero_grad()
            F.cross_entropy(net(images[index]), labels[index]).backward()
            optimizer.step()
    return net.eval()


def batches():
    images, labels = data()
    return list(zip(images[:256].split(32), labels[:256].split(32), strict=True))


def held_out():
    images, labels = data()
    return list(zip(images[1280:].split(64), labels[1280:].split(64), strict=True))


def forward(model, batch):
    return model(batch[0])


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def metric(outputs, batches):
    right = [(o.argmax(1) == b[1]).double() for o, b in zip(outputs, batches)]
    return torch.cat(right).mean().item()
