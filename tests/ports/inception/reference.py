"""A small GoogLeNet with batch normalisation and factorised kernels, and its training."""

import torch
from torch import nn
from torch.nn import functional as F

CROP = (32, 40)
MEAN, STD = (0.485, 0.456, 0.406), 0.226
NUM_CLASSES = 9
AUX_WEIGHT, SMOOTHING = 0.3, 0.1
LR, GAMMA, STEP_SIZE = 0.045, 0.7, 2
WEIGHT_DECAY, MAX_NORM = 5e-3, 2.0


class BasicConv2d(nn.Module):
    def __init__(self, inp, out, kernel, stride=1, padding=0):
        super().__init__()
        self.conv = nn.Conv2d(inp, out, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out, eps=0.001)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)))


class InceptionA(nn.Module):
    """5x5 is two of 3x3."""

    def __init__(self, inp, ch1x1, ch3x3red, ch3x3, ch5x5red, ch5x5, pool_proj):
        super().__init__()
        self.branch1x1 = BasicConv2d(inp, ch1x1, 1)
        self.branch3x3 = nn.Sequential(
            BasicConv2d(inp, ch3x3red, 1),
            BasicConv2d(ch3x3red, ch3x3, 3, padding=1),
        )
        self.branch5x5 = nn.Sequential(
            BasicConv2d(inp, ch5x5red, 1),
            BasicConv2d(ch5x5red, ch5x5, 3, padding=1),
            BasicConv2d(ch5x5, ch5x5, 3, padding=1),
        )
        self.branch_pool = BasicConv2d(inp, pool_proj, 1)

    def forward(self, x):
        branch1x1 = self.branch1x1(x)
        branch3x3 = self.branch3x3(x)
        branch5x5 = self.branch5x5(x)
        branch_pool = F.max_pool2d(x, kernel_size=3, stride=1, padding=1)
        branch_pool = self.branch_pool(branch_pool)
        return torch.cat([branch1x1, branch3x3, branch5x5, branch_pool], 1)


class InceptionB(nn.Module):
    """7x7 is 1x7, then 7x1."""

    def __init__(self, inp, ch1x1, ch3x3red, ch3x3, ch7x7red, ch7x7, pool_proj):
        super().__init__()
        self.branch1x1 = BasicConv2d(inp, ch1x1, 1)
        self.branch3x3 = nn.Sequential(
            BasicConv2d(inp, ch3x3red, 1),
            BasicConv2d(ch3x3red, ch3x3, 3, padding=1),
        )
        self.branch7x7 = nn.Sequential(
            BasicConv2d(inp, ch7x7red, 1),
            BasicConv2d(ch7x7red, ch7x7, (1, 7), padding=(0, 3)),
            BasicConv2d(ch7x7, ch7x7, (7, 1), padding=(3, 0)),
        )
        self.branch_pool = BasicConv2d(inp, pool_proj, 1)

    def forward(self, x):
        branch1x1 = self.branch1x1(x)
        branch3x3 = self.branch3x3(x)
        branch7x7 = self.branch7x7(x)
        branch_pool = F.avg_pool2d(x, kernel_size=3, stride=1, padding=1)
        branch_pool = self.branch_pool(branch_pool)
        return torch.cat([branch1x1, branch3x3, branch7x7, branch_pool], 1)


class InceptionAux(nn.Module):
    def __init__(self, inp, num_classes):
        super().__init__()
        self.conv = BasicConv2d(inp, 8, 1)
        self.fc1 = nn.Linear(8 * 2 * 3, 24)
        self.fc2 = nn.Linear(24, num_classes)

    def forward(self, x):
        x = F.avg_pool2d(x, kernel_size=5, stride=3, ceil_mode=True)
        x = torch.flatten(self.conv(x), 1)
        return self.fc2(F.relu(self.fc1(x)))


