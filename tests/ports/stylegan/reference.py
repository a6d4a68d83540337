"""A small StyleGAN 2: a generator of 16 x 16 images by styles, and its discriminator."""

import math

import torch
from torch import nn
from torch.nn import functional as F

STYLE = 16
CHANNELS = {4: 16, 8: 12, 16: 8}
BLUR = (1, 3, 3, 1)


def make_kernel(k):
    k = torch.tensor(k, dtype=torch.float32)
    k = k[None, :] * k[:, None]
    return k / k.sum()


def upfirdn2d(x, kernel, up=1, down=1, pad=(0, 0)):
    batch, channel, height, width = x.shape
    x = x.reshape(batch * channel, 1, height, 1, width, 1)
    x = F.pad(x, [0, up - 1, 0, 0, 0, up - 1])
    x = x.reshape(batch * channel, 1, height * up, width * up)
    x = F.pad(x, [pad[0], pad[1], pad[0], pad[1]])
    x = F.conv2d(x, torch.flip(kernel, [0, 1])[None, None])
    x = x[:, :, ::down, ::down]
    return x.reshape(batch, channel, x.shape[2], x.shape[3])


def fused_leaky_relu(x, bias, negative_slope=0.2, scale=2**0.5):
    bias = bias.view(1, -1, *[1] * (x.ndim - 2))
    return F.leaky_relu(x + bias, negative_slope) * scale


class FusedLeakyReLU(nn.Module):
    def __init__(self, channel):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(channel))

    def forward(self, x):
        return fused_leaky_relu(x, self.bias)


class PixelNorm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-8)


class Upsample(nn.Module):
    def __init__(self, kernel, factor=2):
        super().__init__()
        self.factor = factor
        kernel = make_kernel(kernel) * factor**2
        self.register_buffer("kernel", kernel)
        p = kernel.shape[0] - factor
        self.pad = ((p + 1) // 2 + factor - 1, p // 2)

    def forward(self, x):
        return upfirdn2d(x, self.kernel, up=self.factor, pad=self.pad)


class Blur(nn.Module):
    def __init__(self, kernel, pad, upsample_factor=1):
        super().__init__()
        self.register_buffer("kernel", make_kernel(kernel) * upsample_factor**2)
        self.pad = pad

    def forward(self, x):
        return upfirdn2d(x, self.kernel, pad=self.pad)


class EqualConv2d(nn.Module):
    def __init__(self, in_channel, out_channel, kernel_size, stride, padding, bias):
        super().__init__()
        self.weight = nn.Parameter(
            torch.randn(out_channel, in_channel, kernel_size, kernel_size)
        )
        self.scale = 1 / math.sqrt(in_channel * kernel_size**2)
        self.stride = stride
        self.padding = padding
        self.bias = nn.Parameter(torch.zeros(out_channel)) if bias else None

    def forward(self, x):
        weight = self.weight * self.scale
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class EqualLinear(nn.Module):
    def __init__(self, in_dim, out_dim, bias_init=0.0, lr_mul=1.0, activation=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_dim, in_dim) / lr_mul)
        self.bias = nn.Parameter(torch.full((out_dim,), bias_init))
        self.activation = activation
        self.scale = (1 / math.sqrt(in_dim)) * lr_mul
        self.lr_mul = lr_mul

    def forward(self, x):
        if self.activation:
            x = F.linear(x, self.weight * self.scale)
            return fused_leaky_relu(x, self.bias * self.lr_mul)
        return F.linear(x, self.weight * self.scale, self.bias * self.lr_mul)


