"""The Set Transformer as Keras layers: kernels [in, out], heads in einsum kernels."""

import math
import re
from pathlib import Path

import torch
from torch import nn

config = {
    "num_heads": 3,
    "units": 24,
    "intermediate_units": 40,
    "num_blocks": 2,
    "num_inducing_points": 6,
    "num_mixtures": 4,
    "num_features": 3,
    "log_variance_limit": 2.5,
    "entropy_regularization": 0.3,
}


def add_weight(*shape):
    return nn.Parameter(torch.zeros(shape))


def gelu(x):
    return x * torch.special.ndtr(x)


class Dense(nn.Module):
    def __init__(self, input_dim, units, activation=None, use_bias=True):
        super().__init__()
        self.kernel = add_weight(input_dim, units)
        self.bias = add_weight(units) if use_bias else None
        self.activation = activation

    def forward(self, inputs):
        outputs = torch.tensordot(inputs, self.kernel, dims=1)
        if self.bias is not None:
            outputs = outputs + self.bias
        return outputs if self.activation is None else self.activation(outputs)


class EinsumDense(nn.Module):
    def __init__(self, equation, kernel_shape, bias_shape=None):
        super().__init__()
        self.equation = equation
        self.kernel = add_weight(*kernel_shape)
        self.bias = None if bias_shape is None else add_weight(*bias_shape)

    def forward(self, inputs):
        outputs = torch.einsum(self.equation, inputs, self.kernel)
        return outputs if self.bias is None else outputs + self.bias


class LayerNormalization(nn.Module):
    def __init__(self, units, epsilon=1e-5):
        super().__init__()
        self.epsilon = epsilon
        self.gamma = add_weight(units)
        self.beta = add_weight(units)

    def forward(self, inputs):
        variance, mean = torch.var_mean(inputs, dim=-1, correction=0, keepdim=True)
        scale = self.gamma / torch.sqrt(variance + self.epsilon)
        return inputs * scale + (self.beta - mean * scale)


class MultiHeadAttention(nn.Module):
    def __init__(self, units, num_heads):
        super().__init__()
        size = units // num_heads
        into, heads = (units, num_heads, size), (num_heads, size)
        self.query_dense = EinsumDense("btf,fnh->btnh", into, heads)
        self.key_dense = EinsumDense("bsf,fnh->bsnh", into)
        self.value_dense = EinsumDense("bsf,fnh->bsnh", into, heads)
        self.output_dense = EinsumDense("btnh,nhf->btf", (*heads, units), (units,))
        self.inverse_sqrt_key_dim = 1.0 / math.sqrt(size)

    def masked_softmax(self, scores, attention_mask):
        if attention_mask is not None:
            scores = scores + (1.0 - attention_mask[:, None, None, :]) * -1e9
        return torch.softmax(scores, dim=-1)

    def forward(self, query, value, attention_mask=None):
        query = self.query_dense(query)
        key = self.key_dense(value)
        value = self.value_dense(value)
        query = query * self.inverse_sqrt_key_dim
        scores = torch.einsum("bsnh,btnh->bnts", key, query)
        scores = self.masked_softmax(scores, attention_mask)
        return self.output_dense(torch.einsum("bnts,bsnh->btnh", scores, value))


class MultiHeadAttentionBlock(nn.Module):
    def __init__(self):
        super().__init__()
        units, wide = config["units"], config["intermediate_units"]
        self.attention = MultiHeadAttention(units, config["num_heads"])
        self.attention_norm = LayerNormalization(units)
        self.intermediate = Dense(units, wide, activation=gelu)
        self.projection = Dense(wide, units)
        self.output_norm = LayerNormalization(units)

    def forward(self, x, y, mask=None):
        attended = self.attention(x, y, attention_mask=mask)
        x = self.attention_norm(attended + x)
        outputs = self.projection(self.intermediate(x))
        return self.output_norm(outputs + x)


class InducedSetAttentionBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.inducing_points = add_weight(
            config["num_inducing_points"], config["units"]
        )
        self.to_inducing = MultiHeadAttentionBlock()
        self.to_inputs = MultiHeadAttentionBlock()

    def forward(self, inputs, mask):
        inducing = self.inducing_points[None].repeat(inputs.shape[0], 1, 1)
        summary = self.to_inducing(inducing, inputs, mask)
        return self.to_inputs(inputs, summary)


