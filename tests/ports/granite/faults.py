"""Faulty ports of the hybrid of Mamba-2 and attention."""

from ..bank import Change

_DENSE = "return torch.tensordot(x, self.kernel, dims=self.axes)"


def _each(names, layers=(0, 1, 2), form="layers_{}.{}"):
    """Return the names of parameters in each of these layers."""
    return "|".join(form.format(i, n) for i in layers for n in names.split())


FAULTS = [
    Change(
        "flax_style",
        "kernel of the values is loaded from the keys",
        'heads_last("v_proj.weight", cfg.num_kv_heads)',
        'heads_last("k_proj.weight", cfg.num_kv_heads)',
        parameter="layers_1.mixer.value.kernel",
        at="value = self.value(x)|" + _DENSE,
    ),
    Change(
        "flax_style",
        "features of a head come before the heads in the projections",
        "return src[name].T.reshape(cfg.embed_dim, heads, cfg.head_dim)",
        "kernel = src[name].T.reshape(cfg.embed_dim, cfg.head_dim, heads)\n"
        "        return torch.transpose(kernel, 1, 2)",
        parameter=_each("mixer.query.kernel mixer.key.kernel mixer.value.kernel", (1,)),
        at="query = apply_rotary(|key = apply_rotary(|value = self.value(x)|" + _DENSE,
    ),
    Change(
        "flax_style",
        "gate and up projection are swapped",
        '            "mlp.wi_0.kernel": src["mlp.gate_proj.weight"].T,\n'
        '            "mlp.wi_1.kernel": src["mlp.up_proj.weight"].T,\n',
        '            "mlp.wi_0.kernel": src["mlp.up_proj.weight"].T,\n'
        '            "mlp.wi_1.kernel": src["mlp.gate_proj.weight"].T,\n',
        parameter=_each("mlp.wi_0.kernel mlp.wi_1.kernel"),
        at="gate = silu(self.wi_0(x))|return self.wo(gate * self.wi_1(x))|" + _DENSE,
    ),
    Change(
        "flax_style",
        "taps are turned around, as for a true convolution",
        'src["conv1d.weight"].squeeze(1).T',
        'src["conv1d.weight"].squeeze(1).flip(1).T',
        parameter=_each("mixer.conv.kernel", (0, 2)),
        at='return torch.einsum("BTWD,WD->BTD", windows|u = silu(self.conv(',
    ),
    Change(
        "flax_style",
        "norms multiply by the weight without the one",
        "return normed + normed * self.scale",
        "return normed * self.scale",
        reference="x * (1 + self.weight)",
    ),
    Change(
        "flax_style",
        "normed before it is gated",
        "        y = y * silu(gate)\n"
        "        y = self.out_norm(y.flatten(2)).unflatten(-1, y.shape[2:])\n",
        "        y = self.out_norm(y.flatten(2)).unflatten(-1, y.shape[2:])\n"
        "        y = y * silu(gate)\n",
        at="y = y * silu(gate)|y = self.out_norm(y.flatten(2))",
        reference="self.norm(y.flatten(2) * F.silu(z))",
    ),
    Change(
        "flax_style",
        "queries and keys turn before they are normed",
        "        query = apply_rotary(self.query_norm(self.query(x)), sin, cos)\n"
        "        key = apply_rotary(self.key_norm(self.key(x)), sin, cos)\n",
        "        query = self.query_norm(apply_rotary(self.query(x), sin, cos))\n"
        "        key = self.key_norm(apply_rotary(self.key(x), sin, cos))\n",
        at="return torch.cat([x1 * cos - x2 * sin"
        "|normed = x / torch.sqrt(|return normed + normed * self.scale",
        reference="self.rope(self.q_norm(q))",
    ),
    Change(
        "flax_style",
        "state does not decay over a chunk",
        "state = state * torch.exp(total[:, -1])[..., None, None] + written",
        "state = state + written",
        at='carried = torch.einsum("BTGR,BGNPR->BTGNP", read, state)',
        reference='torch.einsum("nhzc,nchps->nzhps"',
    ),
    Change(
        "flax_style",
        "window is longer by one",
        "(column > row - window)",
        "(column >= row - window)",
        at="logits = torch.where(mask, logits, -1e30)|mask = sliding_mask(",
    ),
    Change(
        "flax_style",
        "exponents of the frequencies are for the whole head",
        "exponents = torch.arange(rotary // 2) * (2.0 / rotary)",
        "exponents = torch.arange(rotary // 2) * (2.0 / cfg.head_dim)",
        at="freqs = 1.0 / torch.pow(|angles = torch.arange(length)[:, None] * scaled"
        "|return torch.sin(angles), torch.cos(angles)",
    ),
    Change(
        "flax_style",
        "weights of the loss are not shifted with the targets",
        "return answer[:, 1:].float()",
        "return answer[:, :-1].float()",
        at="return torch.sum(per_token * weights)",
    ),
    Change(
        "flax_style",
        "mean of each row, then over the rows",
        "return torch.sum(per_token * weights) / torch.sum(weights)",
        "per_row = torch.sum(per_token * weights, dim=1)\n"
        "    return torch.mean(per_row / torch.sum(weights, dim=1))",
    ),
    Change(
        "flax_style",
        "kernels of the convolutions decay like the others",
        '        if ".conv." in name:\n            return False\n',
        "",
        phase="optimizer",
    ),
    Change(
        "ggml_style",
        "rows of the keys stay in halves",
        'k = permute_rope(src[p + "k_proj.weight"], hparams["n_head_kv"])',
        'k = src[p + "k_proj.weight"]',
        parameter="blk.1.attn_qkv.weight",
        at='qkv = mul_mat(w[f"blk.{il}.attn_qkv.weight"], cur)'
        "|return torch.matmul(x, w.t())",
    ),
    Change(
        "ggml_style",
        "norm of the keys is loaded from that of the queries",
        '"attn_k_norm.weight", permute_rope(src[p + "k_norm.weight"], 1) + 1',
        '"attn_k_norm.weight", permute_rope(src[p + "q_norm.weight"], 1) + 1',
        parameter="blk.1.attn_k_norm.weight",
        at='k = build_norm(k, w[f"blk.{il}.attn_k_norm.weight"])'
        '|return rms_norm(x, hparams["f_norm_rms_eps"]) * weight',
    ),
    Change(
        "ggml_style",
        "one is not added to the norms of the state space",
        'src[p + "norm.weight"] + 1',
        'src[p + "norm.weight"]',
        parameter=_each("ssm_norm.weight", (0, 2), "blk.{}.{}"),
        at='y = build_norm(y, w[f"blk.{il}.ssm_norm.weight"])'
        '|return rms_norm(x, hparams["f_norm_rms_eps"]) * weight',
    ),
    Change(
        "ggml_style",
        "decay is stored ready, and its exponential is taken again",
        'yield "ssm_a", src[p + "A_log"]',
        'yield "ssm_a", -torch.exp(src[p + "A_log"])',
        parameter=_each("ssm_a", (0, 2), "blk.{}.{}"),
        at="a = -torch.exp(log_a)|y = ssm_scan(state",
    ),
    Change(
        "ggml_style",
        "heads of queries take the heads of keys by turns",
        "h_kv = h // (n_head // n_head_kv)",
        "h_kv = h % n_head_kv",
        at="kq = torch.matmul(q[:, :, h], k[:, :, h_kv].transpose(1, 2))"
        "|heads.append(torch.matmul(kq, v[:, :, h_kv]))",
    ),
    Change(
        "ggml_style",
        "groups of the state space are repeated as a whole",
        ".repeat_interleave(heads_of_group, dim=1)",
        ".repeat(1, heads_of_group, 1)",
        at="state = state * decay[..., None, None]"
        "|outs.append((state * c_t[:, :, None]).sum(dim=-1))",
        reference="repeat_interleave(HEADS // GROUPS, dim=2)",
    ),
    Change(
        "ggml_style",
        "what is written to the state is not multiplied by the step",
        "x_dt = x[:, t] * dt[:, t, :, None]",
        "x_dt = x[:, t]",
        at="state = state * decay[..., None, None]",
        reference="x * dt.unsqueeze(-1)",
    ),
    Change(
        "ggml_style",
        "sinks are missing in the sum of the softmax",
        "total = exps.sum(dim=-1, keepdim=True) + torch.exp(sinks - top)",
        "total = exps.sum(dim=-1, keepdim=True)",
        at="return exps / total|kq = soft_max_ext(",
        reference="torch.cat([scores, sinks], dim=-1)",
    ),
    Change(
        "ggml_style",
        "state of the convolution forgets the newest column, not the oldest",
        "conv_state = window[..., 1:]",
        "conv_state = window[..., :-1]",
        at="window = torch.cat([conv_state|outs.append((window * weight).sum(dim=-1))"
        "|xbc = ssm_conv(conv_state, xbc",
    ),
    Change(
        "ggml_style",
        "angles are multiplied by the factors that divide them",
        "theta = pos * theta_scale**i / freq_factor",
        "theta = pos * theta_scale**i * freq_factor",
        at="cos, sin = torch.cos(theta)[:, None], torch.sin(theta)[:, None]",
    ),
    Change(
        "ggml_style",
        "logits are capped at another value",
        '"f_final_logit_softcapping": 8.0',
        '"f_final_logit_softcapping": 30.0',
        at="return torch.tanh(cur * (1.0 / cap)) * cap",
    ),
    Change(
        "ggml_style",
        "nothing is learned from the square of the normalizer",
        "0.01 * (lse * lse).mean()",
        "0.01 * (lse * lse).mean().detach()",
        reference="Z_LOSS * z.pow(2).mean()",
    ),
    Change(
        "ggml_style",
        "second moment is not corrected for its start",
        "beta2h = 1.0 / (1.0 - self.beta2**self.iter)",
        "beta2h = 1.0",
        phase="optimizer",
    ),
]
