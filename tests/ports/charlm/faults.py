"""Faulty ports of the word-level language model."""

from ..bank import Change

FAULTS = [
    Change(
        "theano_style",
        "gates keep the order of the checkpoint, candidate before output",
        "return torch.cat([i, f, o, c])",
        "return torch.cat([i, f, c, o])",
        parameter="|".join(
            f"lstm{i}_{name}{copy}"
            for i in (1, 2)
            for name in "WUb"
            for copy in ("", "_ax")
        ),
        at="o = sigmoid(_slice(|c = torch.tanh(_slice(",
    ),
    Change(
        "theano_style",
        "only one of the two biases is loaded",
        "torch.stack([gates(b_in), gates(b_hid)])",
        "torch.stack([gates(b_in), torch.zeros_like(b_hid)])",
        parameter="lstm1_b|lstm2_b|lstm1_b_ax|lstm2_b_ax",
    ),
    Change(
        "theano_style",
        "gates are hard sigmoids",
        "return 1.0 / (1.0 + torch.exp(-x))",
        "return torch.clamp(0.2 * x + 0.5, 0.0, 1.0)",
        at="i = sigmoid(|f = sigmoid(|o = sigmoid(",
    ),
    Change(
        "theano_style",
        "second layer reads the first a step late",
        "preact = torch.mm(h1, W2)",
        "preact = torch.mm(h1_, W2)",
    ),
    Change(
        "theano_style",
        "state after the first step is kept, not after the last",
        "updates[kk] = steps[-1].detach()",
        "updates[kk] = steps[0].detach()",
        at="outputs_info=[tparams[kk] * keep|setattr(tparams, kk, value)",
        steps=2,
    ),
    Change(
        "theano_style",
        "embedding is a constant in the output layer",
        'logit = torch.matmul(ctx, tparams["Wemb"].T)',
        'logit = torch.matmul(ctx, tparams["Wemb"].detach().T)',
    ),
    Change(
        "theano_style",
        "mean over the padded places, too",
        "cost = (cost.reshape(y.shape) * x_mask).sum() / x_mask.sum()",
        "cost = (cost.reshape(y.shape) * x_mask).mean()",
    ),
    Change(
        "theano_style",
        "changes are averaged over the units before they are squared",
        "tmp = ((proj[1:] - proj[:-1]) ** 2).mean(2)",
        "tmp = (proj[1:] - proj[:-1]).mean(2) ** 2",
    ),
    Change(
        "theano_style",
        "squares are summed over the units, not averaged",
        "act = (proj**2).mean(2)",
        "act = (proj**2).sum(2)",
    ),
    Change(
        "theano_style",
        "rare words get the last row of the table",
        'torch.where(seqs < options["n_words"], seqs, torch.ones_like(seqs))',
        'seqs.clamp(max=options["n_words"] - 1)',
        at='emb = tparams["Wemb"][x.flatten()]|y_flat_idx = torch.arange('
        "|cost = -torch.log(probs.flatten()[y_flat_idx])",
    ),
    Change(
        "theano_style",
        "weights are averaged before they are updated",
        'updates[_p(kk, "ax")] = p_ax + (updates[kk] - p_ax) / t',
        'updates[_p(kk, "ax")] = p_ax + (tparams[kk] - p_ax) / t',
        phase="optimizer",
    ),
    Change(
        "theano_style",
        "each gradient is clipped by its own norm",
        "    g2 = 0.0\n"
        "    for g in grads:\n"
        "        g2 += (g**2).sum()\n"
        "    new_grads = []\n"
        "    for g in grads:\n",
        "    new_grads = []\n    for g in grads:\n        g2 = (g**2).sum()\n",
        phase="optimizer",
    ),
    Change(
        "theano_style",
        "rate falls a step late",
        'if self.uidx in options["bad_counter_at"]:',
        'if self.uidx - 1 in options["bad_counter_at"]:',
        phase="optimizer",
        steps=2,
    ),
    Change(
        "gluon_style",
        "second layer reads the recurrent weights of the first",
        'state[f"{old}.weight_hh_l0"]',
        'state["rnns.0.weight_hh_l0"]',
        parameter="lstm1.h2h_weight|avg_lstm1_h2h_weight",
    ),
    Change(
        "gluon_style",
        "biases of the input stay as the initializer makes them, one for the forget gate",
        '"i2h_bias": state[f"{old}.bias_ih_l0"]',
        '"i2h_bias": torch.eye(4)[1].repeat_interleave(HIDDEN_SIZE)',
        parameter="lstm0.i2h_bias|lstm1.i2h_bias|avg_lstm0_i2h_bias|avg_lstm1_i2h_bias",
    ),
    Change(
        "gluon_style",
        "output gate is cut out before the candidate",
        "        in_transform = torch.tanh(slices[2])\n"
        "        out_gate = torch.sigmoid(slices[3])\n",
        "        in_transform = torch.tanh(slices[3])\n"
        "        out_gate = torch.sigmoid(slices[2])\n",
    ),
    Change(
        "gluon_style",
        "a new document goes on from the state of the last",
        "[[s * goes_on for s in layer] for layer in net.begin_state()]",
        "net.begin_state()",
        at="logits, encoded, states = net(data",
        reference="rnn(x, (h * keep, c * keep))",
        steps=2,
    ),
    Change(
        "gluon_style",
        "no gradient through the cell from step to step",
        "forget_gate, prev_c)",
        "forget_gate, prev_c.detach())",
    ),
    Change(
        "gluon_style",
        "text is reshaped to TN, not transposed",
        'text = batch["text"].swapaxes(0, 1)',
        'text = batch["text"].reshape(-1, BATCH_SIZE)',
        at="encoded = self.embedding(inputs)|one_hot = nn.functional.one_hot(",
    ),
    Change(
        "gluon_style",
        "each sample has the mean of its own words",
        "return mask / torch.mean(mask)",
        "return mask / torch.mean(mask, dim=0)",
        at="weighted = -picked * sample_weight|torch.mean(means * sample_weight)"
        "|ce = SoftmaxCELoss()(|ar = Act|tar = Temp",
    ),
    Change(
        "gluon_style",
        "lengths are those of the data, not of the target",
        "torch.count_nonzero(target != PAD_INDEX, dim=0)",
        "torch.count_nonzero(data != PAD_INDEX, dim=0)",
        at="mask = sequence_mask(target|return (torch.arange(steps)",
    ),
    Change(
        "gluon_style",
        "weights of the two penalties are exchanged",
        "ALPHA, BETA = 2.0, 1.0",
        "BETA, ALPHA = 2.0, 1.0",
        at="return self.alpha *|return self.beta *|ar = Act|tar = Temp",
    ),
    Change(
        "gluon_style",
        "projection has an activation",
        'self.proj = Dense(params["proj"])',
        'self.proj = Dense(params["proj"], activation=torch.tanh)',
        at="return out if self.activation is None|projected = self.proj(",
    ),
    Change(
        "gluon_style",
        "decay is scaled with the gradient",
        "weight.copy_((1 - lr * wd) * weight - lr * (rescale_grad * grad))",
        "weight.sub_(lr * rescale_grad * (grad + wd * weight))",
        phase="optimizer",
    ),
    Change(
        "gluon_style",
        "average begins a step early",
        "gamma = 1.0 / max(1, self.num_update - AVG_TRIGGER)",
        "gamma = 1.0 / max(1, self.num_update - AVG_TRIGGER + 1)",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "gluon_style",
        "rate falls from the first one each time",
        "self.set_learning_rate(self.learning_rate * LR_UPDATE_FACTOR)",
        "self.set_learning_rate(\n"
        '                OPTIMIZER_PARAMS["learning_rate"] * LR_UPDATE_FACTOR\n'
        "            )",
        phase="optimizer",
        steps=3,
    ),
]
