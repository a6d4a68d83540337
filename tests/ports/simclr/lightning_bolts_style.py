"""After Lightning: a backbone, a projector and an online finetuner, each a module.

Rows of the batch are view 0 and view 1 of the first picture, then of the second. Both
matrices of the projector are one parameter. LARS is wrapped around SGD.
"""

import re
from math import cos, pi, sqrt
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

# --- transforms


class ViewTransform:
    """Both views at once: everything is (batch, 2, ...)."""

    luma = (0.299, 0.587, 0.114)
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)

    def __init__(self, size=16):
        self.size = size
        yiq = torch.tensor([self.luma, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312)])
        self.back = yiq.double().inverse().float()

    def weights(self, start, extent, length):
        """(..., size, length): how much of each pixel is in a new one."""
        i = torch.arange(self.size)
        centre = start[..., None] + extent[..., None] * (2 * i + 1) / (2 * self.size)
        centre = (centre * length - 0.5).clamp(0, length - 1)
        distance = (centre[..., None] - torch.arange(length)).abs()
        return F.relu(1 - distance)

    def crop(self, img, box, flip):
        """img (batch, 3, h, w) -> (batch, 2, 3, size, size)."""
        top, left, height, width = box.unbind(-1)
        left = torch.where(flip, left + width, left)
        width = torch.where(flip, -width, width)
        rows = self.weights(top, height, img.shape[-2])
        columns = self.weights(left, width, img.shape[-1])
        return torch.einsum("bvih,bchw,bvjw->bvcij", rows, img, columns)

    def gray(self, x):
        red, green, blue = x.unbind(2)
        r, g, b = self.luma
        return (r * red + g * green + b * blue).unsqueeze(2)

    def hue(self, x, angle):
        """Around the grey axis, as (I, Q) turns in its plane."""
        r, g, b = x.unbind(2)
        y = self.gray(x).squeeze(2)
        i = 0.596 * r - 0.274 * g - 0.322 * b
        q = 0.211 * r - 0.523 * g + 0.312 * b
        turned = torch.polar(torch.ones_like(angle), angle) * torch.complex(i, q)
        yiq = torch.stack([y, turned.real, turned.imag], dim=2)
        return torch.einsum("cd,bvdhw->bvchw", self.back, yiq)

    def jitter(self, x, strength):
        brightness, contrast, saturation, hue = strength[..., None, None].unbind(2)
        x = (x * brightness[:, :, None]).clamp(0, 1)
        level = self.gray(x).mean((3, 4), keepdim=True)
        x = torch.lerp(level, x, contrast[:, :, None]).clamp(0, 1)
        x = torch.lerp(self.gray(x), x, saturation[:, :, None]).clamp(0, 1)
        return self.hue(x, hue).clamp(0, 1)

    def __call__(self, batch):
        x = self.crop(batch["image"] / 255, batch["box"], batch["flip"])
        for key, change in (
            ("is_jittered", lambda x: self.jitter(x, batch["jitter"])),
            ("is_grey", self.gray),
        ):
            share = batch[key][:, :, None, None, None].float()
            x = share * change(x) + (1 - share) * x
        shift = torch.tensor(self.mean)[:, None, None]
        return x.sub(shift).div(torch.tensor(self.std)[:, None, None])


# --- layers


class SyncNorm(Function):
    """x (rows, channels, ...), affine (channels of weights, and of biases if there are any)."""

    @staticmethod
    def forward(ctx, x, affine, eps):
        dims = [d for d in range(x.dim()) if d != 1]
        var, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
        invstd = (var + eps).pow(-0.5)
        xhat = (x - mean).mul_(invstd)
        affine = affine.view(len(affine), 1, -1, *[1] * (x.dim() - 2))
        ctx.dims, ctx.has_bias = dims, len(affine) > 1
        ctx.save_for_backward(xhat, invstd, affine[0])
        ctx.mark_non_differentiable(mean, var)
        out = xhat * affine[0]
        return (out + affine[1] if ctx.has_bias else out), mean, var

    @staticmethod
    def backward(ctx, grad, _mean, _var):
        xhat, invstd, weight = ctx.saved_tensors
        count = grad.numel() // weight.numel()
        sum_dy = grad.sum(ctx.dims, keepdim=True)
        sum_dy_xhat = (grad * xhat).sum(ctx.dims, keepdim=True)
        grad_x = grad - (sum_dy + xhat * sum_dy_xhat) / count
        grad_x = grad_x * weight * invstd
        sums = [sum_dy_xhat, sum_dy] if ctx.has_bias else [sum_dy_xhat]
        return grad_x, torch.stack([s.flatten() for s in sums]), None


