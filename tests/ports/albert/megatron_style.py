"""After Megatron: sequence first, query, key and value in one weight, flat gradients.

The table of words is padded to a multiple of eight. Only the positions that were chosen go
to the head. Gradients of the slow parts are written by hand.
"""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

ARGS = {
    "hidden_size": 48,
    "embedding_size": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 80,
    "num_layers": 3,
    "max_position_embeddings": 32,
    "vocab_size": 150,
    "make_vocab_size_divisible_by": 8,
    "layernorm_epsilon": 1e-12,
    "lr": 2e-2,
    "lr_warmup_steps": 2,
    "lr_decay_steps": 12,
    "weight_decay": 0.05,
    "clip_grad": 1.0,
    "num_microbatches": 2,
}
PAD, SEP, MASK = 0, 2, 3


# ---- fused kernels


SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


class BiasGelu(Function):
    """bias (h), y (..., h)."""

    @staticmethod
    def forward(ctx, y, bias):
        ctx.save_for_backward(y, bias)
        x = bias + y
        return x * 0.5 * (1.0 + torch.tanh(SQRT_2_OVER_PI * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx, g):
        y, bias = ctx.saved_tensors
        x = bias + y
        tanh_out = torch.tanh(SQRT_2_OVER_PI * x * (1 + 0.044715 * x * x))
        slope = SQRT_2_OVER_PI * (1 + 3 * 0.044715 * x * x)
        ff = 0.5 * x * (1 - tanh_out * tanh_out) * slope + 0.5 * (1 + tanh_out)
        grad = ff * g
        return grad, grad.flatten(0, -2).sum(0)


class VocabCrossEntropy(Function):
    """logits (n, vocab), target (n) -> losses (n)."""

    @staticmethod
    def forward(ctx, logits, target):
        logits = logits - logits.amax(dim=-1, keepdim=True)
        rows = torch.arange(len(target))
        predicted_logits = logits[rows, target]
        exp_logits = logits.exp()
        sum_exp_logits = exp_logits.sum(dim=-1)
        ctx.save_for_backward(exp_logits / sum_exp_logits[:, None], rows, target)
        return sum_exp_logits.log() - predicted_logits

    @staticmethod
    def backward(ctx, grad_output):
        softmax, rows, target = ctx.saved_tensors
        grad_input = softmax.clone()
        grad_input[rows, target] -= 1.0
        grad_input.mul_(grad_output[:, None])
        return grad_input, None


# ---- layers


class Linear(nn.Module):
    """Leaves its bias to the caller where that adds it in a kernel of its own."""

    def __init__(self, input_size, output_size, skip_bias_add=False):
        super().__init__()
        self.bias = nn.Parameter(torch.empty(output_size))
        self.weight = nn.Parameter(torch.empty(output_size, input_size))
        self.skip_bias_add = skip_bias_add

    def forward(self, x):
        output = torch.matmul(x, self.weight.t())
        if self.skip_bias_add:
            return output, self.bias
        return output + self.bias


def layer_norm(size):
    return nn.LayerNorm(size, eps=ARGS["layernorm_epsilon"])


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        hidden = ARGS["hidden_size"]
        self.heads = ARGS["num_attention_heads"]
        self.head_size = hidden // self.heads
        self.query_key_value = Linear(hidden, 3 * hidden)
        self.dense = Linear(hidden, hidden, skip_bias_add=True)

    def forward(self, hidden_states, attention_mask, layer_number):
        sq, b, h = hidden_states.shape
        mixed = self.query_key_value(hidden_states)
        mixed = mixed.view(sq, b * self.heads, 3 * self.head_size)
        query, key, value = mixed.split(self.head_size, dim=-1)

        # Scores of deep layers are made small here and large again in the softmax.
        coeff = float(layer_number)
        scores = torch.baddbmm(
            query.new_empty(b * self.heads, sq, sq).zero_(),
            query.transpose(0, 1),
            key.permute(1, 2, 0),
            beta=0.0,
            alpha=1.0 / (math.sqrt(self.head_size) * coeff),
        )
        scores = scores.view(b, self.heads, sq, sq)
        probs = self.scale_mask_softmax(scores, attention_mask, coeff)

        probs = probs.view(b * self.heads, sq, sq)
        context = torch.bmm(probs, value.transpose(0, 1))
        context = context.transpose(0, 1).reshape(sq, b, h)
        return self.dense(context)

    def scale_mask_softmax(self, scores, mask, scale):
        scores = scores * scale
        scores = scores.masked_fill(mask, -10000.0)
        return torch.softmax(scores, dim=-1)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        hidden, ffn = ARGS["hidden_size"], ARGS["ffn_hidden_size"]
        self.dense_h_to_4h = Linear(hidden, ffn, skip_bias_add=True)
        self.dense_4h_to_h = Linear(ffn, hidden, skip_bias_add=True)

    def forward(self, hidden_states):
        return self.dense_4h_to_h(BiasGelu.apply(*self.dense_h_to_4h(hidden_states)))


class TransformerLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attention = SelfAttention()
        self.mlp = MLP()
        self.post_attention_layernorm = layer_norm(ARGS["hidden_size"])
        self.post_mlp_layernorm = layer_norm(ARGS["hidden_size"])

    def forward(self, hidden_states, attention_mask, layer_number):
        output, bias = self.self_attention(hidden_states, attention_mask, layer_number)
        hidden_states = self.post_attention_layernorm(hidden_states + (output + bias))
        output, bias = self.mlp(hidden_states)
        return self.post_mlp_layernorm(hidden_states + (output + bias))


class Embedding(nn.Module):
    def __init__(self, padded_vocab_size):
        super().__init__()
        size, hidden = ARGS["embedding_size"], ARGS["hidden_size"]
        self.word_embeddings = nn.Embedding(padded_vocab_size, size)
        self.position_embeddings = nn.Embedding(ARGS["max_position_embeddings"], size)
        self.tokentype_embeddings = nn.Embedding(2, size)
        self.layernorm = layer_norm(size)
        self.dense_e_to_h = Linear(size, hidden)

    def forward(self, input_ids, tokentype_ids):
        """(b, s) -> (s, b, h)."""
        position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        embeddings = self.word_embeddings(input_ids)
        embeddings = embeddings + self.position_embeddings(position_ids)
        embeddings = embeddings + self.tokentype_embeddings(tokentype_ids)
        embeddings = embeddings.transpose(0, 1).contiguous()
        return self.dense_e_to_h(self.layernorm(embeddings))


class Pooler(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = Linear(ARGS["hidden_size"], ARGS["hidden_size"])

    def forward(self, hidden_states, sequence_index=0):
        return torch.tanh(self.dense(hidden_states[sequence_index]))


class LMHead(nn.Module):
    def __init__(self, padded_vocab_size):
        super().__init__()
        hidden, size = ARGS["hidden_size"], ARGS["embedding_size"]
        self.dense = Linear(hidden, size, skip_bias_add=True)
        self.layernorm = layer_norm(size)
        self.bias = nn.Parameter(torch.empty(padded_vocab_size))

    def forward(self, hidden_states, word_embeddings_weight):
        hidden_states = BiasGelu.apply(*self.dense(hidden_states))
        hidden_states = self.layernorm(hidden_states)
        logits = F.linear(hidden_states, word_embeddings_weight, self.bias)
        return logits[:, : ARGS["vocab_size"]]


class BertModel(nn.Module):
    def __init__(self):
        super().__init__()
        padded = padded_vocab_size(ARGS["vocab_size"])
        self.binary_head = Linear(ARGS["hidden_size"], 2)
        self.lm_head = LMHead(padded)
        self.pooler = Pooler()
        self.layer = TransformerLayer()
        self.embedding = Embedding(padded)

    def forward(self, input_ids, padding_mask, tokentype_ids, positions):
        hidden_states = self.embedding(input_ids, tokentype_ids)
        attention_mask = (padding_mask < 0.5)[:, None, None, :]
        for layer_number in range(1, ARGS["num_layers"] + 1):
            hidden_states = self.layer(hidden_states, attention_mask, layer_number)

        binary_logits = self.binary_head(self.pooler(hidden_states))
        chosen = hidden_states.flatten(0, 1).index_select(0, positions)
        table = self.embedding.word_embeddings.weight
        return self.lm_head(chosen, table), binary_logits


# ---- checkpoint


def padded_vocab_size(size):
    multiple = ARGS["make_vocab_size_divisible_by"]
    return multiple * math.ceil(size / multiple)


def pad_vocab(x):
    """Rows of zeros behind the words."""
    more = padded_vocab_size(len(x)) - len(x)
    return torch.cat([x, x.new_zeros(more, *x.shape[1:])])


def fuse_qkv(query, key, value):
    """Three of (heads * size, ...) -> (heads * 3 * size, ...)."""
    heads = ARGS["num_attention_heads"]
    parts = [x.view(heads, -1, *x.shape[1:]) for x in (query, key, value)]
    return torch.stack(parts, dim=1).flatten(0, 2)


NAMES = {
    "embedding.position_embeddings": "embeddings.position_embeddings",
    "embedding.tokentype_embeddings": "embeddings.token_type_embeddings",
    "embedding.layernorm": "embeddings.LayerNorm",
    "embedding.dense_e_to_h": "encoder.embedding_hidden_mapping_in",
    "layer.self_attention.dense": "encoder.layer.attention.dense",
    "layer.post_attention_layernorm": "encoder.layer.attention.LayerNorm",
    "layer.mlp.dense_h_to_4h": "encoder.layer.ffn",
    "layer.mlp.dense_4h_to_h": "encoder.layer.ffn_output",
    "layer.post_mlp_layernorm": "encoder.layer.full_layer_layer_norm",
    "pooler.dense": "pooler",
    "lm_head.dense": "predictions.dense",
    "lm_head.layernorm": "predictions.LayerNorm",
    "binary_head": "sop_classifier",
}


def convert(state):
    new = {}
    for ours, theirs in NAMES.items():
        for kind in ("weight", "bias"):
            if f"{theirs}.{kind}" in state:
                new[f"{ours}.{kind}"] = state[f"{theirs}.{kind}"]
    for kind in ("weight", "bias"):
        qkv = [
            state[f"encoder.layer.attention.{name}.{kind}"]
            for name in ("query", "key", "value")
        ]
        new[f"layer.self_attention.query_key_value.{kind}"] = fuse_qkv(*qkv)
    words = state["embeddings.word_embeddings.weight"]
    new["embedding.word_embeddings.weight"] = pad_vocab(words)
    new["lm_head.bias"] = pad_vocab(state["predictions.bias"])
    return new


def model():
    net = BertModel()
    net.load_state_dict(convert(torch.load(Path(__file__).with_name("weights.pt"))))
    return net


# ---- data and losses


def get_batch(batch):
    tokens, chosen = batch["tokens"], batch["chosen"]
    b, s = tokens.shape
    padding_mask = tokens.ne(PAD).long()
    first_end = tokens.eq(SEP).long().argmax(dim=1, keepdim=True)
    tokentypes = (torch.arange(s) > first_end).long() * padding_mask

    masked = tokens.clone()
    masked[chosen & batch["dice"].lt(0.8)] = MASK
    swap = chosen & batch["dice"].ge(0.9)
    masked[swap] = batch["other"][swap]

    row, place = chosen.nonzero(as_tuple=True)
    return masked, padding_mask, tokentypes, place * b + row


def forward(net, batch):
    lm_logits, binary_logits = net(*get_batch(batch))
    return {"words": lm_logits, "order": binary_logits}


def loss(output, batch):
    labels = batch["tokens"][batch["chosen"]]
    lm_losses = VocabCrossEntropy.apply(output["words"], labels)
    lm_loss = lm_losses.sum() / batch["chosen"].sum()
    sop_loss = VocabCrossEntropy.apply(output["order"], batch["order"]).mean()
    return lm_loss + sop_loss


# ---- training


class ParamScheduler:
    """Up in a line, then down to nothing."""

    def __init__(self):
        self.num_steps = 0

    def get_lr(self):
        warmup, decay = ARGS["lr_warmup_steps"], ARGS["lr_decay_steps"]
        if self.num_steps <= warmup:
            return ARGS["lr"] * self.num_steps / warmup
        done = (self.num_steps - 1 - warmup) / (decay - warmup)
        return ARGS["lr"] * (1.0 - done)

    def step(self):
        self.num_steps += 1
        return self.get_lr()


class FlatLamb(torch.optim.Optimizer):
    """Gradients and moments of all parameters lie one behind the other, the last first."""

    def __init__(self, named, scheduler, betas=(0.9, 0.999), eps=1e-6):
        named = list(named)[::-1]
        super().__init__([p for _, p in named], {})
        self.scheduler, self.betas, self.eps = scheduler, betas, eps
        self.names = [name for name, _ in named]
        self.params = [p for _, p in named]
        self.microbatches, self.updates = 0, 0
        self.main_grad, self.exp_avg, self.exp_avg_sq = (
            torch.zeros(sum(p.numel() for p in self.params), dtype=named[0][1].dtype)
            for _ in range(3)
        )

    def views(self, flat):
        pieces = flat.split([p.numel() for p in self.params])
        return [piece.view_as(p) for piece, p in zip(pieces, self.params)]

    @torch.no_grad()
    def step(self, closure=None):
        for grad, p in zip(self.views(self.main_grad), self.params):
            grad.add_(p.grad)
        self.microbatches += 1
        if self.microbatches == ARGS["num_microbatches"]:
            self.main_grad.div_(self.microbatches)
            self.clip_grad_norm()
            self.update(self.scheduler.step())
            self.main_grad.zero_()
            self.microbatches = 0

    def clip_grad_norm(self):
        total_norm = torch.linalg.vector_norm(self.main_grad)
        coeff = ARGS["clip_grad"] / (total_norm + 1e-6)
        if coeff < 1.0:
            self.main_grad.mul_(coeff)

    def update(self, lr):
        self.updates += 1
        beta1, beta2 = self.betas
        self.exp_avg.lerp_(self.main_grad, 1 - beta1)
        self.exp_avg_sq.lerp_(self.main_grad.square(), 1 - beta2)
        correction = math.sqrt(1 - beta2**self.updates)
        denom = self.exp_avg_sq.sqrt().div_(correction).add_(self.eps)
        flat = self.exp_avg.div(1 - beta1**self.updates).div_(denom)
        for name, p, update in zip(self.names, self.params, self.views(flat)):
            if decays(name):
                update = update.add(p, alpha=ARGS["weight_decay"])
                update = trusted(name, p, update)
            p.sub_(update, alpha=lr)


def decays(name):
    return name.endswith("weight") and "layernorm" not in name


def trusted(name, p, update):
    """Query, key and value, which are one weight, have a ratio each."""
    parts = (ARGS["num_attention_heads"], 3) if "query_key_value" in name else (1, 1)
    weight, change = p.reshape(*parts, -1), update.reshape(*parts, -1)
    above = torch.linalg.vector_norm(weight, dim=(0, 2), keepdim=True)
    below = torch.linalg.vector_norm(change, dim=(0, 2), keepdim=True)
    ratio = torch.where((above > 0) & (below > 0), above / below, 1.0)
    return (change * ratio).view_as(p)


def optimizer(net):
    return FlatLamb(net.named_parameters(), ParamScheduler())
