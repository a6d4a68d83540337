"""After the first release: weights by scope, heads an axis of their own, everything an einsum."""

from pathlib import Path

import torch
from torch import nn

N_BLOCK, N_HEAD, CLIP = 2, 2, 3


class Scope(nn.Module):
    """Weights by name, scopes by attribute."""

    def __init__(self, weights=(), **scopes):
        super().__init__()
        for name, value in dict(weights).items():
            setattr(self, name, nn.Parameter(value.clone().contiguous()))
        for name, scope in scopes.items():
            setattr(self, name, scope)


class Converter:
    def __init__(self, sd, prefix=""):
        self.sd, self.prefix = sd, prefix

    def at(self, name):
        return Converter(self.sd, f"{self.prefix}{name}.")

    def w(self, name):
        return self.sd[self.prefix + name]

    def linear(self, name):
        return Scope(
            {"weights": self.w(f"{name}.weight").T, "bias": self.w(f"{name}.bias")}
        )

    def norm(self, name):
        return Scope(
            {"scale": self.w(f"{name}.weight"), "offset": self.w(f"{name}.bias")}
        )

    def attention(self, name):
        mha = self.at(name)

        def into_heads(w):
            return w.T.unflatten(1, (N_HEAD, -1))

        return Scope(
            {
                "query_w": into_heads(mha.w("to_q.weight")),
                "key_w": into_heads(mha.w("to_k.weight")),
                "value_w": into_heads(mha.w("to_v.weight")),
                "gating_w": into_heads(mha.w("gate.weight")),
                "gating_b": mha.w("gate.bias").unflatten(0, (N_HEAD, -1)),
                "output_w": mha.w("out.weight").T.unflatten(0, (N_HEAD, -1)),
                "output_b": mha.w("out.bias"),
            }
        )

    def row_attention(self):
        return Scope(
            {"feat_2d_weights": self.w("pair_bias.weight").T},
            query_norm=self.norm("norm_m"),
            feat_2d_norm=self.norm("norm_z"),
            attention=self.attention("mha"),
        )

    def column_attention(self):
        return Scope(query_norm=self.norm("norm_m"), attention=self.attention("mha"))

    def transition(self):
        return Scope(
            input_layer_norm=self.norm("norm"),
            transition1=self.linear("linear_1"),
            transition2=self.linear("linear_2"),
        )

    def outer_product_mean(self):
        out = self.w("out.weight")
        hidden = len(self.w("linear_1.bias"))
        return Scope(
            {
                "output_w": out.T.unflatten(0, (hidden, hidden)),
                "output_b": self.w("out.bias"),
            },
            layer_norm_input=self.norm("norm"),
            left_projection=self.linear("linear_1"),
            right_projection=self.linear("linear_2"),
        )

    def triangle_multiplication(self):
        return Scope(
            layer_norm_input=self.norm("norm_in"),
            left_projection=self.linear("a_p"),
            left_gate=self.linear("a_g"),
            right_projection=self.linear("b_p"),
            right_gate=self.linear("b_g"),
            center_layer_norm=self.norm("norm_out"),
            output_projection=self.linear("z"),
            gating_linear=self.linear("g"),
        )

    def triangle_attention(self):
        return Scope(
            {"feat_2d_weights": self.w("bias.weight").T},
            query_norm=self.norm("norm"),
            attention=self.attention("mha"),
        )

    def iteration(self):
        return Scope(
            msa_row=self.at("row_attn").row_attention(),
            msa_column=self.at("col_attn").column_attention(),
            msa_transition=self.at("msa_transition").transition(),
            outer_product_mean=self.at("opm").outer_product_mean(),
            outgoing=self.at("tri_mul_out").triangle_multiplication(),
            incoming=self.at("tri_mul_in").triangle_multiplication(),
            starting_node=self.at("tri_attn_start").triangle_attention(),
            ending_node=self.at("tri_attn_end").triangle_attention(),
            pair_transition=self.at("pair_transition").transition(),
        )


def linear(p, x):
    return torch.einsum("...i,io->...o", x, p.weights) + p.bias


def layer_norm(p, x):
    mean = x.mean(-1, keepdim=True)
    variance = torch.square(x - mean).mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1e-5) * p.scale + p.offset


def attention(p, q_data, there, nonbatched_bias=None):
    """q_data (batch, rows, queries, channels), attends to itself."""
    q = torch.einsum("brqa,ahc->brqhc", q_data, p.query_w) * p.query_w.shape[-1] ** -0.5
    k = torch.einsum("brka,ahc->brkhc", q_data, p.key_w)
    v = torch.einsum("brka,ahc->brkhc", q_data, p.value_w)
    logits = torch.einsum("brqhc,brkhc->brhqk", q, k)
    if nonbatched_bias is not None:
        logits = logits + nonbatched_bias.unsqueeze(1)
    logits = torch.where(there[:, None, None, None, :], logits, -1e9)
    unnormalized = torch.exp(logits - logits.detach().amax(-1, keepdim=True))
    weights = unnormalized / unnormalized.sum(-1, keepdim=True)
    weighted_avg = torch.einsum("brhqk,brkhc->brqhc", weights, v)
    gate_values = torch.einsum("brqa,ahc->brqhc", q_data, p.gating_w) + p.gating_b
    weighted_avg = weighted_avg * torch.sigmoid(gate_values)
    return torch.einsum("brqhc,hco->brqo", weighted_avg, p.output_w) + p.output_b


def msa_row_attention(p, msa_act, pair_act, there):
    normed = layer_norm(p.feat_2d_norm, pair_act)
    bias = torch.einsum("bijc,ch->bhij", normed, p.feat_2d_weights)
    return attention(p.attention, layer_norm(p.query_norm, msa_act), there, bias)


