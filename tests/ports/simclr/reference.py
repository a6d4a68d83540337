"""SimCLR of small pictures: two views of each, a ResNet, NT-Xent and LARS, a probe beside it."""

import math

import torch
from torch import nn
from torch.nn import functional as F

SIZE, CLASSES = 16, 5
TEMPERATURE = 0.3
BATCH_SIZE, WARMUP, TOTAL = 8, 2, 12
LR = 0.06 * math.sqrt(BATCH_SIZE)
MOMENTUM, WEIGHT_DECAY, TRUST = 0.9, 0.02, 0.05

GREY = torch.tensor([0.299, 0.587, 0.114])
RGB_TO_YIQ = torch.tensor(
    [[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]]
)
YIQ_TO_RGB = torch.linalg.inv(RGB_TO_YIQ.double()).float()
MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
STD = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)


# Views


def random_resized_crop(image, box, flip):
    """Crop boxes of top, left, height, width, from 0 to 1; turn some left to right."""
    top, left, height, width = box.unbind(1)
    theta = torch.zeros(len(image), 2, 3)
    theta[:, 0, 0] = torch.where(flip, -width, width)
    theta[:, 0, 2] = 2 * left + width - 1
    theta[:, 1, 1] = height
    theta[:, 1, 2] = 2 * top + height - 1
    grid = F.affine_grid(theta, list(image.shape), align_corners=False)
    return F.grid_sample(
        image, grid, mode="bilinear", padding_mode="border", align_corners=False
    )


def to_grey(image):
    return torch.einsum("c,bchw->bhw", GREY, image).unsqueeze(1)


def blend(image, other, factor):
    return (factor * image + (1 - factor) * other).clamp(0, 1)


def turn_hue(image, angle):
    y, i, q = torch.einsum("dc,bchw->dbhw", RGB_TO_YIQ, image)
    cos, sin = angle.cos().squeeze(1), angle.sin().squeeze(1)
    yiq = torch.stack([y, cos * i - sin * q, sin * i + cos * q])
    return torch.einsum("cd,dbhw->bchw", YIQ_TO_RGB, yiq).clamp(0, 1)


def color_jitter(image, jitter):
    brightness, contrast, saturation, hue = jitter.view(-1, 4, 1, 1, 1).unbind(1)
    image = (image * brightness).clamp(0, 1)
    image = blend(image, to_grey(image).mean((2, 3), keepdim=True), contrast)
    image = blend(image, to_grey(image), saturation)
    return turn_hue(image, hue)


def augment(image, box, flip, jitter, is_jittered, is_grey):
    x = random_resized_crop(image, box, flip)
    x = torch.where(is_jittered.view(-1, 1, 1, 1), color_jitter(x, jitter), x)
    x = torch.where(is_grey.view(-1, 1, 1, 1), to_grey(x), x)
    return (x - MEAN) / STD


# Model


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = nn.Sequential()
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(inplanes, planes, 1, stride, bias=False),
                nn.BatchNorm2d(planes),
            )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.downsample(x))


class ResNet(nn.Module):
    """The first layer keeps the size, as is usual for CIFAR."""

    def __init__(self, widths=(12, 24, 32)):
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.layer1 = BasicBlock(widths[0], widths[0], 1)
        self.layer2 = BasicBlock(widths[0], widths[1], 2)
        self.layer3 = BasicBlock(widths[1], widths[2], 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.avgpool(x).flatten(1)


class ProjectionHead(nn.Module):
    """The last norm scales only."""

    def __init__(self, features, out):
        super().__init__()
        self.fc1 = nn.Linear(features, features, bias=False)
        self.bn1 = nn.BatchNorm1d(features)
        self.fc2 = nn.Linear(features, out, bias=False)
        self.bn2 = nn.BatchNorm1d(out)
        self.bn2.register_parameter("bias", None)

    def forward(self, x):
        x = F.relu(self.bn1(self.fc1(x)))
        return self.bn2(self.fc2(x))


class SimCLR(nn.Module):
    def __init__(self, features=32, projection=16):
        super().__init__()
        self.encoder = ResNet()
        self.projector = ProjectionHead(features, projection)
        self.probe = nn.Linear(features, CLASSES)

    def forward(self, views):
        """Views of (2, b, 3, h, w) share the statistics of the norms."""
        features = self.encoder(views.flatten(0, 1))
        projection = self.projector(features)
        logits = self.probe(features.detach())
        return projection.unflatten(0, (2, -1)), logits.unflatten(0, (2, -1))


def model():
    torch.manual_seed(2002)
    net = SimCLR()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight, 1.3)
            elif isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
                module.weight.uniform_(0.6, 1.4)
                if module.bias is not None:
                    module.bias.normal_(0, 0.2)
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 1.5)
    return net


