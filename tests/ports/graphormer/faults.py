"""Faulty ports of the graph transformer."""

from ..bank import Change


def _each(pattern, names):
    """Return the names of parameters in each layer."""
    return "|".join(
        pattern.format(i) + name for i in range(3) for name in names.split()
    )


FAULTS = [
    Change(
        "paddle_style",
        "square kernel behind the attention is copied as it is",
        'linear(name + ".self_attn.out_proj", key + ".attn.out")',
        'norm(name + ".self_attn.out_proj", key + ".attn.out")',
        parameter=_each("encoder.{}.self_attn.", "out_proj.weight"),
        at="out = torch.matmul(x, self.weight)|return self.out_proj(out)",
    ),
    Change(
        "paddle_style",
        "fused kernel is taken apart as query, value, key",
        'q, k, v = state[key + ".attn.qkv.weight"].chunk(3)',
        'q, v, k = state[key + ".attn.qkv.weight"].chunk(3)',
        parameter=_each("encoder.{}.self_attn.", "k_proj.weight v_proj.weight"),
        at="out = torch.matmul(x, self.weight)|k = self.to_block(|v = self.to_block(",
    ),
    Change(
        "paddle_style",
        "path stays in the order from its end, in which it was walked",
        "return edges[::-1]",
        "return edges",
        at="path_edge.append(edge)|self.path_edge = torch.tensor("
        "|step = gather(by_hop.flatten(0, 1)",
    ),
    Change(
        "paddle_style",
        "masked atoms are not hidden from the model",
        '        feature[masked, 0] = args["mask_token"]\n',
        "",
        at="self.node_feat = self.ids(feature"
        "|columns.append(feature[:, column] + start)"
        "|node = torch.sum(self.atom_encoder(",
        reference="atoms[masked, 0] = MASK_TYPE",
    ),
    Change(
        "paddle_style",
        "last node of a graph has no pair with the virtual node",
        "for i in range(1, end - begin + 1):",
        "for i in range(1, end - begin):",
        at="pair_slot.append((graph, *pair))|pair_type.append(0)"
        "|dense = scatter(pair, g.pair_slot",
        reference="+= self.virtual_distance",
    ),
    Change(
        "paddle_style",
        "pairs without a path share the type of the longest distance",
        'kind = args["max_dist"] + 2',
        'kind = args["max_dist"] + 1',
        at="pair_type.append(kind)|self.pair_type = torch.tensor("
        "|pair = self.pair_type(g.pair_type)",
    ),
    Change(
        "paddle_style",
        "short paths are divided by the greatest number of hops, too",
        "path = segment_mean(step, g.path_pair, len(g.pair_type))",
        "path = segment_sum(step, g.path_pair, len(g.pair_type))\n"
        '        path = path / args["multi_hop_max_dist"]',
    ),
    Change(
        "paddle_style",
        "what fills the blocks up gets attention",
        "weights = masked_softmax(product + attn_bias, g.filled[:, None, None, :])",
        "weights = torch.softmax(product + attn_bias, dim=-1)",
        reference="bias = bias.masked_fill(",
    ),
    Change(
        "paddle_style",
        "gradients of a row that is taken more than once overwrite each other",
        "x_grad.index_add_(0, index, out_grad)",
        "x_grad[index] = out_grad",
        at="return Gather.apply(x, index)|rows = gather(self.weight"
        "|x = gather(x, g.block)|step = gather(by_hop.flatten(0, 1)",
    ),
    Change(
        "paddle_style",
        "mean over graphs of the means over masked atoms",
        "return torch.sum(per_graph) / torch.sum(count)",
        "return torch.mean(per_graph / torch.clamp(count, min=1.0))",
    ),
    Change(
        "paddle_style",
        "tables and the virtual node decay, as their names are not those of torch",
        'NO_DECAY = ("bias", "norm", "atom_encoder", "degree", "virtual", "_type")',
        'NO_DECAY = ("bias", "norm", "embed", "graph_token")',
        phase="optimizer",
        steps=2,
    ),
    Change(
        "paddle_style",
        "each gradient is clipped by a norm of its own",
        "        global_norm = torch.sqrt(sum(torch.sum(torch.square(g)) for g in grads))\n"
        "        scale = self.clip_norm / torch.clamp(global_norm, min=self.clip_norm)\n"
        "        return [g * scale for g in grads]\n",
        "        norms = [torch.sqrt(torch.sum(torch.square(g))) for g in grads]\n"
        "        scales = [self.clip_norm / n.clamp(min=self.clip_norm) for n in norms]\n"
        "        return [g * scale for g, scale in zip(grads, scales)]\n",
        phase="optimizer",
    ),
    Change(
        "paddle_style",
        "warm-up begins with a rate of nought",
        'args["warmup_steps"], 0.0, rate, last_epoch=0)',
        'args["warmup_steps"], 0.0, rate)',
        phase="optimizer",
    ),
    Change(
        "jax_style",
        "heads come before query, key and value in the rows",
        ".unflatten(0, (3, heads, -1))\n"
        "        qkv = torch.permute(qkv, (3, 0, 1, 2))\n",
        ".unflatten(0, (heads, 3, -1))\n"
        "        qkv = torch.permute(qkv, (3, 1, 0, 2))\n",
        parameter=_each("params.layer_{}/attention.", "qkv"),
        at="query, key, value = torch.einsum(",
    ),
    Change(
        "jax_style",
        "last row of the tables is left out, not that of the padding",
        'return state[name + "_embed.weight"][1:]',
        'return state[name + "_embed.weight"][:-1]',
        parameter="params.nodes/atoms.table|params.nodes/degrees.received"
        "|params.nodes/degrees.sent|params.pairs/distance.table"
        "|params.pairs/edges.table",
        at='x = nodes @ w["nodes/atoms"]|x = x + one_hot(received|x = x + one_hot(sent'
        "|return one_hot(category|values = edges @|return x @ table[",
    ),
    Change(
        "jax_style",
        "second norm is read from the key of the first",
        'norm(old + "ffn_norm")',
        'norm(old + "attn_norm")',
        parameter=_each("params.layer_{}/ln_mlp.", "scale offset"),
        at='inv = w["scale"] * |return inv * (x - mean)'
        '|normed = layer_norm(w[path + "/ln_mlp"]',
    ),
    Change(
        "jax_style",
        "gelu is approximate, as is the default there",
        "approximate=False",
        "approximate=True",
        at="inner = math.sqrt(|return 0.5 * x * (1.0 + torch.tanh(inner))"
        '|return linear(w[path + "/down"], gelu(|x = layer_norm(w["atoms/ln"], gelu(',
    ),
    Change(
        "jax_style",
        "rows of the dense edges are receivers",
        "edges[owner, graph.senders, graph.receivers] = graph.edges",
        "edges[owner, graph.receivers, graph.senders] = graph.edges",
        at="adjacency = torch.sum(edges",
    ),
    Change(
        "jax_style",
        "low bias for queries that are no nodes, not for keys",
        "(1.0 - present)[:, None, :, None]",
        "(1.0 - present)[:, :, None, None]",
    ),
    Change(
        "jax_style",
        "bias is scaled with the products",
        "logits = logits / math.sqrt(query.shape[-1]) + bias",
        "logits = (logits + bias) / math.sqrt(query.shape[-1])",
    ),
    Change(
        "jax_style",
        "table is a constant where it gives the logits",
        'table = w["nodes/atoms"]["table"]\n',
        'table = w["nodes/atoms"]["table"].detach()\n',
        at="return x @ table[",
        reference="types = self.features.atom_embed.weight",
    ),
    Change(
        "jax_style",
        "value is read from the last node of the block",
        "virtual, nodes = x[:, 0], x[:, 1:]",
        "virtual, nodes = x[:, -1], x[:, 1:]",
    ),
    Change(
        "jax_style",
        "mean is over all atoms, with nought for those that are not masked",
        "return torch.sum(torch.where(mask, x, 0.0)) / torch.sum(mask)",
        "return torch.mean(torch.where(mask, x, 0.0))",
        at="atom_loss = masked_mean(",
    ),
    Change(
        "jax_style",
        "decay goes through the moments",
        "        scale_by_adam(b1=0.9, b2=0.98, eps=1e-6),\n"
        "        add_decayed_weights(0.4, mask=is_matrix),\n",
        "        add_decayed_weights(0.4, mask=is_matrix),\n"
        "        scale_by_adam(b1=0.9, b2=0.98, eps=1e-6),\n",
        phase="optimizer",
    ),
    Change(
        "jax_style",
        "count of the moments is not kept",
        "return updates, (count, mu, nu)",
        "return updates, (state[0], mu, nu)",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "jax_style",
        "rate falls in a line",
        "power=2.0,",
        "power=1.0,",
        phase="optimizer",
        steps=3,
    ),
]
