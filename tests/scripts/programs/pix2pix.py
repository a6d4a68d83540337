"""Pairs of town plans and views from the air: a small pix2pix after the well-known one.

A scanned plan lies to the left of its view in one picture. The discriminator judges
patches of plan and view together, and views that were painted earlier as well.
"""

import logging

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

# name: (colour in the plan, colour from the air)
LEGEND = {
    "field": ((232, 226, 180), (148, 160, 84)),
    "water": ((120, 170, 225), (38, 70, 98)),
    "wood": ((110, 190, 110), (40, 84, 46)),
    "road": ((250, 250, 250), (128, 126, 132)),
    "roof": ((225, 120, 100), (176, 92, 70)),
}
PLAN, VIEW = torch.tensor(list(LEGEND.values())).float().unbind(1)
TAPS = torch.tensor([1.0, 3.0, 3.0, 1.0])
BLUR = TAPS[:, None] * TAPS / TAPS.sum() ** 2
leaky = nn.LeakyReLU(0.2)
twice = nn.Upsample(scale_factor=2.0, mode="bilinear")


class TrainOptions:
    seed, plans, stored, crop, jitter = 41, 8, (36, 46), (32, 40), (5, 7)
    input_nc, output_nc, ngf, ndf = len(LEGEND) + 1, 3, 10, 9
    batch_size, epochs, pool_size = 3, 2, 5
    epoch_count, n_epochs, n_epochs_decay = 7, 5, 6
    lr_G, lr_D, betas, clip_G, clip_D = 3e-3, 5e-3, (0.5, 0.999), 4.0, 0.5
    lambda_L1, lambda_feat, layer_weights = 8.0, 3.0, (0.5, 1.0, 2.0)
    real_label, fake_label = 0.9, 0.15


def draw_towns(opt, rng):
    n, (h, w) = opt.plans, opt.stored
    y, x = torch.arange(h)[:, None], torch.arange(w)[None, :]
    label = torch.zeros(n, h, w, dtype=torch.long)
    for town in label:
        a, b, c = torch.rand(3, generator=rng).tolist()
        river = h * (0.2 + 0.6 * a) + 5 * torch.sin(x / (4 + 5 * b) + 6 * c)
        town[(y - river).abs() < 2 + 2 * c] = 1
        town[(y - h * b) ** 2 + (x - w * c) ** 2 < (6 + 5 * a) ** 2] = 2
        town[:, int(w * (0.2 + 0.5 * b)) :][:, :3] = 3
        for cy, cx, r in torch.rand(6, 3, generator=rng).tolist():
            town[int((h - 6) * cy) :, int((w - 9) * cx) :][:4, : 4 + int(5 * r)] = 4
    plan = PLAN[label] + 9 * torch.randn(n, h, w, 3, generator=rng)
    light = 1 + 0.25 * torch.sin((x + y) / 9 + 6 * torch.rand(n, 1, 1, generator=rng))
    grain = 14 * torch.randn(n, h, w, 1, generator=rng)
    both = torch.cat([plan, (VIEW[label] + grain) * light[..., None]], 2)
    return both.permute(0, 3, 1, 2).round().clamp(0, 255).to(torch.uint8)


class AlignedDataset(Dataset):
    def __init__(self, opt, pictures):
        self.opt, self.pictures = opt, pictures
        self.rng = torch.Generator().manual_seed(opt.seed + 5)

    def __len__(self):
        return len(self.pictures)

    def classes(self, plan):
        """Each pixel's class: the nearest colour of the legend."""
        return (plan.float() - PLAN[:, :, None, None]).square().sum(1).argmin(0)

    def __getitem__(self, index):
        plan, view = self.pictures[index].chunk(2, dim=2)
        (h, w), spare = self.opt.crop, self.opt.jitter
        top, left = (int(torch.randint(n, (), generator=self.rng)) for n in spare)
        label = self.classes(plan)[top : top + h, left : left + w]
        real = view[:, top : top + h, left : left + w].float() / 127.5 - 1
        if torch.rand((), generator=self.rng) < 0.5:
            label, real = label.flip(1), real.flip(2)
        across = F.pad(label[:, 1:] != label[:, :-1], (1, 1))
        along = F.pad(label[1:] != label[:-1], (0, 0, 1, 1))
        edge = across[:, 1:] | across[:, :-1] | along[1:] | along[:-1]
        maps = F.one_hot(label, len(LEGEND)).permute(2, 0, 1)
        return {"A": torch.cat([maps, edge[None]]).float(), "B": real, "label": label}


class InstanceNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, eps):
        centred = x - x.mean((2, 3), keepdim=True)
        rstd = (centred.square().mean((2, 3), keepdim=True) + eps).rsqrt()
        y = centred * rstd
        ctx.save_for_backward(y, rstd)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, rstd = ctx.saved_tensors
        level = grad.mean((2, 3), keepdim=True)
        along = (grad * y).mean((2, 3), keepdim=True)
        return rstd * (grad - level - y * along), None


class BlurPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kernel):
        ctx.save_for_backward(kernel)
        wide = F.pad(x, (1, 1, 1, 1), mode="reflect")
        stack = kernel.expand(x.shape[1], 1, 4, 4)
        return F.conv2d(wide, stack, stride=2, groups=x.shape[1])

    @staticmethod
    def backward(ctx, grad):
        stack = ctx.saved_tensors[0].expand(grad.shape[1], 1, 4, 4)
        wide = F.conv_transpose2d(grad, stack, stride=2, groups=grad.shape[1])
        for dim in (2, 3):
            size = wide.shape[dim] - 2
            inner = wide.narrow(dim, 1, size).clone()
            inner.select(dim, 1).add_(wide.select(dim, 0))
            inner.select(dim, size - 2).add_(wide.select(dim, size + 1))
            wide = inner
        return wide, None


class NormedConv(nn.Conv2d):
    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out, 3, padding=1, bias=False)
        self.gamma = nn.Parameter(1 + 0.15 * torch.randn(n_out, 1, 1))
        self.beta = nn.Parameter(0.15 * torch.randn(n_out, 1, 1))

    def forward(self, x):
        h = F.conv2d(x, self.weight, padding=1)
        return InstanceNorm.apply(h, 1e-4) * self.gamma + self.beta


class SpectralConv(nn.Conv2d):
    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out, 3, padding=1)
        self.register_buffer("u", F.normalize(torch.randn(n_out), dim=0))

    def forward(self, x):
        table = self.weight.flatten(1)
        with torch.no_grad():
            v = F.normalize(table.T @ self.u, dim=0)
            self.u.copy_(F.normalize(table @ v, dim=0))
        sigma = torch.dot(self.u.clone(), table @ v)
        return F.conv2d(x, self.weight / sigma, self.bias, padding=1)


class UnetGenerator(nn.Module):
    def __init__(self, opt):
        super().__init__()
        a, b, c, d, e = (opt.ngf + more for more in (0, 5, 11, 7, 3))
        self.inlet = nn.Conv2d(opt.input_nc, a, 3, padding=1)
        self.down1, self.down2 = NormedConv(a, b), NormedConv(b, c)
        self.up2, self.up1 = NormedConv(c, d), NormedConv(d + b, e)
        self.outlet = nn.Conv2d(e + a, opt.output_nc, 3, padding=1)

    def forward(self, maps):
        high = leaky(self.inlet(maps))
        middle = leaky(self.down1(BlurPool.apply(high, BLUR)))
        low = leaky(self.down2(BlurPool.apply(middle, BLUR)))
        h = torch.cat([F.relu(self.up2(twice(low))), middle], 1)
        h = torch.cat([F.relu(self.up1(twice(h))), high], 1)
        return torch.tanh(self.outlet(h))


class PatchDiscriminator(nn.Module):
    def __init__(self, opt):
        super().__init__()
        nc, ndf = opt.input_nc + opt.output_nc, opt.ndf
        self.layer1 = SpectralConv(nc, ndf + 1)
        self.layer2 = SpectralConv(ndf + 1, ndf + 5)
        self.layer3 = SpectralConv(ndf + 5, 2 * ndf)
        self.verdict = SpectralConv(2 * ndf, 1)

    def forward(self, maps, view):
        h1 = leaky(self.layer1(torch.cat([maps, view], 1)))
        h2 = leaky(self.layer2(BlurPool.apply(h1, BLUR)))
        h3 = leaky(self.layer3(BlurPool.apply(h2, BLUR)))
        return self.verdict(h3), (h1, h2, h3)


class ImagePool:
    def __init__(self, opt, maps, views):
        self.pairs = list(zip(maps, views, strict=True))
        self.rng = torch.Generator().manual_seed(opt.seed + 3)

    def query(self, maps, views):
        given = list(zip(maps, views, strict=True))
        for i, pair in enumerate(given):
            at = int(torch.randint(len(self.pairs), (), generator=self.rng))
            if torch.rand((), generator=self.rng) < 0.5:
                given[i], self.pairs[at] = self.pairs[at], pair
        return [torch.stack(side) for side in zip(*given, strict=True)]


