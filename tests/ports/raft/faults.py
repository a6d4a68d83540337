"""Faulty ports of the small RAFT."""

from ..bank import Change


def _each(places, names):
    """Return the names of parameters at each of these places."""
    return "|".join(
        f"{place}.{name}" for place in places.split() for name in names.split()
    )


_CELLS = "update.gru_row update.gru_column"
_WINDOWED = " ".join(
    (
        *(f"{net}.conv2d_{i}" for net in ("fnet", "cnet") for i in range(5)),
        *(f"update.motion_encoder.{name}" for name in ("corr_2", "flow_1")),
        *(f"update.motion_encoder.{name}" for name in ("flow_2", "fuse")),
        *(f"update.{name}" for name in ("flow_head_1", "flow_head_2", "mask_1")),
    )
)
_FOLDED = "|".join(
    f"context/{name}/{kind}"
    for name in ("stem", "block1/a", "block1/b", "block2/a", "block2/b", "block2/skip")
    for kind in "wb"
)

FAULTS = [
    Change(
        "keras_port",
        "update gate has the sign of torch",
        '    kernel = hwio(torch.cat([-w["z"], w["r"], w["q"]]))\n'
        '    bias = torch.cat([-b["z"], b["r"], b["q"]])\n',
        '    kernel = hwio(torch.cat([w["z"], w["r"], w["q"]]))\n'
        '    bias = torch.cat([b["z"], b["r"], b["q"]])\n',
        parameter=_each(_CELLS, "kernel recurrent_kernel bias"),
        at="return z * h + (1 - z) * hh",
    ),
    Change(
        "keras_port",
        "windows' kernel stays in the order of columns",
        "kernel.unflatten(2, (corr_levels, side, side)).transpose(3, 4).flatten(2, 4)",
        "kernel.unflatten(2, (corr_levels, side, side)).flatten(2, 4)",
        parameter="update.motion_encoder.corr_1.kernel",
        at="window = torch.stack([dy.flatten(), dx.flatten()]"
        "|levels.append(bilinear_sample(|return torch.cat(levels, dim=3)",
    ),
    Change(
        "keras_port",
        "flow head gives x before y",
        '    weights[flow_out + "/kernel"] = weights[flow_out + "/kernel"].flip(3)\n'
        '    weights[flow_out + "/bias"] = weights[flow_out + "/bias"].flip(0)\n',
        "",
        parameter="update.flow_head_2.kernel|update.flow_head_2.bias",
    ),
    Change(
        "keras_port",
        "norms of the last convolution and of the projection exchanged",
        "layer2.norm1 layer2.norm2 layer2.downsample.1",
        "layer2.norm1 layer2.downsample.1 layer2.norm2",
        parameter=_each(
            "cnet.norm_4 cnet.norm_5", "gamma beta moving_mean moving_variance"
        ),
    ),
    Change(
        "keras_port",
        "width of the kernels before their height",
        "return weight.permute(2, 3, 1, 0)",
        "return weight.permute(3, 2, 1, 0)",
        parameter="|".join(
            (_each(_WINDOWED, "kernel"), _each(_CELLS, "kernel recurrent_kernel"))
        ),
    ),
    Change(
        "keras_port",
        "epsilon of Keras",
        "def __init__(self, weights, name, epsilon=1e-5):",
        "def __init__(self, weights, name, epsilon=1e-3):",
        at="inv = self.gamma * torch.rsqrt(",
    ),
    Change(
        "keras_port",
        "padding of TensorFlow where it strides",
        "    x = same_padding(x, kernel.shape[:2])\n",
        "    high, wide = (max(k - strides, 0) for k in kernel.shape[:2])\n"
        "    sides = (wide // 2, wide - wide // 2, high // 2, high - high // 2)\n"
        "    x = F.pad(x, (0, 0, *sides))\n",
        at="x = F.conv2d(x.permute(0, 3, 1, 2)",
    ),
    Change(
        "keras_port",
        "pixels outside are those of the border",
        "    return pixels * inside\n",
        "    return pixels\n",
        at="pixels = torch.gather(",
        reference="return F.grid_sample(img",
    ),
    Change(
        "keras_port",
        "all levels are looked up at the coordinates of the first",
        "points = centers / 2**i + window",
        "points = centers + window",
        reference="centroid = coords.reshape(batch * h * w, 1, 1, 2) / 2**i",
    ),
    Change(
        "keras_port",
        "fine flow is in coarse pixels",
        "extract_patches(4 * flow)",
        "extract_patches(flow)",
        at="x = F.pad(x, (0, 0, 1, 1, 1, 1))",
        reference="up_flow = F.unfold(4 * flow",
    ),
    Change(
        "keras_port",
        "state starts anew in every iteration",
        "state, mask, delta = self.update(",
        "_, mask, delta = self.update(",
        at="state = self.gru_row(x, state)|z = torch.sigmoid(x_z + conv2d(h, k_z))"
        "|r = torch.sigmoid(x_r + conv2d(h, k_r))|hh = torch.tanh(x_h + conv2d(r * h"
        "|return z * h + (1 - z) * hh|return F.pad(x, (0, 0, left, left, top, top))",
    ),
    Change(
        "keras_port",
        "gradient passes from each iteration to the one before by the coordinates",
        "            coords = coords.detach()  # tf.stop_gradient\n",
        "",
        at="corr = correlation.lookup(coords)|coords = coords + delta"
        "|self.update(state, context, corr, coords - start)"
        "|centers = coords.reshape(|wy, wx = y - y0, x - x0",
        reference="coords1 = coords1.detach()",
    ),
    Change(
        "keras_port",
        "first prediction weighs most",
        "gamma ** (iterations - 1 - i)",
        "gamma**i",
    ),
    Change(
        "on_demand",
        "folded with the variance for its root",
        'scale = w[norm_at + ".weight"] / torch.sqrt(w[norm_at + ".running_var"] + eps)',
        'scale = w[norm_at + ".weight"] / (w[norm_at + ".running_var"] + eps)',
        parameter=_FOLDED,
    ),
    Change(
        "on_demand",
        "reset gate before the update gate",
        'for gate in "zrq"',
        'for gate in "rzq"',
        parameter="|".join(
            f"gru{i}/{name}"
            for i in (1, 2)
            for name in ("zr/w", "context/w", "context/b")
        ),
        at="z, r = zr.sigmoid().chunk(2, 1)",
    ),
    Change(
        "on_demand",
        "vertical pass has the kernels of the horizontal",
        '[w[f"{at}{gate}{i}.weight"]',
        '[w[f"{at}{gate}1.weight"]',
        parameter="gru2/zr/w|gru2/q/w|gru2/context/w",
    ),
    Change(
        "on_demand",
        "a quarter of the mask left out",
        '*(0.25 * value for value in plain(w, "update_block.mask.2"))',
        '*plain(w, "update_block.mask.2")',
        parameter="mask/2/w|mask/2/b",
        at='logits = conv(p, "mask/2"',
        reference="mask = 0.25 * self.mask(net)",
    ),
    Change(
        "on_demand",
        "grid as for aligned corners",
        "(2 * x + 1) / w - 1, (2 * y + 1) / h - 1",
        "2 * x / (w - 1) - 1, 2 * y / (h - 1) - 1",
        at="return F.grid_sample(image, grid, align_corners=False)",
    ),
    Change(
        "on_demand",
        "first state is not bounded",
        "h, c = hc[:, :HIDDEN].tanh(), hc[:, HIDDEN:].clamp_min(0)",
        "h, c = hc[:, :HIDDEN], hc[:, HIDDEN:].clamp_min(0)",
        reference="net, inp = torch.tanh(net), torch.relu(inp)",
    ),
    Change(
        "on_demand",
        "blocks as in a ResNet, with one activation behind the sum",
        'y = norm(conv(p, block + "b", y, 3)).clamp_min(0)',
        'y = norm(conv(p, block + "b", y, 3))',
        at="x = (x + y).clamp_min(0)",
        reference="y = F.relu(self.norm2(self.conv2(y)))",
    ),
    Change(
        "on_demand",
        "softmax of neighbours and fine pixels together",
        "F.pixel_shuffle(logits, FACTOR).softmax(1)",
        "F.pixel_shuffle(logits.softmax(1), FACTOR)",
    ),
    Change(
        "on_demand",
        "flow goes on beyond the border",
        "F.pad(flow * FACTOR, (1, 1, 1, 1))",
        'F.pad(flow * FACTOR, (1, 1, 1, 1), mode="replicate")',
        reference="up_flow = F.unfold(4 * flow",
    ),
    Change(
        "on_demand",
        "statistics of the instance norm carry no gradient",
        "return (x - mean) * (var + 1e-5).rsqrt()",
        "return (x - mean.detach()) * (var.detach() + 1e-5).rsqrt()",
        at="var, mean = torch.var_mean(",
    ),
    Change(
        "on_demand",
        "no gradient to the state of the step before",
        "        known = flow.detach()\n",
        "        known, h = flow.detach(), h.detach()\n",
        at="return torch.lerp(h, q.tanh(), z)|torch.cat([h, m], 1)|torch.cat([r * h, m], 1)"
        '|h = gru(p, "gru1"|h = gru(p, "gru2"|h, c = hc[:, :HIDDEN].tanh()',
    ),
    Change(
        "on_demand",
        "mean over the valid pixels alone",
        "((steps - target).abs() * used[:, None]).mean((1, 2, 3, 4))",
        "((steps - target).abs() * used[:, None]).sum((1, 2, 3, 4)) / (2 * used.sum())",
        reference="flow_loss = flow_loss + weight * (valid[:, None] * i_loss).mean()",
    ),
    Change(
        "on_demand",
        "large flows count too",
        'used = (batch["valid"] > 0.5) & ((target**2).sum(1) < 9.0**2)',
        'used = batch["valid"] > 0.5',
        at="errors = ((steps - target).abs() * used[:, None])",
        reference='valid = (batch["valid"] >= 0.5) & (mag < MAX_FLOW)',
    ),
]
