"""Faulty ports of the xLSTM."""

from ..bank import Change

_MUL_MAT = "return x @ w.transpose(-2, -1)"


def _matrix(form):
    """Return the names of a parameter in both blocks of a matrix memory."""
    return "|".join(form.format(i) for i in (0, 2))


FAULTS = [
    Change(
        "flax_style",
        "queries, keys and values come behind the heads in the kernels of the gates",
        "kernel = torch.permute(gates, (2, 0, 1)).reshape(3, heads, -1, 2, heads)",
        "kernel = torch.permute(gates, (2, 0, 1)).reshape(heads, 3, -1, 2, heads)\n"
        "    kernel = torch.swapaxes(kernel, 0, 1)",
        parameter=_matrix("block_{}.xlstm.cell.gate_kernel"),
        at='gates = torch.einsum("BTPNH,PNHGM->BTGM"|gates = soft_cap(gates',
    ),
    Change(
        "flax_style",
        "recurrent kernels are not transposed",
        'torch.permute(src["recurrent"][order], (1, 3, 0, 2))',
        'torch.permute(src["recurrent"][order], (1, 2, 0, 3))',
        parameter="block_1.xlstm.cell.recurrent_kernel",
        at='recurrent = torch.einsum("BNH,NHGK->BGNK"',
    ),
    Change(
        "flax_style",
        "biases of the gates keep the reference's order",
        '"bias": src["bias"][order].reshape(4, heads, -1)',
        '"bias": src["bias"].reshape(4, heads, -1)',
        parameter="block_1.xlstm.cell.bias",
        at="z, i, f, o = torch.unbind(",
    ),
    Change(
        "flax_style",
        "convolutions see the next token",
        "nn.functional.pad(x, (0, 0, width - 1, 0))",
        "nn.functional.pad(x, (0, 0, width - 2, 1))",
        at='patches = padded.unfold(|return torch.einsum("BTDW,WD->BTD"'
        "|x_conv = silu(self.conv1d(",
    ),
    Change(
        "flax_style",
        "learnable skip comes from before the convolution",
        "self.learnable_skip * x_conv",
        "self.learnable_skip * x_mlstm",
    ),
    Change(
        "flax_style",
        "normaliser keeps its sign",
        "torch.maximum(torch.abs(similarity), torch.exp(-m))",
        "torch.maximum(similarity, torch.exp(-m))",
        at="h = numerator / (denominator",
        reference="scores.sum(dim=-1, keepdim=True).abs()",
    ),
    Change(
        "flax_style",
        "forget gate of the matrix memory is an exponential",
        'log_f = log_sigmoid(x["f"]) + carry.m',
        'log_f = x["f"] + carry.m',
        at='m = stop_gradient(torch.maximum(log_f, x["i"]))'
        '|keep, write = torch.exp(log_f - m), torch.exp(x["i"] - m)',
        reference="kept = F.logsigmoid(f).cumsum(-1)",
    ),
    Change(
        "flax_style",
        "memory goes through a tanh before the output gate, as in an LSTM",
        "h = torch.sigmoid(o) * (c / n)",
        "h = torch.sigmoid(o) * torch.tanh(c / n)",
    ),
    Change(
        "flax_style",
        "all heads share a mean and a variance",
        "        mean, var = fast_variance(x)\n        x = (x - mean)",
        "        mean, var = fast_variance(torch.flatten(x, 2)[..., None, :])\n"
        "        x = (x - mean)",
        at="x = (x - mean) * torch.rsqrt(var + self.epsilon)"
        "|mean = torch.mean(x, dim=-1, keepdim=True)|mean_of_squares = torch.mean("
        "|return mean, mean_of_squares - ",
    ),
    Change(
        "flax_style",
        "up projection goes through the gelu, its gate does not",
        "return self.wo(gelu(self.wi_gate(x)) * self.wi_up(x))",
        "return self.wo(self.wi_gate(x) * gelu(self.wi_up(x)))",
        at="return 0.5 * x * (1.0 + torch.erf(",
    ),
    Change(
        "flax_style",
        "first padding of a row counts",
        'positions < batch["length"][:, None]',
        'positions <= batch["length"][:, None]',
        at="return torch.sum(losses * weights) / torch.sum(weights)",
    ),
    Change(
        "flax_style",
        "mean is over padding too",
        "return torch.sum(losses * weights) / torch.sum(weights)",
        "return torch.mean(losses * weights)",
    ),
    Change(
        "flax_style",
        "gates see the keys that are scaled",
        "        qkv = torch.stack([q, k, v], dim=2)\n"
        '        gates = torch.einsum("BTPNH,PNHGM->BTGM", qkv, self.gate_kernel)\n'
        "        gates = soft_cap(gates + self.gate_bias, self.cfg.gate_soft_cap)\n"
        "        k = k / math.sqrt(k.shape[-1])\n",
        "        k = k / math.sqrt(k.shape[-1])\n"
        "        qkv = torch.stack([q, k, v], dim=2)\n"
        '        gates = torch.einsum("BTPNH,PNHGM->BTGM", qkv, self.gate_kernel)\n'
        "        gates = soft_cap(gates + self.gate_bias, self.cfg.gate_soft_cap)\n",
        at='qkv = torch.stack([q, k, v]|gates = torch.einsum("BTPNH,PNHGM->BTGM"',
    ),
    Change(
        "ggml_style",
        "keys stand in front of the queries",
        'torch.cat([src["q_proj.weight"], src["k_proj.weight"]], dim=1)',
        'torch.cat([src["k_proj.weight"], src["q_proj.weight"]], dim=1)',
        parameter=_matrix("blk.{}.mlstm_qk.weight"),
        at='qk = mul_mat_blocks(w[p + "mlstm_qk.weight"], xc)'
        "|q = qk[..., :n_block]|k = qk[..., n_block:]"
        "|return mul_mat(w, x).permute(0, 2, 1, 3)|" + _MUL_MAT,
    ),
    Change(
        "ggml_style",
        "one is not added to the norm of the scalar memory",
        'yield "slstm_norm.weight", 1.0 + src["norm.weight"]',
        'yield "slstm_norm.weight", src["norm.weight"]',
        parameter="blk.1.slstm_norm.weight",
        at="return x.reshape(x.shape[0], x.shape[1], -1) * weight"
        '|return build_head_norm(out, w[p + "slstm_norm.weight"])',
    ),
    Change(
        "ggml_style",
        "rows of the recurrent weights are sorted by gates, not by heads",
        'recurrent = src["recurrent"].permute(1, 0, 2, 3)',
        'recurrent = src["recurrent"]',
        parameter="blk.1.slstm_r.weight",
        at='recurrent = mul_mat(w[p + "slstm_r.weight"]|' + _MUL_MAT,
    ),
    Change(
        "ggml_style",
        "taps are read from the newest to the oldest",
        "* taps[i]",
        "* taps[-1 - i]",
        at="return op_silu(out)|xc = build_conv(",
    ),
    Change(
        "ggml_style",
        "what is written does not decay up to the end of the chunk",
        "gate_write = b_last - b + ig",
        "gate_write = ig",
        at="m = torch.maximum(gate_write.amax(|k = k * torch.exp(gate_write - m)",
    ),
    Change(
        "ggml_style",
        "normaliser forgets the chunks before",
        "total = kq.sum(dim=-1) + (q * n[:, :, None]).sum(dim=-1)",
        "total = kq.sum(dim=-1)",
        at="total = torch.maximum(torch.abs(total)|return out / total[..., None]",
    ),
    Change(
        "ggml_style",
        "floor of the normaliser has no gradient, what it bounds has one",
        "torch.exp(-m)) + hparams.f_norm_min",
        "torch.exp(-m.detach())) + hparams.f_norm_min",
        reference="torch.maximum(scores.sum(dim=-1, keepdim=True).abs(), torch.exp(-m))",
    ),
    Change(
        "ggml_style",
        "what leaves the matrix memory is gated by a sigmoid",
        "op_silu(z) * out",
        "op_sigmoid(z) * out",
        reference="self.proj_down(h * F.silu(z))",
    ),
    Change(
        "ggml_style",
        "recurrence reads the memory, not what came out of it",
        'mul_mat(w[p + "slstm_r.weight"], h[:, :, None])',
        'mul_mat(w[p + "slstm_r.weight"], state[0][:, :, None])',
        at=_MUL_MAT,
    ),
    Change(
        "ggml_style",
        "forget gate of the scalar memory leaves out the old stabiliser",
        "f = torch.exp(lf + m_prev - m)",
        "f = torch.exp(lf - m)",
        at="c = c * f + |n = n * f + i",
        reference="log_f = F.logsigmoid(f) + m",
    ),
    Change(
        "ggml_style",
        "norms of the heads have the epsilon of the layers",
        "x = op_norm(x, hparams.f_norm_group_eps)",
        "x = op_norm(x, hparams.f_norm_eps)",
        at="return x / torch.sqrt(variance + eps)",
    ),
    Change(
        "ggml_style",
        "second residual starts from what is normed",
        "inp = ffn_inp + build_ffn(w, p, cur)",
        "inp = cur + build_ffn(w, p, cur)",
    ),
    Change(
        "ggml_style",
        "labels are rolled to the back",
        'torch.roll(batch["tokens"], -1, dims=1)',
        'torch.roll(batch["tokens"], 1, dims=1)',
        at="logits, labels = output[has_label], labels[has_label]"
        "|one_hot = nn.functional.one_hot(|return -(one_hot * (logits - log_sum)).sum()",
    ),
]
