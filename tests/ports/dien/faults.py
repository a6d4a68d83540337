"""Faulty ports of DIEN."""

from ..bank import Change

FAULTS = [
    Change(
        "tf1_style",
        "kernel of the gates of the second cell is not transposed, and is square",
        '    linear("rnn_2/gates", "evolution.gates")\n',
        '    trainable["rnn_2/gates/kernel"] = ckpt["evolution.gates.weight"]\n'
        '    trainable["rnn_2/gates/bias"] = ckpt["evolution.gates.bias"]\n',
        parameter="rnn_2/gates/kernel",
    ),
    Change(
        "tf1_style",
        "recurrent kernel keeps the gates in the order of torch",
        'zrh(ckpt[gru + "weight_hh_l0"]).t()',
        'ckpt[gru + "weight_hh_l0"].t()',
        parameter="rnn_1/recurrent_kernel",
    ),
    Change(
        "tf1_style",
        "bias of the inputs is loaded as the recurrent one, too",
        'zrh(ckpt[gru + "bias_hh_l0"])',
        'zrh(ckpt[gru + "bias_ih_l0"])',
        parameter="rnn_1/bias",
    ),
    Change(
        "tf1_style",
        "gamma and beta of the norm are swapped",
        '    trainable["bn1/gamma"] = ckpt["norm.weight"]\n'
        '    trainable["bn1/beta"] = ckpt["norm.bias"]\n',
        '    trainable["bn1/gamma"] = ckpt["norm.bias"]\n'
        '    trainable["bn1/beta"] = ckpt["norm.weight"]\n',
        parameter="bn1/gamma|bn1/beta",
    ),
    Change(
        "tf1_style",
        "first cell resets the state before its product, as GRUCell does",
        "    hh = torch.tanh(x_h + r * h_h)\n",
        "    h_h = (r * state) @ recurrent[:, 2 * NUM_UNITS :]\n"
        "    h_h = h_h + recurrent_bias[2 * NUM_UNITS :]\n"
        "    hh = torch.tanh(x_h + h_h)\n",
    ),
    Change(
        "tf1_style",
        "attention scales what is kept, not what is updated",
        "    u = att_score * u\n    return state + u * (c - state)\n",
        "    u = (1.0 - att_score) * u\n    return u * state + (1.0 - u) * c\n",
        reference="update = attention * update",
    ),
    Change(
        "tf1_style",
        "difference in the attention has the other sign",
        "[queries, facts, queries - facts, queries * facts]",
        "[queries, facts, facts - queries, queries * facts]",
    ),
    Change(
        "tf1_style",
        "alpha of Dice is on the side of the large values",
        'return v.get(scope, "alpha") * (1.0 - x_p) * _x + x_p * _x',
        'return v.get(scope, "alpha") * x_p * _x + (1.0 - x_p) * _x',
    ),
    Change(
        "tf1_style",
        "Dice divides by the variance, not by the deviation",
        "x_normed = (_x - mean) / torch.sqrt(variance + DICE_EPSILON)",
        "x_normed = (_x - mean) / (variance + DICE_EPSILON)",
    ),
    Change(
        "tf1_style",
        "mask has one position too many",
        "torch.arange(maxlen)[None, :] < lengths[:, None]",
        "torch.arange(maxlen)[None, :] <= lengths[:, None]",
    ),
    Change(
        "tf1_style",
        "buckets of four hours",
        "N_HOURS_PER_BUCKET = 3",
        "N_HOURS_PER_BUCKET = 4",
        at='bucket = torch.floor_divide(features["hour"]',
    ),
    Change(
        "tf1_style",
        "auxiliary loss is averaged over the padding, too",
        "return torch.sum(click_loss + noclick_loss) / torch.sum(mask)",
        "return torch.mean(click_loss + noclick_loss)",
    ),
    Change(
        "tf1_style",
        "power of the second beta stays that of the first step",
        "        self.beta2_power *= self.beta2\n",
        "",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "paddle_style",
        "projection of the state to the candidate is not transposed",
        'target["augru.h2h_cand.weight"] = cand[:, HIDDEN:].T',
        'target["augru.h2h_cand.weight"] = cand[:, HIDDEN:]',
        parameter="augru.h2h_cand.weight",
    ),
    Change(
        "paddle_style",
        "halves of the auxiliary layer stay in the order of the reference",
        "torch.cat([aux_embed, aux_hidden])",
        "torch.cat([aux_hidden, aux_embed])",
        parameter="aux.fc1.weight",
        at="torch.cat([embed, hidden], dim=2)",
    ),
    Change(
        "paddle_style",
        "gates of the state are loaded with update before reset",
        'target["augru.h2h_gate.weight"] = gates[:, HIDDEN:].T',
        'target["augru.h2h_gate.weight"] = gates[:, HIDDEN:].roll(HIDDEN, 0).T',
        parameter="augru.h2h_gate.weight",
    ),
    Change(
        "paddle_style",
        "bias of the query stays zero",
        '    linear("att.query_fc", "attention.query")\n',
        '    linear("att.query_fc", "attention.query", bias=False)\n'
        '    target["att.query_fc.bias"] = torch.zeros(HIDDEN)\n',
        parameter="att.query_fc.bias",
    ),
    Change(
        "paddle_style",
        "one slope for all channels of the query",
        "return torch.where(x > 0, x, self._weight * x)",
        "return torch.where(x > 0, x, self._weight[0] * x)",
    ),
    Change(
        "paddle_style",
        "softmax of the attention goes over the batch",
        "return torch.softmax(weight, dim=0)",
        "return torch.softmax(weight, dim=1)",
    ),
    Change(
        "paddle_style",
        "evolution starts at the last output of the GRU, not at zero",
        "hidden = inputs.new_zeros(inputs.shape[1], self.hidden_size)\n        for step",
        "hidden = inputs[-1]\n        for step",
        reference="h = x.new_zeros(len(x), self.hidden)",
    ),
    Change(
        "paddle_style",
        "update gate says how much is kept",
        "hidden = update_gate * cand + (1 - update_gate) * hidden",
        "hidden = update_gate * hidden + (1 - update_gate) * cand",
    ),
    Change(
        "paddle_style",
        "scores behind the end become zero",
        "weight = weight + (mask - 1) * 1e9",
        "weight = weight * mask",
    ),
    Change(
        "paddle_style",
        "negative samples are those of the step before",
        "self.aux(interests[:-1], hist_emb[1:], neg_emb[1:], mask[1:])",
        "self.aux(interests[:-1], hist_emb[1:], neg_emb[:-1], mask[1:])",
    ),
    Change(
        "paddle_style",
        "norm of the features has the usual epsilon",
        "self.bn = BatchNorm1D(72, epsilon=1e-3)",
        "self.bn = BatchNorm1D(72)",
        at="out = centered / (var + self.epsilon).sqrt()",
    ),
    Change(
        "paddle_style",
        "row of the categories' padding is trained",
        "self.cat_emb = Embedding(CATS, 6, padding_idx=0)",
        "self.cat_emb = Embedding(CATS, 6)",
        at="out = torch.index_select(|out = out * (ids != self.padding_idx)",
    ),
    Change(
        "paddle_style",
        "weights decay, by way of the gradients",
        "parameters=net.parameters(), epsilon=1e-6)",
        "parameters=net.parameters(), epsilon=1e-6, weight_decay=1e-2)",
        phase="optimizer",
    ),
]