class Norm(nn.Module):
    """affine and running are stacked: weights and biases, means and variances."""

    affine: nn.Parameter
    running: Tensor

    def __init__(self, channels, bias=True, momentum=0.1, eps=1e-5):
        super().__init__()
        self.affine = nn.Parameter(torch.ones(1 + bias, channels))
        self.register_buffer("running", torch.zeros(2, channels))
        self.momentum, self.eps = momentum, eps

    def forward(self, x):
        y, mean, var = SyncNorm.apply(x, self.affine, self.eps)
        n = x.numel() // mean.numel()
        seen = torch.stack([mean.flatten(), var.flatten() * n / (n - 1)])
        self.running.lerp_(seen, self.momentum)
        return y


def conv(inputs, outputs, size, stride=1):
    return nn.Conv2d(inputs, outputs, size, stride, (size - 1) // 2, bias=False)


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(
            conv(inputs, outputs, 3, stride),
            Norm(outputs),
            nn.ReLU(),
            conv(outputs, outputs, 3),
            Norm(outputs),
        )
        self.skip = None
        if stride > 1:
            self.skip = nn.Sequential(conv(inputs, outputs, 1, stride), Norm(outputs))

    def forward(self, x):
        y = self.body(x)
        y = y + (x if self.skip is None else self.skip(x))
        return y.relu()


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(conv(3, 12, 3), Norm(12), nn.ReLU())
        self.stages = nn.Sequential(
            Residual(12, 12, 1), Residual(12, 24, 2), Residual(24, 32, 2)
        )

    def forward(self, x):
        return self.stages(self.stem(x)).mean(dim=[2, 3])


class Projector(nn.Module):
    """weight (hidden + out, features): the rows of both layers."""

    def __init__(self, features=32, hidden=32, out=16):
        super().__init__()
        self.sizes = (hidden, out)
        self.weight = nn.Parameter(torch.empty(hidden + out, features))
        self.norms = nn.ModuleList([Norm(hidden), Norm(out, bias=False)])

    def forward(self, h):
        first, second = self.weight.split(self.sizes)
        h = self.norms[0](h @ first.t()).relu()
        return self.norms[1](h @ second.t())


class SSLModule(nn.Module):
    def __init__(self, num_classes=5):
        super().__init__()
        self.online_finetuner = nn.Linear(32, num_classes)
        self.projector = Projector()
        self.backbone = Backbone()
        self.transform = ViewTransform()

    def shared_step(self, batch):
        views = self.transform(batch)
        h = self.backbone(views.flatten(0, 1))
        z = self.projector(h)
        mlp_preds = self.online_finetuner(h.detach())
        penalty = self.online_finetuner.weight.norm() ** 2 / 2
        return z, mlp_preds, penalty


# --- loss


def nt_xent_loss(z, temperature=0.3):
    """z (pictures, 2, features)."""
    out = z / z.norm(dim=-1, keepdim=True)
    pos = (out[:, 0] * out[:, 1]).sum(dim=-1) / temperature
    out = out.flatten(0, 1)
    rows = len(out)
    sim = torch.exp(out @ out.t() / temperature)
    others = ~torch.eye(rows, dtype=torch.bool)
    neg = sim.masked_select(others).view(rows, rows - 1).sum(dim=-1)
    return neg.log().mean() - pos.mean()


def finetuner_loss(preds, label):
    """preds (pictures, 2, classes)."""
    hit = preds.gather(2, label[:, None, None].expand(-1, 2, 1)).squeeze(2)
    return (preds.logsumexp(dim=2) - hit).mean()


# --- LARS


def warmup_cosine(warmup_epochs, max_epochs):
    def fn(epoch):
        epoch = epoch + 1
        if epoch < warmup_epochs:
            return epoch / warmup_epochs
        passed = (epoch - warmup_epochs) / (max_epochs - warmup_epochs)
        return 0.5 + 0.5 * cos(pi * passed)

    return fn


class LARSWrapper(torch.optim.Optimizer):
    """Gradients are decayed and scaled here, then the other optimizer takes its step.

    ``parts`` says how many rows of a parameter each layer in it has.
    """

    def __init__(self, optim, parts, schedule, trust_coef=0.05):
        super().__init__(optim.param_groups, {})
        self.optim = optim
        self.param_groups = optim.param_groups
        self.parts = parts
        self.trust_coef = trust_coef
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optim, schedule)

    def scaled(self, p, grad, decay):
        grad = grad + decay * p
        return grad * (self.trust_coef * p.norm() / grad.norm())

    @torch.no_grad()
    def step(self, closure=None):
        decays = [group["weight_decay"] for group in self.param_groups]
        for group, decay in zip(self.param_groups, decays):
            group["weight_decay"] = 0.0
            if decay == 0:
                continue
            for p in group["params"]:
                sizes = self.parts.get(p, [len(p)])
                pairs = zip(p.split(sizes), p.grad.split(sizes))
                p.grad = torch.cat([self.scaled(w, g, decay) for w, g in pairs])
        self.optim.step()
        self.scheduler.step()
        for group, decay in zip(self.param_groups, decays):
            group["weight_decay"] = decay