class PoolingByAttention(nn.Module):
    def __init__(self):
        super().__init__()
        units = config["units"]
        self.seed_vectors = add_weight(config["num_mixtures"], units)
        self.feed_forward = Dense(units, units, activation=torch.relu)
        self.attention_block = MultiHeadAttentionBlock()

    def forward(self, inputs, mask):
        seeds = self.seed_vectors[None].repeat(inputs.shape[0], 1, 1)
        features = self.feed_forward(inputs)
        return self.attention_block(seeds, features, mask)


class SetNormalization(nn.Module):
    """Gives the moments, too: [batch, 1, features]."""

    epsilon = 1e-4

    def forward(self, inputs, mask):
        weights = mask[:, :, None]
        total = torch.sum(weights, dim=1, keepdim=True)
        mean = torch.sum(inputs * weights, dim=1, keepdim=True) / total
        centered = (inputs - mean) * weights
        variance = torch.sum(centered**2, dim=1, keepdim=True) / total
        stddev = torch.sqrt(variance + self.epsilon)
        return centered / stddev, mean, stddev


class MixtureDensity(nn.Module):
    def __init__(self):
        super().__init__()
        units, features = config["units"], config["num_features"]
        self.logits = Dense(units, 1, use_bias=False)
        self.mu = Dense(units, features)
        self.log_sigma_sq = Dense(units, features)

    def forward(self, inputs, mean, stddev):
        logits = self.logits(inputs)[..., 0]
        limit = config["log_variance_limit"]
        log_variance = limit * torch.tanh(self.log_sigma_sq(inputs) / limit)
        log_variance = log_variance + torch.log(stddev**2)
        locations = self.mu(inputs) * stddev + mean
        return torch.log_softmax(logits, dim=1), locations, log_variance


def sequence_mask(lengths, maxlen):
    positions = torch.arange(maxlen).unsqueeze(0)
    return (positions < lengths.unsqueeze(1)).float()


class SetMixtureModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.normalization = SetNormalization()
        self.embedding = Dense(config["num_features"], config["units"])
        blocks = [InducedSetAttentionBlock() for _ in range(config["num_blocks"])]
        self.blocks = nn.ModuleList(blocks)
        self.pooling = PoolingByAttention()
        self.seed_attention = MultiHeadAttentionBlock()
        self.mixture = MixtureDensity()

    def forward(self, inputs, lengths):
        mask = sequence_mask(lengths, inputs.shape[1])
        x, mean, stddev = self.normalization(inputs, mask)
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, mask)
        x = self.pooling(x, mask)
        x = self.seed_attention(x, x)
        return self.mixture(x, mean, stddev)


# Variable names here, and what they are called in the checkpoint.
RENAMES = [
    (r"^embedding\.", "embed."),
    (r"^blocks\.(\d)\.inducing_points$", r"encoder.\1.inducing"),
    (r"^blocks\.(\d)\.to_inducing\.", r"encoder.\1.mab0."),
    (r"^blocks\.(\d)\.to_inputs\.", r"encoder.\1.mab1."),
    (r"^pooling\.seed_vectors$", "pool.seeds"),
    (r"^pooling\.feed_forward\.", "pool.rff."),
    (r"^pooling\.attention_block\.", "pool.mab."),
    (r"^seed_attention\.", "sab.mab."),
    (r"^mixture\.logits\.", "decoder.weight."),
    (r"^mixture\.mu\.", "decoder.mean."),
    (r"^mixture\.log_sigma_sq\.", "decoder.log_var."),
    (r"attention\.query_dense\.", "attn.q_proj."),
    (r"attention\.key_dense\.", "attn.k_proj."),
    (r"attention\.value_dense\.", "attn.v_proj."),
    (r"attention\.output_dense\.", "attn.out_proj."),
    (r"attention_norm\.", "ln0."),
    (r"output_norm\.", "ln1."),
    (r"\.intermediate\.", ".ff.0."),
    (r"\.projection\.", ".ff.2."),
    (r"\.(kernel|gamma)$", ".weight"),
    (r"\.beta$", ".bias"),
]


