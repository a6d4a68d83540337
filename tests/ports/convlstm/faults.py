"""Faulty ports of the ConvLSTM encoder-forecaster."""

from ..bank import Change

_KERAS_CELLS = ("encoder_low", "encoder_high", "decoder_high", "decoder_low")
_FLAX_CELLS = ("encoder.near", "encoder.far", "forecaster.far", "forecaster.near")


FAULTS = [
    Change(
        "keras_style",
        "gates keep the order of the checkpoint, output before candidate",
        "return torch.cat([i, f, c, o], dim=-1)",
        "return torch.cat([i, f, o, c], dim=-1)",
        parameter="|".join(
            f"{cell}.{name}"
            for cell in _KERAS_CELLS
            for name in ("kernel", "recurrent_kernel", "bias")
            if (cell, name) != ("decoder_high", "kernel")
        ),
        at="z_i, z_f, z_c, z_o = torch.split(",
    ),
    Change(
        "keras_style",
        "peephole of the forget gate is read by the key of the input gate",
        '"peephole_f": peephole(f"{name}.w_cf")',
        '"peephole_f": peephole(f"{name}.w_ci")',
        parameter="|".join(f"{cell}.peephole_f" for cell in _KERAS_CELLS),
        at="f = self.recurrent_activation(",
    ),
    Change(
        "keras_style",
        "zeros only behind the last row and column, as SAME has it at a stride of 2",
        "return nn.functional.pad(x, (0, 0, p, p, p, p))",
        "return nn.functional.pad(x, (0, 0, 0, p, 0, p))",
    ),
    Change(
        "keras_style",
        "epsilon of Keras in the group norm",
        "weights, groups, epsilon=1e-5",
        "weights, groups, epsilon=1e-3",
        at="normalized = (grouped - mean) / torch.sqrt(",
    ),
    Change(
        "keras_style",
        "gates are hard sigmoids, as they once were by default",
        "recurrent_activation=torch.sigmoid",
        "recurrent_activation=hard_sigmoid",
        at="return torch.clamp(0.2 * x + 0.5|i = self.recurrent_activation("
        "|f = self.recurrent_activation(|o = self.recurrent_activation(",
    ),
    Change(
        "keras_style",
        "output gate looks at the cell of the step before",
        "self.peephole_o * c)",
        "self.peephole_o * c_tm1)",
    ),
    Change(
        "keras_style",
        "encoder goes on from the states of the last batch",
        "stateful=False",
        "stateful=True",
        at="return self.states|states = self.get_initial_state("
        "|self.states = [state.detach()",
        steps=2,
    ),
    Change(
        "keras_style",
        "own output is fed back without a gradient",
        "previous = torch.cat([frame, torch.ones_like(frame)], dim=-1)",
        "previous = torch.cat([frame.detach(), torch.ones_like(frame)], dim=-1)",
    ),
    Change(
        "keras_style",
        "mean over all pixels, the invalid ones too",
        "return torch.sum(losses) / torch.sum(sample_weight)",
        "return torch.mean(losses)",
    ),
    Change(
        "keras_style",
        "rates of rain by the constants of Marshall and Palmer",
        "math.log10(58.53)) / 1.56",
        "math.log10(200.0)) / 1.6",
        at="weights = torch.where(rate >= bound",
    ),
    Change(
        "keras_style",
        "pixels without data come in brighter than any rain",
        "frames.to(torch.float32) / SCALE * mask",
        "frames.to(torch.float32) / SCALE",
    ),
    Change(
        "keras_style",
        "epsilon is not that of the corrected moments",
        "epsilon_hat = self.epsilon * correction",
        "epsilon_hat = self.epsilon",
        phase="optimizer",
    ),
    Change(
        "keras_style",
        "clips by the norm of a variable, not by value",
        "gradient = torch.clip(variable.grad, -self.clipvalue, self.clipvalue)",
        "norm = torch.linalg.vector_norm(variable.grad)\n"
        "            gradient = variable.grad * torch.clamp(self.clipvalue / norm, max=1.0)",
        phase="optimizer",
    ),
    Change(
        "flax_style",
        "one is added to a bias of the forget gate that already has it",
        '            if gate == "f":\n                bias = bias - 1.0\n',
        "",
        parameter="|".join(f"params.{cell}.hf.bias" for cell in _FLAX_CELLS),
        at="f = torch.sigmoid(f + peep_f * c + 1.0)",
    ),
    Change(
        "flax_style",
        "kernels of transposed convolutions are not turned",
        '{"kernel": kernel.flip(0, 1), "bias"',
        '{"kernel": kernel, "bias"',
        parameter="params.forecaster.up_far.conv.kernel"
        "|params.forecaster.up_near.conv.kernel",
        at='y = conv_general_dilated(x, params["kernel"], 1, 2, lhs_dilation=2)',
    ),
    Change(
        "flax_style",
        "last map comes before the context among the channels",
        "x = torch.cat([context, down(down_near, last, 2)], dim=-1)",
        "x = torch.cat([down(down_near, last, 2), context], dim=-1)",
    ),
    Change(
        "flax_style",
        "each channel is a group",
        "axes = (1, 2, 4)",
        "axes = (1, 2)",
        at="mean = grouped.mean(axes|var = (grouped * grouped).mean(axes",
    ),
    Change(
        "flax_style",
        "slope that leaky_relu has by default",
        '"slope": 0.2',
        '"slope": 0.01',
        at='return torch.where(x >= 0, x, CONFIG["slope"] * x)',
    ),
    Change(
        "flax_style",
        "no gradient from the output gate's peephole to the cell",
        "        d_new_c = d_new_c + d_o * peep_o\n",
        "",
        at="return Gating.apply(|d_new_c = d_new_c + d_h",
    ),
    Change(
        "flax_style",
        "last observed map is fed at each step of the forecast",
        "        last = torch.cat([y, torch.ones_like(y)], dim=-1)\n",
        "",
        at="near_carry, far_carry, last = carry|x = torch.cat([context, down("
        "|return (near_carry, far_carry, last), y",
        reference="last = torch.cat([y, torch.ones_like(y)], dim=1)",
    ),
    Change(
        "flax_style",
        "far cell reads the near one a step late",
        "        near_carry = conv_lstm(near, near_carry, "
        'down(params["down_near"], x, 2))\n'
        "        _, h = near_carry\n",
        "        _, h = near_carry\n"
        "        near_carry = conv_lstm(near, near_carry, "
        'down(params["down_near"], x, 2))\n',
        at="far_carry = conv_lstm(far, far_carry, down(",
    ),
    Change(
        "flax_style",
        "dry pixels are taken for pixels without data",
        "    valid = frames < NODATA\n    return",
        "    valid = (frames > 0) & (frames < NODATA)\n    return",
        at="maps = torch.cat([values, valid",
    ),
    Change(
        "flax_style",
        "weights are for the squared errors alone",
        'weights * (l2 + CONFIG["l1"] * l1)',
        'weights * l2 + CONFIG["l1"] * l1',
    ),
    Change(
        "flax_style",
        "maps of the loss begin with the last one of the context",
        'frames = batch["frames"][:, CONFIG["context"] :]',
        'frames = batch["frames"][:, CONFIG["context"] - 1 : -1]',
        at="labels = (frames / BYTES)[valid]",
    ),
    Change(
        "flax_style",
        "second moment is not corrected",
        "nu_hat = [v / (1.0 - b2**count) for v in nu]",
        "nu_hat = nu",
        phase="optimizer",
    ),
    Change(
        "flax_style",
        "schedule is one step ahead",
        "factor = -schedule(count)",
        "factor = -schedule(count + 1)",
        phase="optimizer",
    ),
]
