"""A detector with learned queries: patches encoded once, boxes and classes decoded."""

import torch
from torch import nn
from torch.nn import functional as F

CLASSES = 4


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.linear1 = nn.Linear(dim, 2 * dim)
        self.linear2 = nn.Linear(2 * dim, dim)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)

    def forward(self, x, place, is_pad):
        q = x + place
        y = self.attention(q, q, x, key_padding_mask=is_pad, need_weights=False)[0]
        x = self.norm1(x + y)
        return self.norm2(x + self.linear2(F.relu(self.linear1(x))))


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.self_attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.cross_attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.linear1 = nn.Linear(dim, 2 * dim)
        self.linear2 = nn.Linear(2 * dim, dim)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.norm3 = nn.LayerNorm(dim)

    def forward(self, x, memory, query, place, is_pad):
        q = x + query
        x = self.norm1(x + self.self_attention(q, q, x, need_weights=False)[0])
        y = self.cross_attention(
            x + query,
            memory + place,
            memory,
            key_padding_mask=is_pad,
            need_weights=False,
        )[0]
        x = self.norm2(x + y)
        return self.norm3(x + self.linear2(F.relu(self.linear1(x))))


class FrozenNorm(nn.Module):
    """Batch norm with statistics and scale that stay as they are."""

    def __init__(self, dim):
        super().__init__()
        self.register_buffer("weight", torch.ones(dim))
        self.register_buffer("bias", torch.zeros(dim))
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_var", torch.ones(dim))

    def forward(self, x):
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


class Detector(nn.Module):
    def __init__(self, dim=16, heads=4, queries=5):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.frozen = FrozenNorm(8)
        self.project = nn.Conv2d(8, dim, 1)
        self.row = nn.Embedding(8, dim // 2)
        self.column = nn.Embedding(8, dim // 2)
        self.encoder = EncoderLayer(dim, heads)
        self.query = nn.Embedding(queries, dim)
        self.decoder = nn.ModuleList([DecoderLayer(dim, heads) for _ in range(2)])
        self.norm = nn.LayerNorm(dim)
        self.classes = nn.Linear(dim, CLASSES + 1)
        self.box = nn.Sequential(
            nn.Linear(dim, dim),
            nn.ReLU(),
            nn.Linear(dim, dim),
            nn.ReLU(),
            nn.Linear(dim, 4),
        )

    def forward(self, image, is_pad):
        x = self.project(F.relu(self.frozen(self.stem(image))))
        b, d, h, w = x.shape
        column = self.column.weight[:w][None].expand(h, -1, -1)
        row = self.row.weight[:h][:, None].expand(-1, w, -1)
        place = torch.cat([column, row], -1).flatten(0, 1)
        is_pad = (
            F.interpolate(is_pad[:, None].to(x.dtype), size=(h, w))[:, 0]
            .bool()
            .flatten(1)
        )
        memory = self.encoder(x.flatten(2).transpose(1, 2), place, is_pad)
        query = self.query.weight.expand(b, -1, -1)
        y = torch.zeros_like(query)
        for layer in self.decoder:
            y = layer(y, memory, query, place, is_pad)
        y = self.norm(y)
        return {"classes": self.classes(y), "boxes": self.box(y).sigmoid()}


def corners(box):
    center, size = box[..., :2], box[..., 2:]
    return torch.cat([center - size / 2, center + size / 2], -1)


def generalized_iou(a, b):
    a, b = corners(a), corners(b)
    area_a = (a[..., 2:] - a[..., :2]).prod(-1)
    area_b = (b[..., 2:] - b[..., :2]).prod(-1)
    low = torch.maximum(a[..., :2], b[..., :2])
    high = torch.minimum(a[..., 2:], b[..., 2:])
    inter = (high - low).clamp(min=0).prod(-1)
    union = area_a + area_b - inter
    outer = torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(
        a[..., :2], b[..., :2]
    )
    hull = outer.prod(-1)
    return inter / union - (hull - union) / hull


def model():
    torch.manual_seed(220)
    net = Detector()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.MultiheadAttention):
                module.in_proj_bias.normal_(0, 0.2)
                module.out_proj.bias.normal_(0, 0.2)
        net.frozen.weight.uniform_(0.6, 1.4)
        net.frozen.bias.normal_(0, 0.2)
        net.frozen.running_mean.normal_(0, 0.3)
        net.frozen.running_var.uniform_(0.1, 0.8)
    return net


def batches():
    generator = torch.Generator().manual_seed(221)
    image = torch.randn(2, 3, 10, 12, generator=generator)
    is_pad = torch.zeros(2, 10, 12, dtype=torch.bool)
    is_pad[0, :, 8:] = True
    is_pad[1, 6:] = True
    image = image * ~is_pad[:, None]
    # which query is matched with which object, and -1 for none
    matched = torch.tensor([[2, -1, 0, 1, -1], [-1, 1, -1, -1, 0]])
    center = torch.rand(2, 3, 2, generator=generator) * 0.5 + 0.25
    size = torch.rand(2, 3, 2, generator=generator) * 0.3 + 0.1
    kinds = torch.randint(0, 4, (2, 3), generator=generator)
    return [
        {
            "image": image,
            "is_pad": is_pad,
            "matched": matched,
            "boxes": torch.cat([center, size], -1),
            "kinds": kinds,
        }
    ]


def forward(net, batch):
    return net(batch["image"], batch["is_pad"])


def loss(output, batch):
    matched = batch["matched"]
    sample, query = torch.where(matched >= 0)
    target = torch.full(matched.shape, CLASSES)
    target[sample, query] = batch["kinds"][sample, matched[sample, query]]
    weight = torch.ones(CLASSES + 1, dtype=output["classes"].dtype)
    weight[-1] = 0.1
    named = F.cross_entropy(
        output["classes"].flatten(0, 1), target.flatten(), weight=weight
    )
    ours = output["boxes"][sample, query]
    theirs = batch["boxes"][sample, matched[sample, query]]
    absolute = F.l1_loss(ours, theirs, reduction="sum") / len(ours)
    overlap = (1 - generalized_iou(ours, theirs)).sum() / len(ours)
    return named + 5 * absolute + 2 * overlap


def optimizer(net):
    backbone = [p for n, p in net.named_parameters() if n.startswith("stem")]
    rest = [p for n, p in net.named_parameters() if not n.startswith("stem")]
    groups = [{"params": rest}, {"params": backbone, "lr": 1e-4}]
    return torch.optim.AdamW(groups, lr=1e-3, weight_decay=1e-2)
