"""Faulty ports of the keyword spotter."""

from ..bank import Change

_NORMS = (
    "conv_bn",
    *(f"ds_conv_{i}_{half}_bn" for i in (1, 2) for half in ("depthwise", "pointwise")),
)

FAULTS = [
    Change(
        "tf_signal",
        "window is symmetric",
        "framed * hann_window(frame_length)",
        "framed * hann_window(frame_length, periodic=False)",
        at="return (0.5 - 0.5 * torch.cos(",
    ),
    Change(
        "tf_signal",
        "magnitudes, not powers",
        "power = torch.square(torch.abs(stfts))",
        "power = torch.abs(stfts)",
    ),
    Change(
        "tf_signal",
        "triangles of height one, as this library makes them",
        "return (weights * enorm).float()",
        "return weights.float()",
        at="torch.tensordot(power, mel_matrix, 1)",
    ),
    Change(
        "tf_signal",
        "moments of an utterance are divided by all frames",
        "total = torch.sum(weight, dim=1, keepdim=True)",
        "total = weight.shape[1]",
        at="mean = torch.sum(features * weight|mean_sq = (|torch.sum(torch.square(features) * weight",
    ),
    Change(
        "tf_signal",
        "mels stay the height of the first kernel",
        '".weight"], (3, 2, 1, 0))}',
        '".weight"], (2, 3, 1, 0))}',
        parameter="conv.kernel",
    ),
    Change(
        "tf_signal",
        "gates stay in the order r, z, h",
        "return torch.cat([z, r, h])",
        "return torch.cat([r, z, h])",
        parameter="gru.kernel|gru.recurrent_kernel|gru.bias",
        at="x_z, x_r, x_h = torch.split("
        "|recurrent_z, recurrent_r, recurrent_h = torch.split(",
    ),
    Change(
        "tf_signal",
        "no zeros before the picture where the layer strides, as SAME has it",
        "x = nn.functional.pad(inputs, (0, 0, pad, pad, pad, pad))",
        "down, right = (pad // stride for stride in self.strides)\n"
        "        x = nn.functional.pad(inputs, (0, 0, right, pad, down, pad))",
        at="y = nn.functional.conv2d(x, kernel, stride=self.strides)"
        "|x = self.conv(x[..., None])",
    ),
    Change(
        "tf_signal",
        "state runs on where the mask is False",
        "h = torch.where(mask[:, t, None], new_h, h)",
        "h = new_h",
        at="new_h = z * h + (1 - z) * hh|x, state = self.gru(x, mask)"
        "|torch.cat([context, state], dim=-1)",
    ),
    Change(
        "tf_signal",
        "attention to padding",
        "        score = torch.where(mask[..., None], score, torch.full_like(score, -1e9))\n",
        "",
        at="alignment = torch.softmax(score",
        reference='masked_fill(~valid, float("-inf"))',
    ),
    Change(
        "tf_signal",
        "shares of the two labels exchanged",
        'mix * one_hot + (1.0 - mix) * one_hot[batch["partner"]]',
        '(1.0 - mix) * one_hot + mix * one_hot[batch["partner"]]',
    ),
    Change(
        "tf_signal",
        "momentum of Keras",
        "    momentum = 0.9\n",
        "    momentum = 0.99\n",
        parameter="|".join(
            f"{norm}.moving_{kind}" for norm in _NORMS for kind in ("mean", "variance")
        ),
        at="self.moving_mean.sub_(|self.moving_variance.sub_("
        "|(self.moving_variance - variance * bessel)",
    ),
    Change(
        "tf_signal",
        "decay is part of the gradient",
        "            g = gradient * scale\n"
        '            slots["m"].add_((g - slots["m"]) * (1.0 - beta_1))\n'
        '            slots["v"].add_((torch.square(g) - slots["v"]) * (1.0 - self.beta_2))\n'
        '            denominator = torch.sqrt(slots["v"] / correction_2) + self.epsilon\n'
        "            if is_kernel:\n"
        "                v.sub_(v * self.weight_decay * lr)\n",
        "            g = gradient * scale + self.weight_decay * is_kernel * v\n"
        '            slots["m"].add_((g - slots["m"]) * (1.0 - beta_1))\n'
        '            slots["v"].add_((torch.square(g) - slots["v"]) * (1.0 - self.beta_2))\n'
        '            denominator = torch.sqrt(slots["v"] / correction_2) + self.epsilon\n',
        phase="optimizer",
    ),
    Change(
        "tf_signal",
        "first beta does not follow the cycle",
        "return 0.95 - 0.1 * self.height(step)",
        "return 0.95",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "numpyish",
        "window stands at the beginning of its filter",
        "begin = (SIZE - WIDTH) // 2",
        "begin = 0",
        parameter="waves",
        at="bell[begin : begin + WIDTH] =|return (waves * bell)"
        "|both = nn.functional.conv1d(",
    ),
    Change(
        "numpyish",
        "mels of Slaney",
        "    return 2595 * log(1 + hertz / 700, 10)\n\n\n"
        "def hertz_of(mel):\n"
        "    return 700 * (10 ** (mel / 2595) - 1)\n",
        "    return hertz * 3 / 200 if hertz < 1000 else 15 + 27 * log(hertz / 1000, 6.4)\n\n\n"
        "def hertz_of(mel):\n"
        "    return mel * 200 / 3 if mel < 15 else 1000 * 6.4 ** ((mel - 15) / 27)\n",
        parameter="bands",
        at="side = torch.where(|triangle = 1 - (f|rows.append(triangle"
        "|return torch.stack(rows)|return (self.bands @ (re**2",
    ),
    Change(
        "numpyish",
        "samples at both ends come twice in the mirror",
        "        head = wave[:, 1 : half + 1].flip(1)\n"
        "        tail = wave[:, -half - 1 : -1].flip(1)\n",
        "        head = wave[:, :half].flip(1)\n        tail = wave[:, -half:].flip(1)\n",
        at="wave = torch.cat([head, wave, tail], 1)",
    ),
    Change(
        "numpyish",
        "inner derivative left out of the gradient of the gain",
        "(grad * scaled / (1 + scaled)).sum((0, 1))",
        "(grad / (1 + scaled)).sum((0, 1))",
        at="x = Compress.apply(",
    ),
    Change(
        "numpyish",
        "utterances are normalised with the variance of a sample",
        "((centred**2).sum(0) / n + 1e-3)",
        "((centred**2).sum(0) / (n - 1) + 1e-3)",
    ),
    Change(
        "numpyish",
        "masks of bands and times exchanged",
        'net(wave, length, batch["freq_mask"], batch["time_mask"])',
        'net(wave, length, batch["time_mask"], batch["freq_mask"])',
        at="since = b - freq_mask|seen_band = (|since = t - time_mask|seen_time = ("
        "|return x * seen_band",
    ),
    Change(
        "numpyish",
        "mean taken for constant in the gradient of the norm",
        "d_x = root * (g - level - unit * slope)",
        "d_x = root * (g - unit * slope)",
        at="y, mean, spread = NormRelu.apply(",
    ),
    Change(
        "numpyish",
        "recurrent matrices are not turned",
        "gates.mT.contiguous()",
        "gates.contiguous()",
        parameter="w.gates_back",
        at='back = h @ w["gates_back"]',
    ),
    Change(
        "numpyish",
        "gate keeps the new, not the old",
        "h = new + keep * (h - new)",
        "h = h + keep * (new - h)",
    ),
    Change(
        "numpyish",
        "gradient of the scores as if shares need not come to one",
        "pull = ((x - pooled) * grad).sum(2)",
        "pull = (x * grad).sum(2)",
        at="return d_x, share * pull, None|pooled = SoftPool.apply(",
    ),
    Change(
        "numpyish",
        "rare classes count no more than others where labels are smoothed",
        "flat = (surprise @ rarity).sum() / len(rarity)",
        "flat = surprise.sum() / len(rarity)",
    ),
    Change(
        "numpyish",
        "clock moves on before the rate is read",
        "        rate, inertia = self.phase()\n        self.t += 1\n",
        "        self.t += 1\n        rate, inertia = self.phase()\n",
        phase="optimizer",
    ),
    Change(
        "numpyish",
        "every element is clipped, not the length",
        "g = g * (self.limit / g.norm()).clamp(max=1)",
        "g = g.clamp(-self.limit, self.limit)",
        phase="optimizer",
        steps=2,
    ),
]
