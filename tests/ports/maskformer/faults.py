"""Faulty ports of the MaskFormer."""

from ..bank import Change

_NORM = (
    "mean = torch.mean(x, dim=axes, keepdim=True)"
    "|variance = torch.mean(torch.square(x - mean), dim=axes, keepdim=True)"
    "|inv = torch.rsqrt(variance + norm_epsilon) * scale"
    "|return x * inv + (offset - mean * inv)"
)


def _paddle(names):
    """Return the names of parameters in each layer of the Paddle port's decoder."""
    return "|".join(
        f"transformer.layers.{i}.{n}" for i in range(4) for n in names.split()
    )


def _keras(names):
    """Return the names of variables in each block of the Keras port's decoder."""
    return "|".join(
        f"transformer.decoder.{i}.{n}" for i in range(4) for n in names.split()
    )


FAULTS = [
    Change(
        "paddle_style",
        "values stand before the keys in the fused weight",
        'for x in "qkv"]',
        'for x in "qvk"]',
        parameter=_paddle("cross_attn.in_proj_weight self_attn.in_proj_weight"),
        at="tensor = torch.matmul(tensor, weight)"
        "|q, k, v = (self.compute_qkv(t, i)|weight = self.in_proj_weight[:, start",
    ),
    Change(
        "paddle_style",
        "layers behind the sums are not listed from the top",
        'pairs[f"output_convs.{i}"] = f"output.{2 - i}"',
        'pairs[f"output_convs.{i}"] = f"output.{i}"',
        parameter="|".join(
            f"pixel_decoder.output_convs.{i}.{leaf}"
            for i in (0, 2)
            for leaf in ("conv.weight", "norm.weight", "norm.bias")
        ),
        at="y = F.relu(output_conv(y))|return self.norm(self.conv(x))"
        "|out = out.reshape(x.shape) * self.weight|return out + self.bias.reshape([1",
    ),
    Change(
        "paddle_style",
        "square weights of the attention's output are not transposed",
        '        new |= linear(src, f"{theirs}.{name}.out_proj", f"{ours}.{attn}.out_proj")\n',
        '        out_proj = f"{ours}.{attn}.out_proj"\n'
        '        new[f"{out_proj}.weight"] = src[f"{theirs}.{name}.out_proj.weight"]\n'
        '        new[f"{out_proj}.bias"] = src[f"{theirs}.{name}.out_proj.bias"]\n',
        parameter=_paddle("cross_attn.out_proj.weight self_attn.out_proj.weight"),
        at="return self.out_proj(out.reshape(|return torch.matmul(x, self.weight)",
    ),
    Change(
        "paddle_style",
        "images are padded before they are normalised",
        "        images.append(transform(im[:, :h, :w]))\n"
        '    pred_logits, pred_masks = net(pad_batch(images, batch["image"].shape[-2:]))\n',
        "        images.append(im[:, :h, :w])\n"
        '    padded = pad_batch(images, batch["image"].shape[-2:])\n'
        "    pred_logits, pred_masks = net(transform(padded))\n",
        at="return (im / 255.0 - self.mean) / self.std",
        reference="mean) / std * inside",
    ),
    Change(
        "paddle_style",
        "shortcut takes every second pixel and no mean",
        "            inputs = F.avg_pool2d(\n"
        "                inputs, 2, 2, padding=0, ceil_mode=True, count_include_pad=False\n"
        "            )\n",
        "            inputs = inputs[:, :, ::2, ::2]\n",
        at="return self._batch_norm(self._conv(inputs))",
        reference="self.norm3(self.conv3(self.pool(x)))",
    ),
    Change(
        "paddle_style",
        "columns come before rows in the positions",
        "for grid in (grid_y, grid_x)",
        "for grid in (grid_x, grid_y)",
        at="return torch.concat(pos, dim=1).unsqueeze(0)"
        "|pos.append(sine_position_embedding(h, w|k = self.with_pos_embed(memory, pos_embed)"
        "|return tensor if pos_embed is None else tensor + pos_embed",
    ),
    Change(
        "paddle_style",
        "a query that sees nothing is not opened",
        "        mask = torch.logical_or(mask, ~torch.any(mask, dim=-1, keepdim=True))\n"
        "        return mask.unsqueeze(1)\n",
        "        return mask.unsqueeze(1)\n",
        at="return mask.unsqueeze(1)|product = product + (attn_mask.to("
        "|weights = F.softmax(product|attn_mask = self.get_attn_mask(",
        reference="return closed & ~closed.all(",
    ),
    Change(
        "paddle_style",
        "values of the queries among themselves have their positions added",
        "tgt = self.self_attn(q, k, value=tgt)",
        "tgt = self.self_attn(q, k, value=q)",
        at="tensor = torch.matmul(tensor, weight)|q, k, v = (self.compute_qkv(t, i)",
    ),
    Change(
        "paddle_style",
        "masks are made of what was not normed",
        "mask_embed = self.mask_embed(decoder_output)",
        "mask_embed = self.mask_embed(tgt)",
        at="x = F.relu(layer(x)) if i < len(self.layers) - 1 else layer(x)",
    ),
    Change(
        "paddle_style",
        "mean over the queries and not over their weights",
        "torch.sum(picked.squeeze(-1) * weight) / torch.sum(weight)",
        "torch.mean(picked.squeeze(-1) * weight)",
    ),
    Change(
        "paddle_style",
        "alpha is the weight of the background",
        "(label * (2.0 * alpha - 1.0) + 1.0 - alpha)",
        "(label * (1.0 - 2.0 * alpha) + alpha)",
    ),
    Change(
        "paddle_style",
        "rows of a mask are counted by the points that are kept",
        "shift = num_sampled * torch.arange(num_boxes)",
        "shift = num_uncertain * torch.arange(num_boxes)",
        at="idx = idx + shift[:, None]|return point_coords.reshape([-1, 2])[idx.flatten()]"
        "|uncertain = get_uncertain_point_coords("
        "|return torch.concat([uncertain, points[:, self.num_candidates :]]",
    ),
    Change(
        "paddle_style",
        "places go from the center of a corner to that of another, as by default",
        'padding_mode="zeros", align_corners=False',
        'padding_mode="zeros", align_corners=True',
    ),
    Change(
        "tf_style",
        "features of the queries and their positions have changed places",
        '        "transformer.query_features": state["decoder.query.weight"],\n'
        '        "transformer.query_embedding": state["decoder.query_pos.weight"],\n',
        '        "transformer.query_features": state["decoder.query_pos.weight"],\n'
        '        "transformer.query_embedding": state["decoder.query.weight"],\n',
        parameter="transformer.query_features|transformer.query_embedding",
        at="x = torch.broadcast_to(self.query_features|hidden = [self.output_norm(x)]"
        "|x = block(x, memory, self.query_embedding|attention = self.encdec_attention("
        "|query=inputs + input_pos_embed",
    ),
    Change(
        "tf_style",
        "features of the heads alternate",
        "kernel.unflatten(1, heads)",
        "kernel.unflatten(1, heads[::-1]).transpose(1, 2)",
        parameter=_keras(
            " ".join(
                f"{attention}.{name}_kernel"
                for attention in ("encdec_attention", "self_attention")
                for name in ("query", "key", "value")
            )
        ),
        at="query, self.query_kernel)|key, self.key_kernel)|value, self.value_kernel)",
    ),
    Change(
        "tf_style",
        "kernels have their width first",
        'new[f"{outer}.kernel"] = value.permute(2, 3, 1, 0)',
        'new[f"{outer}.kernel"] = value.permute(3, 2, 1, 0)',
        parameter="|".join(
            f"{name}.kernel"
            for name in (
                "backbone.stem.conv",
                *(f"backbone.block_groups.{i}.{n}.conv" for i in "2345" for n in "ab"),
                *(f"pixel_decoder.conv.{i}.conv" for i in "2345"),
                "pixel_decoder.mask_conv",
            )
        ),
        at='outputs = torch.einsum("bhwcij,ijcf->bhwf", patches, self.kernel)',
    ),
    Change(
        "tf_style",
        "strides have all their padding behind, as same padding does",
        "pad_beg = pad_total // 2\n",
        "pad_beg = (pad_total + 1 - self.strides) // 2\n",
        at="patches = pad_images(inputs, (pad_beg"
        "|patches = patches.unfold(axis, self.kernel_size, self.strides)"
        '|outputs = torch.einsum("bhwcij,ijcf->bhwf", patches, self.kernel)',
    ),
    Change(
        "tf_style",
        "groups are the channels that are so far apart",
        "mean, variance = moments(grouped, (1, 2, 4))",
        "mean, variance = moments(grouped, (1, 2, 3))",
        at=_NORM + "|outputs = batch_normalization(grouped, mean",
    ),
    Change(
        "tf_style",
        "every level adds the top, not the one above",
        "above = features[str(int(level) + 1)]",
        'above = features["5"]',
        at="fused = lateral + resize_nearest(above|return images[:, rows][:, :, columns]",
    ),
    Change(
        "tf_style",
        "pixels are at their corners where masks are made smaller",
        "(torch.arange(out_size) + 0.5) * (in_size / out_size) - 0.5",
        "torch.arange(out_size) * (in_size / out_size)",
        at="centers = torch.clamp(centers, 0.0|distance = torch.abs(centers[:, None]"
        "|return torch.relu(1.0 - distance)|rows = bilinear_matrix(images.shape[1]"
        "|columns = bilinear_matrix(images.shape[2]"
        '|return torch.einsum("yh,xw,bhwq->byxq", rows|logits = resize_bilinear(mask_logits',
    ),
    Change(
        "tf_style",
        "a sine and its cosine have periods of their own",
        "dim_t = torch.arange(num_pos_features) // 2 * 2 / num_pos_features",
        "dim_t = torch.arange(num_pos_features) / num_pos_features",
        at="dim_t = torch.pow(torch.tensor(temperature)|pos = embedding[..., None] / dim_t"
        "|pairs = [torch.sin(pos[..., 0::2])|embeddings.append(torch.stack(pairs"
        "|return torch.cat(embeddings, dim=-1)",
    ),
    Change(
        "tf_style",
        "scores are divided by the root of the whole width",
        "1.0 / math.sqrt(query.shape[-1])",
        "1.0 / math.sqrt(hidden_size)",
    ),
    Change(
        "tf_style",
        "layers begin with the largest level",
        "memory, pos_embed, size = memories[i % num_levels]",
        "memory, pos_embed, size = memories[-1 - i % num_levels]",
        at="attention_mask = self.attention_mask(masks[-1], size)"
        "|logits = resize_bilinear(mask_logits|attention = self.encdec_attention("
        "|rows = bilinear_matrix(images.shape[1]"
        '|return torch.einsum("yh,xw,bhwq->byxq", rows|x = block(x, memory, self.query_emb'
        "|key=memory + memory_pos_embed|key, self.key_kernel)|value, self.value_kernel)",
    ),
    Change(
        "tf_style",
        "features of the masks are detached with the masks",
        "masks.append(self.head.mask_logits(hidden[-1], mask_features))",
        "masks.append(self.head.mask_logits(hidden[-1], mask_features.detach()))",
        at='return torch.einsum("bhwc,bqc->bhwq", mask_features',
    ),
    Change(
        "tf_style",
        "the first class counts as background",
        "class_weights[num_classes] = background_class_weight",
        "class_weights[0] = background_class_weight",
        at="losses = -torch.sum(y_true * log_probs * class_weights"
        "|return losses / torch.sum(y_true * class_weights)",
    ),
    Change(
        "tf_style",
        "dice counts the queries that match nothing",
        "torch.sum(dice_loss(logits, targets) * matched, dim=(1, 2))",
        "torch.sum(dice_loss(logits, targets), dim=(1, 2))",
    ),
]
