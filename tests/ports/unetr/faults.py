"""Faulty ports of the UNETR."""

from ..bank import Change

_LAYERS = (0, 1, 2)
_BLOCKS = ("image_skip", "coarse_block", "fine_block")


def _monai(names):
    """Return the names of parameters in each block of the MONAI port."""
    return "|".join(f"vit.blocks.{i}.{n}" for i in _LAYERS for n in names.split())


def _keras(names):
    """Return the names of variables in each layer of the Keras port."""
    return "|".join(f"transformer.{i}.{n}" for i in _LAYERS for n in names.split())


FAULTS = [
    Change(
        "monai_style",
        "kernels keep their depth first",
        "    return weight.permute(0, 1, 4, 3, 2)\n",
        "    return weight\n",
        parameter="encoder1.conv1.weight|encoder1.conv2.weight"
        "|encoder2.blocks.0.0.weight|encoder2.blocks.1.0.weight"
        "|encoder3.blocks.0.0.weight"
        "|decoder3.transp_conv.blocks.0.0.weight|decoder2.transp_conv.blocks.0.0.weight"
        "|decoder3.conv_block.conv1.weight|decoder3.conv_block.conv2.weight"
        "|decoder2.conv_block.conv1.weight|decoder2.conv_block.conv2.weight",
        at="self.norm1(self.conv1(inp))|out = self.norm2(self.conv2(out))"
        "|            x = block(x)",
    ),
    Change(
        "monai_style",
        "channels come first in a patch's weights",
        'state["patch_embed.proj.weight"].permute(0, 4, 3, 2, 1)',
        'state["patch_embed.proj.weight"].permute(0, 1, 4, 3, 2)',
        parameter="vit.patch_embedding.patch_embeddings.weight",
        at="return self.patch_embeddings(x)|x.permute(0, 2, 4, 6, 3, 5, 7, 1)",
    ),
    Change(
        "monai_style",
        "positions keep the order of tokens that have depth first",
        "pos.permute(2, 1, 0, 3).flatten(0, 2)",
        "pos.flatten(0, 2)",
        parameter="vit.patch_embedding.position_embeddings",
        at="return self.patch_embeddings(x)",
    ),
    Change(
        "monai_style",
        "fused weights are not sorted by heads",
        "qkv.view(3, NUM_HEADS, -1, HIDDEN_SIZE).transpose(0, 1)",
        "qkv.view(3, NUM_HEADS, -1, HIDDEN_SIZE)",
        parameter=_monai("attn.qkv.weight"),
        at="qkv = self.qkv(x).unflatten(|q, k, v = torch.unbind(qkv",
    ),
    Change(
        "monai_style",
        "scores are divided by the root of the whole width",
        "/ self.head_dim**0.5",
        "/ x.shape[-1] ** 0.5",
        reference="* self.scale",
    ),
    Change(
        "monai_style",
        "residual is added behind the activation",
        "        out = out + residual\n        return self.lrelu(out)\n",
        "        return self.lrelu(out) + residual\n",
        reference="h + self.norm3(",
    ),
    Change(
        "monai_style",
        "skips stand before what comes from below",
        "torch.cat((out, *skips), dim=1)",
        "torch.cat((*skips, out), dim=1)",
    ),
    Change(
        "monai_style",
        "four channels share a mean and a deviation",
        "F.group_norm(x, x.shape[1], self.weight",
        "F.group_norm(x, x.shape[1] // 4, self.weight",
    ),
    Change(
        "monai_style",
        "hidden states are what goes into the blocks",
        "            x = blk(x)\n            hidden_states_out.append(x)\n",
        "            hidden_states_out.append(x)\n            x = blk(x)\n",
        at="self.proj_feat(hidden_states_out[0])|self.proj_feat(hidden_states_out[1])",
    ),
    Change(
        "monai_style",
        "each channel has a foreground of its own",
        "        slices = torch.amax(img, dim=0) > 0\n"
        "        for i, channel in enumerate(img):\n",
        "        for i, channel in enumerate(img):\n            slices = channel > 0\n",
        at="inside = channel[slices]|torch.std_mean(inside|out[i][slices] = ",
        reference="inside = (image > 0).any(",
    ),
    Change(
        "monai_style",
        "weights of the scales do not come to 1",
        "total + w / sum(weights) * self.loss(pred, target)",
        "total + w * self.loss(pred, target)",
    ),
    Change(
        "monai_style",
        "divided by the number of known voxels, not by their weights",
        "return total / weight.sum()",
        "return total / mask.sum()",
    ),
    Change(
        "monai_style",
        "norms of the decoder decay",
        "isinstance(mod, nn.LayerNorm | InstanceNorm)",
        "isinstance(mod, nn.LayerNorm)",
        phase="optimizer",
    ),
    Change(
        "keras_style",
        "norms of a layer have changed places",
        '    "norm1": "norm_attention",\n    "norm2": "norm_mlp",\n',
        '    "norm1": "norm_mlp",\n    "norm2": "norm_attention",\n',
        parameter=_keras(
            "norm_attention.gamma norm_attention.beta norm_mlp.gamma norm_mlp.beta"
        ),
        at="x1 = self.norm_attention(|x3 = self.norm_mlp(",
    ),
    Change(
        "keras_style",
        "norm of the shortcut reads the scale of the second norm",
        "            set_weights(layers[layer_name(name)], value,",
        '            value = state[key.replace("norm3", "norm2")]\n'
        "            set_weights(layers[layer_name(name)], value,",
        parameter="|".join(f"{block}.norm_shortcut.gamma" for block in _BLOCKS),
        at="shortcut = self.norm_shortcut(|return normalized * self.gamma + self.beta",
    ),
    Change(
        "keras_style",
        "features of the heads alternate",
        "qkv.reshape(3, num_heads, -1, projection_dim).permute(0, 3, 1, 2)",
        "qkv.reshape(3, -1, num_heads, projection_dim).permute(0, 3, 2, 1)",
        parameter=_keras(
            "attention.query_kernel attention.key_kernel attention.value_kernel"
        ),
        at="inputs, self.query_kernel)|inputs, self.key_kernel)"
        "|inputs, self.value_kernel)",
    ),
    Change(
        "keras_style",
        "output kernel of the attention is not transposed",
        "kernel.T.unflatten(0, (num_heads, -1))",
        "kernel.unflatten(0, (num_heads, -1))",
        parameter=_keras("attention.output_kernel"),
        at="outputs, self.output_kernel)",
    ),
    Change(
        "keras_style",
        "last activation of a block has the slope of Keras",
        "return leaky_relu(x + shortcut, alpha=0.01)",
        "return leaky_relu(x + shortcut)",
        at="return torch.relu(x) - alpha",
    ),
    Change(
        "keras_style",
        "epsilon of Keras behind the transposed convolutions",
        "        self.norm = InstanceNormalization(units, epsilon=1e-5)\n",
        "        self.norm = InstanceNormalization(units)\n",
        at="normalized = (inputs - mean)|return leaky_relu(self.norm(self.deconv(x))",
    ),
    Change(
        "keras_style",
        "taps of height and width change places where volumes grow",
        '"ndhwi,xyzoi->ndxhywzo"',
        '"ndhwi,xyzoi->ndxhzwyo"',
    ),
    Change(
        "keras_style",
        "variance of a token is divided by one less",
        "variance = torch.mean(torch.square(inputs - mean), dim=-1, keepdim=True)",
        "variance = torch.var(inputs, dim=-1, keepdim=True)",
        at="inv = self.gamma * torch.rsqrt(|return inputs * inv + (self.beta",
    ),
    Change(
        "keras_style",
        "table of positions is read with width first",
        '        state["patch_embed.pos_embed"].reshape(grid)\n',
        '        state["patch_embed.pos_embed"].reshape(*grid[2::-1], -1).transpose(0, 2)\n',
        parameter="patch_encoder.position_embedding",
        at="encoded = encoded + self.bias + self.position_embedding",
    ),
    Change(
        "keras_style",
        "probabilities count where nobody knows the label",
        "y_pred = (softmax(logits) * mask[..., None])[..., 1:]",
        "y_pred = softmax(logits)[..., 1:]",
        at="union = torch.sum(y_true, dim=axes)",
        reference="probs = logits.softmax(dim=1) * valid",
    ),
    Change(
        "keras_style",
        "label of a cell is that of its last voxel",
        "torch.arange(size) * every)",
        "torch.arange(size) * every + every - 1)",
        at="labels = sample_labels(",
    ),
    Change(
        "keras_style",
        "deviation carries no gradient",
        "        variance = torch.mean(torch.square(inputs - mean), dim=axes, keepdim=True)\n",
        "        variance = torch.mean(torch.square(inputs - mean), dim=axes, keepdim=True)\n"
        "        variance = variance.detach()\n",
        at="normalized = (inputs - mean)",
    ),
    Change(
        "keras_style",
        "gradients are clipped one by one",
        "        norm = torch.sqrt(sum(torch.sum(torch.square(g)) for g in gradients))\n"
        "        factor = self.global_clipnorm / max(float(norm), self.global_clipnorm)\n"
        "        return [gradient * factor for gradient in gradients]\n",
        "        limit = self.global_clipnorm\n"
        "        norms = [float(torch.linalg.vector_norm(g)) for g in gradients]\n"
        "        return [g * limit / max(norm, limit) for g, norm in zip(gradients, norms)]\n",
        phase="optimizer",
    ),
]
