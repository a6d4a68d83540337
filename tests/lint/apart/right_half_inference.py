"""Serve a classifier in half precision: nothing is trained here."""
import argparse
import json
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image
from torchvision import models, transforms


class Ensemble(nn.Module):
    def __init__(self, members):
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x):
        logps = [F.log_softmax(m(x).float(), dim=-1) for m in self.members]
        return torch.logsumexp(torch.stack(logps), 0) - torch.log(torch.tensor(float(len(logps))))


def load(paths, device):
    members = []
    for path in paths:
        net = models.resnet50(num_classes=200)
        net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        members.append(net.half())
    return Ensemble(members).to(device).eval()


transform = transforms.Compose(
    [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()]
)


@torch.inference_mode()
def predict(model, files, device):
    results = {}
    for path in files:
        image = transform(Image.open(path).convert("RGB")).unsqueeze(0)
        probs = model(image.to(device, torch.float16)).exp()
        score, label = probs.max(-1)
        results[str(path)] = {"label": label.item(), "score": score.item()}
    return results


def calibrate(logits, labels):
    temperature = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.LBFGS([temperature], lr=0.1, max_iter=50)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(logits / temperature, labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    return temperature.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weights", nargs="+")
    args = parser.parse_args()
    device = "cuda"
    model = load(args.weights, device)
    print(json.dumps(predict(model, sorted(args.folder.glob("*.jpg")), device), indent=2))


if __name__ == "__main__":
    main()
