"""x2 super-resolution of synthetic textures.

RDN-like generator, perceptual loss, relativistic patch discriminator (ESRGAN's recipe, cut
down to a test rig). Head and tail come from the PSNR-oriented run, which was trained on BGR.
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

SCALE, PATCH, SIZE, BATCH, ACCUM, ITERS, VAL_EVERY = 2, 12, 32, 4, 2, 3, 2
RGB_MEAN, RGB_STD = (0.45, 0.44, 0.40), (0.26, 0.25, 0.28)
opt = {
    "net_g": {"nf": 8, "growth": 6, "layers": 3, "blocks": 2, "res_scale": 0.2},
    "net_d": {"nf": 8},
    "percep": {"nf": (6, 10, 12), "weights": (0.1, 0.4, 1.0), "mean": (0.485, 0.456, 0.406)},
    "lr_g": {"head": 2e-4, "body": 2e-3, "tail": 4e-3},
    "lr_d": 1e-3,
    "adam": {"betas": (0.9, 0.99), "weight_decay": 1e-2},
    "sched": {"warmup": 4, "total": 20},
    "clip": 0.25,
    "ema": 0.9,
    "eps": 1e-2,
    "weights": {"pix": 1.0, "percep": 0.5, "tv": 0.05, "gan": 0.1},
}


# ---- data


def texture(gen, low=0.04, high=0.4):
    """Noise of the frequencies in the band, falling off as pink noise does, in [0, 1]."""
    freq = torch.hypot(torch.fft.fftfreq(SIZE)[:, None], torch.fft.rfftfreq(SIZE)[None])
    spectrum = torch.fft.rfft2(torch.randn(3, SIZE, SIZE, generator=gen))
    spectrum = spectrum * ((freq > low) & (freq < high)) / freq.clamp(min=low)
    image = torch.fft.irfft2(spectrum, s=(SIZE, SIZE))
    tint = torch.tensor([[1.0, 0.5, 0.2], [0.5, 1.0, 0.5], [0.2, 0.5, 1.0]])
    image = torch.einsum("ij,jhw->ihw", tint, image)
    return (torch.tensor(RGB_MEAN)[:, None, None] + 0.24 * image / image.std()).clamp(0, 1)


def degrade(gt):
    """Bicubic with antialiasing, as imresize does."""
    lq = F.interpolate(gt[None], scale_factor=1 / SCALE, mode="bicubic", antialias=True)
    return lq[0].clamp(0, 1)


def to_uint8(image):
    return (image * 255).round().to(torch.uint8)


class PairedImages:
    """Pairs of (lq, gt), stored as bytes; training pairs are cropped and augmented."""

    def __init__(self, count, seed, train):
        gen = torch.Generator().manual_seed(seed)
        gts = [texture(gen) for _ in range(count)]
        self.gt = [to_uint8(gt) for gt in gts]
        self.lq = [to_uint8(degrade(gt)) for gt in gts]
        self.train, self.dice = train, torch.Generator().manual_seed(seed + 1)

    def __len__(self):
        return len(self.gt)

    def crop(self, lq, gt):
        places = lq.shape[-1] - PATCH + 1
        top, left = torch.randint(places, (2,), generator=self.dice).tolist()
        lq = lq[:, top : top + PATCH, left : left + PATCH]
        top, left, size = SCALE * top, SCALE * left, SCALE * PATCH
        return lq, gt[:, top : top + size, left : left + size]

    def augment(self, *images):
        hflip, vflip, turn = (torch.rand(3, generator=self.dice) < 0.5).tolist()
        if hflip:
            images = [image.flip(-1) for image in images]
        if vflip:
            images = [image.flip(-2) for image in images]
        return [image.mT for image in images] if turn else images

    def __getitem__(self, index):
        lq, gt = self.lq[index].float() / 255, self.gt[index].float() / 255
        return self.augment(*self.crop(lq, gt)) if self.train else (lq, gt)


def endless(dataset, seed):
    gen = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(dataset), generator=gen)
        for rows in order.split(BATCH)[: len(dataset) // BATCH]:
            lq, gt = zip(*(dataset[row] for row in rows.tolist()))
            yield torch.stack(lq), torch.stack(gt)


# ---- networks


class Charbonnier(torch.autograd.Function):
    """mean(sqrt((x - y)^2 + eps^2))"""

    @staticmethod
    def forward(ctx, x, y, eps):
        diff = x - y
        root = (diff * diff + eps**2).sqrt()
        ctx.save_for_backward(diff, root)
        return root.mean()

    @staticmethod
    def backward(ctx, grad):
        diff, root = ctx.saved_tensors
        return grad * diff / root / diff.numel(), None, None


class Shuffle(torch.autograd.Function):
    """[n, c r r, h, w] -> [n, c, h r, w r]"""

    @staticmethod
    def forward(ctx, x, r):
        ctx.r = r
        x = x.unflatten(1, (-1, r, r))  # [n, c, r, r, h, w]
        return x.permute(0, 1, 4, 2, 5, 3).flatten(2, 3).flatten(3)

    @staticmethod
    def backward(ctx, grad):
        r = ctx.r
        grad = grad.unflatten(3, (-1, r)).unflatten(2, (-1, r))  # [n, c, h, r, w, r]
        return grad.permute(0, 1, 3, 5, 2, 4).flatten(1, 3), None


class MeanShift(nn.Conv2d):
    """(x - mean) / std, or back."""

    def __init__(self, mean, std, back=False):
        super().__init__(3, 3, 1)
        mean, std = torch.tensor(mean), torch.tensor(std)
        self.weight.data = torch.diag(std if back else 1 / std)[:, :, None, None]
        self.bias.data = mean if back else -mean / std
        self.requires_grad_(False)


class DenseBlock(nn.Module):
    def __init__(self, nf, growth, layers, res_scale):
        super().__init__()
        widths = [nf + i * growth for i in range(layers + 1)]
        self.convs = nn.ModuleList(nn.Conv2d(n, growth, 3, padding=1) for n in widths[:-1])
        self.fuse = nn.Conv2d(widths[-1], nf, 1)
        self.res_scale = res_scale
        for conv in [*self.convs, self.fuse]:
            nn.init.kaiming_normal_(conv.weight, a=0.2)
            conv.weight.data *= 0.5
            nn.init.zeros_(conv.bias)

    def forward(self, x):
        feats = x
        for conv in self.convs:
            grown = F.leaky_relu(conv(feats), 0.2)
            feats = torch.cat([feats, grown], 1)
        return x + self.res_scale * self.fuse(feats)


class Generator(nn.Module):
    def __init__(self, nf, growth, layers, blocks, res_scale):
        super().__init__()
        self.sub_mean = MeanShift(RGB_MEAN, RGB_STD)
        self.head = nn.Conv2d(3, nf, 3, padding=1)
        self.body = nn.ModuleList(DenseBlock(nf, growth, layers, res_scale) for _ in range(blocks))
        self.gff = nn.Conv2d(blocks * nf, nf, 1)
        self.up = nn.Conv2d(nf, nf * SCALE**2, 3, padding=1)
        self.tail = nn.Conv2d(nf, 3, 3, padding=1)
        self.add_mean = MeanShift(RGB_MEAN, RGB_STD, back=True)

    def forward(self, x):
        x = self.sub_mean(x)
        shallow = self.head(x)
        deep, outs = shallow, []
        for block in self.body:
            deep = block(deep)
            outs.append(deep)
        deep = self.gff(torch.cat(outs, 1)) + shallow
        deep = F.leaky_relu(Shuffle.apply(self.up(deep), SCALE), 0.1)
        base = F.interpolate(x, scale_factor=SCALE, mode="bilinear", align_corners=False)
        return self.add_mean(base + self.tail(deep))


class PatchDiscriminator(nn.Module):
    def __init__(self, nf):
        super().__init__()
        self.conv0 = nn.Conv2d(3, nf, 3, padding=1)
        self.conv1 = spectral_norm(nn.Conv2d(nf, 2 * nf, 4, stride=2, padding=1))
        self.conv2 = spectral_norm(nn.Conv2d(2 * nf, 2 * nf, 4, stride=2, padding=1))
        # no bias: a relativistic loss does not see it
        self.score = nn.Conv2d(2 * nf, 1, 3, padding=1, bias=False)

    def forward(self, x):
        for conv in (self.conv0, self.conv1, self.conv2):
            x = F.leaky_relu(conv(x), 0.2)
        return self.score(x)


class FeatureLoss(nn.Module):
    """L1 between the features of a frozen random network, before the activations."""

    def __init__(self, nf, weights, mean):
        super().__init__()
        sizes = zip((3, *nf), nf)
        self.convs = nn.ModuleList(nn.Conv2d(c, n, 3, padding=1, bias=False) for c, n in sizes)
        self.weights = weights
        self.register_buffer("mean", torch.tensor(mean)[:, None, None])
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225])[:, None, None])
        for conv in self.convs:
            nn.init.orthogonal_(conv.weight, gain=math.sqrt(2))
        self.requires_grad_(False)

    def features(self, x):
        x, out = (x - self.mean) / self.std, []
        for conv in self.convs:
            x = conv(x)
            out.append(x)
            x = F.avg_pool2d(F.relu(x), 2)
        return out

    def forward(self, x, y):
        pairs = zip(self.weights, self.features(x), self.features(y))
        return sum(w * F.l1_loss(fx, fy) for w, fx, fy in pairs)


def psnr_run(nf):
    """params of net_g_latest.pth: saved from DataParallel, BGR in and out."""
    gen, params = torch.Generator().manual_seed(301), {}
    for name, shape in {"conv_first": (nf, 3, 3, 3), "conv_last": (3, nf, 3, 3)}.items():
        params[f"module.{name}.weight"] = 0.2 * torch.randn(shape, generator=gen)
        params[f"module.{name}.bias"] = 0.1 * torch.randn(shape[0], generator=gen)
    return params


def load_pretrained(net, params):
    names = {"conv_first": "head", "conv_last": "tail"}
    for key, value in params.items():
        layer, leaf = key.removeprefix("module.").split(".")
        if key.endswith("conv_first.weight"):
            value = value.flip(1)
        if layer == "conv_last":
            value = value.flip(0)
        getattr(getattr(net, names[layer]), leaf).data.copy_(value)


# ---- model


def total_variation(x):
    return x.diff(dim=-1).abs().mean() + x.diff(dim=-2).abs().mean()


def gan_loss(logits, is_real):
    target = torch.full_like(logits, float(is_real))
    return F.binary_cross_entropy_with_logits(logits, target)


def lr_factor(it):
    warmup, total = opt["sched"]["warmup"], opt["sched"]["total"]
    if it < warmup:
        return (it + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (it - warmup) / (total - warmup)))


class SRGANModel:
    def __init__(self):
        self.net_g = g = Generator(**opt["net_g"])
        load_pretrained(g, psnr_run(opt["net_g"]["nf"]))
        self.net_d = PatchDiscriminator(**opt["net_d"])
        self.cri_percep = FeatureLoss(**opt["percep"])
        self.net_g_ema = copy.deepcopy(g).requires_grad_(False)
        parts = {"head": [g.head], "body": [g.body, g.gff], "tail": [g.up, g.tail]}
        groups = [
            {"params": [p for m in mods for p in m.parameters()], "lr": opt["lr_g"][name]}
            for name, mods in parts.items()
        ]
        self.opt_g = torch.optim.AdamW(groups, **opt["adam"])
        self.opt_d = torch.optim.Adam(self.net_d.parameters(), opt["lr_d"], opt["adam"]["betas"])
        lr_scheduler = torch.optim.lr_scheduler
        self.scheds = [lr_scheduler.LambdaLR(o, lr_factor) for o in (self.opt_g, self.opt_d)]

    def optimize_g(self, micro):
        self.net_d.requires_grad_(False)
        self.opt_g.zero_grad()
        fakes, log = [], {}
        for lq, gt in micro:
            sr = self.net_g(lq)
            real, fake = self.net_d(gt), self.net_d(sr)
            gan = (gan_loss(real - fake.mean(), False) + gan_loss(fake - real.mean(), True)) / 2
            losses = {
                "pix": Charbonnier.apply(sr, gt, opt["eps"]),
                "percep": self.cri_percep(sr, gt),
                "tv": total_variation(sr),
                "gan": gan,
            }
            total = sum(opt["weights"][name] * loss for name, loss in losses.items())
            (total / ACCUM).backward()
            fakes.append(sr.detach())
            for name, loss in losses.items():
                log[name] = log.get(name, 0.0) + loss.item() / ACCUM
        nn.utils.clip_grad_norm_(self.net_g.parameters(), opt["clip"])
        self.opt_g.step()
        return fakes, log

    def optimize_d(self, micro, fakes):
        self.net_d.requires_grad_(True)
        self.opt_d.zero_grad()
        for (_, gt), sr in zip(micro, fakes):
            real, fake = self.net_d(gt), self.net_d(sr)
            loss = gan_loss(real - fake.mean(), True) + gan_loss(fake - real.mean(), False)
            (loss / 2 / ACCUM).backward()
        self.opt_d.step()

    @torch.no_grad()
    def update_ema(self):
        for avg, new in zip(self.net_g_ema.parameters(), self.net_g.parameters()):
            avg.mul_(opt["ema"]).add_(new, alpha=1 - opt["ema"])

    @torch.no_grad()
    def validate(self, dataset):
        luma, total = torch.tensor([65.481, 128.553, 24.966]) / 255, 0.0
        for lq, gt in (dataset[index] for index in range(len(dataset))):
            sr = self.net_g_ema(lq[None])[0].clamp(0, 1)
            error = torch.einsum("c,chw->hw", luma, sr - gt)[SCALE:-SCALE, SCALE:-SCALE]
            total += -10 * math.log10(error.square().mean().item())
        return total / len(dataset)


def main():
    torch.manual_seed(10)
    train_set = PairedImages(10, seed=100, train=True)
    val_set = PairedImages(2, seed=200, train=False)
    model = SRGANModel()
    batches = endless(train_set, seed=10)
    for it in range(ITERS):
        lq, gt = next(batches)
        micro = list(zip(lq.chunk(ACCUM), gt.chunk(ACCUM)))
        fakes, log = model.optimize_g(micro)
        model.optimize_d(micro, fakes)
        for sched in model.scheds:
            sched.step()
        model.update_ema()
        words = " ".join(f"{name} {value:.5f}" for name, value in log.items())
        if it % VAL_EVERY == 0:
            words += f" psnr {model.validate(val_set):.3f}"
        print(f"iter {it}: {words}")


if __name__ == "__main__":
    main()
