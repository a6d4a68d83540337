"""Faulty ports of the mixture of experts."""

from ..bank import Change

FAULTS = [
    Change(
        "dense_einsum",
        "shares are not divided by their sum",
        "        best = best / best.sum(dim=-1, keepdim=True)\n",
        "",
        at="probs.topk(2|combine = ",
        reference="weight / weight.sum(",
    ),
    Change(
        "dense_einsum",
        "chances over the tokens",
        "self.gate), dim=-1)",
        "self.gate), dim=1)",
    ),
    Change(
        "dense_einsum",
        "one expert alone",
        "probs.topk(2, dim=-1)",
        "probs.topk(1, dim=-1)",
    ),
    Change(
        "dense_einsum",
        "gate and value of experts exchanged",
        'self.wi = stacked("w1")\n        self.wu = stacked("w3")',
        'self.wi = stacked("w3")\n        self.wu = stacked("w1")',
        parameter="|".join(
            f"layer_{k}.moe.{name}" for k in range(2) for name in ("wi", "wu")
        ),
    ),
    Change(
        "dense_einsum",
        "shared gate without its bias",
        "torch.sigmoid(x @ self.shared_gate + self.shared_bias)",
        "torch.sigmoid(x @ self.shared_gate + 0 * self.shared_bias)",
    ),
    Change(
        "dense_einsum",
        "balance is averaged over the ranks",
        "picked.sum(dim=2).mean(dim=(0, 1))",
        "picked.mean(dim=2).mean(dim=(0, 1))",
    ),
    Change(
        "dense_einsum",
        "decay of the norms",
        "(plain if is_vector else decayed).append(p)",
        "decayed.append(p)",
        phase="optimizer",
    ),
    Change(
        "dense_einsum",
        "heads of the way out in another order",
        'w[at + "out.weight"].T.reshape(n_head, -1, dim)',
        'w[at + "out.weight"].T.reshape(-1, n_head, dim).transpose(0, 1)',
        parameter="layer_0.mha.o|layer_1.mha.o",
    ),
    Change(
        "sorted_tokens",
        "weights on the way in",
        "outs = [mlp(part) for mlp, part in zip(self.mlps, flat[rows].split(sizes))]\n        y = torch.cat(outs) * share[order].unsqueeze(1)",
        "mine = flat[rows] * share[order].unsqueeze(1)\n        outs = [mlp(part) for mlp, part in zip(self.mlps, mine.split(sizes))]\n        y = torch.cat(outs)",
    ),
    Change(
        "sorted_tokens",
        "shares in the order of the tokens",
        "share[order].unsqueeze(1)",
        "share.unsqueeze(1)",
    ),
    Change(
        "sorted_tokens",
        "gelu for silu",
        "self.down(F.silu(gate) * up)",
        "self.down(F.gelu(gate) * up)",
    ),
    Change(
        "sorted_tokens",
        "epsilon of another library",
        "eps=1e-6",
        "eps=1e-3",
        at="self.ln_attn(x)|self.ln_mlp(x)|self.ln_f(x)|eps=1e-3",
    ),
    Change(
        "sorted_tokens",
        "experts of the layer before",
        'b + f"mixture.experts.{e}."',
        '"blocks.0." + f"mixture.experts.{e}."',
        parameter="|".join(
            f"layers.1.mlp.mlps.{e}.{part}.weight"
            for e in range(5)
            for part in ("gate_up", "down")
        ),
    ),
    Change(
        "sorted_tokens",
        "the last token is scored too",
        'output["logits"][:, :-1].transpose(1, 2)\n    return F.cross_entropy(scores, ids[:, 1:])',
        'output["logits"].transpose(1, 2)\n    return F.cross_entropy(scores, ids.roll(-1, 1))',
    ),
]
