"""A small HRNet for poses: branches of three resolutions that exchange what they see."""

import torch
from torch import nn
from torch.nn import functional as F

IMAGE_SIZE, STRIDE = (64, 48), 4
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
STEM, BOTTLENECK, EXPANSION = 16, 12, 2
WIDTHS = (8, 16, 32)
FLIP_PAIRS = ((1, 2), (3, 4), (5, 6))
JOINT_WEIGHTS = (1.0, 0.9, 0.9, 1.5, 1.5, 1.2, 1.2)
VISIBILITY_WEIGHTS = (0.0, 0.6, 1.0)
NUM_JOINTS = len(JOINT_WEIGHTS)
SIGMA, CUTOFF = 1.0, 3
LR, WARMUP, WEIGHT_DECAY = 4e-3, 4, 0.01


def conv3x3(inp, out, stride=1):
    return nn.Conv2d(inp, out, 3, stride, padding=1, bias=False)


def conv1x1(inp, out):
    return nn.Conv2d(inp, out, 1, bias=False)


class BasicBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = conv3x3(width, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv3x3(width, width)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + x)


class Bottleneck(nn.Module):
    def __init__(self, inp, width):
        super().__init__()
        out = width * EXPANSION
        self.conv1 = conv1x1(inp, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv3x3(width, width)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = conv1x1(width, out)
        self.bn3 = nn.BatchNorm2d(out)
        self.downsample = nn.Sequential(conv1x1(inp, out), nn.BatchNorm2d(out))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return F.relu(out + self.downsample(x))


def down(inp, out, steps):
    """Each step halves; the last one changes the width and has no ReLU."""
    layers = []
    for _ in range(steps - 1):
        layers += [conv3x3(inp, inp, 2), nn.BatchNorm2d(inp), nn.ReLU()]
    return nn.Sequential(*layers, conv3x3(inp, out, 2), nn.BatchNorm2d(out))


def up(inp, out, steps):
    return nn.Sequential(
        conv1x1(inp, out),
        nn.BatchNorm2d(out),
        nn.Upsample(scale_factor=2**steps, mode="nearest"),
    )


class HighResolutionModule(nn.Module):
    """Blocks on each branch, then every output is a sum over all branches."""

    def __init__(self, widths, blocks, outputs):
        super().__init__()
        self.branches = nn.ModuleList(
            [nn.Sequential(*[BasicBlock(w) for _ in range(blocks)]) for w in widths]
        )
        self.fuse_layers = nn.ModuleList()
        for i in range(outputs):
            row = nn.ModuleList()
            for j, width in enumerate(widths):
                if j > i:
                    row.append(up(width, widths[i], j - i))
                elif j < i:
                    row.append(down(width, widths[i], i - j))
                else:
                    row.append(nn.Identity())
            self.fuse_layers.append(row)

    def forward(self, xs):
        xs = [branch(x) for branch, x in zip(self.branches, xs)]
        outs = []
        for row in self.fuse_layers:
            y = row[0](xs[0])
            for layer, x in zip(list(row)[1:], xs[1:]):
                y = y + layer(x)
            outs.append(F.relu(y))
        return outs


def transition(inp, out, stride):
    return nn.Sequential(conv3x3(inp, out, stride), nn.BatchNorm2d(out), nn.ReLU())


class PoseHighResolutionNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = conv3x3(3, STEM, 2)
        self.bn1 = nn.BatchNorm2d(STEM)
        self.conv2 = conv3x3(STEM, STEM, 2)
        self.bn2 = nn.BatchNorm2d(STEM)
        self.layer1 = Bottleneck(STEM, BOTTLENECK)
        wide = BOTTLENECK * EXPANSION
        self.transition1 = nn.ModuleList(
            [transition(wide, WIDTHS[0], 1), transition(wide, WIDTHS[1], 2)]
        )
        self.stage2 = HighResolutionModule(WIDTHS[:2], blocks=2, outputs=2)
        self.transition2 = transition(WIDTHS[1], WIDTHS[2], 2)
        self.stage3 = nn.Sequential(
            HighResolutionModule(WIDTHS, blocks=1, outputs=3),
            HighResolutionModule(WIDTHS, blocks=1, outputs=1),
        )
        self.final_layer = nn.Conv2d(WIDTHS[0], NUM_JOINTS, 1)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = self.layer1(x)
        xs = self.stage2([layer(x) for layer in self.transition1])
        xs = self.stage3([*xs, self.transition2(xs[-1])])
        return self.final_layer(xs[0])


def model():
    """As after some training: norms are away from one and zero."""
    torch.manual_seed(1902)
    net = PoseHighResolutionNet()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 1.5)
        net.final_layer.weight.normal_(0, 0.2)
        net.final_layer.bias.normal_(0, 0.2)
    return net