def checkpoint_name(name):
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def convert(name, array):
    """As the variable wants it, up to its shape."""
    if name.endswith("kernel"):
        return array.t()
    return array


def load_weights(net, path):
    checkpoint = torch.load(path)
    with torch.no_grad():
        for name, variable in net.named_parameters():
            array = convert(name, checkpoint[checkpoint_name(name)])
            variable.copy_(array.reshape(variable.shape))


def model():
    net = SetMixtureModel()
    load_weights(net, Path(__file__).with_name("weights.pt"))
    return net


def forward(net, batch):
    log_weights, locations, log_variance = net(batch["points"], batch["sizes"])
    return {
        "log_weights": log_weights,
        "means": locations,
        "log_vars": log_variance,
    }


def mixture_log_likelihood(x, log_weights, locations, log_variance):
    """[batch, points]"""
    difference = x.unsqueeze(2) - locations.unsqueeze(1)
    mahalanobis = torch.sum(
        difference**2 * torch.exp(-log_variance).unsqueeze(1), dim=-1
    )
    log_determinant = torch.sum(log_variance, dim=-1).unsqueeze(1)
    constant = x.shape[-1] * math.log(2.0 * math.pi)
    log_density = -0.5 * (mahalanobis + log_determinant + constant)
    return torch.logsumexp(log_density + log_weights.unsqueeze(1), dim=2)


def loss(output, batch):
    log_weights = output["log_weights"]
    log_likelihood = mixture_log_likelihood(
        batch["points"], log_weights, output["means"], output["log_vars"]
    )
    mask = sequence_mask(batch["sizes"], batch["points"].shape[1])
    per_set = torch.sum(log_likelihood * mask, dim=1) / torch.sum(mask, dim=1)
    entropy = torch.sum(torch.exp(log_weights) * -log_weights, dim=1)
    regularization = config["entropy_regularization"] * torch.mean(entropy)
    return -torch.mean(per_set) - regularization


class AdamW(torch.optim.Optimizer):
    """Variables decay before they move, but for those with an excluded name."""

    def __init__(
        self,
        net,
        learning_rate=4e-3,
        weight_decay=0.2,
        beta_1=0.9,
        beta_2=0.98,
        epsilon=1e-4,
    ):
        super().__init__(net.parameters(), {"lr": learning_rate})
        self.variables = dict(net.named_parameters())
        self.weight_decay = weight_decay
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.excluded = []
        self.iterations = 0
        self.momentums = {n: torch.zeros_like(v) for n, v in self.variables.items()}
        self.velocities = {n: torch.zeros_like(v) for n, v in self.variables.items()}

    def exclude_from_weight_decay(self, var_names):
        self.excluded = var_names

    def use_weight_decay(self, name):
        return not any(re.search(pattern, name) for pattern in self.excluded)

    @torch.no_grad()
    def step(self, closure=None):
        self.iterations += 1
        learning_rate = self.param_groups[0]["lr"]
        for name, variable in self.variables.items():
            if self.use_weight_decay(name):
                variable.sub_(variable * self.weight_decay * learning_rate)
            self.update_step(name, variable, variable.grad, learning_rate)

    def update_step(self, name, variable, gradient, learning_rate):
        m, v = self.momentums[name], self.velocities[name]
        m.add_((gradient - m) * (1 - self.beta_1))
        v.add_((gradient**2 - v) * (1 - self.beta_2))
        correction_1 = 1 - self.beta_1**self.iterations
        correction_2 = math.sqrt(1 - self.beta_2**self.iterations)
        alpha = learning_rate * correction_2 / correction_1
        epsilon_hat = self.epsilon * correction_2
        variable.sub_(alpha * m / (torch.sqrt(v) + epsilon_hat))


def optimizer(net):
    adam = AdamW(net)
    adam.exclude_from_weight_decay(
        ["bias$", "gamma$", "beta$", "inducing_points$", "seed_vectors$"]
    )
    return adam
