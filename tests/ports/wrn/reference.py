"""A wide residual network: Cutout and mixup, and a teacher that is the average of its weights."""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

SIZE, CLASSES = 16, 7
PAD, HOLE = 2, 6
SLOPE = 0.1
SMOOTHING, CONSISTENCY, TEMPERATURE = 0.1, 8.0, 0.5
LR, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 0.02
WARMUP, TOTAL = 2, 12
EMA_DECAY = 0.9

MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
STD = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)


class BasicBlock(nn.Module):
    """Where the shape changes, the shortcut begins behind the first activation."""

    def __init__(self, in_planes, planes, stride):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_planes)
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.shortcut = None
        if in_planes != planes or stride != 1:
            self.shortcut = nn.Conv2d(in_planes, planes, 1, stride, bias=False)

    def forward(self, x):
        out = F.leaky_relu(self.bn1(x), SLOPE)
        shortcut = x if self.shortcut is None else self.shortcut(out)
        out = self.conv1(out)
        out = self.conv2(F.leaky_relu(self.bn2(out), SLOPE))
        return shortcut + out


class WideResNet(nn.Module):
    def __init__(self, depth=16, widen=2, base=6):
        super().__init__()
        blocks = (depth - 4) // 6
        widths = [base, base * widen, 2 * base * widen, 4 * base * widen]
        self.conv1 = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.group1 = self.group(widths[0], widths[1], blocks, 1)
        self.group2 = self.group(widths[1], widths[2], blocks, 2)
        self.group3 = self.group(widths[2], widths[3], blocks, 2)
        self.bn = nn.BatchNorm2d(widths[3])
        self.fc = nn.Linear(widths[3], CLASSES)

    @staticmethod
    def group(in_planes, planes, blocks, stride):
        layers = [BasicBlock(in_planes, planes, stride)]
        layers += [BasicBlock(planes, planes, 1) for _ in range(blocks - 1)]
        return nn.Sequential(*layers)

    def forward(self, x):
        x = self.group3(self.group2(self.group1(self.conv1(x))))
        x = F.leaky_relu(self.bn(x), SLOPE)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class MeanTeacher(nn.Module):
    """The teacher is the average of the student, also of its statistics."""

    updates: torch.Tensor

    def __init__(self, student):
        super().__init__()
        self.student = student
        self.teacher = copy.deepcopy(student).requires_grad_(False).eval()
        self.register_buffer("updates", torch.tensor(0))

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, mixed, clean):
        with torch.no_grad():
            target = self.teacher(clean)
        return {"logits": self.student(mixed), "target": target}

    @torch.no_grad()
    def update_teacher(self):
        """The first values weigh as much as later ones: no trace of the beginning."""
        self.updates += 1
        rate = (1 - EMA_DECAY) / (1 - EMA_DECAY ** int(self.updates))
        now = self.student.state_dict()
        for name, average in self.teacher.state_dict().items():
            if average.is_floating_point():
                average.lerp_(now[name], rate)


def model():
    """As after some steps: with statistics, and a teacher that is behind the student."""
    torch.manual_seed(2334)
    net = MeanTeacher(WideResNet())
    with torch.no_grad():
        for module in net.student.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight, 2.0)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
                module.momentum = 1.0
        net.student(F.interpolate(torch.randn(16, 3, 4, 4), SIZE, mode="bilinear"))
        for module in net.student.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.1
        now = net.student.state_dict()
        for name, average in net.teacher.state_dict().items():
            if average.is_floating_point():
                average.copy_(now[name] * (1 + 0.1 * torch.randn(average.shape)))
        net.updates.fill_(4)
    return net


def batches():
    """Waves with a slope for each class, and a bright spot; all that is random is given."""
    generator = torch.Generator().manual_seed(2302)

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    def randint(high, *shape):
        return torch.randint(0, high, shape, generator=generator)

    down = torch.arange(16.0).view(16, 1, 1)
    across = torch.arange(16.0).view(16, 1)
    made = []
    for size in (8, 6, 8):
        label = randint(7, size)
        slope = (0.45 * label + 0.15 * rand(size)).view(-1, 1, 1, 1)
        way = slope.cos() * down + slope.sin() * across
        image = 115 + 55 * torch.sin(0.8 * way + 6.28 * rand(size, 1, 1, 3))
        y, x = 16 * rand(2, size, 1, 1, 1)
        spot = torch.exp(-((down - y).square() + (across - x).square()) / 12)
        image = image + 160 * (rand(size, 1, 1, 3) - 0.4) * spot
        image = image + 8 * torch.randn(image.shape, generator=generator)
        made.append(
            {
                "image": image.clamp(0, 255).to(torch.uint8),
                "label": label,
                "offset": randint(5, size, 2),
                "flip": rand(size) < 0.5,
                "hole": randint(16, size, 2),
                "partner": torch.randperm(size, generator=generator),
                "lam": 0.5 + 0.5 * rand(size),
            }
        )
    return made


def crop_and_flip(image, offset, flip):
    padded = F.pad(image, (PAD, PAD, PAD, PAD), mode="reflect")
    crops = []
    for item, (top, left), mirror in zip(padded, offset.tolist(), flip):
        crop = item[:, top : top + SIZE, left : left + SIZE]
        crops.append(crop.flip(2) if mirror else crop)
    return torch.stack(crops)


def cutout(image, hole):
    """Squares of zeros; a part of them may lie outside."""
    mask = torch.ones(len(image), 1, SIZE, SIZE)
    for item, (y, x) in zip(mask, hole.tolist()):
        top, left = max(y - HOLE // 2, 0), max(x - HOLE // 2, 0)
        item[:, top : y + HOLE // 2, left : x + HOLE // 2] = 0
    return image * mask


def mix(x, batch):
    lam = batch["lam"].view(-1, *[1] * (x.ndim - 1))
    return lam * x + (1 - lam) * x[batch["partner"]]


def forward(net, batch):
    """The teacher sees the pictures before Cutout and mixup."""
    image = batch["image"].permute(0, 3, 1, 2).float() / 255
    clean = (crop_and_flip(image, batch["offset"], batch["flip"]) - MEAN) / STD
    mixed = mix(cutout(clean, batch["hole"]), batch)
    return net(mixed, clean)


def loss(output, batch):
    """Cross-entropy with both labels, and the teacher's answers mixed like the pictures."""
    logits, label, lam = output["logits"], batch["label"], batch["lam"]
    options = {"reduction": "none", "label_smoothing": SMOOTHING}
    first = F.cross_entropy(logits, label, **options)
    second = F.cross_entropy(logits, label[batch["partner"]], **options)
    entropy = (lam * first + (1 - lam) * second).mean()
    target = mix((output["target"] / TEMPERATURE).softmax(1), batch)
    return entropy + CONSISTENCY * F.mse_loss(logits.softmax(1), target)


class TeacherSGD(torch.optim.SGD):
    """A warm-up, then a part of a cosine; the teacher follows each step."""

    done = 0

    def __init__(self, net, groups):
        super().__init__(groups, lr=LR, momentum=MOMENTUM, nesterov=True)
        self.net = net

    def rate(self):
        step = self.done + 1
        if step <= WARMUP:
            return LR * step / WARMUP
        progress = (step - WARMUP) / (TOTAL - WARMUP)
        return LR * math.cos(7 / 16 * math.pi * progress)

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = self.rate()
        self.done += 1
        result = super().step(closure)
        self.net.update_teacher()
        return result


def optimizer(net):
    """Norms and biases do not decay."""
    params = list(net.student.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    return TeacherSGD(net, groups)
