"""A radiance field: rays are sampled coarse and fine, and their colours composed."""

import torch
from torch import nn
from torch.nn import functional as F

NEAR, FAR = 2.0, 6.0
COARSE = 10


def encode(x, count):
    """x, then sin and cos of x times powers of two."""
    parts = [x]
    for power in range(count):
        parts += [torch.sin(2.0**power * x), torch.cos(2.0**power * x)]
    return torch.cat(parts, dim=-1)


class Field(nn.Module):
    def __init__(self, width=24, places=4, views=2):
        super().__init__()
        self.places, self.views = places, views
        size = 3 + 6 * places
        self.layers = nn.ModuleList(
            [
                nn.Linear(size, width),
                nn.Linear(width, width),
                nn.Linear(width + size, width),
                nn.Linear(width, width),
            ]
        )
        self.density = nn.Linear(width, 1)
        self.feature = nn.Linear(width, width)
        self.view = nn.Linear(width + 3 + 6 * views, width // 2)
        self.colour = nn.Linear(width // 2, 3)

    def forward(self, points, directions):
        place = encode(points, self.places)
        x = place
        for i, layer in enumerate(self.layers):
            if i == 2:
                x = torch.cat([place, x], dim=-1)
            x = F.relu(layer(x))
        density = F.softplus(self.density(x) - 1)[..., 0]
        view = encode(directions, self.views)[:, None].expand(-1, points.shape[1], -1)
        x = F.relu(self.view(torch.cat([self.feature(x), view], dim=-1)))
        return torch.sigmoid(self.colour(x)), density


def composed(colour, density, depth, length):
    step = torch.cat([depth.diff(dim=-1), torch.full_like(depth[:, :1], 0.5)], dim=-1)
    alpha = 1 - torch.exp(-density * step * length)
    left = torch.cumprod(1 - alpha, dim=-1)
    left = torch.cat([torch.ones_like(left[:, :1]), left[:, :-1]], dim=-1)
    weight = alpha * left
    seen = (weight[..., None] * colour).sum(dim=1)
    background = 1 - weight.sum(dim=-1, keepdim=True)
    return seen + background, weight


def resampled(edges, weight, u):
    """Draw depths from the histogram of the weights, by the inverse of its sum."""
    weight = weight + 1e-2
    share = weight / weight.sum(dim=-1, keepdim=True)
    total = F.pad(torch.cumsum(share, dim=-1), (1, 0))
    above = torch.searchsorted(total, u, right=True).clamp(1, share.shape[-1])
    low, high = total.gather(1, above - 1), total.gather(1, above)
    start, end = edges.gather(1, above - 1), edges.gather(1, above)
    return start + (u - low) / (high - low) * (end - start)


class Radiance(nn.Module):
    def __init__(self):
        super().__init__()
        self.coarse = Field()
        self.fine = Field()

    def see(self, field, origin, direction, depth):
        points = origin[:, None] + depth[..., None] * direction[:, None]
        length = direction.norm(dim=-1, keepdim=True)
        colour, density = field(points, direction / length)
        return composed(colour, density, depth, length)

    def forward(self, batch):
        origin, direction = batch["origin"], batch["direction"]
        edge = torch.linspace(NEAR, FAR, COARSE + 1)
        depth = edge[:-1] + (FAR - NEAR) / COARSE * batch["jitter"]
        first, weight = self.see(self.coarse, origin, direction, depth)
        middle = 0.5 * (depth[:, 1:] + depth[:, :-1])
        more = resampled(middle, weight[:, 1:-1].detach(), batch["u"])
        both = torch.cat([depth, more], dim=-1).sort(dim=-1).values
        second, weight = self.see(self.fine, origin, direction, both)
        return {"first": first, "second": second, "depth": (weight * both).sum(dim=-1)}


def model():
    torch.manual_seed(320)
    net = Radiance()
    with torch.no_grad():
        for field in (net.coarse, net.fine):
            field.density.weight.mul_(4)
            field.density.bias.fill_(1.0)
            for layer in field.layers:
                layer.bias.normal_(0, 0.3)
    return net


def batches():
    generator = torch.Generator().manual_seed(321)
    aim = torch.randn(7, 3, generator=generator) * 0.3
    origin = torch.tensor([0.0, 0.0, 4.0]) + aim
    direction = -origin + torch.randn(7, 3, generator=generator) * 0.3
    return [
        {
            "origin": origin,
            "direction": direction / 3,
            "jitter": torch.rand(7, 10, generator=generator),
            "u": (torch.arange(8) + torch.rand(7, 8, generator=generator)) / 8,
            "colour": torch.rand(7, 3, generator=generator),
        }
    ]


def forward(net, batch):
    return net(batch)


def loss(output, batch):
    first = F.mse_loss(output["first"], batch["colour"])
    second = F.mse_loss(output["second"], batch["colour"])
    return second + 0.5 * first


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=5e-4, eps=1e-7)
