import torch
import torch.nn as nn


class FeatureStats:
    """Mean and variance of features over a data set, for FID."""

    def __init__(self, dim, device):
        self.total = torch.zeros(dim, dtype=torch.float16, device=device)
        self.square = torch.zeros(dim, dtype=torch.float16, device=device)
        self.count = 0

    def update(self, feats):
        feats = feats.half()
        self.total += feats.sum(0)  # expect: RO305
        self.square += feats.pow(2).sum(0)  # expect: RO305 RO306
        self.count += feats.size(0)

    def result(self):
        mean = self.total.float() / self.count
        return mean, self.square.float() / self.count - mean**2  # expect: RO413


class Extractor(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone.eval().requires_grad_(False)

    @torch.no_grad()
    def forward(self, x):
        with torch.autocast("cuda", dtype=torch.float16):
            return self.backbone(x).flatten(1)


def position_grid(h, w, device):
    ys = torch.arange(h, device=device).to(torch.bfloat16)  # expect: RO303
    xs = torch.arange(w, device=device, dtype=torch.float32)
    return torch.stack(torch.meshgrid(ys.float(), xs, indexing="ij"))


def feature_loss(a, b):
    a = a.half()
    b = b.half()
    return ((a - b) ** 2).mean()  # expect: RO306


def run(loader, backbone, device="cuda"):
    extractor = Extractor(backbone).to(device)
    stats = FeatureStats(512, device)
    for images, _ in loader:
        stats.update(extractor(images.to(device)))
    mean, var = stats.result()
    torch.save({"mean": mean.cpu(), "var": var.cpu()}, "stats.pt")
    print("features of", stats.count, "images")


if __name__ == "__main__":
    from data import image_loader
    from torchvision.models import resnet18

    run(image_loader("images"), resnet18(weights="DEFAULT"))
