"""Faulty ports of the graph isomorphism network."""

from ..bank import Change

_MATMUL = "out = torch.matmul(x, self.w)"
_TENSORDOT = "x = torch.tensordot(x, self.kernel, dims=1)"


def _each(form, rounds=4):
    """Return the names of a parameter in each of these rounds."""
    return "|".join(form.format(i) for i in range(rounds))


FAULTS = [
    Change(
        "jraph_style",
        "tables of the last two fields of the atoms have changed places",
        '"embed_nodes.w": tables("atom_encoder", len(NUM_ATOM_TYPES)),\n',
        '"embed_nodes.w": torch.cat(\n'
        '            [state[f"atom_encoder.tables.{i}.weight"] for i in (0, 2, 1)]\n'
        "        ),\n",
        parameter="encoder.embed_nodes.w",
        at="nodes = self.embed_nodes(graph.nodes)|" + _MATMUL,
    ),
    Change(
        "jraph_style",
        "scale and offset of the norm inside the MLP are swapped",
        '        f"{new}.norm_0.scale": state[f"{mlp}.1.weight"],\n'
        '        f"{new}.norm_0.offset": state[f"{mlp}.1.bias"],\n'
        '        f"{new}.linear_1.w": state[f"{mlp}.3.weight"].T,\n'
        '        f"{new}.norm_1.scale"',
        '        f"{new}.norm_0.scale": state[f"{mlp}.1.bias"],\n'
        '        f"{new}.norm_0.offset": state[f"{mlp}.1.weight"],\n'
        '        f"{new}.linear_1.w": state[f"{mlp}.3.weight"].T,\n'
        '        f"{new}.norm_1.scale"',
        parameter=_each("encoder.node_updates.{}.norm_0.scale")
        + "|"
        + _each("encoder.node_updates.{}.norm_0.offset"),
        at="x = torch.relu(self.norm_0(self.linear_0(x), mask))"
        "|inv = self.scale * torch.rsqrt(var + self.eps)"
        "|return (x - mean) * inv + self.offset",
    ),
    Change(
        "jraph_style",
        "one is not added to the epsilons",
        '"self_weight": 1.0 + torch.stack(',
        '"self_weight": torch.stack(',
        parameter="encoder.self_weight",
        at="inputs = self.self_weight[step] * nodes + received_edges",
        reference="(1 + self.eps) * x + total",
    ),
    Change(
        "jraph_style",
        "first node of the padding counts as a real one",
        "torch.arange(total) < total - padded_graph.n_node[-1]",
        "torch.arange(total) <= total - padded_graph.n_node[-1]",
        at="mask = get_node_padding_mask(graph)|weights = mask.float()"
        "|count = torch.sum(weights)"
        '|mean = torch.einsum("n,nd->d", weights, x) / count'
        '|mean_of_squares = torch.einsum("n,nd->d", weights',
    ),
    Change(
        "jraph_style",
        "nodes read the edges that they sent",
        "self.self_weight[step] * nodes + received_edges",
        "self.self_weight[step] * nodes + sent_edges",
        at="sent = segment_sum(edges, graph.senders, num_nodes)",
        reference="torch.zeros_like(x).index_add(0, target, message)",
    ),
    Change(
        "jraph_style",
        "activation comes before the bond is added",
        "return torch.relu(sent_nodes + global_attributes + edges)",
        "return torch.relu(sent_nodes + global_attributes) + edges",
    ),
    Change(
        "jraph_style",
        "sum of the softmax carries no gradient",
        "    return unnormalized / normalizers[segment_ids]\n",
        "    return unnormalized / normalizers.detach()[segment_ids]\n",
        at="normalizers = segment_sum(unnormalized|weights = segment_softmax(",
    ),
    Change(
        "jraph_style",
        "targets teach the classes",
        "probs = torch.sigmoid(stop_gradient(logits))",
        "probs = torch.sigmoid(logits)",
        reference="hint = task.sigmoid().detach()",
    ),
    Change(
        "jraph_style",
        "globals are not added to their update",
        "return global_attributes + self.global_updates[step](inputs)",
        "return self.global_updates[step](inputs)",
        reference="return virtual + self.mlp(virtual + total)",
    ),
    Change(
        "jraph_style",
        "layers are weighted without a softmax",
        "weights = torch.softmax(self.jumping_logits, dim=0)",
        "weights = self.jumping_logits",
        at="nodes = torch.tensordot(weights, torch.stack(layers), dims=1)",
        reference="weight = self.jump.softmax(dim=0)",
    ),
    Change(
        "jraph_style",
        "variance is divided by one less",
        "        var = mean_of_squares - torch.square(mean)\n",
        "        var = mean_of_squares - torch.square(mean)\n"
        "        var = var * count / (count - 1.0)\n",
        at="inv = self.scale * torch.rsqrt(var + self.eps)",
    ),
    Change(
        "jraph_style",
        "linear part of the Huber loss has slope one",
        "return 0.5 * quadratic**2 + delta * linear",
        "return 0.5 * quadratic**2 + linear",
        at="target_loss = torch.mean(huber_loss(",
    ),
    Change(
        "jraph_style",
        "methods are counted from one in the table of statistics",
        "torch.unbind(STATISTICS[method], dim=-1)",
        "torch.unbind(STATISTICS[method - 1], dim=-1)",
        at="return (values - mean) / std|targets = normalize(",
    ),
    Change(
        "spektral_style",
        "tables begin with the row of what is not there, and the last category is lost",
        'embeddings[1:].copy_(self.state[f"{key}.tables.{i}.weight"])',
        'embeddings[:-1].copy_(self.state[f"{key}.tables.{i}.weight"])',
        parameter="|".join(
            f"{name}.embeddings.{i}"
            for name in (
                "node_embedding",
                *(f"blocks.{layer}.conv.edge_embedding" for layer in range(4)),
            )
            for i in range(3)
        ),
        at="output = output + embeddings[indices[..., field]]"
        "|x = self.node_embedding(x) * mask"
        "|messages = torch.relu(senders + self.edge_embedding(e))",
    ),
    Change(
        "spektral_style",
        "channels of the heads are not sorted for heads that come last",
        "    layer.value.kernel.copy_(heads_last(value))\n"
        "    layer.value.bias.copy_(heads_last("
        'checkpoint.state["readout.value.bias"]))\n',
        "    layer.value.kernel.copy_(value)\n"
        '    layer.value.bias.copy_(checkpoint.state["readout.value.bias"])\n',
        parameter="attention_pool.value.kernel|attention_pool.value.bias",
        at="values = self.value(x).unflatten(|x = x + self.bias|" + _TENSORDOT,
    ),
    Change(
        "spektral_style",
        "rows for the mean stay behind those for the heads",
        "torch.cat([mean, heads_last(heads.T).T, rest])",
        "torch.cat([heads_last(heads.T).T, mean, rest])",
        parameter="task_dense.kernel|target_dense.kernel",
        at="logits = self.task_logits(self.task_dense(pooled))"
        "|return logits, self.target_out(self.target_dense(features))|" + _TENSORDOT,
    ),
    Change(
        "spektral_style",
        "norms of the nodes have the epsilon of Keras",
        "BatchNormalization(channels, epsilon=1e-5)",
        "BatchNormalization(channels)",
        at="outputs = (inputs - mean) / torch.sqrt(variance + self.epsilon)"
        "|x = self.norm(self.conv(inputs",
    ),
    Change(
        "spektral_style",
        "slope of the gate is that of Keras",
        "gate = leaky_relu(self.gate(x), alpha=0.2)",
        "gate = leaky_relu(self.gate(x))",
        at="return torch.maximum(x, alpha * x)",
    ),
    Change(
        "spektral_style",
        "scores of the padding become 0, not very low",
        "softmax(scores - 1e9 * (1.0 - mask), axis=1)",
        "softmax(scores * mask, axis=1)",
        at="exps = torch.exp(x - torch.amax(|return exps / torch.sum(exps"
        '|pooled = torch.einsum("bnh,bnch->bch"',
    ),
    Change(
        "spektral_style",
        "each molecule is normed by itself",
        "mean, variance = weighted_moments(inputs, (0, 1), mask)",
        "mean, variance = weighted_moments(inputs, (1,), mask)",
        at="divisor = torch.sum(frequency_weights"
        "|mean = torch.sum(frequency_weights * x"
        "|variance = torch.sum(frequency_weights * distance"
        "|outputs = (inputs - mean) / torch.sqrt(",
    ),
    Change(
        "spektral_style",
        "mean is taken over the padding, too",
        "return torch.sum(x * mask, dim=1) / torch.sum(mask, dim=1)",
        "return torch.mean(x * mask, dim=1)",
        at="pools = [self.avg_pool(x, mask)",
    ),
    Change(
        "spektral_style",
        "skip starts before the virtual node is added",
        "            x = x + virtual[:, None] * mask\n"
        "            x = x + block(x, a, e, mask)\n",
        "            x = x + block(x + virtual[:, None] * mask, a, e, mask)\n",
        reference="h = x + out",
    ),
    Change(
        "spektral_style",
        "last block has an activation as well",
        "activations = [torch.relu] * (n_layers - 1) + [linear]",
        "activations = [torch.relu] * n_layers",
        at="return self.activation(x) * mask",
    ),
    Change(
        "spektral_style",
        "node that receives is repeated, not the one that sends",
        "senders = torch.unsqueeze(x, 1)",
        "senders = torch.unsqueeze(x, 2)",
        at="messages = torch.relu(senders + self.edge_embedding(e))",
        reference="message = F.relu(x[source]",
    ),
    Change(
        "spektral_style",
        "mean of the tasks' means, not of what is known",
        "return torch.sum(losses * sample_weight) / torch.sum(sample_weight)",
        "per_task = torch.sum(losses * sample_weight, dim=0)\n"
        "    return torch.mean(per_task / torch.sum(sample_weight, dim=0).clamp(min=1.0))",
    ),
    Change(
        "spektral_style",
        "weights of the positives count for all",
        "log_weight = 1.0 + (torch.tensor(pos_weight) - 1.0) * labels",
        "log_weight = torch.tensor(pos_weight)",
        at="return (1.0 - labels) * logits + log_weight * softplus"
        "|losses = weighted_cross_entropy_with_logits(",
    ),
]
