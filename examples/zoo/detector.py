"""A one-stage detector: backbone, feature pyramid, and a dict of scores and decoded boxes."""

import torch
import torch.nn.functional as F
from torch import nn

SIZE, STRIDES = 48, (4, 8)


def conv_bn(inputs, outputs, stride):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.SiLU(inplace=True),
    )


class Detector(nn.Module):
    def __init__(self, classes=2, width=24):
        super().__init__()
        self.classes = classes
        self.c1 = nn.Sequential(conv_bn(3, 12, 2), conv_bn(12, width, 2))
        self.c2 = conv_bn(width, 2 * width, 2)
        self.lateral1 = nn.Conv2d(width, width, 1)
        self.lateral2 = nn.Conv2d(2 * width, width, 1)
        self.smooth = nn.Conv2d(width, width, 3, padding=1)
        self.cls_head = nn.Conv2d(width, classes, 3, padding=1)
        self.box_head = nn.Conv2d(width, 4, 3, padding=1)
        nn.init.constant_(self.cls_head.bias, -3.0)

    def decode(self, raw, stride):
        """Centres and sizes in pixels, from offsets and logarithms in cells."""
        b, _, h, w = raw.shape
        y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        grid = torch.stack((x, y)).to(raw)
        xy = (raw[:, :2].sigmoid() * 2 - 0.5 + grid) * stride
        wh = torch.exp(raw[:, 2:].clamp(max=4.0)) * stride
        return torch.cat((xy, wh), 1).view(b, 4, h * w)

    def forward(self, images):
        c1 = self.c1(images)
        c2 = self.c2(c1)
        p2 = self.lateral2(c2)
        p1 = self.lateral1(c1) + F.interpolate(p2, scale_factor=2)
        cls, box = [], []
        for p, stride in zip((self.smooth(p1), p2), STRIDES):
            p = F.silu(p)
            cls.append(self.cls_head(p).flatten(2))
            box.append(self.decode(self.box_head(p), stride))
        scores = torch.cat(cls, 2).sigmoid().permute(0, 2, 1)
        return {"cls": scores, "box": torch.cat(box, 2).permute(0, 2, 1)}


def scenes(count, seed):
    """One rectangle a picture; its class is its colour; and the box as x, y, w, h."""
    g = torch.Generator().manual_seed(seed)
    wh = torch.rand(count, 2, generator=g) * 12 + 8
    xy = torch.rand(count, 2, generator=g) * 24 + 12
    label = torch.randint(0, 2, (count,), generator=g)
    at = torch.arange(SIZE)
    inside_x = (at - xy[:, :1]).abs() < wh[:, :1] / 2
    inside_y = (at - xy[:, 1:]).abs() < wh[:, 1:] / 2
    box = (inside_y[:, None, :, None] & inside_x[:, None, None, :]).float()
    colour = torch.tensor([[1.0, 0.2, 0.1], [0.1, 0.3, 1.0]])[label][:, :, None, None]
    image = box * colour + 0.2 * torch.rand(count, 3, SIZE, SIZE, generator=g)
    return image, torch.cat([xy, wh], 1), label


def loss(output, batch):
    """Cells whose decoded centre is nearest to the true one are positive."""
    _, target, label = batch
    near = (output["box"][..., :2].detach() - target[:, None, :2]).norm(dim=-1) < 6
    wanted = near.unsqueeze(-1) * F.one_hot(label, 2).unsqueeze(1)
    scores = F.binary_cross_entropy(output["cls"], wanted.float())
    miss = (output["box"] - target[:, None]).abs().mean(-1)
    return 10 * scores + 0.05 * miss[near].sum() / near.sum().clamp(min=1)


def model():
    torch.manual_seed(0)
    net = Detector()
    optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3)
    for step in range(40):
        batch = scenes(16, 100 + step)
        optimizer.zero_grad()
        loss(forward(net, batch), batch).backward()
        optimizer.step()
    return net.eval()


def forward(model, batch):
    return model(batch[0])


def batches():
    return [scenes(8, seed) for seed in range(8)]


def held_out():
    return [scenes(8, seed) for seed in range(50, 56)]
