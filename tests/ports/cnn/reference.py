"""A small image classifier with batch normalisation."""

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(12)
        self.fc1 = nn.Linear(12 * 4 * 4, 20)
        self.fc2 = nn.Linear(20, 10)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = F.max_pool2d(x, 2)
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        return self.fc2(x)


def model():
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        for norm in (net.bn1, net.bn2):
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.normal_(0, 0.3)
            norm.running_mean.normal_(0, 0.3)
            norm.running_var.uniform_(0.3, 2.0)
    return net.eval()


def batches():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(4, 3, 16, 16, generator=generator)
    labels = torch.randint(0, 10, (4,), generator=generator)
    return [{"x": images, "labels": labels}]


def forward(net, batch):
    return net(batch["x"])


def loss(output, batch):
    return F.cross_entropy(output, batch["labels"])


def optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=0.05)
