"""StyleGAN2 as written for TF 1: NHWC, HWIO kernels, activations scaled by the styles."""

from math import sqrt
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

resample_kernel = [1, 3, 3, 1]
num_layers = 6
mapping_lrmul = 0.01


def variable(value):
    return nn.Parameter(value.contiguous().clone())


def get_weight(ckpt, name, lrmul=1.0):
    """Return a weight (out, in, ...) with its runtime coefficient multiplied in."""
    w = ckpt[name].squeeze(0) if ckpt[name].ndim == 5 else ckpt[name]
    fan_in = w[0].numel()
    return w * (lrmul / sqrt(fan_in))


def get_kernel(ckpt, name):
    return get_weight(ckpt, name).permute(2, 3, 1, 0)


# ----------------------------------------------------------------------------
# Resampling.


def setup_kernel(k):
    k = torch.tensor(k, dtype=torch.float32)
    k = torch.outer(k, k)
    return k / torch.sum(k)


def upfirdn_2d(x, k, up=1, pad0=0, pad1=0):
    n, h, w, c = x.shape
    x = x.reshape(n, h, 1, w, 1, c)
    x = F.pad(x, (0, 0, 0, up - 1, 0, 0, 0, up - 1))
    x = x.reshape(n, h * up, w * up, c)
    x = F.pad(x, (0, 0, pad0, pad1, pad0, pad1))
    size = k.shape[0]
    out_h, out_w = x.shape[1] - size + 1, x.shape[2] - size + 1
    y = 0
    for i in range(size):
        for j in range(size):
            tap = k[size - 1 - i, size - 1 - j]
            y = y + tap * x[:, i : i + out_h, j : j + out_w]
    return y


def conv2d(x, w, stride=1, padding="same"):
    x = F.conv2d(
        x.permute(0, 3, 1, 2), w.permute(3, 2, 0, 1), stride=stride, padding=padding
    )
    return x.permute(0, 2, 3, 1)


