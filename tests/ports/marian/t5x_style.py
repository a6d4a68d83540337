"""After T5X and Optax: trees of arrays, heads with an axis of their own, logical masks.

Words are looked up by products with one-hot rows. The optimizer is a chain of pure functions.
"""

import math
from collections import namedtuple
from pathlib import Path

import numpy as np
import torch
from torch import nn

Config = namedtuple("Config", "vocab_size pad_id eos_id emb_dim num_heads num_layers")
CONFIG = Config(44, 43, 0, 32, 4, 2)
MAX_DECODE_LENGTH = 24


# ---------------------------------------------------------------- masks


def make_attention_mask(query_keep, key_keep):
    """(batch, 1, queries, keys): both are words."""
    return torch.logical_and(query_keep[:, None, :, None], key_keep[:, None, None, :])


def make_causal_mask(tokens):
    index = torch.arange(tokens.shape[-1]).expand(tokens.shape)
    return index[:, None, :, None] >= index[:, None, None, :]


def combine_masks(*masks):
    mask, *others = masks
    for other in others:
        mask = torch.logical_and(mask, other)
    return mask


# ---------------------------------------------------------------- layers


def dense(p, x):
    return torch.einsum("...d,df->...f", x, p["kernel"]) + p["bias"]


def to_heads(p, x):
    return torch.einsum("bld,dhk->blhk", x, p["kernel"]) + p["bias"]


def layer_norm(p, x, epsilon=1e-5):
    mean = torch.mean(x, dim=-1, keepdim=True)
    mean2 = torch.mean(torch.square(x), dim=-1, keepdim=True)
    inverse = torch.rsqrt(mean2 - torch.square(mean) + epsilon)
    return (x - mean) * (inverse * p["scale"]) + p["bias"]


def swish(x):
    return x / (1.0 + torch.exp(-x))


def attention(p, inputs_q, inputs_kv, mask):
    query = to_heads(p["query"], inputs_q)
    key = to_heads(p["key"], inputs_kv)
    value = to_heads(p["value"], inputs_kv)
    depth = query.shape[-1]
    query = query / math.sqrt(depth)
    logits = torch.einsum("bqhk,bshk->bhqs", query, key)
    bias = torch.where(mask, 0.0, -1e10)
    weights = torch.softmax(logits + bias, dim=-1)
    x = torch.einsum("bhqs,bshk->bqhk", weights, value)
    return torch.einsum("bqhk,hkd->bqd", x, p["out"]["kernel"]) + p["out"]["bias"]


def mlp(p, x):
    return dense(p["wo"], swish(dense(p["wi"], x)))


def one_hot(index, depth):
    return (index[..., None] == torch.arange(depth)).to(torch.float32)


def embed(embedding, tokens, positions):
    """Padding, which starts the decoder, does not train its row."""
    x = torch.matmul(one_hot(tokens, CONFIG.vocab_size), embedding)
    x = torch.where((tokens == CONFIG.pad_id)[..., None], x.detach(), x)
    x = x * math.sqrt(CONFIG.emb_dim)
    return x + positions[None, : x.shape[1]]


def encode(params, x, mask):
    for i in range(CONFIG.num_layers):
        p = params[f"layers_{i}"]
        y = attention(p["attention"], x, x, mask)
        x = layer_norm(p["attention_layer_norm"], x + y)
        y = mlp(p["mlp"], x)
        x = layer_norm(p["mlp_layer_norm"], x + y)
    return x


def decode(params, x, encoded, mask, cross_mask):
    for i in range(CONFIG.num_layers):
        p = params[f"layers_{i}"]
        y = attention(p["self_attention"], x, x, mask)
        x = layer_norm(p["self_attention_layer_norm"], x + y)
        y = attention(p["cross_attention"], x, encoded, cross_mask)
        x = layer_norm(p["cross_attention_layer_norm"], x + y)
        y = mlp(p["mlp"], x)
        x = layer_norm(p["mlp_layer_norm"], x + y)
    return x


def sinusoidal(max_len, d_feature, max_scale=10000.0):
    table = np.zeros((max_len, d_feature), dtype=np.float64)
    half = d_feature // 2
    position = np.arange(max_len)[:, np.newaxis]
    div_term = np.exp(np.arange(half) * -(np.log(max_scale) / half))
    table[:, :half] = np.sin(position * div_term)
    table[:, half:] = np.cos(position * div_term)
    return torch.tensor(table, dtype=torch.float32)


class Tree(nn.Module):
    """Nested dicts of arrays."""

    def __init__(self, leaves):
        super().__init__()
        for name, value in leaves.items():
            if isinstance(value, dict):
                self.add_module(name, Tree(value))
            else:
                self.register_parameter(name, nn.Parameter(value.clone().contiguous()))

    def __getitem__(self, name):
        return getattr(self, name)


