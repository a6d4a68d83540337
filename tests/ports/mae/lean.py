"""Few kernels: weights of all layers in one tensor, tokens before pictures, gradients by hand.

A stack packs query, key and value head by head, so that heads are batches without a copy.
Seen places are taken in the order of the grid: attention does not care for the order.
"""

from math import cos, pi, sqrt
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

SIDE = 4
ROWS, COLUMNS = 4, 6
SEEN = 9
TINY = 1e-6


# --- with gradients by hand


class Norm(Function):
    """x (m, d), affine (2, d): gain and shift."""

    @staticmethod
    def forward(ctx, x, affine):
        var, mean = torch.var_mean(x, dim=1, correction=0, keepdim=True)
        inv = (var + TINY).rsqrt()
        unit = (x - mean) * inv
        ctx.save_for_backward(unit, inv, affine)
        return torch.addcmul(affine[1], unit, affine[0])

    @staticmethod
    def backward(ctx, g):
        unit, inv, affine = ctx.saved_tensors
        g_affine = torch.stack([(g * unit).sum(0), g.sum(0)])
        g = g * affine[0]
        along = (g * unit).mean(1, keepdim=True)
        return (g - g.mean(1, keepdim=True) - unit * along) * inv, g_affine


class Gelu(Function):
    @staticmethod
    def forward(ctx, x):
        below = 0.5 * (1 + torch.erf(x / sqrt(2)))
        ctx.save_for_backward(x, below)
        return x * below

    @staticmethod
    def backward(ctx, g):
        x, below = ctx.saved_tensors
        bell = torch.exp(-0.5 * x * x) / sqrt(2 * pi)
        return g * (below + x * bell)


class Softmax(Function):
    @staticmethod
    def forward(ctx, score):
        p = (score - score.amax(-1, keepdim=True)).exp()
        p = p / p.sum(-1, keepdim=True)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx, g):
        (p,) = ctx.saved_tensors
        return p * (g - (g * p).sum(-1, keepdim=True))


class SquaredError(Function):
    """Mean of all elements."""

    @staticmethod
    def forward(ctx, got, wanted):
        apart = got - wanted
        ctx.save_for_backward(apart)
        return apart.square().sum() / apart.numel()

    @staticmethod
    def backward(ctx, g):
        (apart,) = ctx.saved_tensors
        return apart * (2 * g / apart.numel()), None


# --- the net


class Stack(nn.Module):
    """All layers of one side; the first dimension of each tensor counts them."""

    def __init__(self, weights):
        super().__init__()
        for name, value in weights.items():
            self.register_parameter(name, nn.Parameter(value.contiguous()))

    def attend(self, h, i, n):
        """h (n * b, d) -> (n * b, d)."""
        heads, size = self.qv_bias.shape[2:]
        q_bias, v_bias = self.qv_bias[i]
        bias = torch.stack([q_bias, torch.zeros_like(q_bias), v_bias], dim=1)
        packed = torch.addmm(bias.flatten(), h, self.qkv[i])
        packed = packed.view(n, -1, 3, size).transpose(0, 1)
        q, k, v = packed.unbind(2)
        nothing = q.new_zeros(())
        score = torch.baddbmm(nothing, q, k.mT, beta=0, alpha=1 / sqrt(size))
        mixed = torch.bmm(Softmax.apply(score), v)
        mixed = mixed.transpose(0, 1).reshape(h.shape)
        return torch.addmm(self.out_bias[i], mixed, self.out[i])

    def forward(self, x):
        n, b, d = x.shape
        x = x.reshape(n * b, d)
        for i in range(len(self.qkv)):
            h = Norm.apply(x, self.norms[i, 0])
            h = self.attend(h, i, n)
            x = torch.addcmul(x, h, self.damp[i, 0])
            h = Norm.apply(x, self.norms[i, 1])
            h = Gelu.apply(torch.addmm(self.up_bias[i], h, self.up[i]))
            h = torch.addmm(self.down_bias[i], h, self.down[i])
            x = torch.addcmul(x, h, self.damp[i, 1])
        return Norm.apply(x, self.last).view(n, b, d)


