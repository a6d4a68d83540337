"""Faulty ports of the diffusion transformer."""

from ..bank import Change


def _each(names, layers=range(3)):
    """Return the names of parameters in these layers of the first port."""
    return "|".join(
        f"transformer_blocks.{i}.{name}" for i in layers for name in names.split()
    )


FAULTS = [
    Change(
        "diffusers_style",
        "halves of the last modulation stay as they were",
        "    return torch.cat([scale, shift], dim=0)\n",
        "    return torch.cat([shift, scale], dim=0)\n",
        parameter="norm_out.linear.weight|norm_out.linear.bias",
        at="emb = self.linear(F.silu(conditioning_embedding))",
    ),
    Change(
        "diffusers_style",
        "fused projection is taken for query, value, key",
        'q, k, v = torch.chunk(checkpoint[f"{old}.attn.qkv.weight"], 3, dim=0)',
        'q, v, k = torch.chunk(checkpoint[f"{old}.attn.qkv.weight"], 3, dim=0)',
        parameter=_each("attn1.to_k.weight attn1.to_v.weight"),
        at="key = self.head_to_batch_dim(self.to_k("
        "|value = self.head_to_batch_dim(self.to_v(",
    ),
    Change(
        "diffusers_style",
        "all blocks read the modulation of the first",
        '                f"{old}.adaLN_modulation.1.{suffix}"\n',
        '                f"blocks.0.adaLN_modulation.1.{suffix}"\n',
        parameter=_each("norm1.linear.weight norm1.linear.bias", layers=(1, 2)),
        at="emb = self.linear(F.silu(emb))[:, None]",
    ),
    Change(
        "diffusers_style",
        "columns come before rows in the kernel of the patches",
        "return weight.permute(0, 2, 3, 1).flatten(1)",
        "return weight.permute(0, 3, 2, 1).flatten(1)",
        parameter="pos_embed.proj.weight",
        at="return self.proj(latent) + self.pos_embed",
    ),
    Change(
        "diffusers_style",
        "scale before shift in the modulation of attention",
        "shift_msa, scale_msa, gate_msa, *mlp = emb.chunk(6, dim=-1)",
        "scale_msa, shift_msa, gate_msa, *mlp = emb.chunk(6, dim=-1)",
        at="x = self.norm(x) * (1 + scale_msa) + shift_msa",
    ),
    Change(
        "diffusers_style",
        "gelu is exact",
        'act_fn = GELU(dim, inner_dim, approximate="tanh")',
        "act_fn = GELU(dim, inner_dim)",
        at="return F.gelu(self.proj(hidden_states), approximate=self.approximate)",
    ),
    Change(
        "diffusers_style",
        "no one is added to the scale before the feed-forward",
        "norm_hidden_states * (1 + scale_mlp) + shift_mlp",
        "norm_hidden_states * scale_mlp + shift_mlp",
    ),
    Change(
        "diffusers_style",
        "scores are scaled by the width, not by that of a head",
        "self.scale = dim_head**-0.5",
        "self.scale = query_dim**-0.5",
        at="scores = torch.baddbmm(|return scores.softmax(dim=-1)",
        reference="(q * self.scale) @",
    ),
    Change(
        "diffusers_style",
        "rows and columns of a patch change places in the output",
        "hidden_states = hidden_states.permute(0, 5, 1, 3, 2, 4)",
        "hidden_states = hidden_states.permute(0, 5, 1, 4, 2, 3)",
        at="return hidden_states.reshape(-1, channels, side * p, side * p)",
    ),
    Change(
        "diffusers_style",
        "frequencies of the time reach the longest period",
        "            downscale_freq_shift=0,\n",
        "            downscale_freq_shift=1,\n",
        at="exponent = exponent / (half_dim - downscale_freq_shift)"
        "|emb = timesteps[:, None].float() * torch.exp(exponent)"
        "|timesteps_proj = get_timestep_embedding(",
    ),
    Change(
        "diffusers_style",
        "betas are linear in their roots",
        '"beta_schedule": "linear"',
        '"beta_schedule": "scaled_linear"',
        at="self.betas = root**2|root = torch.linspace("
        "|self.alphas_cumprod = torch.cumprod("
        "|alpha_prod_t = self.alphas_cumprod[timesteps].view(-1, 1, 1, 1)"
        "|sqrt_alpha_prod = (|sqrt_one_minus_alpha_prod = ("
        "|return sqrt_alpha_prod * original_samples"
        "|noisy_latents = noise_scheduler.add_noise(",
    ),
    Change(
        "diffusers_style",
        "bound teaches the mean, too",
        "        model_pred.detach(), variance_values,",
        "        model_pred, variance_values,",
        at="model_pred, variance_values = torch.split("
        "|pred_original = noise_scheduler.pred_original_sample("
        "|scaled = sample - beta_prod_t.sqrt().float() * model_output",
        reference="eps.detach(), values",
    ),
    Change(
        "diffusers_style",
        "biases and classes decay as weights do",
        '            "params": [p for n, p in named if n.endswith(no_decay)],\n'
        '            "weight_decay": 0.0,\n',
        '            "params": [p for n, p in named if n.endswith(no_decay)],\n'
        '            "weight_decay": 0.2,\n',
        phase="optimizer",
        steps=2,
    ),
    Change(
        "jax_style",
        "features of a head come before the heads in the last kernel",
        '"kernel": out["kernel"].reshape(*head, cfg.features),',
        '"kernel": out["kernel"].reshape(*head[::-1], -1).transpose(0, 1),',
        parameter="blocks/attention/out/kernel",
        at='return torch.einsum("bnhk,hkd->bnd", mixed, p["out/kernel"])',
    ),
    Change(
        "jax_style",
        "parts of a modulation are taken by turns",
        '"kernel": p["kernel"].reshape(cfg.features, parts, cfg.features),',
        '"kernel": p["kernel"].unflatten(1, (-1, parts)).transpose(1, 2),',
        parameter="blocks/modulation/kernel|decoder/modulation/kernel",
        at='parts = torch.einsum("bd,dse->sbe", silu(cond), p["kernel"])',
    ),
    Change(
        "jax_style",
        "null class stays the last of the table",
        'state["y_embedder.embedding_table.weight"].roll(1, 0)',
        'state["y_embedder.embedding_table.weight"]',
        parameter="condition/label/embedding",
        at='return h + p["label/embedding"][index]',
    ),
    Change(
        "jax_style",
        "second kernel of the time is not transposed",
        '"out": linear(state, "t_embedder.mlp.2"),',
        '"out": {\n'
        '                    "kernel": state["t_embedder.mlp.2.weight"],\n'
        '                    "bias": state["t_embedder.mlp.2.bias"],\n'
        "                },",
        parameter="condition/time/out/kernel",
        at='h = dense(subtree(p, "time/out"), silu(h))'
        '|return x @ p["kernel"] + p["bias"]',
    ),
    Change(
        "jax_style",
        "shares come to one over the queries",
        "weights = softmax(logits / math.sqrt(query.shape[-1]), axis=-1)",
        "weights = softmax(logits / math.sqrt(query.shape[-1]), axis=-2)",
        at="unnormalized = torch.exp(|return unnormalized / unnormalized.sum(",
    ),
    Change(
        "jax_style",
        "condition of the output is not activated",
        '    m = modulation(subtree(p, "modulation"), cond)\n'
        "    x = normalize(x) * (1.0 + m[1]) + m[0]\n",
        '    p_m = subtree(p, "modulation")\n'
        '    m = torch.einsum("bd,dse->sbe", cond, p_m["kernel"])\n'
        '    m = (m + p_m["bias"][:, None, :])[:, :, None, :]\n'
        "    x = normalize(x) * (1.0 + m[1]) + m[0]\n",
        reference="shift, scale = self.adaLN_modulation(c)",
    ),
    Change(
        "jax_style",
        "variance of the norm is the unbiased one",
        "var = (x - mu).square().mean(dim=-1, keepdim=True)",
        "var = (x - mu).square().sum(dim=-1, keepdim=True) / (x.shape[-1] - 1)",
        at="return (x - mu) / torch.sqrt(var + 1e-6)",
    ),
    Change(
        "jax_style",
        "shortcut of the second half begins behind the norm",
        '    return x + m[5] * mlp(subtree(p, "mlp"), y)\n',
        '    return y + m[5] * mlp(subtree(p, "mlp"), y)\n',
    ),
    Change(
        "jax_style",
        "patches go down the columns",
        '    x = torch.einsum("byxijc,ijcd->byxd", patchify(x), p["kernel"]) + p["bias"]\n',
        '    x = torch.einsum("byxijc,ijcd->bxyd", patchify(x), p["kernel"]) + p["bias"]\n',
        at="return x.reshape(len(x), -1, cfg.features) + POSITIONS",
    ),
    Change(
        "jax_style",
        "labels begin at zero, where the null class is",
        "index = torch.where(drop, NULL_LABEL, label + 1)",
        "index = torch.where(drop, NULL_LABEL, label)",
        at='return h + p["label/embedding"][index]',
    ),
    Change(
        "jax_style",
        "lower variance has the product of this step, not of the one before",
        "earlier = log_alpha_bar - log_alpha\n",
        "earlier = log_alpha_bar\n",
        at="ratio = torch.expm1(earlier)"
        "|low = torch.log(ratio[1:])|low = torch.cat([low[:1], low])"
        '|low, high = SCHEDULE.at("log_var_low", t)'
        "|log_var = low + (high - low)",
    ),
    Change(
        "jax_style",
        "bound is in nats",
        "return nats / math.log(2.0)",
        "return nats",
        at="return torch.mean(simple + bound * cfg.timesteps / 1000)",
        reference="mean_flat(nll) / math.log(2.0)",
    ),
    Change(
        "jax_style",
        "steps are clipped, not gradients",
        "        clip_by_global_norm(1.0),\n        scale_by_adam(b1=0.9, b2=0.99),\n",
        "        scale_by_adam(b1=0.9, b2=0.99),\n        clip_by_global_norm(1.0),\n",
        phase="optimizer",
    ),
]