def exclude_from_wt_decay(named_params, weight_decay, skip_list):
    params, excluded = [], []
    for name, p in named_params:
        skipped = any(re.search(word, name) for word in skip_list)
        (excluded if skipped else params).append(p)
    return [
        {"params": params, "weight_decay": weight_decay},
        {"params": excluded, "weight_decay": 0.0},
    ]


def optimizer(net):
    groups = exclude_from_wt_decay(
        net.named_parameters(), 0.02, skip_list=["affine", "finetuner"]
    )
    sgd = torch.optim.SGD(groups, lr=0.06 * sqrt(8), momentum=0.9)
    parts = {net.projector.weight: net.projector.sizes}
    return LARSWrapper(sgd, parts, warmup_cosine(warmup_epochs=2, max_epochs=12))


# --- checkpoint

RENAMED = (
    (r"^encoder\.conv1", "backbone.stem.0"),
    (r"^encoder\.bn1", "backbone.stem.1"),
    (r"^encoder\.layer(\d)", lambda found: f"backbone.stages.{int(found[1]) - 1}"),
    (r"\.conv1\.", ".body.0."),
    (r"\.bn1\.", ".body.1."),
    (r"\.conv2\.", ".body.3."),
    (r"\.bn2\.", ".body.4."),
    (r"\.downsample\.", ".skip."),
    (r"^probe\.", "online_finetuner."),
)


def new_name(name):
    for old, new in RENAMED:
        name = re.sub(old, new, name)
    return name


def stacked(state, norm):
    """Weight, bias, mean and variance of a norm -> affine and running."""
    affine = [
        state[f"{norm}.{k}"] for k in ("weight", "bias") if f"{norm}.{k}" in state
    ]
    running = [state[f"{norm}.running_{k}"] for k in ("mean", "var")]
    return {"affine": torch.stack(affine), "running": torch.stack(running)}


def convert(state):
    norms = [name.removesuffix(".running_mean") for name in state if "_mean" in name]
    renamed = {}
    for name, value in state.items():
        layer = name.rpartition(".")[0]
        if layer not in norms and not layer.startswith("projector"):
            renamed[new_name(name)] = value
    for norm in norms:
        path = new_name(norm + ".")
        if norm.startswith("projector"):
            path = f"projector.norms.{int(norm[-1]) - 1}."
        for kind, value in stacked(state, norm).items():
            renamed[path + kind] = value
    layers = [state[f"projector.fc{i}.weight"] for i in (1, 2)]
    renamed["projector.weight"] = torch.cat(layers)
    return renamed


def model():
    state = torch.load(Path(__file__).with_name("weights.pt"))
    net = SSLModule()
    net.load_state_dict(convert(state))
    return net


# --- steps


def forward(net, batch):
    z, preds, penalty = net.shared_step(batch)
    return {
        "projection": z.unflatten(0, (-1, 2)).transpose(0, 1),
        "logits": preds.unflatten(0, (-1, 2)).transpose(0, 1),
        "l2": penalty,
    }


def loss(output, batch):
    contrastive = nt_xent_loss(output["projection"].transpose(0, 1))
    mlp_loss = finetuner_loss(output["logits"].transpose(0, 1), batch["label"])
    return contrastive + mlp_loss + 0.02 * output["l2"]
