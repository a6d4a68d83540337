"""Rows of pixels: every convolution a product, windows by index, layers as stacked weights."""

import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

SIDE, PATCH, WINDOW = 8, 4, 3
KINDS = "foreground background top_left bottom_right".split()


class Bag(nn.Module):
    """Parameters by name."""

    def __init__(self, **values):
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value.clone().contiguous()))


class Store:
    """Reads tensors below a prefix."""

    def __init__(self, state, prefix=""):
        self.state, self.prefix = state, prefix

    def __getitem__(self, name):
        return self.state[self.prefix + name]

    def below(self, prefix):
        return Store(self.state, self.prefix + prefix + ".")

    def cat(self, pattern, parts):
        return torch.cat([self[pattern.format(part)] for part in parts])

    def stack(self, pattern, parts):
        return torch.stack([self[pattern.format(part)] for part in parts])


def pixels_to_patches(x, p):
    """(n, c, h, w) to rows of p * p pixels with c channels each."""
    n, c, h, w = x.shape
    x = x.view(n, c, h // p, p, w // p, p)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(n, -1, p * p * c)


def neighbours(x):
    """(n, side * side, c) to rows of c channels with nine neighbours each."""
    x = x.transpose(1, 2).unflatten(2, (SIDE, SIDE))
    return F.unfold(x, 3, padding=1).transpose(1, 2)


def enlarge(x, weight, bias, side):
    """(n, side * side, c) to (n, 4 * side * side, c'), each row to two rows of two."""
    x = F.linear(x, weight) + bias.repeat_interleave(4)
    x = F.pixel_shuffle(x.transpose(1, 2).unflatten(2, (side, side)), 2)
    return x.flatten(2).transpose(1, 2)


def window_index(side, window):
    """For each window its places in the image; side * side where it hangs over."""
    whole = -(-side // window) * window
    places = torch.full((whole, whole), side * side)
    places[:side, :side] = torch.arange(side * side).view(side, side)
    blocks = places.unfold(0, window, window).unfold(1, window, window)
    return blocks.reshape(-1, window * window)


def norm(x, gain, shift, eps):
    var, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
    return (x - mean) / (var + eps).sqrt() * gain + shift


def attend(q, k, v, bias=None):
    """(..., heads, tokens, size), heads joined in the result."""
    scores = torch.matmul(q, k.mT) / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias
    top = scores.detach().amax(-1, keepdim=True)
    share = (scores - top).exp()
    share = share / share.sum(-1, keepdim=True)
    return torch.matmul(share, v).transpose(-3, -2).flatten(-2)


def heads(x, count):
    return x.unflatten(-1, (count, -1)).transpose(-3, -2)


class Vision(nn.Module):
    """Rows of a block's weights for queries, keys and values, head by head."""

    def __init__(self, s, heads=3, depth=3):
        super().__init__()
        self.heads = heads
        self.patch = Bag(
            w=s["patch_embed.weight"].permute(0, 2, 3, 1).flatten(1),
            b=s["patch_embed.bias"],
            place=s["pos_embed"].flatten(0, 2),
        )
        self.blocks = nn.ModuleList(self.block(s, f"blocks.{i}.") for i in range(depth))
        self.neck = Bag(
            reduce=s["neck.0.weight"].flatten(1),
            gain1=s["neck.1.weight"],
            shift1=s["neck.1.bias"],
            mix=s["neck.2.weight"].flatten(1),
            gain2=s["neck.3.weight"],
            shift2=s["neck.3.bias"],
        )
        self.register_buffer("windows", window_index(SIDE, WINDOW), persistent=False)

    def by_head(self, x):
        """Queries, keys, values of all heads to heads of queries, keys, values."""
        return x.unflatten(0, (3, self.heads, -1)).transpose(0, 1).flatten(0, 2)

    def block(self, s, prefix):
        return Bag(
            gain=s.stack(prefix + "norm{}.weight", (1, 2)),
            shift=s.stack(prefix + "norm{}.bias", (1, 2)),
            qkv=self.by_head(s[prefix + "attn.qkv.weight"]),
            qkv_b=self.by_head(s[prefix + "attn.qkv.bias"]),
            out=s[prefix + "attn.proj.weight"],
            out_b=s[prefix + "attn.proj.bias"],
            steps=s.stack(prefix + "attn.rel_pos_{}", "hw"),
            up=s[prefix + "mlp.0.weight"],
            up_b=s[prefix + "mlp.0.bias"],
            down=s[prefix + "mlp.2.weight"],
            down_b=s[prefix + "mlp.2.bias"],
        )

    def steps(self, q, table, side):
        """What each query gives to the steps to the rows, and to the columns."""
        place = torch.arange(side)
        step = place[:, None] - place + side - 1
        by_step = torch.einsum("...qd,asd->a...qs", q, table)
        row = step.repeat_interleave(side, 0).expand(*q.shape[:-1], -1)
        column = step.repeat(side, 1).expand(*q.shape[:-1], -1)
        rows = by_step[0].gather(-1, row)
        columns = by_step[1].gather(-1, column)
        return (rows.unsqueeze(-1) + columns.unsqueeze(-2)).flatten(-2)

    def attention(self, x, p, side):
        x = F.linear(x, p.qkv, p.qkv_b)
        q, k, v = heads(x, self.heads).chunk(3, dim=-1)
        y = attend(q, k, v, self.steps(q, p.steps, side))
        return F.linear(y, p.out, p.out_b)

    def in_windows(self, x, p):
        empty = x.new_zeros(len(x), 1, x.shape[2])
        parts = torch.cat((x, empty), dim=1)[:, self.windows]
        parts = self.attention(parts, p, WINDOW).flatten(1, 2)
        back = self.windows.flatten().argsort()[: x.shape[1]]
        return parts[:, back]

    def forward(self, image):
        x = F.linear(pixels_to_patches(image, PATCH), self.patch.w, self.patch.b)
        x = x + self.patch.place
        for i, p in enumerate(self.blocks):
            y = norm(x, p.gain[0], p.shift[0], 1e-6)
            y = self.attention(y, p, SIDE) if i % 2 else self.in_windows(y, p)
            x = x + y
            y = norm(x, p.gain[1], p.shift[1], 1e-6)
            y = F.gelu(F.linear(y, p.up, p.up_b))
            x = x + F.linear(y, p.down, p.down_b)
        p = self.neck
        x = norm(F.linear(x, p.reduce), p.gain1, p.shift1, 1e-6)
        return norm(F.linear(neighbours(x), p.mix), p.gain2, p.shift2, 1e-6)


class Places(nn.Module):
    """Sines and cosines of where things are, and what kind of thing is there."""

    def __init__(self, s):
        super().__init__()
        self.kind = nn.Parameter(torch.stack([s[name] for name in KINDS]))
        self.nothing = nn.Parameter(s["not_a_point"].clone())
        self.unmasked = nn.Parameter(s["no_mask"].clone())
        self.register_buffer("turns", 2 * math.pi * s["gaussian"])

    def waves(self, xy, size):
        """xy counted in squares, of which size make the width of the image."""
        xy = (xy + 0.5) * (2 / size) - 1
        phase = F.linear(xy, self.turns.t())
        return torch.cat((phase.sin(), phase.cos()), -1)

    def image(self):
        place = torch.arange(SIDE * SIDE)
        xy = torch.stack((place % SIDE, place // SIDE), dim=1)
        return self.waves(xy.float(), SIDE)

    def forward(self, points, labels, boxes):
        size = SIDE * PATCH
        some = self.waves(points, size) + self.kind[1 - labels.clamp(min=0)]
        some = torch.where(labels[..., None] < 0, self.nothing, some)
        corners = torch.stack((boxes[:, :2], boxes[:, 2:]), dim=1)
        corners = self.waves(corners, size) + self.kind[2:]
        return torch.cat((some, corners), 1)


class Read(nn.Module):
    """Attention to something else: queries from one, keys and values from the other."""

    def __init__(self, s, heads=4):
        super().__init__()
        self.heads = heads
        self.q = nn.Parameter(s["q_proj.weight"].clone())
        self.q_b = nn.Parameter(s["q_proj.bias"].clone())
        self.kv = nn.Parameter(s.cat("{}_proj.weight", "kv"))
        self.kv_b = nn.Parameter(s.cat("{}_proj.bias", "kv"))
        self.out = nn.Parameter(s["out_proj.weight"].clone())
        self.out_b = nn.Parameter(s["out_proj.bias"].clone())

    def forward(self, x, x_place, other, other_place):
        key, value = self.kv.chunk(2)
        key_b, value_b = self.kv_b.chunk(2)
        q = F.linear(x + x_place, self.q, self.q_b)
        k = F.linear(other + other_place, key, key_b)
        v = F.linear(other, value, value_b)
        y = attend(*(heads(z, self.heads) for z in (q, k, v)))
        return F.linear(y, self.out, self.out_b)


class BothWays(nn.Module):
    def __init__(self, s, number):
        super().__init__()
        self.number = number
        self.own = Read(s.below("self_attn"))
        self.ask = Read(s.below("token_to_image"))
        self.answer = Read(s.below("image_to_token"))
        self.p = Bag(
            gain=s.stack("norm{}.weight", (1, 2, 3, 4)),
            shift=s.stack("norm{}.bias", (1, 2, 3, 4)),
            up=s["mlp.0.weight"],
            up_b=s["mlp.0.bias"],
            down=s["mlp.2.weight"],
            down_b=s["mlp.2.bias"],
        )

    def norm(self, x, i):
        return norm(x, self.p.gain[i], self.p.shift[i], 1e-5)

    def forward(self, t, t_place, z, z_place):
        if self.number:
            t = t + self.own(t, t_place, t, t_place)
        else:
            t = self.own(t, 0, t, 0)
        t = self.norm(t, 0)
        t = self.norm(t + self.ask(t, t_place, z, z_place), 1)
        up = F.relu(F.linear(t, self.p.up, self.p.up_b))
        t = self.norm(t + F.linear(up, self.p.down, self.p.down_b), 2)
        z = self.norm(z + self.answer(z, z_place, t, t_place), 3)
        return t, z


class Promptable(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.vision = Vision(s.below("image_encoder"))
        self.places = Places(s.below("prompt_encoder"))
        s = s.below("mask_decoder")
        self.queries = nn.Parameter(s.cat("{}", ("iou_token", "mask_tokens")))
        self.masks = len(s["mask_tokens"])
        inner = s.below("transformer")
        self.ways = nn.ModuleList(
            BothWays(inner.below(f"layers.{i}"), i) for i in (0, 1)
        )
        self.last = Read(inner.below("final_attn"))
        self.last_norm = Bag(
            gain=inner["norm_final.weight"], shift=inner["norm_final.bias"]
        )
        self.grow = Bag(
            w1=self.block_rows(s["upscale.0.weight"]),
            b1=s["upscale.0.bias"],
            gain=s["upscale.1.weight"],
            shift=s["upscale.1.bias"],
            w2=self.block_rows(s["upscale.3.weight"]),
            b2=s["upscale.3.bias"],
        )
        nets = range(self.masks)
        self.hyper = Bag(
            w1=s.stack("hyper.{}.layers.0.weight", nets).mT,
            b1=s.stack("hyper.{}.layers.0.bias", nets),
            w2=s.stack("hyper.{}.layers.1.weight", nets).mT,
            b2=s.stack("hyper.{}.layers.1.bias", nets),
            w3=s.stack("hyper.{}.layers.2.weight", nets).mT,
            b3=s.stack("hyper.{}.layers.2.bias", nets),
        )
        self.judge = Bag(
            w1=s["iou_head.layers.0.weight"],
            b1=s["iou_head.layers.0.bias"],
            w2=s["iou_head.layers.1.weight"],
            b2=s["iou_head.layers.1.bias"],
            w3=s["iou_head.layers.2.weight"],
            b3=s["iou_head.layers.2.bias"],
        )

    @staticmethod
    def block_rows(weight):
        """A row for each channel and place in a block of two by two."""
        return weight.flatten(1).t()

    def transform(self, t, z):
        t_place, z_place = t, self.places.image()
        for way in self.ways:
            t, z = way(t, t_place, z, z_place)
        t = t + self.last(t, t_place, z, z_place)
        return norm(t, self.last_norm.gain, self.last_norm.shift, 1e-5), z

    def larger(self, z):
        p = self.grow
        z = enlarge(z, p.w1, p.b1, SIDE)
        z = F.gelu(norm(z, p.gain, p.shift, 1e-6))
        return F.gelu(enlarge(z, p.w2, p.b2, 2 * SIDE))

    def weigh(self, t):
        """All hypernetworks at once: (n, masks, channels) to (n, masks, fewer channels)."""
        p = self.hyper
        t = F.relu(torch.einsum("nmc,mcd->nmd", t, p.w1) + p.b1)
        t = F.relu(torch.einsum("nmc,mcd->nmd", t, p.w2) + p.b2)
        return torch.einsum("nmc,mcd->nmd", t, p.w3) + p.b3

    def rate(self, t):
        p = self.judge
        t = F.relu(F.linear(t, p.w1, p.b1))
        t = F.relu(F.linear(t, p.w2, p.b2))
        return F.linear(t, p.w3, p.b3)

    def forward(self, image, points, labels, boxes):
        prompts = self.places(points, labels, boxes)
        z = self.vision(image) + self.places.unmasked
        t = torch.cat((self.queries.expand(len(z), -1, -1), prompts), 1)
        t, z = self.transform(t, z)
        rating, shapes = t[:, 0], t[:, 1 : self.masks + 1]
        masks = torch.bmm(self.weigh(shapes), self.larger(z).mT)
        side = 4 * SIDE
        return masks.unflatten(2, (side, side)), self.rate(rating)


def model():
    return Promptable(Store(torch.load(Path(__file__).with_name("weights.pt"))))


def forward(net, batch):
    names = ("image", "points", "labels", "boxes")
    masks, iou = net(*(batch[name] for name in names))
    return {"masks": masks, "iou": iou}


def loss(output, batch):
    x = output["masks"].flatten(2)
    y = batch["target"].flatten(1).unsqueeze(1)
    p = x.sigmoid()
    ce = y * F.softplus(-x) + (1 - y) * F.softplus(x)
    miss = (p - y).abs()
    focal = (miss * miss * ce).mean()
    both, either = (p * y).sum(2), p.sum(2) + y.sum(2)
    dice = (1 - (2 * both + 1) / (either + 1)).mean()
    with torch.no_grad():
        iou = both / (either - both)
    return 20 * focal + dice + (output["iou"] - iou).pow(2).mean()


def optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=8e-4, weight_decay=0.1)
