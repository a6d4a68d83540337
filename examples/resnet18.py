"""ResNet-18 built from a transformers config (random weights, fixed seed); metric: top-1 agreement with fp32."""

import torch


def images(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 3, 64, 64, generator=torch.Generator().manual_seed(seed))


def model() -> torch.nn.Module:
    """Its running statistics come from ten batches in training mode, so that activations keep their scale."""
    from transformers import ResNetConfig, ResNetForImageClassification

    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        config = ResNetConfig(
            embedding_size=64,
            hidden_sizes=[64, 128, 256, 512],
            depths=[2, 2, 2, 2],
            layer_type="basic",
            num_labels=10,
        )
        net = ResNetForImageClassification(config).train()
        for seed in range(10):
            net(images(16, 100 + seed))
    return net.eval()


def batches() -> list[torch.Tensor]:
    return [images(16, seed) for seed in range(2)]


def forward(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The logits, shape (images, 10)."""
    return model(batch).logits


def top1_agreement(outputs: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """Share of images whose most likely class is the same as in fp32."""
    same = [
        (o.argmax(-1) == r.argmax(-1)).double()
        for o, r in zip(outputs, reference, strict=True)
    ]
    return torch.cat(same).mean().item()


metric = top1_agreement
