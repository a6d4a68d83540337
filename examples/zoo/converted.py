"""A classifier as a converter writes it: sizes are tensors, and constants meet 0-dim tensors."""

import torch
from sklearn.datasets import load_digits
from torch import nn


class Converted(nn.Module):
    """Names and steps follow the nodes of an ONNX graph."""

    def __init__(self):
        super().__init__()
        self.Conv_0 = nn.Conv2d(1, 12, 3, 1, 1)
        self.BatchNormalization_1 = nn.BatchNorm2d(12)
        self.Conv_4 = nn.Conv2d(12, 24, 3, 2, 1)
        self.Gemm_18 = nn.Linear(24 * 4 * 4, 32)
        self.Gemm_22 = nn.Linear(32, 10)
        self.register_buffer("initializer_0", torch.tensor([1, 2, 3]))
        self.register_buffer("initializer_1", torch.tensor(0.5))

    def forward(self, input_1):
        scale = input_1.abs().max() + 1
        x = input_1 / scale
        x = self.BatchNormalization_1(self.Conv_0(x))
        x = torch.clamp(x, 0.0, 6.0)
        x = self.Conv_4(x)
        x = torch.clamp(x, min=0)
        shape = torch.tensor(x.shape)
        batch = torch.gather(shape, 0, torch.tensor([0]))
        features = torch.prod(torch.index_select(shape, 0, self.initializer_0))
        target = torch.cat([batch, features.unsqueeze(0)])
        x = x.reshape([int(size) for size in target])
        x = torch.relu(self.Gemm_18(x))
        x = torch.mul(x, self.initializer_1)
        x = torch.add(self.Gemm_22(x), 0.0)
        return torch.sub(x, torch.mean(x, dim=[1], keepdim=True))


def data():
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    return images, torch.from_numpy(digits.target)


def model():
    torch.manual_seed(0)
    images, labels = data()
    net = Converted()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.15, momentum=0.9)
    for _ in range(5):
        for rows in torch.randperm(1300).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images[rows]), labels[rows]).backward()
            optimizer.step()
    return net.eval()


def batches():
    images, labels = data()
    return list(zip(images[:256].split(32), labels[:256].split(32)))


def held_out():
    images, labels = data()
    return list(zip(images[1300:1780].split(32), labels[1300:1780].split(32)))


def forward(model, batch):
    return model(batch[0])


def metric(outputs, batches):
    right = sum((o.argmax(1) == b[1]).sum().item() for o, b in zip(outputs, batches))
    return right / sum(len(b[1]) for b in batches)
