"""Faulty ports of the small Deep Speech 2."""

from ..bank import Change

_CELLS = [
    f"bidirectional_{i}.{way}_layer.cell"
    for i in (1, 2)
    for way in ("forward", "backward")
]
_MOMENTS = (
    "mean, variance, count = self.moments(|mean = torch.sum(inputs * weight"
    "|variance = torch.sum(torch.square(inputs - mean)"
)

FAULTS = [
    Change(
        "keras_rnn",
        "gates stay in the order r, z, n",
        "return torch.cat([z, r, n])",
        "return torch.cat([r, z, n])",
        parameter="|".join(
            f"{cell}.{part}"
            for cell in _CELLS
            for part in ("kernel", "recurrent_kernel", "bias")
        ),
        at="x_z, x_r, x_h = torch.split(|recurrent_z, recurrent_r, recurrent_h = torch.split(",
    ),
    Change(
        "keras_rnn",
        "state is reset before the product, as with reset_after=False",
        "        hh = torch.tanh(x_h + r * recurrent_h)\n",
        "        new_kernel = self.recurrent_kernel[:, 2 * UNITS :]\n"
        "        new_bias = recurrent_bias[2 * UNITS :]\n"
        "        recurrent_h = torch.matmul(r * h_tm1, new_kernel) + new_bias\n"
        "        hh = torch.tanh(x_h + recurrent_h)\n",
    ),
    Change(
        "keras_rnn",
        "state runs on where the mask is False",
        "            new_state = self.cell(x, state)\n"
        "            state = torch.where(keep[:, None], new_state, state)\n",
        "            state = self.cell(x, state)\n",
        at="y_rev = self.backward_layer(",
    ),
    Change(
        "keras_rnn",
        "outputs of the backward layer stay reversed",
        "        y_rev = torch.flip(y_rev, dims=[1])\n",
        "",
        at="return torch.stack(outputs, dim=1)|y_rev = self.backward_layer("
        "|return torch.cat([y, y_rev]",
    ),
    Change(
        "keras_rnn",
        "norm between the recurrent layers counts padding",
        "x = self.gru_2_bn(x, mask)",
        "x = self.gru_2_bn(x)",
        at=f"{_MOMENTS}|weight = torch.ones(|count = weight.sum()",
    ),
    Change(
        "keras_rnn",
        "first convolution padded as SAME",
        "ZeroPadding2D(padding=((2, 2), (3, 3)))",
        "ZeroPadding2D(padding=((1, 2), (2, 3)))",
        at="return F.pad(inputs, (0, 0|x = self.conv_1(self.conv_1_pad(|x = F.conv2d(",
    ),
    Change(
        "keras_rnn",
        "rows of the first recurrent kernels stay in the order of channels, bins",
        ", shape=(8, 4))",
        ")",
        parameter="bidirectional_1.forward_layer.cell.kernel"
        "|bidirectional_1.backward_layer.cell.kernel",
        at="x = torch.reshape(x, x.shape[:2]",
    ),
    Change(
        "keras_rnn",
        "blank is the last class, as in the older loss",
        "BLANK = 0\n",
        "BLANK = 7\n",
        at="blanks = torch.full_like(|states = torch.stack([blanks, labels]"
        "|states = ctc_states(|log_p = torch.gather(log_probs",
    ),
    Change(
        "keras_rnn",
        "blank between equal letters can be left out",
        "can_skip = (states != BLANK) & differs",
        "can_skip = states != BLANK",
        at="skip = torch.where(can_skip",
    ),
    Change(
        "keras_rnn",
        "recursion runs on behind an utterance's end",
        "        alpha = torch.where((t < input_length)[:, None], new_alpha, alpha)\n",
        "        alpha = new_alpha\n",
    ),
    Change(
        "keras_rnn",
        "losses are not divided by the numbers of letters",
        'torch.mean(each / batch["sizes"])',
        "torch.mean(each)",
    ),
    Change(
        "keras_rnn",
        "level of an utterance is taken over padding, too",
        'weight = sequence_mask(batch["frames"], x.shape[1])[:, :, None].float()\n'
        '    count = batch["frames"][:, None, None] * x.shape[2]\n',
        "weight = torch.ones_like(x)\n    count = x[0].numel()\n",
        at="mean = torch.sum(x * weight, (1, 2)|centred = (x - mean)"
        "|variance = torch.sum(torch.square(centred)",
    ),
    Change(
        "keras_rnn",
        "biases of the recurrent layers decay, being matrices",
        'self.is_kernel = [name.endswith("kernel") for name in names]',
        "self.is_kernel = [v.ndim > 1 for v in variables]",
        phase="optimizer",
    ),
    Change(
        "fused",
        "gradient passes above the ceiling",
        "(y > 0) & (y < TOP)",
        "y > 0",
        at="g = grad * inside|NormClip.apply(",
    ),
    Change(
        "fused",
        "backward of the norm without the gain",
        "dx = (gain * rstd)[:, None] * (g - common)",
        "dx = rstd[:, None] * (g - common)",
        at="NormClip.apply(",
    ),
    Change(
        "fused",
        "gradient of the update gate has the other sign",
        "dz = g * (h - n) * z * (1 - z)",
        "dz = g * (n - h) * z * (1 - z)",
        at="Gates.apply(",
    ),
    Change(
        "fused",
        "gradient of the state's part of the new gate without the reset",
        "torch.cat([dr, dz, dn * r], -1)",
        "torch.cat([dr, dz, dn], -1)",
        at="Gates.apply(",
    ),
    Change(
        "fused",
        "both biases are added in front, that of the new gate is not reset",
        "gi = (x @ self.wi + self.bi).unflatten(2, (2, -1))\n"
        "        turned = gi[:, :, 1].gather(0, turn[..., None].expand(-1, -1, 3 * H))\n"
        "        gi = torch.stack([gi[:, :, 0], turned], dim=1)\n"
        "        bias = self.bh.view(2, 1, -1)\n"
        "        h = x.new_zeros(2, x.shape[1], H)\n"
        "        states = []\n"
        "        for step in gi:\n"
        "            gh = torch.baddbmm(bias, h, self.wh)\n",
        "gi = (x @ self.wi + (self.bi + self.bh)).unflatten(2, (2, -1))\n"
        "        turned = gi[:, :, 1].gather(0, turn[..., None].expand(-1, -1, 3 * H))\n"
        "        gi = torch.stack([gi[:, :, 0], turned], dim=1)\n"
        "        h = x.new_zeros(2, x.shape[1], H)\n"
        "        states = []\n"
        "        for step in gi:\n"
        "            gh = torch.bmm(h, self.wh)\n",
        at="n = torch.addcmul(i_n, r, hn)|Gates.apply(",
    ),
    Change(
        "fused",
        "whole batch is reversed, padding first",
        "turn = torch.where(valid, times - 1 - t[:, None], t[:, None])",
        "turn = t.flip(0)[:, None].expand(-1, len(times))",
        at="turned = gi[:, :, 1].gather(",
    ),
    Change(
        "fused",
        "biases of the directions change places",
        'torch.stack([self.get(f"{name}_l0"), self.get(f"{name}_l0_reverse")])',
        'torch.stack([self.get(f"{name}_l0_reverse"), self.get(f"{name}_l0")])',
        parameter="gru1.bi|gru1.bh|gru2.bi|gru2.bh",
    ),
    Change(
        "fused",
        "taps over time come before those over bins",
        "x.permute(0, 4, 5, 1, 2, 3)",
        "x.permute(0, 5, 4, 1, 2, 3)",
        at="x = self.patches(x)|y = self.w @ x.flatten(1)",
    ),
    Change(
        "fused",
        "padding is not cleared behind the norm of a convolution",
        "return y.unflatten(1, x.shape[1:]) * valid",
        "return y.unflatten(1, x.shape[1:])",
        reference="return x.masked_fill(outside, 0.0)",
    ),
    Change(
        "fused",
        "biased variance is averaged",
        "var * (count / (count - 1))",
        "var",
        parameter="conv1.average.seen|conv2.average.seen|norm2.average.seen",
        at="self.average.update(|self.seen.lerp_(",
    ),
    Change(
        "fused",
        "gradient of the costs without that of what is made of them",
        "return each * grad[:, None], None",
        "return each, None",
        at="costs = CTC.apply(",
    ),
    Change(
        "fused",
        "backward recursion asks the state it leaves whether it may be jumped to",
        "two = after[:, 2:].masked_fill(~jump[:, 2:], -INF)",
        "two = after[:, 2:].masked_fill(~jump[:, :-2], -INF)",
        at="b[:, :-2] = b[:, :-2].logaddexp(two)|CTC.apply(",
    ),
    Change(
        "fused",
        "first moves are the gradients themselves, which change in place",
        "self.moves = [g.clone() for g in grads]",
        "self.moves = list(grads)",
        phase="optimizer",
        steps=2,
    ),
]
