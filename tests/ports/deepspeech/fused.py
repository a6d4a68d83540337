"""Few large products and backward passes by hand; time comes first in the recurrence.

Maps of the convolutions are (channels, bins, batch, time). Both directions run side by
side: the second one reads frames from the end of each utterance, by index.
"""

from pathlib import Path

import torch
from torch import nn
from torch.autograd import Function

H = 12
TOP = 2.0
EPS = 1e-5
INF = float("inf")


class NormClip(Function):
    """x (c, m): norm of the rows, gain, shift, and a ramp from 0 to TOP."""

    @staticmethod
    def forward(ctx, x, gain, shift):
        var, mean = torch.var_mean(x, dim=1, correction=0)
        rstd = (var + EPS).rsqrt()
        xhat = (x - mean[:, None]) * rstd[:, None]
        y = torch.addcmul(shift[:, None], xhat, gain[:, None])
        ctx.save_for_backward(xhat, rstd, gain, (y > 0) & (y < TOP))
        ctx.mark_non_differentiable(mean, var)
        return y.clamp(0, TOP), mean, var

    @staticmethod
    def backward(ctx, grad, _mean, _var):
        xhat, rstd, gain, inside = ctx.saved_tensors
        g = grad * inside
        dshift = g.sum(1)
        dgain = (g * xhat).sum(1)
        common = (dshift[:, None] + xhat * dgain[:, None]) / xhat.shape[1]
        dx = (gain * rstd)[:, None] * (g - common)
        return dx, dgain, dshift


class Gates(Function):
    """What follows the two products of a step: gi, gh (2, n, 3h) in r, z, n; h (2, n, h)."""

    @staticmethod
    def forward(ctx, gi, gh, h):
        ir, iz, i_n = gi.chunk(3, -1)
        hr, hz, hn = gh.chunk(3, -1)
        r = (ir + hr).sigmoid()
        z = (iz + hz).sigmoid()
        n = torch.addcmul(i_n, r, hn).tanh()
        ctx.save_for_backward(r, z, n, hn, h)
        return torch.lerp(n, h, z)

    @staticmethod
    def backward(ctx, g):
        r, z, n, hn, h = ctx.saved_tensors
        dn = g * (1 - z) * (1 - n * n)
        dz = g * (h - n) * z * (1 - z)
        dr = dn * hn * r * (1 - r)
        dgi = torch.cat([dr, dz, dn], -1)
        dgh = torch.cat([dr, dz, dn * r], -1)
        return dgi, dgh, g * z


class CTC(Function):
    """logp (t, n, c), a log-softmax; -> costs (n).

    The gradient is that of what the softmax was taken of, as in warp-ctc: its sum over
    classes is 0, so that the softmax behind it leaves it as it is.
    """

    @staticmethod
    def forward(ctx, logp, labels, times, sizes):
        steps, n, _ = logp.shape
        ext = labels.new_zeros(n, 2 * labels.shape[1] + 1)
        ext[:, 1::2] = labels
        jump = torch.zeros_like(ext, dtype=torch.bool)
        jump[:, 2:] = (ext[:, 2:] > 0) & (ext[:, 2:] != ext[:, :-2])
        emit = logp.gather(2, ext.expand(steps, -1, -1))

        alpha = torch.full_like(emit, -INF)
        alpha[0, :, :2] = emit[0, :, :2]
        for t in range(1, steps):
            before = alpha[t - 1]
            a = before.clone()
            a[:, 1:] = a[:, 1:].logaddexp(before[:, :-1])
            two = before[:, :-2].masked_fill(~jump[:, 2:], -INF)
            a[:, 2:] = a[:, 2:].logaddexp(two)
            alpha[t] = a + emit[t]

        place = torch.arange(ext.shape[1])
        ends = (place == 2 * sizes[:, None]) | (place == 2 * sizes[:, None] - 1)
        final = torch.zeros_like(emit[0]).masked_fill(~ends, -INF)
        beta = torch.full_like(emit, -INF)
        for t in range(steps - 1, -1, -1):
            if t + 1 < steps:
                after = beta[t + 1] + emit[t + 1]
                b = after.clone()
                b[:, :-1] = b[:, :-1].logaddexp(after[:, 1:])
                two = after[:, 2:].masked_fill(~jump[:, 2:], -INF)
                b[:, :-2] = b[:, :-2].logaddexp(two)
                beta[t] = b
            beta[t] = torch.where((t == times - 1)[:, None], final, beta[t])

        last = alpha[times - 1, torch.arange(n)]
        total = (last + final).logsumexp(1)
        occupied = (alpha + beta - total[:, None]).exp()
        seen = torch.zeros_like(logp).scatter_add_(2, ext.expand_as(emit), occupied)
        valid = torch.arange(steps)[:, None] < times
        ctx.save_for_backward(logp.exp() * valid[..., None] - seen)
        return -total

    @staticmethod
    def backward(ctx, grad):
        (each,) = ctx.saved_tensors
        return each * grad[:, None], None, None, None