def waves(width):
    """(width, rows, columns): channels of the column, then channels of the row."""
    count = width // 4
    pace = 10000.0 ** -(torch.arange(count, dtype=torch.double) / count)
    made = torch.empty(2, 2, count, ROWS, COLUMNS, dtype=torch.double)
    for axis, place in enumerate((torch.arange(COLUMNS), torch.arange(ROWS)[:, None])):
        angle = pace[:, None, None] * place
        made[axis, 0] = angle.sin()
        made[axis, 1] = angle.cos()
    return made.flatten(0, 2).float()


class Painter(nn.Module):
    def __init__(self, seer, painter, single):
        super().__init__()
        self.seer, self.painter = Stack(seer), Stack(painter)
        for name, value in single.items():
            self.register_parameter(name, nn.Parameter(value.contiguous()))
        self.register_buffer("where_seen", waves(len(self.kernel)))
        self.register_buffer("where_painted", waves(len(self.blank)))

    def forward(self, image, noise):
        seen = noise <= noise.kthvalue(SEEN, dim=1, keepdim=True).values
        place = seen.nonzero()[:, 1].view(-1, SEEN).t()
        y = self.see(image, place)
        y = self.paint(y, place)
        return y, ~seen

    def see(self, image, place):
        x = F.conv2d(image, self.kernel, self.kernel_bias, stride=SIDE)
        x = x + self.where_seen
        x = x.flatten(2).permute(2, 0, 1)
        x = x.gather(0, place[:, :, None].expand(-1, -1, x.shape[2]))
        start = self.start.expand(1, x.shape[1], -1)
        return self.seer(torch.cat([start, x]))

    def paint(self, y, place):
        n, b, d = y.shape
        y = torch.addmm(self.narrow_bias, y.view(n * b, d), self.narrow).view(n, b, -1)
        index = place[:, :, None].expand(-1, -1, y.shape[2])
        canvas = self.blank.expand(ROWS * COLUMNS, b, -1)
        canvas = canvas.scatter(0, index, y[1:])
        canvas = canvas + self.where_painted.flatten(1).t()[:, None]
        y = self.painter(torch.cat([y[:1], canvas]))[1:]
        y = torch.addmm(self.pixels_bias, y.flatten(0, 1), self.pixels)
        return y.view(ROWS * COLUMNS, b, 3, SIDE, SIDE)


# --- loading


def by_head(packed, heads):
    """(kinds * d, ...) -> (heads * kinds * size, ...), of kinds query, key, value."""
    return packed.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)


def load_stack(state, blocks, norm, layers, heads):
    def each(name):
        return torch.stack([state[f"{blocks}.{i}.{name}"] for i in range(layers)])

    def norms(number):
        return torch.stack(
            [each(f"norm{number}.weight"), each(f"norm{number}.bias")], dim=1
        )

    packed = each("attn.qkv.weight")
    qv_bias = torch.stack([each("attn.q_bias"), each("attn.v_bias")], dim=1)
    return {
        "qkv": torch.stack([by_head(layer, heads).t() for layer in packed]),
        "qv_bias": qv_bias.unflatten(2, (heads, -1)),
        "out": each("attn.proj.weight").mT,
        "out_bias": each("attn.proj.bias"),
        "up": each("mlp.fc1.weight").mT,
        "up_bias": each("mlp.fc1.bias"),
        "down": each("mlp.fc2.weight").mT,
        "down_bias": each("mlp.fc2.bias"),
        "norms": torch.stack([norms(1), norms(2)], dim=1),
        "damp": torch.stack([each("gamma_1"), each("gamma_2")], dim=1),
        "last": torch.stack([state[norm + ".weight"], state[norm + ".bias"]]),
    }


def colours_first(x):
    """Pixels in the first dimension: (4 * 4 * 3, ...) -> (3 * 4 * 4, ...)."""
    return x.unflatten(0, (SIDE, SIDE, 3)).movedim(2, 0).flatten(0, 2)


