"""Faulty ports of the Informer."""

from ..bank import Change

_LINEAR = "out = torch.matmul(x, self.weight)"
_FULLY_CONNECTED = "out = torch.matmul(data, torch.swapaxes(weight, 0, 1))"


def _each(form, count):
    """Return the names of a parameter in so many layers."""
    return "|".join(form.format(i) for i in range(count))


FAULTS = [
    Change(
        "paddle_style",
        "keys and values change places where they are joined",
        "join([k, v])",
        "join([v, k])",
        parameter=_each("decoder.{}.cross_attention.kv_proj.weight", 2),
        at="kv = self.kv_proj(memory)|k, v = kv[:, :, 0], kv[:, :, 1]|" + _LINEAR,
    ),
    Change(
        "paddle_style",
        "table of the calendar has weekdays before days",
        'CALENDAR = ("month", "day", "weekday", "hour")',
        'CALENDAR = ("month", "weekday", "day", "hour")',
        parameter="enc_embedding.temporal_embedding.embed.weight"
        "|dec_embedding.temporal_embedding.embed.weight",
        at="return torch.sum(self.embed(x_mark + self.offset)"
        "|return torch.index_select(self.weight",
    ),
    Change(
        "paddle_style",
        "square weights of the outputs are not transposed",
        '(".linear1.weight", ".linear2.weight", ".out_proj.weight")',
        '(".linear1.weight", ".linear2.weight")',
        parameter=_each("encoder.attn_layers.{}.attention.out_proj.weight", 3)
        + "|"
        + _each("decoder.{}.self_attention.out_proj.weight", 2)
        + "|"
        + _each("decoder.{}.cross_attention.out_proj.weight", 2),
        at="return self.out_proj(torch.reshape(|return self.out_proj(torch.flatten(|"
        + _LINEAR,
    ),
    Change(
        "paddle_style",
        "zeros stand beside the series, it is no ring",
        'Conv1D(config["in_channels"], d_model, "circular")',
        'Conv1D(config["in_channels"], d_model)',
        at="return F.pad(x, [0, 0, 1, 1])|x = torch.permute(self.pad(x), [0, 2, 1])"
        "|return torch.permute(F.conv1d(x, self.weight)"
        "|out = self.value_embedding(x) + self.temporal_embedding(x_mark)",
    ),
    Change(
        "paddle_style",
        "sum of the drawn scores is divided by how many were drawn",
        "torch.sum(sampled, dim=-1) / scores.shape[-1]",
        "torch.sum(sampled, dim=-1) / sampled.shape[-1]",
        at="_, index = torch.topk(self.measure(scores)"
        "|active = torch.take_along_dim(scores, rows, dim=2)",
    ),
    Change(
        "paddle_style",
        "a step does not see itself",
        "dtype=torch.bool), diagonal=1)",
        "dtype=torch.bool), diagonal=0)",
        at="active = torch.where(future[index], -1e9, active)",
    ),
    Change(
        "paddle_style",
        "values are cumulated over their features",
        "return torch.cumsum(values, dim=2)",
        "return torch.cumsum(values, dim=-1)",
        at="context = self.initial_context(values)|return torch.scatter(context, 2, rows",
    ),
    Change(
        "paddle_style",
        "heads of the decoder are put side by side",
        'config["nhead"], inner, mix=True)',
        'config["nhead"], inner, mix=False)',
        at="out = torch.permute(out, [0, 2, 1, 3])"
        "|return self.out_proj(torch.reshape(out, [batch",
    ),
    Change(
        "paddle_style",
        "activation stands before the norm where the series is halved",
        "        x = self.norm(self.down_conv(x))\n        x = F.elu(x)\n",
        "        x = F.elu(self.down_conv(x))\n        x = self.norm(x)\n",
        at="mean = torch.mean(x, dim=[0, 1])"
        "|variance = torch.mean(torch.square(x - mean), dim=[0, 1])"
        "|return x * scale + (self.bias - mean * scale)",
        reference="x = F.elu(self.norm(self.conv(",
    ),
    Change(
        "paddle_style",
        "layers are normed over time",
        "        mean = torch.mean(x, dim=-1, keepdim=True)\n"
        "        variance = torch.mean(torch.square(x - mean), dim=-1, keepdim=True)\n",
        "        mean = torch.mean(x, dim=1, keepdim=True)\n"
        "        variance = torch.mean(torch.square(x - mean), dim=1, keepdim=True)\n",
        at="out = (x - mean) / torch.sqrt(variance + self.epsilon)",
    ),
    Change(
        "paddle_style",
        "start token is the oldest part of the series",
        "token = x[:, -self.start_token_len :]",
        "token = x[:, : self.start_token_len]",
        at="return torch.concat([token, zeros], dim=1)"
        "|out = self.dec_embedding(self.start_token(x), future_mark)",
    ),
    Change(
        "paddle_style",
        "gaps of the normed series are not set to zero",
        "        return x * mask\n",
        "        return x\n",
        at="x = x * self.affine_weight + self.affine_bias",
        reference="self.weight + self.bias) * observed",
    ),
    Change(
        "paddle_style",
        "weights of what is far off carry gradients",
        "size = torch.abs(diff).detach()",
        "size = torch.abs(diff)",
        at="weight = self.weight * mask * (1.5 - 1.0 / (1.0 + size))",
        reference="far_off = error.detach().abs()",
    ),
    Change(
        "gluonts_style",
        "queries of all heads come before the keys",
        "torch.stack(parts, dim=1)",
        "torch.stack(parts, dim=0)",
        parameter=_each("enc_cells.{}.attention.in_weight", 3)
        + "|"
        + _each("dec_cells.{}.attention_in.in_weight", 2)
        + "|"
        + _each("dec_cells.{}.attention_inter.key_value_weight", 2),
        at="qkv = F.FullyConnected(x, in_weight)|query, key, value = split_heads(qkv"
        "|memory = F.FullyConnected(memory, key_value_weight)"
        "|key, value = split_heads(memory|" + _FULLY_CONNECTED,
    ),
    Change(
        "gluonts_style",
        "lags come before the variables in the weights",
        'torch.flatten(source[f"{theirs}.value.weight"], 1)',
        'torch.flatten(torch.swapaxes(source[f"{theirs}.value.weight"], 1, 2), 1)',
        parameter="enc_input.lag_weight|dec_input.lag_weight",
        at="value = F.FullyConnected(lags, lag_weight)|" + _FULLY_CONNECTED,
    ),
    Change(
        "gluonts_style",
        "a key that was drawn twice counts once",
        "return torch.sum(hot, dim=1).to(torch.float32)",
        "return torch.amax(hot, dim=1).to(torch.float32)",
        parameter=_each("enc_cells.{}.attention.cell.sample_count", 3)
        + "|"
        + _each("dec_cells.{}.attention_in.cell.sample_count", 2),
        at="torch.sum(scores * sample_count, -1)|active = F.topk_mask("
        "|return torch.where(active[:, :, None] > 0, attended, lazy)",
    ),
    Change(
        "gluonts_style",
        "gelu is the one by a sigmoid",
        "return 0.5 * data * (1.0 + torch.erf(data / math.sqrt(2.0)))",
        "return data * torch.sigmoid(1.702 * data)",
        at='out = F.LeakyReLU(self.ffn_1(x), act_type="gelu")',
    ),
    Change(
        "gluonts_style",
        "sign of the lags is turned",
        "begin=length - lag, end=2 * length - lag)",
        "begin=length + lag, end=2 * length + lag)",
        at="lags = get_lagged_subsequences(F, data|lagged = ["
        "|return torch.narrow(data, axis, begin, end - begin)"
        "|stacked = torch.stack(lagged, dim=-1)|return torch.reshape(stacked"
        "|value = F.FullyConnected(lags, lag_weight)|" + _FULLY_CONNECTED,
    ),
    Change(
        "gluonts_style",
        "places are counted from one",
        "angle = torch.arange(length, dtype=torch.float32)[:, None] * rate[None, :]",
        "angle = torch.arange(1.0, length + 1.0)[:, None] * rate[None, :]",
        at="pairs = torch.stack([torch.sin(angle), torch.cos(angle)], dim=-1)"
        "|return torch.reshape(pairs, (length, units))"
        "|position = sinusoidal_position_encoding(self.length"
        "|return value + position + self.time_embedder(time_feat)",
    ),
    Change(
        "gluonts_style",
        "scores of the encoder's series are not scaled",
        "        query = query / math.sqrt(query.shape[-1])\n",
        "",
        at="att_weights = F.softmax(F.batch_dot(query, key, transpose_b=True))"
        "|return torch.bmm(lhs, torch.swapaxes(rhs, 1, 2) if transpose_b else rhs)",
        reference="scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5",
    ),
    Change(
        "gluonts_style",
        "second residual of a decoder cell comes from its input",
        "        x = self.layer_norm_in(x + out)\n"
        "        out = self.attention_inter(x, memory)\n",
        "        normed = self.layer_norm_in(x + out)\n"
        "        out = self.attention_inter(normed, memory)\n",
        at="x = self.layer_norm_inter(x + out)",
    ),
    Change(
        "gluonts_style",
        "batch and heads change places where heads are merged",
        "    x = torch.reshape(x, (-1, heads, x.shape[1], x.shape[2]))\n"
        "    return torch.flatten(torch.swapaxes(x, 1, 2), 2, 3)\n",
        "    x = torch.reshape(x, (heads, -1, x.shape[1], x.shape[2]))\n"
        "    return torch.flatten(torch.permute(x, (1, 2, 0, 3)), 2, 3)\n",
        at="return self.proj(self.join(out, self.heads))"
        "|out = merge_heads(F.batch_dot(att_weights, value), self.heads)",
    ),
    Change(
        "gluonts_style",
        "least active queries attend",
        "_, index = torch.topk(data, k, dim=-1)",
        "_, index = torch.topk(data, k, dim=-1, largest=False)",
        at="return torch.zeros_like(data).scatter(-1, index, 1.0)"
        "|active = F.topk_mask("
        "|return torch.where(active[:, :, None] > 0, attended, lazy)",
    ),
    Change(
        "gluonts_style",
        "calendar of the decoder is a step early",
        "dec_feat = F.slice_axis(time_feat, axis=1, begin=begin, end=None)",
        "dec_feat = F.slice_axis(time_feat, axis=1, begin=begin - 1, end=-1)",
        at="out = self.decode(F, data, dec_feat, memory)|feature = features[:, :, i]"
        "|total = total + nn.functional.embedding(feature",
    ),
    Change(
        "gluonts_style",
        "first channels are taken for the targets",
        "begin=-self.num_targets, end=None)",
        "begin=0, end=self.num_targets)",
        at="return torch.narrow(data, axis, begin, end - begin)"
        "|slope = self.target(scale) / self.target(self.gamma)"
        "|return (out - self.target(self.beta)) * slope + self.target(loc)"
        "|return out, self.scaler.target(scale)",
    ),
    Change(
        "gluonts_style",
        "mean over all, whatever their weights come to",
        "return torch.sum(x * weights) / torch.sum(weights)",
        "return torch.mean(x * weights)",
        at="return weighted_average(",
    ),
]
