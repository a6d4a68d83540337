import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader


def normals(a, b):
    n = torch.cross(a, b, dim=-1)
    return n / n.norm(dim=-1, keepdim=True)  # expect: RO407


def rotation_error(r1, r2):
    trace = torch.diagonal(r1 @ r2.transpose(-1, -2), dim1=-2, dim2=-1).sum(-1)
    return torch.acos((trace - 1) / 2).mean()  # expect: RO409


def chamfer(x, y):
    d = torch.sqrt(((x[:, :, None] - y[:, None]) ** 2).sum(-1))  # expect: RO408
    return d.amin(1).mean() + d.amin(2).mean()


class PointNet(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.mlp = nn.Sequential(nn.Conv1d(3, 64, 1), nn.ReLU(), nn.Conv1d(64, 256, 1))
        self.fc = nn.Linear(256, k)

    def forward(self, x):
        return self.fc(self.mlp(x).amax(-1))


def train(dataset, epochs, device="cuda"):
    torch.manual_seed(0)
    model = PointNet(3 * 128).to(device)
    loader = DataLoader(dataset, 32, shuffle=True, num_workers=4, pin_memory=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        model.train()
        for points in loader:
            points = points.to(device, non_blocking=True)
            optimizer.zero_grad()
            out = model(points.transpose(1, 2)).view(-1, 128, 3)
            loss = chamfer(out, points)
            if torch.isnan(loss):  # expect: RO607
                print("nan, skipped")
                continue
            loss.backward()
            optimizer.step()
        torch.save(model.state_dict(), "pointnet.pt")


@torch.no_grad()
def reconstruct(model, points):
    model.eval()
    out = model(points.transpose(1, 2)).view(-1, 128, 3)
    return F.normalize(out, dim=-1)