def model():
    state = torch.load(Path(__file__).with_name("weights.pt"))
    kernel = colours_first(state["patch_embed.weight"].t())
    single = {
        "kernel": kernel.t().unflatten(1, (3, SIDE, SIDE)),
        "kernel_bias": state["patch_embed.bias"],
        "start": state["cls_token"].flatten(),
        "narrow": state["decoder_embed.weight"].t(),
        "narrow_bias": state["decoder_embed.bias"],
        "blank": state["mask_token"].flatten(),
        "pixels": colours_first(state["decoder_pred.weight"]).t(),
        "pixels_bias": colours_first(state["decoder_pred.bias"]),
    }
    seer = load_stack(state, "blocks", "norm", layers=3, heads=3)
    painter = load_stack(state, "decoder_blocks", "decoder_norm", layers=2, heads=2)
    return Painter(seer, painter, single)


# --- pictures


def whiten(image):
    mean = torch.tensor([0.485, 0.456, 0.406])
    std = torch.tensor([0.229, 0.224, 0.225])
    gain, shift = 1 / (255 * std), -mean / std
    return torch.addcmul(shift[:, None, None], image, gain[:, None, None])


def forward(net, batch):
    painted, hidden = net(whiten(batch["image"].float()), batch["noise"])
    painted = painted.permute(1, 0, 3, 4, 2).flatten(2)
    return {"pred": painted, "mask": hidden.float()}


def loss(output, batch):
    hidden = output["mask"] > 0
    image = whiten(batch["image"].float())
    tiles = image.unfold(2, SIDE, SIDE).unfold(3, SIDE, SIDE)
    tiles = tiles.permute(0, 2, 3, 4, 5, 1).reshape(*hidden.shape, -1)[hidden]
    var, mean = torch.var_mean(tiles, dim=1, keepdim=True)
    wanted = (tiles - mean) / (var + TINY).sqrt()
    return SquaredError.apply(output["pred"][hidden], wanted)


# --- training


class FusedAdam(torch.optim.Optimizer):
    """Each tensor has a fade, and a share of the rate that may differ by layer."""

    def __init__(self, named, shares, fades):
        self.names = [name for name, _ in named]
        super().__init__([p for _, p in named], {})
        self.shares = [shares(name, p) for name, p in named]
        self.fades = [fades(name) for name in self.names]
        self.t = 0

    def rate(self):
        """Of the step that comes next; steps count from nought."""
        if self.t < 2:
            return 2e-3 * (self.t + 1) / 2
        return 1e-5 + 1.99e-3 * (1 + cos(pi * (self.t - 2) / 10)) / 2

    def moments(self, params):
        for p in params:
            if not self.state[p]:
                self.state[p] = {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}
        return [[self.state[p][k] for p in params] for k in "mv"]

    @torch.no_grad()
    def step(self, closure=None):
        rate = self.rate()
        self.t += 1
        params = self.param_groups[0]["params"]
        grads = [p.grad for p in params]
        m, v = self.moments(params)
        torch._foreach_lerp_(m, grads, 0.1)
        torch._foreach_mul_(v, 0.95)
        torch._foreach_addcmul_(v, grads, grads, value=0.05)
        below = torch._foreach_sqrt(v)
        torch._foreach_div_(below, sqrt(1 - 0.95**self.t))
        torch._foreach_add_(below, 1e-8)
        moves = torch._foreach_div(m, below)
        torch._foreach_div_(moves, 1 - 0.9**self.t)
        torch._foreach_add_(moves, torch._foreach_mul(params, self.fades))
        torch._foreach_mul_(moves, self.shares)
        torch._foreach_add_(params, moves, alpha=-rate)


FADING = ("kernel", "narrow", "pixels", "qkv", "out", "up", "down")


def fade_of(name):
    return 0.05 if name.split(".")[-1] in FADING else 0.0


def share_of(name, p):
    """What lies deeper below the end of the seer learns more slowly."""
    if name in ("kernel", "kernel_bias", "start"):
        return torch.tensor(0.75**4)
    if name.startswith("seer.") and name != "seer.last":
        below = torch.arange(len(p), 0, -1)
        return (0.75**below).view(-1, *[1] * (p.dim() - 1))
    return torch.tensor(1.0)


def optimizer(net):
    return FusedAdam(list(net.named_parameters()), share_of, fade_of)
