"""As one writes it in TensorFlow: scopes and a dictionary of variables, einsum over heads.

Kernels are (in, out), those of attention (in, heads, size) and (heads, size, out).
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn

PARAMS = {
    "num_items": 60,
    "hidden_size": 24,
    "num_heads": 3,
    "num_blocks": 2,
    "label_smoothing": 0.1,
    "ranking_weight": 0.5,
    "learning_rate": 8e-3,
    "warmup_steps": 2,
    "weight_decay_rate": 0.1,
    "clip_norm": 1.0,
}
NEGATIVE = -1e9


# Variables.


class Scope:
    """Variables under a name, as ``v["dense/kernel"]``."""

    def __init__(self, module, prefix=""):
        self.module, self.prefix = module, prefix

    def __getitem__(self, name):
        return getattr(self.module, self.prefix + name)

    def enter(self, name):
        return Scope(self.module, f"{self.prefix}{name}/")


# Layers.


def layer_normalization(v, x, epsilon=1e-5):
    mean = torch.mean(x, dim=-1, keepdim=True)
    variance = torch.mean(torch.square(x - mean), dim=-1, keepdim=True)
    scale = v["gamma"] * torch.rsqrt(variance + epsilon)
    return x * scale + (v["beta"] - mean * scale)


def gelu(x):
    return 0.5 * x * (1.0 + torch.erf(x / np.sqrt(2.0)))


def conv1d(v, x):
    """Of width one: kernel (1, in, out)."""
    return torch.tensordot(x, v["kernel"][0], dims=1) + v["bias"]


def multi_head_attention(v, x, gap_ids, attention_bias):
    query = torch.einsum("bfd,dnh->bfnh", x, v["query/kernel"])
    key = torch.einsum("btd,dnh->btnh", x, v["key/kernel"])
    value = torch.einsum("btd,dnh->btnh", x, v["value/kernel"])
    query = query * query.shape[-1] ** -0.5
    logits = torch.einsum("bfnh,btnh->bnft", query, key)
    gaps = v["gap/embeddings"].permute(1, 0)[:, gap_ids]
    logits = logits + gaps.permute(1, 0, 2, 3) + attention_bias
    weights = torch.softmax(logits, dim=-1)
    context = torch.einsum("bnft,btnh->bfnh", weights, value)
    return torch.einsum("bfnh,nhd->bfd", context, v["output/kernel"]) + v["output/bias"]


def feed_forward(v, x):
    x = conv1d(v.enter("conv1d"), x)
    x = gelu(x)
    return conv1d(v.enter("conv1d_1"), x)


def encoder(v, x, gap_ids, attention_bias):
    for i in range(PARAMS["num_blocks"]):
        block = v.enter(f"block_{i}")
        y = layer_normalization(block.enter("ln_attention"), x)
        y = multi_head_attention(block.enter("attention"), y, gap_ids, attention_bias)
        x = x + y
        y = layer_normalization(block.enter("ln_ffn"), x)
        y = feed_forward(block.enter("ffn"), y)
        x = x + y
    return layer_normalization(v.enter("ln_final"), x)


# Inputs.


def get_attention_bias(mask, dtype):
    """Nought where a place may be looked at, (batch, 1, from, to)."""
    length = mask.shape[1]
    ahead = torch.triu(torch.ones(length, length, dtype=dtype), diagonal=1)
    padded = 1.0 - mask.to(dtype)
    hidden = torch.maximum(ahead[None, :, :], padded[:, None, :])
    return hidden[:, None] * NEGATIVE


def get_positions(mask):
    """1, 2, 3 ... from the first real item; 0 before."""
    length = mask.shape[1]
    num_padding = length - mask.sum(1, keepdim=True)
    return torch.relu(torch.arange(1, length + 1)[None] - num_padding)


def get_gap_ids(hours):
    """0 for none, then one more at each power of two."""
    gap = torch.relu(hours[:, :, None] - hours[:, None, :])
    ids = torch.zeros_like(gap)
    for power in range(6):
        ids = ids + (gap >= 2**power).to(ids.dtype)
    return ids


# Model.


class Model(nn.Module):
    def __init__(self, variables):
        super().__init__()
        for name, value in variables.items():
            self.register_parameter(name, nn.Parameter(value.clone().contiguous()))

    def forward(self, features):
        v = Scope(self)
        ids = features["items"]
        mask = ids != 0
        table = v["item/embeddings"]
        x = table[ids] * PARAMS["hidden_size"] ** 0.5
        x = x + v["position/embeddings"][get_positions(mask)]
        x = x * mask[:, :, None].to(x.dtype)
        bias = get_attention_bias(mask, x.dtype)
        x = encoder(v, x, get_gap_ids(features["hours"]), bias)

        flat = torch.reshape(x, (-1, x.shape[-1]))[torch.reshape(mask, (-1,))]
        logits = torch.matmul(flat, table.T)[:, 1:] + v["logits/bias"]

        last = x[:, -1, :]
        candidates = features["candidates"]
        scores = torch.einsum("bd,bcd->bc", last, table[candidates])
        scores = scores + v["logits/bias"][candidates - 1]
        return {"logits": logits, "scores": scores}


# Checkpoint of the other framework.


def convert(state):
    heads = PARAMS["num_heads"]

    def split_out(name):
        kernel = state[name + ".weight"].T
        return kernel.reshape(len(kernel), heads, -1)

    def split_in(name):
        kernel = state[name + ".weight"].T
        return kernel.reshape(heads, -1, kernel.shape[1])

    out = {
        "item/embeddings": state["item.weight"],
        "position/embeddings": state["position.weight"],
        "logits/bias": state["item_bias"],
    }

    def norm(target, source):
        out[target + "/gamma"] = state[source + ".weight"]
        out[target + "/beta"] = state[source + ".bias"]

    def conv(target, source):
        out[target + "/kernel"] = state[source + ".weight"].permute(2, 1, 0)
        out[target + "/bias"] = state[source + ".bias"]

    for i in range(PARAMS["num_blocks"]):
        target, source = f"block_{i}", f"blocks.{i}"
        norm(f"{target}/ln_attention", f"{source}.norm1")
        for name in ("query", "key", "value"):
            kernel = split_out(f"{source}.attention.{name}")
            out[f"{target}/attention/{name}/kernel"] = kernel
        out[f"{target}/attention/output/kernel"] = split_in(f"{source}.attention.out")
        out[f"{target}/attention/output/bias"] = state[f"{source}.attention.out.bias"]
        out[f"{target}/attention/gap/embeddings"] = state[
            f"{source}.attention.gap.weight"
        ]
        norm(f"{target}/ln_ffn", f"{source}.norm2")
        conv(f"{target}/ffn/conv1d", f"{source}.ffn.conv1")
        conv(f"{target}/ffn/conv1d_1", f"{source}.ffn.conv2")
    norm("ln_final", "norm")
    return out


def model():
    return Model(convert(torch.load(Path(__file__).with_name("weights.pt"))))


def forward(net, batch):
    return net(batch)


# Training.


def smoothed_cross_entropy(logits, labels, weights):
    smoothing = PARAMS["label_smoothing"]
    depth = logits.shape[-1]
    one_hot = (labels[:, None] == torch.arange(depth)).to(logits.dtype)
    soft = one_hot * (1.0 - smoothing) + smoothing / depth
    log_probs = torch.log_softmax(logits, dim=-1)
    per_example = -torch.sum(soft * log_probs, dim=-1)
    return torch.sum(per_example * weights) / torch.sum(weights)


def loss(output, batch):
    labels = batch["targets"][batch["items"] != 0]
    weights = (labels != 0).to(output["logits"].dtype)
    xent = smoothed_cross_entropy(output["logits"], labels - 1, weights)
    positive, negative = output["scores"].split([1, 4], dim=1)
    pairs = torch.nn.functional.softplus(negative - positive)
    return xent + PARAMS["ranking_weight"] * torch.mean(pairs)


class WarmupThenRsqrt:
    def __init__(self, peak, warmup_steps):
        self.peak = peak
        self.warmup_steps = warmup_steps

    def __call__(self, step):
        """Step counts from nought."""
        step = step + 1.0
        rise = step / self.warmup_steps
        fall = (step / self.warmup_steps) ** -0.5
        return self.peak * min(rise, fall)


def clip_by_global_norm(grads, clip_norm):
    global_norm = torch.sqrt(sum(torch.sum(torch.square(g)) for g in grads))
    scale = clip_norm / torch.clamp(global_norm, min=clip_norm)
    return [g * scale for g in grads]


class AdamWeightDecay(torch.optim.Optimizer):
    """As in models/official: names of variables say what decays."""

    exclude = ("gamma", "beta", "bias", "position", "gap")

    def __init__(self, named, learning_rate, beta_1=0.9, beta_2=0.98, epsilon=1e-6):
        self.names, variables = zip(*named)
        super().__init__(variables, {})
        self.learning_rate = learning_rate
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.iterations = 0

    def do_decay(self, name):
        return not any(word in name for word in self.exclude)

    @torch.no_grad()
    def step(self, closure=None):
        variables = self.param_groups[0]["params"]
        lr = self.learning_rate(self.iterations)
        grads = [var.grad for var in variables]
        grads = clip_by_global_norm(grads, PARAMS["clip_norm"])
        local_step = self.iterations + 1
        for name, var, grad in zip(self.names, variables, grads):
            if self.do_decay(name):
                var.sub_(lr * PARAMS["weight_decay_rate"] * var)
            slots = self.state[var]
            if not slots:
                slots["m"] = torch.zeros_like(var)
                slots["v"] = torch.zeros_like(var)
            m = self.beta_1 * slots["m"] + (1.0 - self.beta_1) * grad
            v = self.beta_2 * slots["v"] + (1.0 - self.beta_2) * torch.square(grad)
            slots["m"], slots["v"] = m, v
            m_hat = m / (1.0 - self.beta_1**local_step)
            v_hat = v / (1.0 - self.beta_2**local_step)
            var.sub_(lr * m_hat / (torch.sqrt(v_hat) + self.epsilon))
        self.iterations += 1


def optimizer(net):
    schedule = WarmupThenRsqrt(PARAMS["learning_rate"], PARAMS["warmup_steps"])
    return AdamWeightDecay(list(net.named_parameters()), schedule)
