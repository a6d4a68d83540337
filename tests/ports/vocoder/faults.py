"""Faulty ports of the small vocoder."""

from ..bank import Change

_NORMED = (
    *(f"vocoder.{name}.kernel" for name in ("first", "up.0", "up.1", "last")),
    *(
        f"vocoder.residual.{block}.{name}.{nth}.kernel"
        for block in range(4)
        for name in ("first", "second")
        for nth in range(2)
    ),
    *(f"{judge}.layers.{nth}" for judge in ("two", "three") for nth in range(3)),
)

FAULTS = [
    Change(
        "keras_like",
        "symmetric window",
        "np.cos(2 * np.pi * n / fft)",
        "np.cos(2 * np.pi * n / (fft - 1))",
        parameter="spectrum.real|spectrum.imag",
        at="power = (frames",
    ),
    Change(
        "keras_like",
        "wave is padded with zeros",
        "        left = wave[:, 1 : side + 1].flip(1)\n"
        "        right = wave[:, -side - 1 : -1].flip(1)\n",
        "        left = right = torch.zeros_like(wave[:, :side])\n",
        at="frames = torch.cat(",
    ),
    Change(
        "keras_like",
        "power for magnitude",
        "return (power + 1e-9).sqrt().matmul(",
        "return (power + 1e-9).matmul(",
    ),
    Change(
        "keras_like",
        "mels of natural logarithms",
        "return 2595 * math.log10(1 + hertz / 700)",
        "return 1127 * math.log10(1 + hertz / 700)",
        parameter="spectrum.mels",
        at="(power + 1e-9)",
    ),
    Change(
        "keras_like",
        "floor of the logarithm",
        ".clamp(min=1e-5).log()",
        ".clamp(min=0.3).log()",
    ),
    Change(
        "keras_like",
        "slope of the last activation",
        "x = torch.where(x > 0, x, 0.01 * x)",
        "x = torch.where(x > 0, x, ALPHA * x)",
    ),
    Change(
        "keras_like",
        "activation between the convolutions is left out",
        "            y = second(torch.where(y > 0, y, ALPHA * y))\n",
        "            y = second(y)\n",
        reference="x = c2(F.leaky_relu(xt, SLOPE)) + x",
        at="y = y + x[:, start|x = F.pad(x, (0, 0, reach",
    ),
    Change(
        "keras_like",
        "residual of a block is left out",
        "            x = x + y\n",
        "            x = y\n",
        reference="x = c2(F.leaky_relu(xt, SLOPE)) + x",
        at="y = second(",
    ),
    Change(
        "keras_like",
        "blocks are summed",
        "x = torch.stack([block(x) for block in pair]).mean(0)",
        "x = torch.stack([block(x) for block in pair]).sum(0)",
    ),
    Change(
        "keras_like",
        "blocks behind each other",
        "            x = torch.stack([block(x) for block in pair]).mean(0)\n",
        "            x = (pair[0](x) + pair[1](pair[0](x))) / 2\n",
        at="x = F.pad(x, (0, 0, reach|y = first(",
    ),
    Change(
        "keras_like",
        "dilations of the second convolutions too",
        'Conv1D(sd, f"{prefix}.convs2.{i}") for i in range(2)',
        'Conv1D(sd, f"{prefix}.convs2.{i}", d) for i, d in enumerate((1, 3))',
        at="x = F.pad(x, (0, 0, reach|y = y + x[:, start|y = second(",
    ),
    Change(
        "keras_like",
        "dilated convolutions are causal",
        "x = F.pad(x, (0, 0, reach // 2, reach - reach // 2))",
        "x = F.pad(x, (0, 0, reach, 0))",
        at="y = y + x[:, start",
    ),
    Change(
        "keras_like",
        "one length for all directions",
        "length = (self.direction**2).sum((0, 1)).sqrt()",
        "length = (self.direction**2).sum((0, 1)).sqrt().mean()",
        at="return self.direction * (self.gain",
    ),
    Change(
        "keras_like",
        "gains are not loaded",
        "self.gain = nn.Parameter(g.flatten())",
        "self.gain = nn.Parameter(v.flatten(1).norm(dim=1))",
        parameter="|".join(f"{name}.gain" for name in _NORMED),
        at="return self.direction * (self.gain",
    ),
    Change(
        "keras_like",
        "taps of transposed kernels in reverse",
        "y[:, tap : tap + (t - 1) * self.rate + 1 : self.rate] += pieces[:, :, tap]",
        "y[:, tap : tap + (t - 1) * self.rate + 1 : self.rate] += pieces[:, :, -1 - tap]",
        at="return y[:, cut|pieces = torch.einsum(",
    ),
    Change(
        "keras_like",
        "all of the transposed surplus is cut at the end",
        "return y[:, cut : y.shape[1] - cut]",
        "return y[:, : y.shape[1] - 2 * cut]",
    ),
    Change(
        "keras_like",
        "last samples are repeated",
        "mirrored = wave[:, t - 1 - missing : t - 1].flip(1)",
        "mirrored = wave[:, t - missing : t].flip(1)",
        at="wave = torch.cat([wave, mirrored]|x = wave.reshape(",
    ),
    Change(
        "keras_like",
        "stride of the second layer",
        "self.convolved(one, self.layers[1], 1)",
        "self.convolved(one, self.layers[1], 3)",
        at="frames = x.unfold(|torch.einsum(",
    ),
    Change(
        "keras_like",
        "waves are columns one after another",
        "wave.reshape(n, -1, self.period)\n            .transpose(1, 2)\n",
        "wave.reshape(n, self.period, -1)\n",
        at="x = F.pad(x, (0, 0, half|.reshape(n * self.period, -1, 1)",
    ),
    Change(
        "keras_like",
        "features of the last layer are not matched",
        "matching = matching + 2 * (real - fake).abs().mean()",
        "matching = matching + 2 * (real - fake).abs().mean() * (real.shape[-1] > 1)",
    ),
    Change(
        "keras_like",
        "real features carry no gradient",
        "for real, fake in zip(judge(wave), judge(made)):",
        "for real, fake in zip(judge(wave.detach()), judge(made.detach())):",
        at="x = wave.reshape(",
    ),
    Change(
        "keras_like",
        "spectrum weighs as in another recipe",
        "return made[:, None], 45 * error",
        "return made[:, None], 10 * error",
    ),
    Change(
        "keras_like",
        "betas of the default",
        "betas=(0.8, 0.99)",
        "betas=(0.9, 0.999)",
        phase="optimizer",
    ),
]