class GoogLeNet(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv1 = BasicConv2d(3, 12, 5, stride=2, padding=2)
        self.maxpool1 = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.norm1 = nn.LocalResponseNorm(5, alpha=0.4, beta=0.75, k=1.0)
        self.conv2 = BasicConv2d(12, 12, 1)
        self.conv3 = BasicConv2d(12, 24, 3, padding=1)
        self.norm2 = nn.LocalResponseNorm(5, alpha=0.4, beta=0.75, k=1.0)

        self.inception3a = InceptionA(24, 10, 8, 14, 6, 8, 8)
        self.aux = InceptionAux(40, num_classes)
        self.inception3b = InceptionB(40, 12, 10, 16, 6, 10, 8)
        self.maxpool2 = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.inception4a = InceptionA(46, 14, 12, 20, 8, 10, 10)

        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(54, num_classes)

    def forward(self, x):
        x = self.norm1(self.maxpool1(self.conv1(x)))
        x = self.norm2(self.conv3(self.conv2(x)))

        x = self.inception3a(x)
        aux = self.aux(x)
        x = self.maxpool2(self.inception3b(x))
        x = self.inception4a(x)

        x = torch.flatten(self.avgpool(x), 1)
        return self.fc(x), aux


def model():
    torch.manual_seed(1409)
    net = GoogLeNet(NUM_CLASSES)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.trunc_normal_(module.weight, std=0.1)
            elif isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 1.5)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight, gain=1.5)
                module.bias.normal_(0, 0.2)
    return net


def batches():
    """Stripes of a colour, as many and as steep as the class says, on a slope of light."""
    generator = torch.Generator().manual_seed(4842)
    down = torch.arange(36.0).view(36, 1)
    across = torch.arange(46.0).view(1, 46)
    made = []
    for size in (5, 4, 5, 3):
        label = torch.randint(0, 9, (size,), generator=generator)
        images = []
        for kind in label.tolist():
            angle = torch.tensor(0.35 * kind + 0.1)
            phase, left, top = 6 * torch.rand(3, generator=generator)
            wave = down * torch.sin(angle) + across * torch.cos(angle)
            wave = torch.sin(wave * (0.25 + 0.08 * (kind % 3)) + phase)
            colour = torch.tensor([90.0, 60.0, 30.0]).roll(kind % 3).view(3, 1, 1)
            light = 70 + 8 * left + left * down / 2 + top * across / 4
            noise = 12 * torch.randn(3, 36, 46, generator=generator)
            images.append(light + colour * wave + noise)
        corner = torch.stack(
            [
                torch.randint(0, 5, (size,), generator=generator),
                torch.randint(0, 7, (size,), generator=generator),
            ],
            dim=1,
        )
        made.append(
            {
                "image": torch.stack(images).clamp(0, 255).to(torch.uint8),
                "corner": corner,
                "flip": torch.arange(size) % 2 == 0,
                "label": label,
            }
        )
    return made


def transform(batch):
    height, width = CROP
    images = []
    for image, corner, flip in zip(batch["image"], batch["corner"], batch["flip"]):
        top, left = corner.tolist()
        image = image[:, top : top + height, left : left + width]
        images.append(image.flip(2) if flip else image)
    mean = torch.tensor(MEAN).view(3, 1, 1)
    return (torch.stack(images) / 255 - mean) / STD


def forward(net, batch):
    logits, aux = net(transform(batch))
    return {"logits": logits, "aux": aux}


def loss(output, batch):
    criterion = nn.CrossEntropyLoss(label_smoothing=SMOOTHING)
    main = criterion(output["logits"], batch["label"])
    return main + AUX_WEIGHT * criterion(output["aux"], batch["label"])


class StepRMSprop(torch.optim.RMSprop):
    """Clips by norm; the rate falls every few steps."""

    done = 0

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        for group in self.param_groups:
            group["lr"] = LR * GAMMA ** (self.done // STEP_SIZE)
        self.done += 1
        return super().step(closure)


def optimizer(net):
    """Scales and biases do not decay."""
    decay = [p for p in net.parameters() if p.ndim > 1]
    plain = [p for p in net.parameters() if p.ndim == 1]
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": plain, "weight_decay": 0.0},
    ]
    return StepRMSprop(groups, lr=LR, alpha=0.9, eps=0.1, momentum=0.9)
