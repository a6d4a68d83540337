"""Landmarks of a face: separable backbone, pyramid, heat maps, soft-argmax, visibility."""

import math

import torch
from torch import nn
from torch.nn import functional as F

HEIGHT, WIDTH, STRIDE = 32, 24, 2
NUM_POINTS = 5
BETA = 8.0
SIGMA = 1.2
WING_W, WING_EPSILON = 5.0, 2.0
HEATMAP_WEIGHT, WING_WEIGHT, VISIBILITY_WEIGHT = 10.0, 0.2, 0.5
BASE_LR, TOTAL_STEPS, WEIGHT_DECAY = 0.03, 8, 4e-3
EMA_DECAY = 0.99


def batch_norm(channels):
    """As the weights were trained elsewhere."""
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.03)


class Stem(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, stride=2, bias=False)
        self.bn = batch_norm(channels)

    def forward(self, x):
        x = F.pad(x, (0, 1, 0, 1))
        return F.relu(self.bn(self.conv(x)))


class SqueezeExcite(nn.Module):
    def __init__(self, channels, squeezed):
        super().__init__()
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x):
        scale = F.adaptive_avg_pool2d(x, 1)
        scale = F.relu(self.fc1(scale))
        scale = F.hardsigmoid(self.fc2(scale))
        return x * scale


