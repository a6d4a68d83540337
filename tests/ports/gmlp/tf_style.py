"""After TensorFlow: Keras layers with kernels [in, out], weights set layer by layer.

The kernel over positions is [to, from, head], its bias [to, head].
"""

import re
from pathlib import Path

import torch
from torch import nn

hparams = {
    "vocab_size": 37,
    "pad_id": 0,
    "hidden_size": 24,
    "filter_size": 48,
    "attention_size": 12,
    "num_blocks": 3,
    "spatial_heads": 2,
    "max_length": 16,
    "layer_norm_epsilon": 1e-5,
    "label_smoothing": 0.1,
    "z_loss": 5e-3,
    "learning_rate": 3e-3,
    "weight_decay": 0.1,
    "beta_1": 0.9,
    "beta_2": 0.98,
    "epsilon": 1e-8,
}


class Layer(nn.Module):
    def add_weight(self, name, shape):
        variable = nn.Parameter(torch.zeros(shape))
        self.register_parameter(name, variable)
        return variable

    @torch.no_grad()
    def set_weights(self, weights):
        """In the order in which they were added."""
        variables = list(self.parameters(recurse=False))
        if len(variables) != len(weights):
            raise ValueError(f"{len(weights)} weights for {len(variables)} variables")
        for variable, value in zip(variables, weights):
            if variable.shape != value.shape:
                raise ValueError(f"{tuple(value.shape)} for {tuple(variable.shape)}")
            variable.copy_(value)


class Dense(Layer):
    def __init__(self, input_dim, units, use_bias=True):
        super().__init__()
        self.use_bias = use_bias
        self.add_weight("kernel", (input_dim, units))
        if use_bias:
            self.add_weight("bias", (units,))

    def forward(self, inputs):
        outputs = torch.matmul(inputs, self.kernel)
        return outputs + self.bias if self.use_bias else outputs


class LayerNormalization(Layer):
    def __init__(self, units, epsilon):
        super().__init__()
        self.epsilon = epsilon
        self.add_weight("gamma", (units,))
        self.add_weight("beta", (units,))

    def forward(self, inputs):
        mean = torch.mean(inputs, dim=-1, keepdim=True)
        centered = inputs - mean
        variance = torch.mean(torch.square(centered), dim=-1, keepdim=True)
        normalized = centered / torch.sqrt(variance + self.epsilon)
        return normalized * self.gamma + self.beta


class SharedEmbedding(Layer):
    """Looks up the tokens, and gives their logits at the end."""

    def __init__(self, vocab_size, hidden_size, pad_id):
        super().__init__()
        self.hidden_size, self.pad_id = hidden_size, pad_id
        self.add_weight("embeddings", (vocab_size, hidden_size))
        self.add_weight("output_bias", (vocab_size,))

    def forward(self, ids):
        outputs = torch.index_select(self.embeddings, 0, torch.flatten(ids))
        outputs = torch.reshape(outputs, (*ids.shape, self.hidden_size))
        mask = (ids != self.pad_id).to(outputs.dtype)[:, :, None]
        outputs = outputs * mask + (outputs * (1.0 - mask)).detach()
        return outputs * self.hidden_size**0.5

    def linear(self, hidden):
        batch, length, units = hidden.shape
        flat = torch.reshape(hidden, (batch * length, units))
        logits = torch.matmul(flat, self.embeddings.T) + self.output_bias
        return torch.reshape(logits, (batch, length, -1))


def softmax(logits, axis=-1):
    exps = torch.exp(logits - torch.amax(logits, dim=axis, keepdim=True))
    return exps / torch.sum(exps, dim=axis, keepdim=True)


def gelu(features):
    cdf = 0.5 * torch.erfc(-features * 0.5**0.5)
    return features * cdf


def get_attention_bias(ids, pad_id):
    """[batch, length, length]: a large negative number where nothing may be seen."""
    length = ids.shape[1]
    band = torch.tril(torch.ones(length, length))
    visible = band * (ids != pad_id).to(band.dtype)[:, None, :]
    return (1.0 - visible) * -1e9


