# Organ and lesion in small CT-like volumes: patch-wise residual U-Net with deep supervision.
# The encoder comes from a self-supervised run in a channels-last framework.
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE = 255  # the organ's rim is not annotated


@dataclass(frozen=True)
class Plan:
    patch: int = 16
    batch: int = 4
    foreground: float = 0.5  # share of patches that surely hold organ or lesion
    widths: tuple[int, ...] = (6, 8, 12, 16)
    classes: int = 3
    slope: float = 0.01
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 0.03
    clip: float = 2.0
    iterations: int = 10
    stop: int = 3


plan = Plan()


# ---------------------------------------------------------------- cases
def make_case(gen: torch.Generator) -> tuple[Tensor, Tensor]:
    shape = torch.randint(20, 26, (3,), generator=gen)
    axes = [torch.arange(int(n)).float() for n in shape]
    grid = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)
    centre = shape * (0.35 + 0.3 * torch.rand(3, generator=gen))
    radii = 5 + 3 * torch.rand(3, generator=gen)
    spot = centre + 0.8 * radii * (torch.rand(3, generator=gen) - 0.5)
    far = ((grid - centre) / radii).norm(dim=-1)
    lesion = (grid - spot).norm(dim=-1) < 3.0
    label = (far < 1).long()
    label[(far > 0.9) & (far < 1)] = IGNORE
    label[lesion] = 2
    image = -60 + 90.0 * (far < 1) + 40.0 * lesion - 3 * grid[..., 0]
    return image + 25 * torch.randn(image.shape, generator=gen), label


def fingerprint(cases: list[tuple[Tensor, Tensor]]) -> tuple[float, ...]:
    """Intensities of the foreground: 1st and 99th percentile, mean and deviation."""
    inside = torch.cat([image[(label == 1) | (label == 2)] for image, label in cases])
    low, high = torch.quantile(inside, torch.tensor([0.01, 0.99])).tolist()
    return low, high, inside.mean().item(), inside.std().item()


class PatchSampler:
    def __init__(self, cases, stats, seed: int):
        self.gen = torch.Generator().manual_seed(seed)
        low, high, mean, std = stats
        self.cases = [((image.clamp(low, high) - mean) / std, label) for image, label in cases]

    def draw(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.gen)

    def below(self, n: int) -> int:
        return int(torch.randint(n, (), generator=self.gen))

    def corner(self, label: Tensor, forced: bool) -> list[int]:
        room = torch.tensor(label.shape) - plan.patch
        if not forced:
            return [self.below(int(r) + 1) for r in room]
        present = [c for c in range(1, plan.classes) if (label == c).any()]
        voxels = (label == present[self.below(len(present))]).nonzero()
        start = voxels[self.below(len(voxels))] - plan.patch // 2
        return torch.minimum(start.clamp(min=0), room).tolist()

    def intensity(self, image: Tensor) -> Tensor:
        image = image * (0.75 + 0.5 * self.draw())
        mean, contrast = image.mean(), 0.75 + 0.5 * self.draw()
        image = (image - mean) * contrast + mean
        if self.draw() < 0.5:  # gamma, within the image's own range
            low, span = image.min(), image.max() - image.min()
            image = ((image - low) / span) ** (0.7 + 0.8 * self.draw()) * span + low
        return image + 0.1 * torch.randn(image.shape, generator=self.gen)

    def batch(self) -> tuple[Tensor, Tensor]:
        images, labels = [], []
        for slot in range(plan.batch):
            image, label = self.cases[self.below(len(self.cases))]
            forced = slot >= round(plan.batch * (1 - plan.foreground))
            cut = tuple(slice(c, c + plan.patch) for c in self.corner(label, forced))
            mirrored = [axis for axis in range(3) if self.draw() < 0.5]
            images.append(self.intensity(image[cut].flip(mirrored)))
            labels.append(label[cut].flip(mirrored))
        return torch.stack(images)[:, None], torch.stack(labels)