class Residual(nn.Module):
    def __init__(self, channels, dilation=1):
        super().__init__()
        self.conv1 = nn.Conv2d(
            channels, channels, 3, padding=dilation, dilation=dilation, bias=False
        )
        self.bn1 = batch_norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = batch_norm(channels)
        self.se = SqueezeExcite(channels, channels // 4)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out = self.se(out)
        return F.relu(out + x)


class Down(nn.Module):
    """Half the size; new channels of the skip are zeros."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.channel_pad = outputs - inputs
        self.depthwise = nn.Conv2d(
            inputs, inputs, 3, stride=2, groups=inputs, bias=False
        )
        self.pointwise = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.bn = batch_norm(outputs)

    def forward(self, x):
        h = F.pad(x, (0, 1, 0, 1))
        h = self.bn(self.pointwise(self.depthwise(h)))
        skip = F.max_pool2d(x, 2)
        skip = F.pad(skip, (0, 0, 0, 0, 0, self.channel_pad))
        return F.relu(h + skip)


class Smooth(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            batch_norm(outputs),
            nn.ReLU(),
        )


class LandmarkNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = Stem(8)
        self.layer1 = Residual(8)
        self.down1 = Down(8, 12)
        self.layer2 = Residual(12, dilation=2)
        self.down2 = Down(12, 16)
        self.layer3 = Residual(16)

        self.lateral1 = nn.Conv2d(8, 12, 1, bias=False)
        self.lateral2 = nn.Conv2d(12, 12, 1, bias=False)
        self.lateral3 = nn.Conv2d(16, 12, 1, bias=False)
        self.smooth2 = Smooth(24, 12)
        self.smooth1 = Smooth(12, 12)
        self.heatmap_head = nn.Conv2d(12, NUM_POINTS, 1)
        self.visibility_head = nn.Linear(16, NUM_POINTS)

    def forward(self, x):
        c1 = self.layer1(self.stem(x))
        c2 = self.layer2(self.down1(c1))
        c3 = self.layer3(self.down2(c2))

        p3 = F.interpolate(
            self.lateral3(c3), scale_factor=2, mode="bilinear", align_corners=False
        )
        p2 = self.smooth2(torch.cat([p3, self.lateral2(c2)], dim=1))
        p2 = F.interpolate(p2, scale_factor=2, mode="nearest")
        p1 = self.smooth1(p2 + self.lateral1(c1))

        heatmaps = self.heatmap_head(p1)
        visibility = self.visibility_head(c3.mean(dim=(2, 3)))
        return heatmaps, soft_argmax(heatmaps), visibility


def soft_argmax(heatmaps):
    """(n, points, h, w) -> x and y from 0 to 1, (n, points, 2)."""
    h, w = heatmaps.shape[2:]
    prob = F.softmax(BETA * heatmaps.flatten(2), dim=-1).unflatten(2, (h, w))
    xs = (torch.arange(w) + 0.5) / w
    ys = (torch.arange(h) + 0.5) / h
    x = (prob.sum(dim=2) * xs).sum(dim=-1)
    y = (prob.sum(dim=3) * ys).sum(dim=-1)
    return torch.stack([x, y], dim=-1)


class WeightAverage(nn.Module):
    """Shadows of the parameters; the average is fast at the start."""

    def __init__(self, net):
        super().__init__()
        self.num_updates = 0
        for name, p in net.named_parameters():
            self.register_buffer(name.replace(".", "_"), p.detach().clone())

    @torch.no_grad()
    def update(self, named_parameters):
        self.num_updates += 1
        decay = min(EMA_DECAY, (1 + self.num_updates) / (10 + self.num_updates))
        for name, p in named_parameters:
            shadow = getattr(self, name.replace(".", "_"))
            shadow.sub_((1 - decay) * (shadow - p))


def model():
    torch.manual_seed(2210)
    net = LandmarkNet()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 2)
            if isinstance(module, SqueezeExcite):
                module.fc2.bias.uniform_(-1, 1)
        net.heatmap_head.weight.mul_(0.3)
    net.ema = WeightAverage(net)
    return net.train()


def batches():
    """Faces are spots on a noisy slope; points in pixels from the upper left corner."""
    generator = torch.Generator().manual_seed(2211)
    mean_face = torch.tensor([[7, 11], [17, 11], [12, 17], [8, 23], [16, 23]])
    rows, columns = torch.arange(32) + 0.5, torch.arange(24) + 0.5
    made = []
    for size in (5, 4, 3):
        shift = 6 * torch.rand(size, 1, 2, generator=generator) - 3
        points = mean_face + shift + torch.randn(size, 5, 2, generator=generator)
        visible = torch.rand(size, 5, generator=generator) < 0.7
        visible[:, 2] = True
        image = 30 * torch.rand(size, 3, 32, 24, generator=generator)
        image = image + 40 + 2 * rows[:, None] + columns
        for n in range(size):
            for k in range(5):
                x, y = points[n, k]
                far = (rows[:, None] - y) ** 2 + (columns - x) ** 2
                spot = torch.exp(-far / 6) * (100 if visible[n, k] else 15)
                image[n, k % 3] += spot
        made.append(
            {
                "image": image.clamp(0, 255).to(torch.uint8),
                "points": points,
                "visible": visible.float(),
            }
        )
    return made


def forward(net, batch):
    heatmaps, points, visibility = net(batch["image"].float() / 127.5 - 1)
    return {"heatmaps": heatmaps, "points": points, "visibility": visibility}


def gaussians(points, h, w):
    """Heat maps with 1 at the points, which are in pixels of the image."""
    centre = points / STRIDE - 0.5
    dx = torch.arange(w) - centre[..., 0, None]
    dy = torch.arange(h) - centre[..., 1, None]
    squared = dx.square()[:, :, None, :] + dy.square()[:, :, :, None]
    return torch.exp(-squared / (2 * SIGMA**2))


def wing_loss(difference):
    distance = difference.abs()
    c = WING_W - WING_W * math.log(1 + WING_W / WING_EPSILON)
    near = WING_W * torch.log(1 + distance / WING_EPSILON)
    return torch.where(distance < WING_W, near, distance - c)


def loss(output, batch):
    visible = batch["visible"]
    heatmaps = output["heatmaps"]
    h, w = heatmaps.shape[2:]

    target = gaussians(batch["points"], h, w)
    squared = (heatmaps - target).square() * visible[:, :, None, None]
    heatmap_loss = squared.sum() / (visible.sum() * h * w)

    pixels = output["points"] * torch.tensor([WIDTH, HEIGHT])
    wing = wing_loss(pixels - batch["points"]).sum(dim=-1)
    coordinate_loss = (wing * visible).sum() / visible.sum()

    visibility_loss = F.binary_cross_entropy_with_logits(output["visibility"], visible)
    return (
        HEATMAP_WEIGHT * heatmap_loss
        + WING_WEIGHT * coordinate_loss
        + VISIBILITY_WEIGHT * visibility_loss
    )


class CosineSGD(torch.optim.SGD):
    """The rate falls as a cosine; the average follows each step."""

    def __init__(self, groups, net):
        super().__init__(groups, lr=BASE_LR, momentum=0.9, nesterov=True)
        self.net = net
        self.done = 0

    def step(self, closure=None):
        for group in self.param_groups:
            turn = math.pi * self.done / TOTAL_STEPS
            group["lr"] = BASE_LR * 0.5 * (1 + math.cos(turn))
        result = super().step(closure)
        self.done += 1
        self.net.ema.update(self.net.named_parameters())
        return result


def optimizer(net):
    """Norms and biases do not decay."""
    decay = [p for p in net.parameters() if p.dim() > 1]
    no_decay = [p for p in net.parameters() if p.dim() == 1]
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": no_decay, "weight_decay": 0.0},
    ]
    return CosineSGD(groups, net)