class TinySelfAttention(nn.Module):
    def __init__(self, hidden_size, attention_size, output_size):
        super().__init__()
        self.attention_size = attention_size
        self.qkv = Dense(hidden_size, 3 * attention_size, use_bias=False)
        self.output_dense = Dense(attention_size, output_size)

    def forward(self, inputs, attention_bias):
        query, key, value = torch.split(self.qkv(inputs), self.attention_size, dim=-1)
        logits = torch.matmul(query, torch.transpose(key, 1, 2))
        logits = logits / self.attention_size**0.5
        weights = softmax(logits + attention_bias)
        return self.output_dense(torch.matmul(weights, value))


class SpatialGatingUnit(Layer):
    def __init__(self, units, max_length, num_heads, epsilon):
        super().__init__()
        self.num_heads = num_heads
        self.layer_norm = LayerNormalization(units, epsilon)
        self.add_weight("spatial_kernel", (max_length, max_length, num_heads))
        self.add_weight("spatial_bias", (max_length, num_heads))

    def causal_kernel(self, length):
        rows = torch.arange(length)[:, None, None]
        columns = torch.arange(length)[None, :, None]
        kernel = self.spatial_kernel[:length, :length]
        return torch.where(columns <= rows, kernel, 0.0)

    def forward(self, inputs, attended):
        batch, length, _ = inputs.shape
        u, v = torch.chunk(inputs, 2, dim=-1)
        v = self.layer_norm(v)
        v = torch.reshape(v, (batch, length, self.num_heads, -1))
        v = torch.einsum("mnh,bnhd->bmhd", self.causal_kernel(length), v)
        v = v + self.spatial_bias[:length, :, None]
        v = torch.reshape(v, (batch, length, -1))
        return torch.mul(u, torch.add(v, attended))


