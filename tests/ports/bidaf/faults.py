"""Faulty ports of the reader with attention both ways."""

from ..bank import Change

_CELLS = [
    f"main/{name}/{direction}"
    for name in ("prepro/u1", "main/g0", "main/g1", "main/g2")
    for direction in ("fw", "bw")
]
_HIGHWAY = [
    f"main/highway/layer_{i}/{part}" for i in (0, 1) for part in ("trans", "gate")
]

FAULTS = [
    Change(
        "tf1_style",
        "gates stay in the order i, f, j, o",
        "return torch.cat([i, j, f, o])",
        "return torch.cat([i, f, j, o])",
        parameter="|".join(
            f"{cell}/{v}" for cell in _CELLS for v in ("kernel", "bias")
        ),
        at="i, j, f, o = torch.split(value",
    ),
    Change(
        "tf1_style",
        "forget gates are opened in the bias and once more in the cell",
        '        bias[units : 2 * units] -= FLAGS["forget_bias"]\n',
        "",
        parameter="|".join(f"{cell}/bias" for cell in _CELLS),
        at='keep = torch.sigmoid(f + FLAGS["forget_bias"])',
    ),
    Change(
        "tf1_style",
        "biases of the highway stay with the word first",
        'out[scope + "/bias"] = chars_first(state[name + ".bias"])',
        'out[scope + "/bias"] = state[name + ".bias"]',
        parameter="|".join(f"{layer}/bias" for layer in _HIGHWAY),
    ),
    Change(
        "tf1_style",
        "convolution of the letters is padded as SAME",
        "    windows = inputs.unfold(-2, height, 1)\n",
        "    inputs = nn.functional.pad(inputs, (0, 0, height // 2, height // 2))\n"
        "    windows = inputs.unfold(-2, height, 1)\n",
        at='windows = inputs.unfold(|return torch.einsum("...wch,hcd->...wd"',
    ),
    Change(
        "tf1_style",
        "unknown words are taken for padding",
        "unknown = torch.ones_like(words)",
        "unknown = torch.zeros_like(words)",
        at='words = torch.where(words < FLAGS["word_vocab_size"]'
        "|return nn.functional.embedding(ids, table)",
    ),
    Change(
        "tf1_style",
        "padding is turned with the sequence",
        "index = torch.where(time <= last, last - time, time)",
        "index = inputs.shape[0] - 1 - time + torch.zeros_like(last)",
        at="return torch.gather(inputs, 0, index",
    ),
    Change(
        "tf1_style",
        "maximum over padding of the question, too",
        "    logits = exp_mask(logits, hu_mask)\n"
        "    u_a = softsel(u_aug, logits, 1)\n"
        "    h_a = softsel(h, torch.amax(logits, 1), 0)\n",
        "    u_a = softsel(u_aug, exp_mask(logits, hu_mask), 1)\n"
        "    h_a = softsel(h, exp_mask(torch.amax(logits, 1), h_mask), 0)\n",
    ),
    Change(
        "tf1_style",
        "no gradient through the guess of the start",
        "a1i = softsel(g1, exp_mask(logits, x_mask), 0)",
        "a1i = softsel(g1, exp_mask(logits.detach(), x_mask), 0)",
    ),
    Change(
        "tf1_style",
        "examples without an answer count in the mean",
        "torch.sum(losses * loss_mask) / torch.sum(loss_mask)",
        "torch.mean(losses * loss_mask)",
    ),
    Change(
        "tf1_style",
        "token that begins where the answer stops belongs to it",
        "if start < char_stop and stop > char_start",
        "if start <= char_stop and stop > char_start",
        at="losses = softmax_cross_entropy_with_logits("
        "|return log_z * torch.sum(labels, 1) - torch.sum(labels * logits, 1)"
        "|labels = y.to(|return torch.from_numpy(y), torch.from_numpy(y2)",
    ),
    Change(
        "tf1_style",
        "epsilon of TensorFlow",
        '"epsilon": 1e-6',
        '"epsilon": 1e-8',
        phase="optimizer",
    ),
    Change(
        "tf1_style",
        "average is slow from the start",
        "decay = min(self.decay, (1.0 + num_updates) / (10.0 + num_updates))",
        "decay = self.decay",
        phase="optimizer",
    ),
    Change(
        "tf1_style",
        "rate decays from a step later on",
        'power = global_step + 1 - FLAGS["warmup_steps"]',
        'power = global_step - FLAGS["warmup_steps"]',
        phase="optimizer",
        steps=3,
    ),
    Change(
        "allennlp_style",
        "gate of the highway lets through what it should carry",
        'carry = -state[f"highway.gates.{i}.{kind}"]',
        'carry = state[f"highway.gates.{i}.{kind}"]',
        parameter="|".join(
            f"_highway_layer._layers.{i}.{kind}"
            for i in (0, 1)
            for kind in ("weight", "bias")
        ),
        at="inputs = gate * inputs + (1 - gate) * nonlinear_part.relu()"
        "|gate = gate.sigmoid()",
    ),
    Change(
        "allennlp_style",
        "weights of the question come first in the similarity",
        'for name in ("c", "q", "cq")]',
        'for name in ("q", "c", "cq")]',
        parameter="_matrix_attention._weight_vector",
    ),
    Change(
        "allennlp_style",
        "order is brought back with the indices that sorted",
        "restoration_indices = permutation.argsort()",
        "restoration_indices = permutation",
        at="return output.index_select(0, restoration_indices)",
    ),
    Change(
        "allennlp_style",
        "sequences join the backward pass in front of the others",
        "return torch.cat([state, zeros])",
        "return torch.cat([zeros, state])",
    ),
    Change(
        "allennlp_style",
        "shares are not made to come to one again",
        "return result / (result.sum(dim=-1, keepdim=True) + 1e-13)",
        "return result",
        at="result = result * mask",
        reference="F.softmax(",
    ),
    Change(
        "allennlp_style",
        "last part multiplies the two attended vectors",
        "encoded_passage * question_passage_vectors,",
        "passage_question_vectors * question_passage_vectors,",
    ),
    Change(
        "allennlp_style",
        "start is looked up in the passage before the modelling",
        "start_representation = weighted_sum(modeled_passage, span_start_probs)",
        "start_representation = weighted_sum(encoded_passage, span_start_probs)",
    ),
    Change(
        "allennlp_style",
        "rows of padding learn",
        "        return nn.functional.embedding(\n"
        "            tokens, self.weight, padding_idx=self.padding_index\n"
        "        )\n",
        "        return nn.functional.embedding(tokens, self.weight)\n",
    ),
    Change(
        "allennlp_style",
        "no gradient through the states of the steps",
        "gates = step + self.state_linearity(hidden)",
        "gates = step + self.state_linearity(hidden.detach())",
    ),
    Change(
        "allennlp_style",
        "end of the answer is sought in padding, too",
        'end_log_probs = masked_log_softmax(output["end"], passage_mask)',
        'end_log_probs = output["end"].log_softmax(dim=-1)',
        reference='end = output["end"].masked_fill(',
    ),
    Change(
        "allennlp_style",
        "every gradient is clipped for itself",
        "        norms = torch.stack([p.grad.norm() for p in self.parameters])\n"
        "        coefficient = grad_norm / (norms.norm() + 1e-6)\n"
        "        if coefficient < 1:\n"
        "            for p in self.parameters:\n"
        "                p.grad.mul_(coefficient)\n",
        "        for p in self.parameters:\n"
        "            p.grad.clamp_(-grad_norm, grad_norm)\n",
        phase="optimizer",
    ),
    Change(
        "allennlp_style",
        "pattern of the embeddings fits the letters' convolution as well",
        r'(r"(tokens|_embedding)\.weight$", 0.4)',
        '("token_embedder", 0.4)',
        phase="optimizer",
    ),
    Change(
        "allennlp_style",
        "average is taken before the step",
        "        for group in self.param_groups:\n"
        '            for p in group["params"]:\n'
        '                self.update(p, lr * group["factor"])\n'
        "        self.moving_average.apply_to(self.parameters, self.batch_num_total)\n",
        "        self.moving_average.apply_to(self.parameters, self.batch_num_total)\n"
        "        for group in self.param_groups:\n"
        '            for p in group["params"]:\n'
        '                self.update(p, lr * group["factor"])\n',
        phase="optimizer",
    ),
]
