"""Faulty ports of the CoAtNet."""

from ..bank import Change

_ATTENTION = ("block_02_00", "block_02_01", "block_03_00")
_MBCONV = ("block_00_00", "block_01_00", "block_01_01")
_JAX_ATTENTION = ("s2.block0", "s2.block1", "s3.block0")
_JAX_MBCONV = ("s0.block0", "s1.block0", "s1.block1")


def _each(blocks, names):
    """Return the names of parameters in each of these blocks."""
    return "|".join(f"{block}.{name}" for block in blocks for name in names.split())


FAULTS = [
    Change(
        "keras_style",
        "height and width of the depthwise kernels are exchanged",
        "kernel.permute(2, 3, 0, 1)",
        "kernel.permute(3, 2, 0, 1)",
        parameter=_each(_MBCONV, "depthwise_conv.depthwise_kernel"),
        at='outputs = torch.einsum("bijcxy,xycm->bijcm"'
        "|self.depthwise_norm(self.depthwise_conv(output))",
    ),
    Change(
        "keras_style",
        "table of relative places keeps query minus key",
        "layer.relative_bias.copy_(torch.flip(table, dims=(1, 2)))",
        "layer.relative_bias.copy_(table)",
        parameter=_each(_ATTENTION, "attention.relative_bias"),
        at='reindexed = torch.einsum("nhw,ixh->nixw"'
        '|torch.einsum("nixw,jyw->nijxy"|logits = logits + reindex_2d(',
    ),
    Change(
        "keras_style",
        "output kernels are not transposed",
        "layer.kernel.copy_(kernel.T.reshape(layer.kernel.shape))",
        "layer.kernel.copy_(kernel.reshape(layer.kernel.shape))",
        parameter=_each(_ATTENTION, "attention.o.kernel")
        + "|attention_pooling.output.kernel",
        at="outputs = torch.einsum(self.equation|return self.o(|return self.output(",
    ),
    Change(
        "keras_style",
        "what is odd of the padding goes above and to the left",
        "return total // 2, total - total // 2",
        "return total - total // 2, total // 2",
        at="images = nn.functional.pad(images|return images.unfold(1, window, strides)"
        "|padding = (0, 0, left, right|top, bottom = same_padding("
        "|left, right = same_padding("
        '|outputs = torch.einsum("bijcxy,xycd->bijd"',
    ),
    Change(
        "keras_style",
        "averages at the edge count the padding",
        "return torch.sum(patches, dim=(4, 5)) / torch.sum(inside, dim=(4, 5))",
        "return torch.mean(patches, dim=(4, 5))",
        at="shortcut = self.shortcut_conv(average_pool2d(shortcut))",
    ),
    Change(
        "keras_style",
        "gate of straight pieces",
        "gate = torch.sigmoid(self.excite(",
        "gate = nn.functional.hardsigmoid(self.excite(",
        at="return gate * inputs",
    ),
    Change(
        "keras_style",
        "each picture has statistics of its own",
        "axes = (0, 1, 2)",
        "axes = (1, 2)",
        at="mean = torch.mean(inputs, dim=axes|torch.square(inputs - mean), dim=axes"
        "|inv = torch.rsqrt(variance + self.epsilon) * self.gamma"
        "|return inputs * inv + (self.beta - mean * inv)",
    ),
    Change(
        "keras_style",
        "attention sums to one in each row of keys",
        "return exps / torch.sum(exps, dim=(-2, -1), keepdim=True)",
        "return exps / torch.sum(exps, dim=-1, keepdim=True)",
        at="probs = softmax_2d(logits)",
    ),
    Change(
        "keras_style",
        "queries are scaled by the width of the input",
        "self.scale = 1.0 / math.sqrt(size)",
        "self.scale = 1.0 / math.sqrt(inputs)",
        at='q = q * self.scale|logits = torch.einsum("bijnd,bxynd->bnijxy"',
    ),
    Change(
        "keras_style",
        "shortcut starts behind the norm",
        "shortcut = self.downsample(inputs)",
        "shortcut = self.downsample(self.attn_layer_norm(inputs))",
        at="shortcut = self.shortcut_proj(shortcut)"
        "|output = shortcut + self.attention(output)"
        "|return max_pool2d(inputs) if self.strides > 1",
    ),
    Change(
        "keras_style",
        "maxima at the edge see zeros",
        "extract_patches(images, pool_size, strides, fill=-torch.inf)",
        "extract_patches(images, pool_size, strides)",
        at="return torch.amax(patches, dim=(4, 5))|images = nn.functional.pad(images"
        "|return images.unfold(1, window, strides)"
        "|return max_pool2d(inputs) if self.strides > 1",
    ),
    Change(
        "keras_style",
        "pictures without a label count in the mean",
        "return torch.sum(losses * sample_weight) / torch.sum(sample_weight)",
        "return torch.mean(losses * sample_weight)",
        at="total = categorical_crossentropy(labels, logits)"
        "|auxiliary_weight * categorical_crossentropy(labels, auxiliary)",
    ),
    Change(
        "keras_style",
        "teacher learns from the student",
        "torch.softmax(teacher.detach() / temperature, dim=-1)",
        "torch.softmax(teacher / temperature, dim=-1)",
        at="y_true = torch.clamp(y_true, epsilon, 1.0)"
        "|return torch.sum(y_true * torch.log(y_true / y_pred), dim=-1)"
        "|torch.mean(kl_divergence(teacher, student))",
        reference="teacher.detach()",
    ),
    Change(
        "jax_style",
        "keys and values of the pooling are swapped",
        'wk, wv = state["pool.kv.weight"].tensor_split(2)',
        'wv, wk = state["pool.kv.weight"].tensor_split(2)',
        parameter="pool.wk|pool.wv",
        at="keys = torch.einsum(|values = torch.einsum(",
    ),
    Change(
        "jax_style",
        "norm behind the expansion is that behind the depthwise convolution",
        '"norm_expand": norm(state, f"{at}.norm1")',
        '"norm_expand": norm(state, f"{at}.norm2")',
        parameter=_each(_JAX_MBCONV, "norm_expand.scale norm_expand.offset"),
        at='h = norm_act(p["norm_expand"], h)|multiplier = p["scale"] / '
        '|shift = p["offset"] - mean|return xs * multiplier[:, None, None]',
    ),
    Change(
        "jax_style",
        "heads alternate in the weights of queries, keys and values",
        "return w.reshape(heads, -1, w.shape[1]).transpose(1, 2)",
        "return w.reshape(-1, heads, w.shape[1]).permute(1, 2, 0)",
        parameter=_each(_JAX_ATTENTION, "attention.wq attention.wk attention.wv")
        + "|pool.wk|pool.wv",
        at="logits = (tokens @ wq) @ (tokens @ wk).T|return weights @ (tokens @ wv)"
        "|keys = torch.einsum(|values = torch.einsum("
        "|heads = vmap(head_attention",
    ),
    Change(
        "jax_style",
        "differences of rows start at zero and go around",
        "dy = y[:, None] - y[None, :] + (height - 1)",
        "dy = y[:, None] - y[None, :]",
        at="bias = table[dy[:, None, :, None]|logits = logits + bias"
        '|bias = relative_bias(p["table"]',
        reference="dy = y[:, None] - y + height - 1",
    ),
    Change(
        "jax_style",
        "no activation behind the first norm of a block",
        'vmap(partial(pointwise, p["expand"]))(norm_act(p["norm_in"], xs))',
        'vmap(partial(pointwise, p["expand"]))(batch_norm(p["norm_in"], xs))',
        at='y = torch.einsum("io,ihw->ohw"',
        reference="return F.gelu(super().forward(x)",
    ),
    Change(
        "jax_style",
        "factor two is missing in the sigmoid for the hyperbolic tangent",
        "torch.sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))",
        "torch.sigmoid(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))",
        at="return gelu_tanh(batch_norm(p, xs))",
    ),
    Change(
        "jax_style",
        "epsilon of another library in the norms over the batch",
        "def batch_norm(p, xs, eps=1e-3):",
        "def batch_norm(p, xs, eps=1e-5):",
        at='multiplier = p["scale"] / torch.sqrt(var + eps)',
    ),
    Change(
        "jax_style",
        "variance of a token is that about zero",
        "var = torch.mean(centred**2, dim=-1, keepdim=True)",
        "var = torch.mean(x**2, dim=-1, keepdim=True)",
        at='return p["scale"] * centred * torch.rsqrt(var + eps)',
    ),
    Change(
        "jax_style",
        "squeeze and excitation stand before the norm",
        '    h = norm_act(p["norm_depthwise"], h)\n'
        '    h = vmap(partial(squeeze_excite, p["gate"]))(h)\n',
        '    h = vmap(partial(squeeze_excite, p["gate"]))(h)\n'
        '    h = norm_act(p["norm_depthwise"], h)\n',
        at='h = vmap(partial(squeeze_excite, p["gate"]))(h)'
        '|h = norm_act(p["norm_depthwise"], h)|squeezed = torch.mean(x, dim=(1, 2))',
        reference="shortcut + self.conv3(self.se(x))",
    ),
    Change(
        "jax_style",
        "cells that begin at a picture's end count",
        "columns = torch.arange(width) * PIXELS_PER_CELL < size[1]",
        "columns = torch.arange(width) * PIXELS_PER_CELL <= size[1]",
        at="mask = (rows[:, None] & columns[None, :])"
        "|weights = torch.exp(logits - torch.amax(logits, dim=1, keepdim=True)) * mask",
    ),
    Change(
        "jax_style",
        "axis of the heads is reshaped to the front, not moved",
        "    bias = bias.reshape(height * width, height * width, -1)\n"
        "    return torch.movedim(bias, -1, 0)\n",
        "    return bias.reshape(-1, height * width, height * width)\n",
        at='logits = logits + bias|bias = relative_bias(p["table"]',
        reference="self.table[self.index].permute(2, 0, 1)",
    ),
    Change(
        "jax_style",
        "divergence is not multiplied by the squared temperature",
        "return temperature**2 * torch.sum(torch.exp(log_p) * (log_p - log_q))",
        "return torch.sum(torch.exp(log_p) * (log_p - log_q))",
        at="return main_xent + 0.4 * aux_xent + 0.3 * torch.mean(kl)",
        reference="return TEMPERATURE**2 * F.kl_div(",
    ),
    Change(
        "jax_style",
        "label keeps its whole share beside what is spread",
        "return log_z - (1.0 - alpha) * picked - alpha * torch.mean(logits)",
        "return log_z - picked - alpha * torch.mean(logits)",
        at="main_xent = masked_mean(vmap(smoothed_xent)(logits, labels), known)"
        "|aux_xent = masked_mean(vmap(smoothed_xent)(aux, labels), known)",
    ),
]