class GMLPBlock(nn.Module):
    def __init__(self, params):
        super().__init__()
        hidden, filters = params["hidden_size"], params["filter_size"]
        epsilon = params["layer_norm_epsilon"]
        self.layer_norm = LayerNormalization(hidden, epsilon)
        self.attention = TinySelfAttention(
            hidden, params["attention_size"], filters // 2
        )
        self.dense_in = Dense(hidden, filters)
        self.gating = SpatialGatingUnit(
            filters // 2, params["max_length"], params["spatial_heads"], epsilon
        )
        self.dense_out = Dense(filters // 2, hidden)

    def forward(self, inputs, attention_bias):
        outputs = self.layer_norm(inputs)
        attended = self.attention(outputs, attention_bias)
        outputs = gelu(self.dense_in(outputs))
        outputs = self.gating(outputs, attended)
        outputs = self.dense_out(outputs)
        return inputs + outputs


class GMLPLanguageModel(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.params = params
        self.shared = SharedEmbedding(
            params["vocab_size"], params["hidden_size"], params["pad_id"]
        )
        self.block = nn.ModuleList(
            GMLPBlock(params) for _ in range(params["num_blocks"])
        )
        self.output_norm = LayerNormalization(
            params["hidden_size"], params["layer_norm_epsilon"]
        )

    def forward(self, ids):
        attention_bias = get_attention_bias(ids, self.params["pad_id"])
        hidden = self.shared(ids)
        for block in self.block:
            hidden = block(hidden, attention_bias)
        return self.shared.linear(self.output_norm(hidden))


# -------------------------------------------------------------------- checkpoint


def load_torch_checkpoint(net, checkpoint):
    def dense(name):
        return [checkpoint[name + ".weight"].T, checkpoint[name + ".bias"]]

    def norm(name):
        return [checkpoint[name + ".weight"], checkpoint[name + ".bias"]]

    net.shared.set_weights([checkpoint["embed.weight"], checkpoint["out_bias"]])
    for i, block in enumerate(net.block):
        prefix = f"blocks.{i}."
        block.layer_norm.set_weights(norm(prefix + "norm"))
        qkv = checkpoint[prefix + "attn.to_qkv.weight"]
        block.attention.qkv.set_weights([qkv.T])
        block.attention.output_dense.set_weights(dense(prefix + "attn.to_out"))
        block.dense_in.set_weights(dense(prefix + "proj_in"))
        block.gating.layer_norm.set_weights(norm(prefix + "sgu.norm"))
        spatial_kernel = torch.permute(checkpoint[prefix + "sgu.weight"], (1, 2, 0))
        spatial_bias = torch.permute(checkpoint[prefix + "sgu.bias"], (1, 0))
        block.gating.set_weights([spatial_kernel, spatial_bias])
        block.dense_out.set_weights(dense(prefix + "proj_out"))
    net.output_norm.set_weights(norm("norm"))


def model():
    net = GMLPLanguageModel(hparams)
    load_torch_checkpoint(net, torch.load(Path(__file__).with_name("weights.pt")))
    return net


def forward(net, batch):
    return net(batch["tokens"][:, :-1])


# -------------------------------------------------------------------------- loss


def padded_cross_entropy(logits, labels, smoothing, z_loss):
    """Returns the loss of each token and the weight of each."""
    vocab_size = logits.shape[-1]
    low_confidence = smoothing / vocab_size
    confidence = 1.0 - smoothing + low_confidence
    hot = nn.functional.one_hot(labels, vocab_size).to(torch.bool)
    soft_targets = torch.where(hot, confidence, low_confidence)
    top = torch.amax(logits, dim=-1, keepdim=True)
    log_z = top + torch.log(torch.sum(torch.exp(logits - top), dim=-1, keepdim=True))
    xentropy = -torch.sum(soft_targets * (logits - log_z), dim=-1)
    xentropy = xentropy + z_loss * torch.square(torch.squeeze(log_z, -1))
    weights = (labels != hparams["pad_id"]).to(logits.dtype)
    return xentropy * weights, weights


def loss(output, batch):
    xentropy, weights = padded_cross_entropy(
        output, batch["tokens"][:, 1:], hparams["label_smoothing"], hparams["z_loss"]
    )
    return torch.sum(xentropy) / torch.sum(weights)


# --------------------------------------------------------------------- optimizer


class AdamWeightDecay(torch.optim.Optimizer):
    """Slots m and v; the decay goes past them."""

    def __init__(self, named_variables, params, exclude_from_weight_decay):
        named_variables = list(named_variables)
        super().__init__([variable for _, variable in named_variables], {})
        self.variables, self.hp = named_variables, params
        self.exclude = exclude_from_weight_decay
        self.iterations = 0

    def do_use_weight_decay(self, name):
        return not any(re.search(pattern, name) for pattern in self.exclude)

    @torch.no_grad()
    def step(self, closure=None):
        self.iterations += 1
        lr, decay = self.hp["learning_rate"], self.hp["weight_decay"]
        beta_1, beta_2 = self.hp["beta_1"], self.hp["beta_2"]
        m_correction = 1.0 - beta_1**self.iterations
        v_correction = 1.0 - beta_2**self.iterations
        for name, variable in self.variables:
            slots = self.state[variable]
            if not slots:
                slots["m"] = torch.zeros_like(variable)
                slots["v"] = torch.zeros_like(variable)
            grad = variable.grad
            slots["m"].mul_(beta_1).add_(grad * (1.0 - beta_1))
            slots["v"].mul_(beta_2).add_(torch.square(grad) * (1.0 - beta_2))
            denominator = torch.sqrt(slots["v"] / v_correction) + self.hp["epsilon"]
            update = slots["m"] / m_correction / denominator
            if self.do_use_weight_decay(name):
                update = update + decay * variable
            variable.sub_(lr * update)


def optimizer(net):
    excluded = ["embeddings$", "gamma$", "beta$", "bias$"]
    return AdamWeightDecay(net.named_parameters(), hparams, excluded)