class Transformer(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.params = Tree(params)
        positions = sinusoidal(MAX_DECODE_LENGTH, CONFIG.emb_dim)
        self.register_buffer("positions", positions)

    def forward(self, features):
        encoder_tokens = features["encoder_input_tokens"]
        decoder_tokens = features["decoder_input_tokens"]
        target_tokens = features["decoder_target_tokens"]
        embedding = self.params["token_embedder"]["embedding"]
        all_queries = torch.ones_like(target_tokens, dtype=torch.bool)
        encoder_keep = encoder_tokens != CONFIG.pad_id
        decoder_keep = target_tokens != CONFIG.pad_id

        every = torch.ones_like(encoder_keep)
        encoder_mask = make_attention_mask(every, encoder_keep)
        x = embed(embedding, encoder_tokens, self.positions)
        encoded = encode(self.params["encoder"], x, encoder_mask)

        decoder_mask = combine_masks(
            make_attention_mask(all_queries, decoder_keep),
            make_causal_mask(target_tokens),
        )
        cross_mask = make_attention_mask(all_queries, encoder_keep)
        y = embed(embedding, decoder_tokens, self.positions)
        y = decode(self.params["decoder"], y, encoded, decoder_mask, cross_mask)
        logits = torch.einsum("bld,vd->blv", y, embedding)
        return logits + self.params["decoder"]["logits_bias"]


# ---------------------------------------------------------------- checkpoint


def params_from_torch(state):
    heads = CONFIG.num_heads

    def linear(name):
        return {"kernel": state[name + ".weight"].T, "bias": state[name + ".bias"]}

    def norm(name):
        return {"scale": state[name + ".weight"], "bias": state[name + ".bias"]}

    def projection(name):
        kernel = state[name + ".weight"].T
        return {
            "kernel": kernel.reshape(kernel.shape[0], heads, -1),
            "bias": state[name + ".bias"].reshape(heads, -1),
        }

    def attend(name):
        kernel = state[name + ".out_proj.weight"].T
        return {
            "query": projection(name + ".q_proj"),
            "key": projection(name + ".k_proj"),
            "value": projection(name + ".v_proj"),
            "out": {
                "kernel": kernel.reshape(heads, -1, kernel.shape[1]),
                "bias": state[name + ".out_proj.bias"],
            },
        }

    def feed_forward(name):
        return {"wi": linear(name + ".fc1"), "wo": linear(name + ".fc2")}

    encoder, decoder = {}, {"logits_bias": state["final_logits_bias"]}
    for i in range(CONFIG.num_layers):
        encoder[f"layers_{i}"] = {
            "attention": attend(f"encoder.{i}.self_attn"),
            "attention_layer_norm": norm(f"encoder.{i}.self_attn_norm"),
            "mlp": feed_forward(f"encoder.{i}.ffn"),
            "mlp_layer_norm": norm(f"encoder.{i}.final_norm"),
        }
        decoder[f"layers_{i}"] = {
            "self_attention": attend(f"decoder.{i}.self_attn"),
            "self_attention_layer_norm": norm(f"decoder.{i}.self_attn_norm"),
            "cross_attention": attend(f"decoder.{i}.cross_attn"),
            "cross_attention_layer_norm": norm(f"decoder.{i}.cross_attn_norm"),
            "mlp": feed_forward(f"decoder.{i}.ffn"),
            "mlp_layer_norm": norm(f"decoder.{i}.final_norm"),
        }
    embedding = {"embedding": state["shared.weight"]}
    return {"token_embedder": embedding, "encoder": encoder, "decoder": decoder}


def model():
    state = torch.load(Path(__file__).with_name("weights.pt"))
    return Transformer(params_from_torch(state))


# ---------------------------------------------------------------- features


def append_eos(tokens):
    length = torch.sum(tokens != CONFIG.pad_id, dim=-1, keepdim=True)
    pad = torch.full_like(tokens[:, :1], CONFIG.pad_id)
    tokens = torch.cat([tokens, pad], dim=-1)
    return torch.where(torch.arange(tokens.shape[1]) == length, CONFIG.eos_id, tokens)


def autoregressive_inputs(targets):
    inputs = torch.roll(targets, 1, dims=-1)
    inputs[:, 0] = CONFIG.pad_id
    return inputs


def convert_features(micro):
    targets = append_eos(micro["target"])
    return {
        "encoder_input_tokens": append_eos(micro["source"]),
        "decoder_target_tokens": targets,
        "decoder_input_tokens": autoregressive_inputs(targets),
        "decoder_loss_weights": (targets != CONFIG.pad_id).to(torch.float32),
    }


def forward(net, batch):
    return [net(convert_features(micro)) for micro in batch["micro"]]


# ---------------------------------------------------------------- loss


class CrossEntropyWithLogits(torch.autograd.Function):
    """Of logits (..., words) and targets that are shares."""

    @staticmethod
    def forward(ctx, logits, targets):
        shifted = logits - torch.amax(logits, dim=-1, keepdim=True)
        exp_shifted = torch.exp(shifted)
        sum_exp = torch.sum(exp_shifted, dim=-1, keepdim=True)
        ctx.save_for_backward(targets, exp_shifted, sum_exp)
        return -torch.sum(targets * (shifted - torch.log(sum_exp)), dim=-1)

    @staticmethod
    def backward(ctx, g):
        targets, exp_shifted, sum_exp = ctx.saved_tensors
        return g[..., None] * (exp_shifted / sum_exp - targets), None


def smooth(targets, vocab_size, label_smoothing):
    low_confidence = label_smoothing / vocab_size
    confidence = 1.0 - label_smoothing + low_confidence
    hot = one_hot(targets, vocab_size)
    return hot * confidence + (1.0 - hot) * low_confidence


def loss(output, batch, label_smoothing=0.1):
    loss_sum, weight_sum = torch.zeros(()), torch.zeros(())
    for logits, micro in zip(output, batch["micro"]):
        features = convert_features(micro)
        soft = smooth(
            features["decoder_target_tokens"], CONFIG.vocab_size, label_smoothing
        )
        weights = features["decoder_loss_weights"]
        each = CrossEntropyWithLogits.apply(logits, soft)
        loss_sum = loss_sum + torch.sum(each * weights)
        weight_sum = weight_sum + torch.sum(weights)
    return loss_sum / weight_sum


# ---------------------------------------------------------------- optimizer

Transformation = namedtuple("Transformation", "init update")


def tree_map(f, *trees):
    return {name: f(*(tree[name] for tree in trees)) for name in trees[0]}


def clip_by_global_norm(max_norm):
    def update(updates, state):
        squares = [torch.sum(torch.square(g)) for g in updates.values()]
        norm = torch.sqrt(torch.sum(torch.stack(squares)))
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        return tree_map(lambda g: g * scale, updates), state

    return Transformation(lambda params: (), update)


def scale_by_adam(b1=0.9, b2=0.999, eps=1e-8):
    def init(params):
        zeros = tree_map(torch.zeros_like, params)
        return {"count": 0, "mu": zeros, "nu": tree_map(torch.zeros_like, params)}

    def update(updates, state):
        count = state["count"] + 1
        mu = tree_map(lambda m, g: m * b1 + g * (1 - b1), state["mu"], updates)
        nu = tree_map(lambda v, g: v * b2 + g * g * (1 - b2), state["nu"], updates)
        c1, c2 = 1 - b1**count, 1 - b2**count
        out = tree_map(lambda m, v: (m / c1) / (torch.sqrt(v / c2) + eps), mu, nu)
        return out, {"count": count, "mu": mu, "nu": nu}

    return Transformation(init, update)


def scale_by_schedule(schedule):
    def update(updates, count):
        rate = schedule(count)
        return tree_map(lambda u: u * -rate, updates), count + 1

    return Transformation(lambda params: 0, update)


def rsqrt_with_warmup(base, warmup_steps):
    """constant * linear_warmup * rsqrt_decay; counts start at nought."""

    def schedule(count):
        step = count + 1
        rate = base * min(1.0, step / warmup_steps)
        return rate * math.sqrt(warmup_steps) / math.sqrt(max(step, warmup_steps))

    return schedule


def chain(*parts):
    def init(params):
        return tuple(part.init(params) for part in parts)

    def update(updates, states):
        new = []
        for part, state in zip(parts, states):
            updates, state = part.update(updates, state)
            new.append(state)
        return updates, tuple(new)

    return Transformation(init, update)


def ema_step(ema, params, step, decay=0.999):
    decay = min(decay, (1 + step) / (10 + step))
    return tree_map(lambda e, p: e * decay + p * (1 - decay), ema, params)


class TrainState(torch.optim.Optimizer):
    def __init__(self, params, tx):
        super().__init__(params.values(), {})
        self.params, self.tx = params, tx
        self.opt_state = tx.init(params)
        self.ema = tree_map(lambda p: p.detach().clone(), params)
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        grads = tree_map(lambda p: p.grad, self.params)
        updates, self.opt_state = self.tx.update(grads, self.opt_state)
        for name, p in self.params.items():
            p.copy_(p + updates[name])
        self.ema = ema_step(self.ema, self.params, self.count)


def optimizer(net):
    tx = chain(
        clip_by_global_norm(1.0),
        scale_by_adam(b1=0.9, b2=0.98, eps=1e-9),
        scale_by_schedule(rsqrt_with_warmup(6e-3, warmup_steps=2)),
    )
    return TrainState(dict(net.named_parameters()), tx)