class Average(nn.Module):
    """Running mean and variance, in the rows of one tensor."""

    def __init__(self, seen):
        super().__init__()
        self.register_buffer("seen", seen)

    @torch.no_grad()
    def update(self, mean, var, count):
        self.seen.lerp_(torch.stack([mean, var * (count / (count - 1))]), 0.1)


class Conv(nn.Module):
    def __init__(self, pack, name, kernel, stride):
        super().__init__()
        self.w = nn.Parameter(pack.get(f"{name}.conv.weight").flatten(1))
        self.gain = nn.Parameter(pack.get(f"{name}.norm.weight"))
        self.shift = nn.Parameter(pack.get(f"{name}.norm.bias"))
        self.average = pack.average(f"{name}.norm")
        self.kernel, self.stride = kernel, stride

    def patches(self, x):
        """(c, bins, n, t) -> (c * kb * kt, bins, n, t) of the output."""
        (kb, kt), (sb, st) = self.kernel, self.stride
        x = nn.functional.pad(x, (kt // 2, kt // 2, 0, 0, kb // 2, kb // 2))
        x = x.unfold(1, kb, sb).unfold(3, kt, st)
        return x.permute(0, 4, 5, 1, 2, 3).flatten(0, 2)

    def forward(self, x, valid):
        x = self.patches(x)
        y = self.w @ x.flatten(1)
        y = (y.unflatten(1, x.shape[1:]) * valid).flatten(1)
        y, mean, var = NormClip.apply(y, self.gain, self.shift)
        self.average.update(mean, var, y.shape[1])
        return y.unflatten(1, x.shape[1:]) * valid


class FrameNorm(nn.Module):
    """Norm of the frames that are there; the others become zero."""

    def __init__(self, pack, name):
        super().__init__()
        self.gain = nn.Parameter(pack.get(f"{name}.weight"))
        self.shift = nn.Parameter(pack.get(f"{name}.bias"))
        self.average = pack.average(name)

    def forward(self, x, valid):
        rows = x[valid]
        var, mean = torch.var_mean(rows, dim=0, correction=0)
        self.average.update(mean, var, len(rows))
        rows = (rows - mean) * (var + EPS).rsqrt() * self.gain + self.shift
        return torch.zeros_like(x).masked_scatter(valid[..., None], rows)


class BiGRU(nn.Module):
    """wi (in, 2 * 3h) has the gates of both directions, wh (2, h, 3h) too."""

    def __init__(self, pack, name):
        super().__init__()
        ways = ("l0", "l0_reverse")
        wi = torch.cat([pack.get(f"{name}.weight_ih_{way}") for way in ways])
        wh = [pack.get(f"{name}.weight_hh_{way}").t() for way in ways]
        self.wi = nn.Parameter(wi.t().contiguous())
        self.wh = nn.Parameter(torch.stack(wh))
        self.bi = nn.Parameter(pack.both(f"{name}.bias_ih").flatten())
        self.bh = nn.Parameter(pack.both(f"{name}.bias_hh").flatten())

    def forward(self, x, valid, turn):
        """turn (t, n): where the frame is that comes here in the other direction."""
        gi = (x @ self.wi + self.bi).unflatten(2, (2, -1))
        turned = gi[:, :, 1].gather(0, turn[..., None].expand(-1, -1, 3 * H))
        gi = torch.stack([gi[:, :, 0], turned], dim=1)
        bias = self.bh.view(2, 1, -1)
        h = x.new_zeros(2, x.shape[1], H)
        states = []
        for step in gi:
            gh = torch.baddbmm(bias, h, self.wh)
            h = Gates.apply(step, gh, h)
            states.append(h)
        there, back = torch.stack(states, dim=1)
        back = back.gather(0, turn[..., None].expand(-1, -1, H))
        return torch.cat([there, back], dim=-1) * valid[..., None]


class Recogniser(nn.Module):
    def __init__(self, pack):
        super().__init__()
        self.conv1 = Conv(pack, "conv1", (7, 5), (2, 2))
        self.conv2 = Conv(pack, "conv2", (5, 3), (2, 1))
        self.gru1 = BiGRU(pack, "rnn1.gru")
        self.norm2 = FrameNorm(pack, "rnn2.norm")
        self.gru2 = BiGRU(pack, "rnn2.gru")
        self.out = nn.Parameter(pack.get("head.weight"))
        self.out_bias = nn.Parameter(pack.get("head.bias"))

    def forward(self, x, times):
        """x (bins, n, t)."""
        t = torch.arange((x.shape[2] + 1) // 2)
        valid = t < times[:, None]
        x = self.conv1(x[None], valid)
        x = self.conv2(x, valid)
        x = x.permute(3, 2, 0, 1).flatten(2)

        valid = valid.t()
        turn = torch.where(valid, times - 1 - t[:, None], t[:, None])
        x = self.gru1(x, valid, turn)
        x = self.norm2(x, valid)
        x = self.gru2(x, valid, turn)
        scores = x @ self.out.t() + self.out_bias
        return scores - scores.logsumexp(-1, keepdim=True)


class Pack:
    def __init__(self, file):
        self.tensors = torch.load(file)

    def get(self, name):
        return self.tensors[name].clone()

    def both(self, name):
        return torch.stack([self.get(f"{name}_l0"), self.get(f"{name}_l0_reverse")])

    def average(self, name):
        kinds = ("running_mean", "running_var")
        return Average(torch.stack([self.get(f"{name}.{kind}") for kind in kinds]))


def model():
    return Recogniser(Pack(Path(__file__).with_name("weights.pt")))


def times_of(batch):
    return (batch["frames"] + 1) // 2


def forward(net, batch):
    sound = batch["sound"].log1p().permute(1, 0, 2)
    inside = torch.arange(sound.shape[2]) < batch["frames"][:, None]
    parts = [sound[:, i, keep] for i, keep in enumerate(inside)]
    mean = torch.stack([part.mean() for part in parts])[:, None]
    std = torch.stack([part.std() for part in parts])[:, None]
    return net((sound - mean) / std * inside, times_of(batch))


def loss(output, batch):
    costs = CTC.apply(output, batch["labels"], times_of(batch), batch["sizes"])
    return (costs / batch["sizes"]).sum() / len(costs)


class Nesterov(torch.optim.Optimizer):
    def __init__(self, net, rate, momentum, fade, limit):
        params = list(net.parameters())
        super().__init__(params, {})
        self.params = params
        self.fades = [fade if p.ndim > 1 else 0.0 for p in params]
        self.rate, self.momentum, self.limit = rate, momentum, limit
        self.moves = None

    @torch.no_grad()
    def step(self, closure=None):
        raw = [p.grad for p in self.params]
        length = torch.stack(torch._foreach_norm(raw)).norm()
        shrink = (self.limit / (length + 1e-6)).clamp(max=1.0)
        grads = torch._foreach_mul(raw, shrink)
        faded = torch._foreach_mul(self.params, self.fades)
        torch._foreach_add_(grads, faded)
        if self.moves is None:
            self.moves = [g.clone() for g in grads]
        else:
            torch._foreach_mul_(self.moves, self.momentum)
            torch._foreach_add_(self.moves, grads)
        torch._foreach_add_(grads, self.moves, alpha=self.momentum)
        torch._foreach_add_(self.params, grads, alpha=-self.rate)


def optimizer(net):
    return Nesterov(net, rate=0.02, momentum=0.9, fade=5e-3, limit=1.0)