def upsample_2d(x, factor=2):
    k = setup_kernel(resample_kernel) * factor**2
    p = k.shape[0] - factor
    return upfirdn_2d(x, k, up=factor, pad0=(p + 1) // 2 + factor - 1, pad1=p // 2)


def upsample_conv_2d(x, w, factor=2):
    k = setup_kernel(resample_kernel) * factor**2
    p = (k.shape[0] - factor) - (w.shape[1] - 1)
    w = torch.flip(w, (0, 1)).permute(2, 3, 0, 1)
    x = F.conv_transpose2d(x.permute(0, 3, 1, 2), w, stride=factor)
    x = x.permute(0, 2, 3, 1)
    return upfirdn_2d(x, k, pad0=(p + factor - 1) // 2 + 1, pad1=p // 2 + 1)


def conv_downsample_2d(x, w, factor=2):
    k = setup_kernel(resample_kernel)
    p = (k.shape[0] - factor) + (w.shape[1] - 1)
    x = upfirdn_2d(x, k, pad0=(p + 1) // 2, pad1=p // 2)
    return conv2d(x, w, stride=factor, padding="valid")


# ----------------------------------------------------------------------------
# Layers.


def leaky_relu(x, alpha=0.2):
    return torch.maximum(x, alpha * x) * sqrt(2)


class Dense(nn.Module):
    def __init__(self, ckpt, name, lrmul=1.0, act=None, res=None):
        super().__init__()
        w = get_weight(ckpt, name + ".weight", lrmul).t()
        if res is not None:
            # activations are flattened from NHWC here
            w = w.unflatten(0, (-1, res, res)).permute(1, 2, 0, 3).flatten(0, 2)
        self.weight = variable(w)
        self.bias = variable(ckpt[name + ".bias"] * lrmul)
        self.act = act

    def forward(self, x):
        x = torch.matmul(x, self.weight) + self.bias
        return x if self.act is None else self.act(x)


class ModulatedConv2D(nn.Module):
    def __init__(self, ckpt, name, up=False, demodulate=True):
        super().__init__()
        w = get_kernel(ckpt, name + ".weight")
        if up:
            w = torch.flip(w, (0, 1))
        self.weight = variable(w)
        self.mod_weight = variable(get_weight(ckpt, name + ".modulation.weight").t())
        self.mod_bias = variable(ckpt[name + ".modulation.bias"] - 1)
        self.up = up
        self.demodulate = demodulate

    def forward(self, x, y):
        s = torch.matmul(y, self.mod_weight) + self.mod_bias + 1
        x = x * s[:, None, None, :]
        if self.up:
            x = upsample_conv_2d(x, self.weight)
        else:
            x = conv2d(x, self.weight)
        if self.demodulate:
            ww = self.weight[None] * s[:, None, None, :, None]
            d = torch.rsqrt(torch.sum(torch.square(ww), dim=(1, 2, 3)) + 1e-8)
            x = x * d[:, None, None, :]
        return x


class SynthesisLayer(nn.Module):
    def __init__(self, ckpt, name, noise, up=False):
        super().__init__()
        self.conv = ModulatedConv2D(ckpt, name + ".conv", up=up)
        self.noise_strength = variable(ckpt[name + ".noise.weight"][0])
        self.bias = variable(ckpt[name + ".activate.bias"])
        self.register_buffer("noise", ckpt[noise].permute(0, 2, 3, 1).clone())

    def forward(self, x, dlatent):
        x = self.conv(x, dlatent)
        x = x + self.noise * self.noise_strength
        return leaky_relu(x + self.bias)


class ToRGB(nn.Module):
    def __init__(self, ckpt, name):
        super().__init__()
        self.conv = ModulatedConv2D(ckpt, name + ".conv", demodulate=False)
        self.bias = variable(ckpt[name + ".bias"].flatten())

    def forward(self, x, y, dlatent):
        t = self.conv(x, dlatent) + self.bias
        return t if y is None else y + t


# ----------------------------------------------------------------------------
# Networks.


class Mapping(nn.Module):
    def __init__(self, ckpt, scope):
        super().__init__()
        self.dense = nn.ModuleList(
            Dense(ckpt, f"{scope}.{i}", mapping_lrmul, leaky_relu) for i in (1, 2, 3)
        )

    def forward(self, x):
        x = x * torch.rsqrt(torch.mean(torch.square(x), dim=1, keepdim=True) + 1e-8)
        for layer in self.dense:
            x = layer(x)
        return x[:, None].tile(1, num_layers, 1)


class Synthesis(nn.Module):
    def __init__(self, ckpt, scope):
        super().__init__()
        self.const = variable(ckpt[scope + "input.input"].permute(0, 2, 3, 1))
        noise = scope + "noises.noise_"
        self.conv = nn.ModuleList([SynthesisLayer(ckpt, scope + "conv1", noise + "0")])
        self.conv0_up = nn.ModuleList()
        self.torgb = nn.ModuleList([ToRGB(ckpt, scope + "to_rgb1")])
        for res in (3, 4):
            i = res * 2 - 6
            up, same = f"{scope}convs.{i}", f"{scope}convs.{i + 1}"
            self.conv0_up.append(SynthesisLayer(ckpt, up, f"{noise}{i + 1}", up=True))
            self.conv.append(SynthesisLayer(ckpt, same, f"{noise}{i + 2}"))
            self.torgb.append(ToRGB(ckpt, f"{scope}to_rgbs.{res - 3}"))

    def forward(self, dlatents):
        x = self.const.tile(dlatents.shape[0], 1, 1, 1)
        x = self.conv[0](x, dlatents[:, 0])
        y = self.torgb[0](x, None, dlatents[:, 1])
        for res in (3, 4):
            x = self.conv0_up[res - 3](x, dlatents[:, res * 2 - 5])
            x = self.conv[res - 2](x, dlatents[:, res * 2 - 4])
            y = upsample_2d(y)
            y = self.torgb[res - 2](x, y, dlatents[:, res * 2 - 3])
        return y


class Conv2D(nn.Module):
    def __init__(self, ckpt, weight, bias=None, down=False):
        super().__init__()
        self.weight = variable(get_kernel(ckpt, weight))
        self.bias = None if bias is None else variable(ckpt[bias])
        self.down = down

    def forward(self, x):
        x = conv_downsample_2d(x, self.weight) if self.down else conv2d(x, self.weight)
        return x if self.bias is None else leaky_relu(x + self.bias)


class Block(nn.Module):
    def __init__(self, ckpt, scope):
        super().__init__()
        conv1, conv2, skip = scope + ".conv1", scope + ".conv2", scope + ".skip"
        self.conv0 = Conv2D(ckpt, conv1 + ".0.weight", conv1 + ".1.bias")
        self.conv1_down = Conv2D(
            ckpt, conv2 + ".1.weight", conv2 + ".2.bias", down=True
        )
        self.skip = Conv2D(ckpt, skip + ".1.weight", down=True)

    def forward(self, x):
        t = self.skip(x)
        x = self.conv1_down(self.conv0(x))
        return (x + t) * (1 / sqrt(2))


def minibatch_stddev_layer(x, group_size=2):
    n, h, w, c = x.shape
    y = x.reshape(group_size, n // group_size, h, w, c)
    y = y - torch.mean(y, dim=0, keepdim=True)
    y = torch.mean(torch.square(y), dim=0)
    y = torch.sqrt(y + 1e-8)
    y = torch.mean(y, dim=(1, 2, 3), keepdim=True)
    y = y.tile(group_size, h, w, 1)
    return torch.cat([x, y], dim=3)


class Discriminator(nn.Module):
    def __init__(self, ckpt, scope):
        super().__init__()
        self.fromrgb = Conv2D(
            ckpt, scope + "convs.0.0.weight", scope + "convs.0.1.bias"
        )
        self.blocks = nn.Sequential(
            Block(ckpt, scope + "convs.1"), Block(ckpt, scope + "convs.2")
        )
        self.conv = Conv2D(
            ckpt, scope + "final_conv.0.weight", scope + "final_conv.1.bias"
        )
        self.dense0 = Dense(ckpt, scope + "final_linear.0", act=leaky_relu, res=4)
        self.output = Dense(ckpt, scope + "final_linear.1")

    def forward(self, images):
        x = self.blocks(self.fromrgb(images))
        x = minibatch_stddev_layer(x)
        x = self.conv(x)
        x = self.dense0(x.flatten(1))
        return self.output(x)


class GAN(nn.Module):
    def __init__(self, ckpt):
        super().__init__()
        self.mapping = Mapping(ckpt, "generator.style")
        self.synthesis = Synthesis(ckpt, "generator.")
        self.D = Discriminator(ckpt, "discriminator.")

    def forward(self, latents, latents2, reals, mixing_cutoff=3):
        layer_idx = torch.arange(num_layers)[None, :, None]
        dlatents = torch.where(
            layer_idx < mixing_cutoff, self.mapping(latents), self.mapping(latents2)
        )
        images = self.synthesis(dlatents)
        return images, self.D(images), self.D(reals)


def model():
    return GAN(torch.load(Path(__file__).with_name("weights.pt"))).eval()


def forward(net, batch):
    images, fake_scores, real_scores = net(
        batch["z"], batch["z_mix"], batch["real"].permute(0, 2, 3, 1)
    )
    return {
        "image": images.permute(0, 3, 1, 2),
        "fake": fake_scores,
        "real": real_scores,
    }


def loss(output, batch):
    g_loss = torch.mean(F.softplus(-output["fake"]))
    d_loss = torch.mean(F.softplus(-output["real"]))
    pixels = torch.mean(torch.abs(output["image"] - batch["real"]))
    return g_loss + d_loss + pixels