class ModulatedConv2d(nn.Module):
    def __init__(
        self,
        in_channel,
        out_channel,
        kernel_size,
        style_dim,
        demodulate=True,
        upsample=False,
    ):
        super().__init__()
        self.out_channel = out_channel
        self.kernel_size = kernel_size
        self.demodulate = demodulate
        self.upsample = upsample
        self.padding = kernel_size // 2
        if upsample:
            factor = 2
            p = (len(BLUR) - factor) - (kernel_size - 1)
            pad = ((p + factor - 1) // 2 + 1, p // 2 + 1)
            self.blur = Blur(BLUR, pad, upsample_factor=factor)
        self.scale = 1 / math.sqrt(in_channel * kernel_size**2)
        self.weight = nn.Parameter(
            torch.randn(1, out_channel, in_channel, kernel_size, kernel_size)
        )
        self.modulation = EqualLinear(style_dim, in_channel, bias_init=1.0)

    def forward(self, x, style):
        batch, in_channel, height, width = x.shape
        style = self.modulation(style).view(batch, 1, in_channel, 1, 1)
        weight = self.scale * self.weight * style
        if self.demodulate:
            demod = torch.rsqrt(weight.pow(2).sum([2, 3, 4]) + 1e-8)
            weight = weight * demod.view(batch, self.out_channel, 1, 1, 1)

        x = x.reshape(1, batch * in_channel, height, width)
        if self.upsample:
            weight = weight.transpose(1, 2).flatten(0, 1)
            out = F.conv_transpose2d(x, weight, stride=2, groups=batch)
            out = out.view(batch, self.out_channel, *out.shape[2:])
            return self.blur(out)
        out = F.conv2d(x, weight.flatten(0, 1), padding=self.padding, groups=batch)
        return out.view(batch, self.out_channel, *out.shape[2:])


class NoiseInjection(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, image, noise):
        return image + self.weight * noise


class ConstantInput(nn.Module):
    def __init__(self, channel, size=4):
        super().__init__()
        self.input = nn.Parameter(torch.randn(1, channel, size, size))

    def forward(self, latent):
        return self.input.repeat(latent.shape[0], 1, 1, 1)


class StyledConv(nn.Module):
    def __init__(self, in_channel, out_channel, style_dim, upsample=False):
        super().__init__()
        self.conv = ModulatedConv2d(
            in_channel, out_channel, 3, style_dim, upsample=upsample
        )
        self.noise = NoiseInjection()
        self.activate = FusedLeakyReLU(out_channel)

    def forward(self, x, style, noise):
        out = self.conv(x, style)
        out = self.noise(out, noise)
        return self.activate(out)


class ToRGB(nn.Module):
    def __init__(self, in_channel, style_dim, upsample=True):
        super().__init__()
        if upsample:
            self.upsample = Upsample(BLUR)
        self.conv = ModulatedConv2d(in_channel, 3, 1, style_dim, demodulate=False)
        self.bias = nn.Parameter(torch.zeros(1, 3, 1, 1))

    def forward(self, x, style, skip=None):
        out = self.conv(x, style)
        out = out + self.bias
        if skip is not None:
            out = out + self.upsample(skip)
        return out


class Generator(nn.Module):
    def __init__(self, style_dim=STYLE, n_mlp=3, lr_mlp=0.01):
        super().__init__()
        layers = [PixelNorm()]
        for _ in range(n_mlp):
            layers.append(
                EqualLinear(style_dim, style_dim, lr_mul=lr_mlp, activation=True)
            )
        self.style = nn.Sequential(*layers)

        self.input = ConstantInput(CHANNELS[4])
        self.conv1 = StyledConv(CHANNELS[4], CHANNELS[4], style_dim)
        self.to_rgb1 = ToRGB(CHANNELS[4], style_dim, upsample=False)
        self.convs = nn.ModuleList()
        self.to_rgbs = nn.ModuleList()
        self.noises = nn.Module()
        for layer_idx in range(5):
            size = 2 ** ((layer_idx + 5) // 2)
            noise = torch.randn(1, 1, size, size)
            self.noises.register_buffer(f"noise_{layer_idx}", noise)

        in_channel = CHANNELS[4]
        for size in (8, 16):
            out_channel = CHANNELS[size]
            self.convs.append(
                StyledConv(in_channel, out_channel, style_dim, upsample=True)
            )
            self.convs.append(StyledConv(out_channel, out_channel, style_dim))
            self.to_rgbs.append(ToRGB(out_channel, style_dim))
            in_channel = out_channel
        self.n_latent = 6

    def forward(self, styles, inject_index):
        first, second = [self.style(s) for s in styles]
        latent = first.unsqueeze(1).repeat(1, inject_index, 1)
        latent2 = second.unsqueeze(1).repeat(1, self.n_latent - inject_index, 1)
        latent = torch.cat([latent, latent2], 1)
        noise = [getattr(self.noises, f"noise_{i}") for i in range(5)]

        out = self.input(latent)
        out = self.conv1(out, latent[:, 0], noise=noise[0])
        skip = self.to_rgb1(out, latent[:, 1])
        i = 1
        for conv1, conv2, noise1, noise2, to_rgb in zip(
            self.convs[::2], self.convs[1::2], noise[1::2], noise[2::2], self.to_rgbs
        ):
            out = conv1(out, latent[:, i], noise=noise1)
            out = conv2(out, latent[:, i + 1], noise=noise2)
            skip = to_rgb(out, latent[:, i + 2], skip)
            i += 2
        return skip


class ConvLayer(nn.Sequential):
    def __init__(
        self,
        in_channel,
        out_channel,
        kernel_size,
        downsample=False,
        bias=True,
        activate=True,
    ):
        layers = []
        if downsample:
            p = (len(BLUR) - 2) + (kernel_size - 1)
            layers.append(Blur(BLUR, pad=((p + 1) // 2, p // 2)))
            stride, padding = 2, 0
        else:
            stride, padding = 1, kernel_size // 2
        layers.append(
            EqualConv2d(
                in_channel,
                out_channel,
                kernel_size,
                stride=stride,
                padding=padding,
                bias=bias and not activate,
            )
        )
        if activate:
            layers.append(FusedLeakyReLU(out_channel))
        super().__init__(*layers)


class ResBlock(nn.Module):
    def __init__(self, in_channel, out_channel):
        super().__init__()
        self.conv1 = ConvLayer(in_channel, in_channel, 3)
        self.conv2 = ConvLayer(in_channel, out_channel, 3, downsample=True)
        self.skip = ConvLayer(
            in_channel, out_channel, 1, downsample=True, activate=False, bias=False
        )

    def forward(self, x):
        out = self.conv1(x)
        out = self.conv2(out)
        skip = self.skip(x)
        return (out + skip) / math.sqrt(2)


class Discriminator(nn.Module):
    def __init__(self, stddev_group=2):
        super().__init__()
        self.convs = nn.Sequential(
            ConvLayer(3, CHANNELS[16], 1),
            ResBlock(CHANNELS[16], CHANNELS[8]),
            ResBlock(CHANNELS[8], CHANNELS[4]),
        )
        self.stddev_group = stddev_group
        self.final_conv = ConvLayer(CHANNELS[4] + 1, CHANNELS[4], 3)
        self.final_linear = nn.Sequential(
            EqualLinear(CHANNELS[4] * 4 * 4, CHANNELS[4], activation=True),
            EqualLinear(CHANNELS[4], 1),
        )

    def forward(self, x):
        out = self.convs(x)
        batch, channel, height, width = out.shape
        group = min(batch, self.stddev_group)
        stddev = out.view(group, -1, 1, channel, height, width)
        stddev = torch.sqrt(stddev.var(0, unbiased=False) + 1e-8)
        stddev = stddev.mean([2, 3, 4], keepdim=True).squeeze(2)
        stddev = stddev.repeat(group, 1, height, width)
        out = torch.cat([out, stddev], 1)

        out = self.final_conv(out)
        out = out.view(batch, -1)
        return self.final_linear(out)


class StyleGAN2(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = Generator()
        self.discriminator = Discriminator()

    def forward(self, z, z_mix, real):
        image = self.generator([z, z_mix], inject_index=3)
        return {
            "image": image,
            "fake": self.discriminator(image),
            "real": self.discriminator(real),
        }


def model():
    torch.manual_seed(910)
    net = StyleGAN2()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, EqualLinear):
                module.bias.add_(torch.randn_like(module.bias) * 0.3 / module.lr_mul)
            elif isinstance(module, FusedLeakyReLU | ToRGB):
                module.bias.normal_(0, 0.3)
            elif isinstance(module, NoiseInjection):
                module.weight.uniform_(0.2, 0.6)
    return net.eval()


def batches():
    generator = torch.Generator().manual_seed(911)
    made = []
    for _ in range(2):
        z = torch.randn(2, 4, 16, generator=generator)
        coarse = torch.randn(4, 3, 6, 6, generator=generator)
        real = nn.functional.interpolate(coarse, size=(16, 16), mode="bilinear")
        real = torch.tanh(real + 0.1 * torch.randn(4, 3, 16, 16, generator=generator))
        made.append({"z": z[0], "z_mix": z[1], "real": real})
    return made


def forward(net, batch):
    return net(batch["z"], batch["z_mix"], batch["real"])


def loss(output, batch):
    generator = F.softplus(-output["fake"]).mean()
    discriminator = F.softplus(-output["real"]).mean()
    return generator + discriminator + F.l1_loss(output["image"], batch["real"])