# ---------------------------------------------------------------- functions by hand
class NormLeaky(torch.autograd.Function):
    """Leaky ReLU of an affine instance norm; only the input's unit form is kept."""

    @staticmethod
    def forward(ctx, x, gamma, beta, slope):
        var, mean = torch.var_mean(x, (2, 3, 4), correction=0, keepdim=True)
        inv = (var + 1e-5).rsqrt()
        unit = (x - mean) * inv
        gamma, beta = gamma.view(-1, 1, 1, 1), beta.view(-1, 1, 1, 1)
        y = gamma * unit + beta
        ctx.save_for_backward(unit, inv, gamma, beta)
        ctx.slope = slope
        return torch.where(y > 0, y, slope * y)

    @staticmethod
    def backward(ctx, grad):
        unit, inv, gamma, beta = ctx.saved_tensors
        y = gamma * unit + beta
        grad = torch.where(y > 0, grad, ctx.slope * grad)
        grad_gamma, grad_beta = (grad * unit).sum((0, 2, 3, 4)), grad.sum((0, 2, 3, 4))
        grad = grad * gamma
        along = (grad * unit).mean((2, 3, 4), keepdim=True)
        grad = grad - grad.mean((2, 3, 4), keepdim=True) - unit * along
        return grad * inv, grad_gamma, grad_beta, None


class WeightedEntropy(torch.autograd.Function):
    """Cross entropy, averaged with the classes' weights over what is annotated."""

    @staticmethod
    def forward(ctx, logits, label, weight):
        known = label != IGNORE
        target = label.where(known, 0)
        share = weight[target] * known
        share = share / share.sum()
        logp = logits.log_softmax(1)
        ctx.save_for_backward(logp, target, share)
        return -(share * logp.gather(1, target[:, None])[:, 0]).sum()

    @staticmethod
    def backward(ctx, grad):
        logp, target, share = ctx.saved_tensors
        delta = logp.exp()
        delta.scatter_add_(1, target[:, None], torch.full_like(delta[:, :1], -1.0))
        return grad * share[:, None] * delta, None, None


def dice_loss(logits: Tensor, label: Tensor) -> Tensor:
    """Soft Dice of the foreground's classes, over the whole batch."""
    known = (label != IGNORE)[:, None]
    truth = F.one_hot(label.where(known[:, 0], 0), plan.classes).movedim(-1, 1) * known
    prob = logits.softmax(1) * known
    axes = (0, 2, 3, 4)
    overlap, total = (prob * truth).sum(axes), prob.sum(axes) + truth.sum(axes)
    return 1 - ((2 * overlap + 1) / (total + 1))[1:].mean()


