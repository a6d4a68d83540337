"""Faulty ports of the speech recogniser."""

from ..bank import Change

_KERAS_ATTENTIONS = (
    *(f"encoder_layer_{i}.self_attention" for i in (0, 1)),
    *(f"decoder_layer_{i}.self_attention" for i in (0, 1)),
    *(f"decoder_layer_{i}.cross_attention" for i in (0, 1)),
)
_FAIRSEQ_ATTENTIONS = (
    *(f"encoder.layers.{i}.self_attn" for i in (0, 1)),
    *(f"decoder.layers.{i}.self_attn" for i in (0, 1)),
    *(f"decoder.layers.{i}.encoder_attn" for i in (0, 1)),
)

FAULTS = [
    Change(
        "keras_style",
        "rows of the kernel that merges heads are read with sizes before heads",
        'kernel = torch.reshape(kernel, (CONFIG["num_heads"], -1, kernel.shape[1]))',
        'kernel = torch.reshape(kernel, (-1, CONFIG["num_heads"], kernel.shape[1]))\n'
        "        kernel = torch.transpose(kernel, 0, 1)",
        parameter="|".join(f"{name}.output_dense.kernel" for name in _KERAS_ATTENTIONS),
        at='torch.einsum("bhtk,hkd->btd", inputs, self.kernel)',
    ),
    Change(
        "keras_style",
        "norm before the feedforward part is read from that before the attention",
        'self.norm(name + ".mlp_ln")',
        'self.norm(name + ".attn_ln")',
        parameter="|".join(
            f"{side}_layer_{i}.feedforward_norm.{kind}"
            for side in ("encoder", "decoder")
            for i in (0, 1)
            for kind in ("gamma", "beta")
        ),
        at="return centered * inv * self.gamma + self.beta",
    ),
    Change(
        "keras_style",
        "sines and cosines take turns",
        "table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)",
        "table = np.stack([np.sin(angles), np.cos(angles)], axis=2)\n"
        "    table = table.reshape(length, hidden_dim)",
        parameter="encoder_positions",
        at="x = x + self.encoder_positions[",
    ),
    Change(
        "keras_style",
        "gelu by the logistic function, as in CLIP",
        "return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))",
        "return x * torch.sigmoid(1.702 * x)",
    ),
    Change(
        "keras_style",
        "zeros of the strided convolution stand behind, as with padding same",
        "    strides = 2\n",
        "    strides = 2\n    padding = (0, 1)\n",
        at="inputs = nn.functional.pad(inputs|windows = inputs.unfold("
        '|torch.einsum("btcw,wcf->btf"',
    ),
    Change(
        "keras_style",
        "last frame of an odd number is lost",
        "return -(lengths // -stride)",
        "return lengths // stride",
        at="return torch.arange(maxlen)[None, :] < lengths|frame_mask = sequence_mask("
        "|frame_bias = (1.0 - cast(frame_mask))",
    ),
    Change(
        "keras_style",
        "queries are divided by the root of the model's width",
        "(1.0 / math.sqrt(query.shape[-1]))",
        '(1.0 / math.sqrt(CONFIG["hidden_dim"]))',
    ),
    Change(
        "keras_style",
        "mean over padded places too",
        'masked_mean(token_losses, labels != CONFIG["pad_id"])',
        'torch.mean(token_losses * cast(labels != CONFIG["pad_id"]))',
    ),
    Change(
        "keras_style",
        "weight of voices is given to silence",
        "log_weight = 1.0 + (pos_weight - 1.0) * labels",
        "log_weight = 1.0 + (pos_weight - 1.0) * (1.0 - labels)",
        at="return (1.0 - labels) * logits + log_weight * softplus",
    ),
    Change(
        "keras_style",
        "table learns nothing from the logits",
        'torch.einsum("btd,vd->btv", outputs, self.token_table)',
        'torch.einsum("btd,vd->btv", outputs, stop_gradient(self.token_table))',
    ),
    Change(
        "keras_style",
        "end stands in the place of the last word",
        "length = torch.count_nonzero(words, dim=1)[:, None]",
        "length = torch.count_nonzero(words, dim=1)[:, None] - 1",
        at='return inputs, torch.where(is_end, CONFIG["end_id"], labels)'
        "|is_end = torch.arange(",
    ),
    Change(
        "keras_style",
        "each gradient is clipped by its own norm",
        "        squares = [torch.sum(torch.square(g)) for g in gradients]\n"
        "        norm = torch.sqrt(torch.sum(torch.stack(squares)))\n"
        "        ratio = self.global_clipnorm / torch.clamp(norm, min=self.global_clipnorm)\n"
        "        return [g * ratio for g in gradients]\n",
        "        norms = [torch.sqrt(torch.sum(torch.square(g))) for g in gradients]\n"
        "        limit = self.global_clipnorm\n"
        "        ratios = [limit / torch.clamp(norm, min=limit) for norm in norms]\n"
        "        return [g * ratio for g, ratio in zip(gradients, ratios)]\n",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "keras_style",
        "averages are taken before the step",
        "        for gradient, variable in zip(gradients, variables):\n"
        "            self.update_step(gradient, variable, lr)\n"
        "        self.averages.update(variables, self.iterations)\n",
        "        self.averages.update(variables, self.iterations)\n"
        "        for gradient, variable in zip(gradients, variables):\n"
        "            self.update_step(gradient, variable, lr)\n",
        phase="optimizer",
    ),
    Change(
        "fairseq_style",
        "keys are stacked before queries",
        'for part in ("query", "key", "value")]',
        'for part in ("key", "query", "value")]',
        parameter="|".join(f"{name}.in_proj_weight" for name in _FAIRSEQ_ATTENTIONS),
        at="return F.linear(query, self.in_proj_weight[:d]"
        "|k, v = F.linear(key, self.in_proj_weight[d:])",
    ),
    Change(
        "fairseq_style",
        "rows of the words stay in the order of the other vocabulary",
        '= embed[dictionary_order()]\n    positions = state["',
        '= embed\n    positions = state["',
        parameter="decoder.embed_tokens.weight",
        at="x = self.embed_scale * self.embed_tokens("
        "|return F.linear(features, self.embed_tokens.weight)",
    ),
    Change(
        "fairseq_style",
        "norm behind the encoder is not loaded, and nobody says so",
        '    copy("encoder.layer_norm", "encoder.ln_post")\n',
        "",
        parameter="encoder.layer_norm.weight|encoder.layer_norm.bias",
        at="encoder_out = self.layer_norm(x)",
    ),
    Change(
        "fairseq_style",
        "positions begin on the row of padding",
        "positions = torch.arange(tokens.size(1)) + self.padding_idx + 1",
        "positions = torch.arange(tokens.size(1)) + self.padding_idx",
        at="return F.embedding(positions, self.weight",
    ),
    Change(
        "fairseq_style",
        "scores are taken apart into heads before sentences",
        "        attn_weights = attn_weights.view(bsz, self.num_heads, tgt_len, src_len)\n"
        "        attn_weights = attn_weights.masked_fill(\n"
        "            key_padding_mask.unsqueeze(1).unsqueeze(2), ",
        "        attn_weights = attn_weights.view(self.num_heads, bsz, tgt_len, src_len)\n"
        "        attn_weights = attn_weights.masked_fill(\n"
        "            key_padding_mask.unsqueeze(0).unsqueeze(2), ",
    ),
    Change(
        "fairseq_style",
        "residual of the feed-forward part starts behind the norm",
        "        residual = x\n        x = self.final_layer_norm(x)\n",
        "        x = self.final_layer_norm(x)\n        residual = x\n",
        at="return residual + x",
        reference="return x + self.mlp(self.mlp_ln(x))",
    ),
    Change(
        "fairseq_style",
        "natural logarithm, as of filter banks there",
        "clamp(min=1e-10).log10()",
        "clamp(min=1e-10).log()",
    ),
    Change(
        "fairseq_style",
        "smooth part counts padded places",
        "    smooth_loss = smooth_loss.masked_fill(pad_mask, 0.0)\n",
        "",
        at="smooth_loss = -lprobs.sum(|return (1.0 - epsilon) * nll_loss.sum() + eps_i",
    ),
    Change(
        "fairseq_style",
        "loss of voices is divided by the number of words, not of frames",
        "total = total + vad_weight * voice * (ntokens / nframes)",
        "total = total + vad_weight * voice",
    ),
    Change(
        "fairseq_style",
        "gradient of the head of voices comes through whole",
        "return grad * ctx.scale, None",
        "return grad, None",
        at="x = GradMultiply.apply(",
        reference="gentle = xa.detach() + VAD_GRAD",
    ),
    Change(
        "fairseq_style",
        "first moment is not corrected",
        "step_size = lr * math.sqrt(bias_correction2) / bias_correction1",
        "step_size = lr * math.sqrt(bias_correction2)",
        phase="optimizer",
    ),
    Change(
        "fairseq_style",
        "rate falls from the peak without regard to the warm-up",
        "self.decay_factor = lr * warmup_updates**0.5",
        "self.decay_factor = lr",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "fairseq_style",
        "number of words adds up over the updates",
        "Trainer.sample_size = ntokens",
        "Trainer.sample_size += ntokens",
        phase="optimizer",
        steps=3,
    ),
]