def msa_column_attention(p, msa_act, there):
    msa_act = layer_norm(p.query_norm, msa_act.swapaxes(1, 2))
    return attention(p.attention, msa_act, there).swapaxes(1, 2)


def transition(p, act):
    act = layer_norm(p.input_layer_norm, act)
    act = torch.clamp_min(linear(p.transition1, act), 0)
    return linear(p.transition2, act)


def outer_product_mean(p, act, mask):
    act = layer_norm(p.layer_norm_input, act)
    left = mask * linear(p.left_projection, act)
    right = mask * linear(p.right_projection, act)
    half = torch.einsum("bsjd,cdo->bsjco", right, p.output_w)
    act = torch.einsum("bsic,bsjco->bijo", left, half) + p.output_b
    norm = torch.einsum("bsia,bsja->bija", mask, mask)
    return act / torch.maximum(norm, torch.ones(()))


def triangle_multiplication(p, act, mask, equation):
    act = layer_norm(p.layer_norm_input, act)
    left = mask * linear(p.left_projection, act)
    right = mask * linear(p.right_projection, act)
    left = left * torch.sigmoid(linear(p.left_gate, act))
    right = right * torch.sigmoid(linear(p.right_gate, act))
    product = torch.einsum(equation, left, right)
    product = linear(p.output_projection, layer_norm(p.center_layer_norm, product))
    return product * torch.sigmoid(linear(p.gating_linear, act))


def triangle_attention(p, pair_act, there):
    pair_act = layer_norm(p.query_norm, pair_act)
    bias = torch.einsum("bqkc,ch->bhqk", pair_act, p.feat_2d_weights)
    return attention(p.attention, pair_act, there, bias)


def iteration(p, msa_act, pair_act, seq_there, res_there):
    msa_mask = torch.einsum("bs,bi->bsi", seq_there.float(), res_there.float())
    pair_mask = torch.einsum("bi,bj->bij", res_there.float(), res_there.float())
    msa_mask, pair_mask = msa_mask.unsqueeze(-1), pair_mask.unsqueeze(-1)
    msa_act = msa_act + msa_row_attention(p.msa_row, msa_act, pair_act, res_there)
    msa_act = msa_act + msa_column_attention(p.msa_column, msa_act, seq_there)
    msa_act = msa_act + transition(p.msa_transition, msa_act)
    pair_act = pair_act + outer_product_mean(p.outer_product_mean, msa_act, msa_mask)
    pair_act = pair_act + triangle_multiplication(
        p.outgoing, pair_act, pair_mask, "bikc,bjkc->bijc"
    )
    pair_act = pair_act + triangle_multiplication(
        p.incoming, pair_act, pair_mask, "bkic,bkjc->bijc"
    )
    pair_act = pair_act + triangle_attention(p.starting_node, pair_act, res_there)
    turned = triangle_attention(p.ending_node, pair_act.swapaxes(1, 2), res_there)
    pair_act = pair_act + turned.swapaxes(1, 2)
    pair_act = pair_act + transition(p.pair_transition, pair_act)
    return msa_act, pair_act


def embed(p, batch):
    target = torch.eye(len(p.left_single.weights))[batch["target"]]
    msa = torch.eye(len(p.preprocess_msa.weights))[batch["msa"]]
    msa_act = linear(p.preprocess_1d, target)[:, None] + linear(p.preprocess_msa, msa)
    left, right = linear(p.left_single, target), linear(p.right_single, target)
    pair_act = left.unsqueeze(2) + right.unsqueeze(1)
    position = batch["index"]
    offset = position.unsqueeze(2) - position.unsqueeze(1)
    offset = torch.clip(offset + CLIP, 0, 2 * CLIP)
    relative = torch.eye(2 * CLIP + 1)[offset]
    return msa_act, pair_act + linear(p.pair_activations, relative)


def model():
    c = Converter(torch.load(Path(__file__).with_name("weights.pt")))
    iterations = [c.at(f"blocks.{i}").iteration() for i in range(N_BLOCK)]
    return Scope(
        left_single=c.linear("tf_z_i"),
        right_single=c.linear("tf_z_j"),
        preprocess_1d=c.linear("tf_m"),
        preprocess_msa=c.linear("msa_m"),
        pair_activations=c.linear("relpos"),
        evoformer=nn.ModuleList(iterations),
        masked_msa_head=c.linear("masked_msa"),
        half_logits=c.linear("distogram"),
    )


def forward(net, batch):
    msa_act, pair_act = embed(net, batch)
    for p in net.evoformer:
        msa_act, pair_act = iteration(
            p, msa_act, pair_act, batch["rows"], batch["residues"]
        )
    half = linear(net.half_logits, pair_act)
    return {
        "msa": linear(net.masked_msa_head, msa_act),
        "distogram": half + half.swapaxes(1, 2),
    }


def softmax_cross_entropy(logits, labels):
    labels = torch.eye(logits.shape[-1])[labels]
    return (logits.logsumexp(-1, keepdim=True) - logits).mul(labels).sum(-1)


def loss(output, batch):
    bert_mask = (batch["letters"] != -100).float()
    errors = softmax_cross_entropy(output["msa"], batch["letters"].clamp_min(0))
    msa = (errors * bert_mask).sum() / bert_mask.sum()
    errors = softmax_cross_entropy(output["distogram"], batch["bins"])
    there = batch["residues"].float()
    square_mask = there.unsqueeze(1) * there.unsqueeze(2)
    of_each = (errors * square_mask).sum((-2, -1))
    of_each = of_each / (1e-6 + square_mask.sum((-2, -1)))
    return 2.0 * msa + 0.3 * of_each.mean()


def optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