class Pix2PixModel:
    def __init__(self, opt, pool, class_weights):
        self.opt, self.pool, self.class_weights = opt, pool, class_weights
        self.netG, self.netD = UnetGenerator(opt), PatchDiscriminator(opt)
        self.opt_G = torch.optim.Adam(self.netG.parameters(), opt.lr_G, opt.betas)
        self.opt_D = torch.optim.Adam(self.netD.parameters(), opt.lr_D, opt.betas)
        schedule = torch.optim.lr_scheduler.LambdaLR
        self.schedulers = [schedule(o, self.decay) for o in (self.opt_G, self.opt_D)]

    def decay(self, epoch):
        late = max(0, epoch + self.opt.epoch_count - self.opt.n_epochs)
        return 1.0 - late / (self.opt.n_epochs_decay + 1)

    def set_input(self, batch):
        self.maps, self.real, self.label = batch["A"], batch["B"], batch["label"]

    def forward(self):
        self.fake = self.netG(self.maps)

    def weighted_l1(self):
        weight = self.class_weights[self.label]
        off = (self.fake - self.real).abs().mean(1)
        return (weight * off).sum() / weight.sum()

    def backward_G(self):
        verdict, seen = self.netD(self.maps, self.fake)
        wanted = [h.detach() for h in self.netD(self.maps, self.real)[1]]
        loss_GAN = (verdict - self.opt.real_label).square().mean()
        gaps = [F.l1_loss(*pair) for pair in zip(seen, wanted, strict=True)]
        loss_feat = torch.stack(gaps) @ torch.tensor(self.opt.layer_weights)
        pixels = self.opt.lambda_L1 * self.weighted_l1()
        self.loss_G = loss_GAN + pixels + self.opt.lambda_feat * loss_feat
        self.loss_G.backward()

    def backward_D(self):
        verdict, _ = self.netD(self.maps, self.real)
        loss_real = 0.5 * (verdict - self.opt.real_label).square().mean()
        loss_real.backward()
        verdict, _ = self.netD(*self.pool.query(self.maps, self.fake.detach()))
        loss_fake = 0.5 * (verdict - self.opt.fake_label).square().mean()
        loss_fake.backward()
        self.losses = (self.loss_G, loss_real, loss_fake)

    def optimize_parameters(self):
        self.forward()
        self.opt_G.zero_grad()
        self.backward_G()
        nn.utils.clip_grad_norm_(self.netG.parameters(), self.opt.clip_G)
        self.opt_G.step()
        self.opt_D.zero_grad()  # the generator's loss went through it
        self.backward_D()
        nn.utils.clip_grad_norm_(self.netD.parameters(), self.opt.clip_D)
        self.opt_D.step()


def last_run(opt, dataset):
    """What an earlier run left: first filters by the alphabet, and views it painted."""
    rng = torch.Generator().manual_seed(2024)
    filters = torch.randn(opt.ngf, len(LEGEND), 3, 3, generator=rng)
    pairs = [dataset[index] for index in range(opt.pool_size)]
    views = torch.stack([F.avg_pool2d(pair["B"], 5, 1, 2) for pair in pairs])
    views = (views + 0.1 * torch.randn(views.shape, generator=rng)).clamp(-1, 1)
    saved = {"names": sorted(LEGEND), "inlet": (filters / 7).half()}
    saved["maps"] = torch.stack([pair["A"] for pair in pairs])
    return saved | {"views": ((views + 1) * 127.5).round().to(torch.uint8)}


def balance(dataset):
    """Weights of the classes: root of the median share over the class's own share."""
    seen = torch.stack([dataset.classes(p.chunk(2, 2)[0]) for p in dataset.pictures])
    share = seen.flatten().bincount(minlength=len(LEGEND)) / seen.numel()
    return (share.median() / share).sqrt()


@torch.no_grad()
def adopt(net, saved, pictures):
    order = [saved["names"].index(name) for name in LEGEND]
    net.inlet.weight[:, : len(order)] = saved["inlet"].float()[:, order]
    usual = pictures.chunk(2, dim=3)[1].float().mean((0, 2, 3)) / 127.5 - 1
    net.outlet.bias.copy_(torch.atanh(usual))


def main():
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    opt = TrainOptions()
    torch.manual_seed(opt.seed)
    pictures = draw_towns(opt, torch.Generator().manual_seed(opt.seed))
    dataset = AlignedDataset(opt, pictures)
    order = torch.Generator().manual_seed(opt.seed + 2)
    loader = DataLoader(dataset, opt.batch_size, True, drop_last=True, generator=order)
    saved = last_run(opt, dataset)
    pool = ImagePool(opt, saved["maps"], saved["views"].float() / 127.5 - 1)
    model = Pix2PixModel(opt, pool, balance(dataset))
    adopt(model.netG, saved, pictures)
    for epoch in range(opt.epochs):
        for batch in loader:
            model.set_input(batch)
            model.optimize_parameters()
            logging.info("epoch %d: %s", epoch, [loss.item() for loss in model.losses])
        for scheduler in model.schedulers:
            scheduler.step()


if __name__ == "__main__":
    main()