def batches():
    """People of seven coloured discs; some joints are hidden, unknown or out of sight."""
    generator = torch.Generator().manual_seed(1903)
    pose = torch.tensor(
        [[24, 10], [32, 22], [15, 21], [39, 36], [8, 34], [30, 57], [17, 58.0]]
    )
    colours = torch.tensor(
        [
            [230, 200, 90],
            [200, 60, 60],
            [60, 60, 200],
            [240, 130, 40],
            [40, 180, 220],
            [180, 50, 180],
            [50, 190, 90.0],
        ]
    )
    down, across = torch.arange(64.0).view(64, 1), torch.arange(48.0)
    made = []
    for size in (5, 4):
        shift = 5 * torch.randn(size, 1, 2, generator=generator)
        joints = pose + shift + 3 * torch.randn(size, 7, 2, generator=generator)
        joints[0, 3, 0], joints[1, 5, 1], joints[2, 4, 0] = 50.3, 82.0, -1.4
        visible = torch.randint(0, 6, (size, 7), generator=generator)
        visible = (visible + 1).clamp(max=4) // 2
        visible[1, 5] = 2
        image = 80 + 70 * torch.rand(size, 1, 1, 3, generator=generator)
        image = image + 0.8 * (down - 30).unsqueeze(2) + torch.zeros(48, 1)
        for k in range(7):
            x, y = joints[:, k, 0].view(-1, 1, 1), joints[:, k, 1].view(-1, 1, 1)
            near = torch.exp(-((down - y) ** 2 + (across - x) ** 2) / 18)
            near = near * (visible[:, k] == 2).view(-1, 1, 1)
            image = image + near.unsqueeze(3) * (colours[k] - image)
        image = image + 12 * torch.randn(image.shape, generator=generator)
        made.append(
            {
                "image": image.clamp(0, 255).to(torch.uint8),
                "joints": joints,
                "visible": visible,
                "flip": torch.arange(size) % 3 == 1,
            }
        )
    return made


def forward(net, batch):
    x = batch["image"].permute(0, 3, 1, 2).contiguous() / 255
    x = (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    return net(torch.where(batch["flip"].view(-1, 1, 1, 1), x.flip(3), x))


def flip_joints(joints, visible, flip):
    """Mirror the places; left and right change their names."""
    order = list(range(NUM_JOINTS))
    for left, right in FLIP_PAIRS:
        order[left], order[right] = right, left
    x, y = joints.unbind(2)
    mirrored = torch.stack([IMAGE_SIZE[1] - 1 - x, y], dim=2)[:, order]
    joints = torch.where(flip.view(-1, 1, 1), mirrored, joints)
    return joints, torch.where(flip.view(-1, 1), visible[:, order], visible)


def heatmaps(joints, visible):
    """Gaussians that end after three sigmas; what lies outside has no weight."""
    height, width = IMAGE_SIZE[0] // STRIDE, IMAGE_SIZE[1] // STRIDE
    x, y = torch.floor(joints / STRIDE + 0.5).unbind(2)
    dx = torch.arange(width) - x.unsqueeze(2)
    dy = torch.arange(height) - y.unsqueeze(2)
    square = dx.unsqueeze(2) ** 2 + dy.unsqueeze(3) ** 2
    near = (dx.abs() <= CUTOFF).unsqueeze(2) & (dy.abs() <= CUTOFF).unsqueeze(3)
    target = torch.exp(-square / (2 * SIGMA**2)) * near
    inside = near.any(dim=3).any(dim=2)
    return target, torch.tensor(VISIBILITY_WEIGHTS)[visible] * inside


def loss(output, batch):
    joints, visible = flip_joints(batch["joints"], batch["visible"], batch["flip"])
    target, weight = heatmaps(joints, visible)
    weight = (weight * torch.tensor(JOINT_WEIGHTS))[:, :, None, None]
    return 0.5 * F.mse_loss(output * weight, target * weight)


class WarmupAdam(torch.optim.Adam):
    done = 0

    def step(self, closure=None):
        self.done += 1
        for group in self.param_groups:
            group["lr"] = LR * min(1.0, self.done / WARMUP)
        return super().step(closure)


def optimizer(net):
    """L2 for the convolutions; norms and the bias have none."""
    decay = [p for p in net.parameters() if p.ndim > 1]
    rest = [p for p in net.parameters() if p.ndim == 1]
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]
    return WarmupAdam(groups, lr=LR, betas=(0.9, 0.99), eps=1e-4)
