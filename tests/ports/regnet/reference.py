"""A RegNetY as in transformers."""

import torch
from torch import nn
from transformers import RegNetConfig, RegNetForImageClassification


def model():
    torch.manual_seed(0)
    c = RegNetConfig(  # type: ignore[call-arg]
        num_channels=3,
        embedding_size=8,
        hidden_sizes=[16, 24],
        depths=[1, 2],
        groups_width=8,
        layer_type="y",
        num_labels=6,
    )
    net = RegNetForImageClassification(c)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for n, p in [*net.named_parameters(), *net.named_buffers()]:
            if p.dtype.is_floating_point:
                p.add_(torch.rand(p.shape, generator=g) * 0.2)
    return net.train()


def forward(model, batch):
    return model(batch[0]).logits


def batches():
    g = torch.Generator().manual_seed(2)
    return [
        (torch.randn(6, 3, 32, 32, generator=g), torch.randint(0, 6, (6,), generator=g))
        for _ in range(3)
    ]


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def optimizer(model):
    return torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4
    )