# Data


def batches():
    """Waves of a slope for each class, and a spot; numbers for the views of each picture."""
    generator = torch.Generator().manual_seed(2003)

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    down = torch.arange(16.0).view(16, 1)
    across = torch.arange(16.0)
    made = []
    for size in (8, 6, 8):
        label = torch.randint(0, 5, (size,), generator=generator)
        slope = (0.6 * label + 0.2 * rand(size)).view(-1, 1, 1, 1)
        phase = 6.28 * rand(size, 3, 1, 1)
        way = slope.cos() * down + slope.sin() * across
        image = (
            110 + 60 * torch.sin(0.9 * way + phase) + 80 * (rand(size, 3, 1, 1) - 0.5)
        )
        y, x = 16 * rand(2, size, 1, 1, 1)
        spot = torch.exp(-((down - y).square() + (across - x).square()) / 10)
        image = image + 150 * (rand(size, 3, 1, 1) - 0.3) * spot
        image = image + 8 * torch.randn(image.shape, generator=generator)

        area, ratio = (
            0.25 + 0.75 * rand(size, 2),
            torch.exp(0.5 * (rand(size, 2) - 0.5)),
        )
        sides = torch.stack([(area / ratio).sqrt(), (area * ratio).sqrt()], 2)
        sides = sides.clamp(max=1)
        corner = (1 - sides) * rand(size, 2, 2)
        factors = 1 + 0.8 * (rand(size, 2, 4) * 2 - 1)
        factors[..., 3] = factors[..., 3] - 1
        made.append(
            {
                "image": image.clamp(0, 255).to(torch.uint8),
                "label": label,
                "box": torch.cat([corner, sides], 2),
                "flip": rand(size, 2) < 0.5,
                "jitter": factors,
                "is_jittered": rand(size, 2) < 0.8,
                "is_grey": rand(size, 2) < 0.2,
            }
        )
    return made


# Training


def forward(net, batch):
    image = batch["image"].float() / 255
    names = ("box", "flip", "jitter", "is_jittered", "is_grey")
    views = [
        augment(image, **{name: batch[name][:, view] for name in names})
        for view in range(2)
    ]
    projection, logits = net(torch.stack(views))
    l2 = 0.5 * net.probe.weight.square().sum()
    return {"projection": projection, "logits": logits, "l2": l2}


def nt_xent(projection):
    z = F.normalize(projection.flatten(0, 1), dim=1)
    similarity = z @ z.t() / TEMPERATURE
    itself = torch.eye(len(z), dtype=torch.bool)
    similarity = similarity.masked_fill(itself, float("-inf"))
    partner = torch.arange(len(z)).roll(len(z) // 2)
    return F.cross_entropy(similarity, partner)


def loss(output, batch):
    """The probe's decay is part of the loss, all others that of the optimizer."""
    contrastive = nt_xent(output["projection"])
    probe = F.cross_entropy(output["logits"].flatten(0, 1), batch["label"].repeat(2))
    return contrastive + probe + WEIGHT_DECAY * output["l2"]


class LARS(torch.optim.Optimizer):
    """A warm-up, then half a cosine; groups that do not adapt are those of SGD."""

    done = 0

    def rate(self):
        step = self.done + 1
        if step <= WARMUP:
            return LR * step / WARMUP
        return LR / 2 * (1 + math.cos(math.pi * (step - WARMUP) / (TOTAL - WARMUP)))

    @torch.no_grad()
    def step(self, closure=None):
        lr = self.rate()
        self.done += 1
        for group in self.param_groups:
            for p in group["params"]:
                update = p.grad + group["weight_decay"] * p
                if group["adapt"]:
                    update = update * TRUST * p.norm() / update.norm()
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].mul_(MOMENTUM).add_(update)
                p.add_(state["momentum"], alpha=-lr)


def optimizer(net):
    """Biases, norms and the probe neither adapt nor decay."""
    adapted, others = [], []
    for name, p in net.named_parameters():
        is_other = p.ndim == 1 or name.startswith("probe")
        (others if is_other else adapted).append(p)
    return LARS(
        [
            {"params": adapted, "weight_decay": WEIGHT_DECAY, "adapt": True},
            {"params": others, "weight_decay": 0.0, "adapt": False},
        ],
        {},
    )