# ---------------------------------------------------------------- network
class Norm(nn.Module):
    def __init__(self, width: int, slope: float):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return NormLeaky.apply(x, self.weight, self.bias, self.slope)


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv3d(inside, outside, 3, stride, padding=1, bias=False)
        self.norm1 = Norm(outside, plan.slope)
        self.conv2 = nn.Conv3d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = Norm(outside, 1.0)
        self.short = nn.Sequential(nn.AvgPool3d(stride), nn.Conv3d(inside, outside, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.norm1(self.conv1(x))))
        return F.leaky_relu(y + self.short(x), plan.slope)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        w = plan.widths
        self.encoder = nn.ModuleList([Residual(1, w[0])])
        self.encoder.extend(Residual(a, b, stride=2) for a, b in zip(w, w[1:]))
        pairs = list(zip(w, w[1:]))[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, 2) for a, b in pairs)
        self.decoder = nn.ModuleList(Residual(2 * a, a) for a, _ in pairs)
        self.heads = nn.ModuleList(nn.Conv3d(a, plan.classes, 1) for a, _ in pairs)
        for m in self.modules():
            if isinstance(m, nn.Conv3d | nn.ConvTranspose3d):
                nn.init.kaiming_normal_(m.weight, a=plan.slope)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Logits of all levels, the finest first."""
        kept, out = [], []
        for stage in self.encoder:
            x = stage(x)
            kept.append(x)
        kept.pop()
        for up, block, head in zip(self.up, self.decoder, self.heads):
            x = block(torch.cat([up(x), kept.pop()], 1))
            out.append(head(x))
        return out[::-1]


def load_encoder(encoder: nn.ModuleList) -> None:
    """Kernels of the other run are [depth, height, width, in, out]."""
    gen = torch.Generator().manual_seed(404)
    saved = {}
    for name, p in encoder.named_parameters():
        if p.ndim == 5:
            std = (2 / p[0].numel()) ** 0.5
            saved[name] = std * torch.randn(*p.shape[2:], *p.shape[1::-1], generator=gen)
        else:
            saved[name] = p.detach() + 0.2 * torch.randn(p.shape, generator=gen)
    for name, p in encoder.named_parameters():
        value = saved[name]
        p.data = value.permute(4, 3, 0, 1, 2).contiguous() if value.ndim == 5 else value


# ---------------------------------------------------------------- training
class Trainer:
    def __init__(self, cases):
        self.net = UNet()
        load_encoder(self.net.encoder)
        self.optimizer = torch.optim.SGD(
            self.net.parameters(),
            plan.lr,
            momentum=plan.momentum,
            weight_decay=plan.weight_decay,
            nesterov=True,
        )
        level = 0.5 ** torch.arange(len(self.net.heads))
        self.level_weights = (level / level.sum()).tolist()
        labels = torch.cat([label[label != IGNORE] for _, label in cases])
        often = torch.bincount(labels, minlength=plan.classes) / len(labels)
        self.class_weights = often.rsqrt() / often.rsqrt().mean()

    def loss(self, outputs: list[Tensor], label: Tensor) -> Tensor:
        total = 0.0
        for level, (weight, logits) in enumerate(zip(self.level_weights, outputs)):
            every = 2**level
            small = label[:, ::every, ::every, ::every]
            entropy = WeightedEntropy.apply(logits, small, self.class_weights)
            total = total + weight * (entropy + dice_loss(logits, small))
        return total

    def step(self, iteration: int, image: Tensor, label: Tensor) -> tuple[float, float]:
        for group in self.optimizer.param_groups:
            group["lr"] = plan.lr * (1 - iteration / plan.iterations) ** 0.9
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.net(image), label)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), plan.clip)
        self.optimizer.step()
        return loss.item(), norm.item()

    @torch.no_grad()
    def predict(self, image: Tensor) -> Tensor:
        """Windows overlap by half; their middles count more."""
        size = plan.patch
        bell = torch.exp(-0.5 * ((torch.arange(size) - (size - 1) / 2) / (size / 8)) ** 2)
        bell = torch.einsum("i,j,k->ijk", bell, bell, bell).clamp(min=1e-4)
        total = torch.zeros(plan.classes, *image.shape)
        starts = [sorted({*range(0, n - size, size // 2), n - size}) for n in image.shape]
        for corner in product(*starts):
            cut = tuple(slice(c, c + size) for c in corner)
            total[:, *cut] += bell * self.net(image[cut][None, None])[0][0].softmax(0)
        return total.argmax(0)

    def validate(self, cases) -> list[float]:
        overlap, total = torch.zeros(2, plan.classes)
        for image, label in cases:
            known = label != IGNORE
            guess, label = self.predict(image)[known], label[known]
            for c in range(plan.classes):
                overlap[c] += 2 * ((guess == c) & (label == c)).sum()
                total[c] += (guess == c).sum() + (label == c).sum()
        return (overlap / total)[1:].tolist()


def main() -> None:
    torch.manual_seed(12)
    gen = torch.Generator().manual_seed(120)
    cases = [make_case(gen) for _ in range(6)]
    stats = fingerprint(cases[1:])
    sampler = PatchSampler(cases[1:], stats, seed=121)
    trainer = Trainer(cases[1:])
    for iteration in range(plan.stop):
        loss, norm = trainer.step(iteration, *sampler.batch())
        print(f"{iteration}: loss {loss:.4f}, gradient {norm:.3f}")
    held_out = PatchSampler(cases[:1], stats, seed=0).cases
    print("dice", *(f"{value:.3f}" for value in trainer.validate(held_out)))


if __name__ == "__main__":
    main()
