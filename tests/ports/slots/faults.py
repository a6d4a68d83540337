"""Faulty ports of the small Slot Attention autoencoder."""

from ..bank import Change

_CELL = "slot_attention.gru."

FAULTS = [
    Change(
        "pytree",
        "kernels of the transposed convolutions are not turned",
        ".permute(2, 3, 0, 1).flip(0, 1)",
        ".permute(2, 3, 0, 1)",
        parameter="|".join(f"decoder.deconv_{i}.kernel" for i in range(3)),
        at='relu(conv(params["deconv_|return conv(params["deconv_2"]'
        "|y = nn.functional.conv2d(lhs",
    ),
    Change(
        "pytree",
        "square matrices of the cell are not transposed",
        '{"kernel": kernel.T, "bias": bias}',
        '{"kernel": kernel, "bias": bias}',
        parameter="|".join(f"{_CELL}{s}_{gate}.kernel" for s in "ih" for gate in "rzn"),
    ),
    Change(
        "pytree",
        "rows of the positions' kernels stay in the order of the checkpoint",
        "torch.stack([from_top, from_bottom, from_left, from_right])",
        "torch.stack([from_top, from_left, from_bottom, from_right])",
        parameter="encoder.position.kernel|decoder.position.kernel",
        at="return torch.stack([down, 1 - down",
    ),
    Change(
        "pytree",
        "both norms of the slots are the first one",
        'self.norm(name + ".norm_mlp")',
        'self.norm(name + ".norm_slots")',
        parameter="slot_attention.norm_mlp.scale|slot_attention.norm_mlp.bias",
    ),
    Change(
        "pytree",
        "padding of SAME where it strides",
        "pads = [(size // 2, size // 2) for size in kernel.shape[:2]]",
        "total = [size - strides for size in kernel.shape[:2]]\n"
        "    pads = [(each // 2, each - each // 2) for each in total]",
        at="x = nn.functional.pad(|y = nn.functional.conv2d(lhs",
    ),
    Change(
        "pytree",
        "zeros come before the pixels",
        "torch.stack([x, torch.zeros_like(x)]",
        "torch.stack([torch.zeros_like(x), x]",
    ),
    Change(
        "pytree",
        "sigma from the logarithm of a variance",
        'torch.exp(params["log_sigma"])',
        'torch.exp(0.5 * params["log_sigma"])',
        at="start = params[",
    ),
    Change(
        "pytree",
        "sum over the pixels, not their mean",
        "        attention = attention / total\n",
        "",
        at="updates = torch.einsum(",
        reference="attn = attn / torch.sum(attn",
    ),
    Change(
        "pytree",
        "state is reset before the matrix",
        'r * dense(params["h_n"], carry)',
        'dense(params["h_n"], r * carry)',
    ),
    Change(
        "pytree",
        "state of the cell is the normed one",
        'gru(params["gru"], carry, updates)',
        'gru(params["gru"], normed, updates)',
        at="r = torch.sigmoid(|z = torch.sigmoid(|n = torch.tanh("
        "|return (1.0 - z) * n + z * carry",
    ),
    Change(
        "pytree",
        "total of a slot's attention carries no gradient",
        "attention = attention / total",
        "attention = attention / total.detach()",
        at="total = torch.sum(|attention = softmax(logits",
    ),
    Change(
        "pytree",
        "decay beside the moments",
        '                update = leaf.grad + group["decay"] * leaf\n'
        "                update = self.moments(leaf, update)\n",
        "                update = self.moments(leaf, leaf.grad)\n"
        '                update = update + group["decay"] * leaf\n',
        phase="optimizer",
    ),
    Change(
        "pytree",
        "second moment is corrected as in the first step",
        'state["nu"] / (1 - self.b2 ** state["count"])',
        'state["nu"] / (1 - self.b2)',
        phase="optimizer",
        steps=2,
    ),
    Change(
        "gemm",
        "kernels of the transposed convolutions reshaped, not transposed",
        "kernel.flatten(1).t()",
        "kernel.reshape(-1, len(kernel))",
        parameter="dec0_w|dec1_w|dec2_w",
    ),
    Change(
        "gemm",
        "reset gate taken for the update gate",
        "reset, update, new = source",
        "update, reset, new = source",
        parameter="gru_x|gru_h|gru_b",
        at="h = Gates.apply(|z = torch.sigmoid(gx[0]|r = torch.sigmoid(gx[1]",
    ),
    Change(
        "gemm",
        "bias of the input for that of the state",
        'torch.stack([stacked("bias_ih"), stacked("bias_hh")])',
        'torch.stack([stacked("bias_ih"), stacked("bias_ih")])',
        parameter="gru_b",
    ),
    Change(
        "gemm",
        "tables run column by column",
        '    down = place.div(width, rounding_mode="floor") / (height - 1)\n'
        "    across = place.remainder(width) / (width - 1)\n",
        "    down = place.remainder(height) / (height - 1)\n"
        '    across = place.div(height, rounding_mode="floor") / (width - 1)\n',
        parameter="enc_table|dec_table",
        at="torch.addmm(self.enc_pos_b|torch.addmm(self.dec_pos_b"
        "|return torch.stack([down, across",
    ),
    Change(
        "gemm",
        "pixels divided by 128",
        "image = (image - 127.5) / 127.5",
        "image = (image - 127.5) / 128",
    ),
    Change(
        "gemm",
        "a slot of all pictures, then the next slot",
        "first.repeat(n, 1)",
        "first.repeat_interleave(n, 0)",
    ),
    Change(
        "gemm",
        "scale by the size of the inputs",
        "* N_DIM**-0.5",
        "* self.vk_w.shape[1] ** -0.5",
    ),
    Change(
        "gemm",
        "an iteration is missing",
        "        h = self.refine(h, keys, values)\n        return",
        "        return",
        at="self.refine(h, keys, values)",
        reference="for _ in range(NUM_ITERATIONS)",
    ),
    Change(
        "gemm",
        "alpha shared out among the pixels",
        "alpha.logsumexp(1, keepdim=True)",
        "alpha.logsumexp((2, 3), keepdim=True)",
    ),
    Change(
        "gemm",
        "gradient passes where relu is shut",
        "        g = g * (y > 0)\n",
        "",
        at='gw = torch.einsum("nop,ncp->oc", g, cols)|gb = g.sum((0, 2))'
        "|gcols = torch.matmul(w.t(), g)|ConvRelu.apply(",
    ),
    Change(
        "gemm",
        "reset left out of the gradient of the state's product",
        "torch.stack([dz, dr, dc * r])",
        "torch.stack([dz, dr, dc])",
        at="h = Gates.apply(|gh = torch.matmul(",
    ),
    Change(
        "gemm",
        "gradient of the mean as if its total were constant",
        "ga = (g - (g * share).sum(2, keepdim=True)) / mass",
        "ga = g / mass",
        at="Compete.apply(logits)|logits = torch.bmm(",
    ),
    Change(
        "gemm",
        "vectors are not given to the optimizer",
        "for value in net.parameters()]",
        "for value in net.parameters() if value.dim() > 1]",
        phase="optimizer",
    ),
]
