"""After TensorFlow: overlapping frames of keys below blocks of queries, bands by band_part.

Tensors are [batch, tokens, heads, units]; a dilated layer moves phases into an axis before
the tokens, as space_to_batch does.
"""

import re
from pathlib import Path

import torch
from torch import nn

PAD_ID, IGNORED = 1, -100
UNITS, NUM_HEADS, INTERMEDIATE = 24, 3, 48
HEAD_UNITS = UNITS // NUM_HEADS
ATTENTION_SIDE, BLOCK = 3, 4
LAYER_DILATION = [1, 2, 1]
MASKED = -10000.0


# -------------------------------------------------------------------------- basics


class Dense(nn.Module):
    def __init__(self, inputs, units, use_bias=True):
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(inputs, units))
        if use_bias:
            self.bias = nn.Parameter(torch.zeros(units))
        self.use_bias = use_bias

    def forward(self, inputs):
        outputs = torch.tensordot(inputs, self.kernel, dims=1)
        return outputs + self.bias if self.use_bias else outputs


class LayerNormalization(nn.Module):
    def __init__(self, units, epsilon=1e-5):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(units))
        self.beta = nn.Parameter(torch.zeros(units))
        self.epsilon = epsilon

    def forward(self, inputs):
        variance, mean = torch.var_mean(inputs, -1, correction=0, keepdim=True)
        inv = self.gamma / torch.sqrt(variance + self.epsilon)
        return inputs * inv + (self.beta - mean * inv)


class Table(nn.Module):
    def __init__(self, rows, units):
        super().__init__()
        self.embeddings = nn.Parameter(torch.zeros(rows, units))


def softmax(logits):
    return torch.exp(logits - torch.logsumexp(logits, dim=-1, keepdim=True))


def gelu(x):
    cdf = 0.5 * (1.0 + torch.erf(x / 2.0**0.5))
    return x * cdf


def band_part(matrix, num_lower, num_upper):
    return torch.triu(torch.tril(matrix, num_upper), -num_lower)


# ----------------------------------------------------------------------- attention


def space_to_batch(x, rate):
    """[batch, tokens, ...] -> [batch, rate, tokens / rate, ...]."""
    x = torch.reshape(x, (x.shape[0], -1, rate, *x.shape[2:]))
    return torch.swapaxes(x, 1, 2)


def batch_to_space(x):
    """[batch, rate, tokens, ...] -> [batch, tokens * rate, ...]."""
    x = torch.swapaxes(x, 1, 2)
    return torch.reshape(x, (x.shape[0], -1, *x.shape[3:]))


def blocks(x):
    """[batch, rate, tokens, ...] -> [batch, rate, blocks, BLOCK, ...]."""
    return torch.reshape(x, (*x.shape[:2], -1, BLOCK, *x.shape[3:]))


def frames(x):
    """Each block with a side of tokens on either hand, [batch, rate, blocks, frame, ...]."""
    paddings = (0, 0) * (x.ndim - 3) + (ATTENTION_SIDE, ATTENTION_SIDE)
    x = nn.functional.pad(x, paddings)
    size = BLOCK + 2 * ATTENTION_SIDE
    starts = range(0, x.shape[2] - size + 1, BLOCK)
    return torch.stack([x[:, :, start : start + size] for start in starts], dim=2)


class TFLongformerSelfAttention(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate
        self.query = Dense(UNITS, UNITS)
        self.key = Dense(UNITS, UNITS, use_bias=False)
        self.value = Dense(UNITS, UNITS)
        self.query_global = Dense(UNITS, UNITS)
        self.kv_global = Dense(UNITS, 2 * UNITS, use_bias=False)
        self.value_global_bias = nn.Parameter(torch.zeros(UNITS))
        self.output_dense = Dense(UNITS, UNITS)

    def split(self, x):
        return torch.reshape(x, (*x.shape[:-1], NUM_HEADS, HEAD_UNITS))

    def band_context(self, hidden_states, attention_mask):
        query = self.split(self.query(hidden_states)) * HEAD_UNITS**-0.5
        key = self.split(self.key(hidden_states))
        value = self.split(self.value(hidden_states))
        key_0, value_0 = key[:, :1], value[:, :1]
        local_mask = attention_mask.clone()
        local_mask[:, 0] = 0.0

        query = blocks(space_to_batch(query, self.rate))
        key = frames(space_to_batch(key, self.rate))
        value = frames(space_to_batch(value, self.rate))
        local_mask = frames(space_to_batch(local_mask, self.rate))
        band = torch.ones(BLOCK, BLOCK + 2 * ATTENTION_SIDE)
        band = band_part(band, 0, 2 * ATTENTION_SIDE)
        visible = band * local_mask[:, :, :, None, :]

        scores = torch.einsum("brnqhd,brnkhd->brnhqk", query, key)
        scores = scores + (1.0 - visible[:, :, :, None]) * MASKED
        score_0 = torch.einsum("brnqhd,bkhd->brnhqk", query, key_0)
        probs = softmax(torch.cat([score_0, scores], dim=-1))
        prob_0, probs = probs[..., :1], probs[..., 1:]
        context = torch.einsum("brnhqk,brnkhd->brnqhd", probs, value)
        context = context + torch.einsum("brnhqk,bkhd->brnqhd", prob_0, value_0)
        context = batch_to_space(torch.flatten(context, 2, 3))
        return context * attention_mask[:, :, None, None]

    def global_context(self, hidden_states, attention_mask):
        query = self.split(self.query_global(hidden_states[:, :1]))
        key, value = torch.split(self.kv_global(hidden_states), UNITS, dim=-1)
        key, value = self.split(key), self.split(value + self.value_global_bias)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / HEAD_UNITS**0.5
        scores = scores + (1.0 - attention_mask[:, None, None, :]) * MASKED
        return torch.einsum("bhqk,bkhd->bqhd", softmax(scores), value)

    def forward(self, hidden_states, attention_mask):
        context = self.band_context(hidden_states, attention_mask)
        first = self.global_context(hidden_states, attention_mask)
        context = torch.cat([first, context[:, 1:]], dim=1)
        return self.output_dense(torch.flatten(context, 2))


# --------------------------------------------------------------------------- model


class TFLongformerLayer(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.attention = TFLongformerSelfAttention(rate)
        self.attention_norm = LayerNormalization(UNITS)
        self.intermediate_dense = Dense(UNITS, INTERMEDIATE)
        self.output_dense = Dense(INTERMEDIATE, UNITS)
        self.output_norm = LayerNormalization(UNITS)

    def forward(self, hidden_states, attention_mask):
        attention_output = self.attention(hidden_states, attention_mask)
        hidden_states = self.attention_norm(hidden_states + attention_output)
        layer_output = gelu(self.intermediate_dense(hidden_states))
        layer_output = self.output_dense(layer_output)
        return self.output_norm(hidden_states + layer_output)


class TFLongformerEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = Table(40, UNITS)
        self.position_embeddings = Table(26, UNITS)
        self.token_type_embeddings = Table(2, UNITS)
        self.norm = LayerNormalization(UNITS)

    def forward(self, input_ids, token_type_ids, attention_mask):
        mask = attention_mask.to(torch.int64)
        position_ids = torch.cumsum(mask, dim=1) * mask + PAD_ID
        one_hot = (token_type_ids[..., None] == torch.arange(2)).float()
        embeddings = self.word_embeddings.embeddings[input_ids]
        embeddings = embeddings + self.position_embeddings.embeddings[position_ids]
        embeddings = embeddings + one_hot @ self.token_type_embeddings.embeddings
        return self.norm(embeddings)


class TFLongformerForTokenClassification(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = TFLongformerEmbeddings()
        self.layer = nn.ModuleList(TFLongformerLayer(r) for r in LAYER_DILATION)
        self.classifier = Dense(UNITS, 5)

    def forward(self, input_ids, token_type_ids):
        seq_len = input_ids.shape[1]
        multiple = BLOCK * max(LAYER_DILATION)
        padding_len = (multiple - seq_len % multiple) % multiple
        input_ids = nn.functional.pad(input_ids, (0, padding_len), value=PAD_ID)
        token_type_ids = nn.functional.pad(token_type_ids, (0, padding_len))
        attention_mask = (input_ids != PAD_ID).float()
        hidden_states = self.embeddings(input_ids, token_type_ids, attention_mask)
        for layer in self.layer:
            hidden_states = layer(hidden_states, attention_mask)
        return self.classifier(hidden_states)[:, :seq_len]


# ------------------------------------------------------------------------- weights

TO_PYTORCH = {
    "word_embeddings": "word",
    "position_embeddings": "position",
    "token_type_embeddings": "segment",
    "attention_norm": "norm1",
    "output_norm": "norm2",
    "intermediate_dense": "fc1",
    "attention.output_dense": "attn.out",
    "output_dense": "fc2",
    "layer.": "layers.",
    "attention.": "attn.",
    "value_global_bias": "value_global.bias",
    "kernel": "weight",
    "embeddings$": "weight",
    "gamma": "weight",
    "beta": "bias",
}


def pytorch_name(name):
    for ours, theirs in TO_PYTORCH.items():
        name = re.sub(ours, theirs, name)
    return name


def pytorch_array(state, name):
    name = pytorch_name(name)
    if "kv_global" in name:
        sources = ("key_global", "value_global")
        arrays = [state[name.replace("kv_global", source)] for source in sources]
        return torch.cat(arrays)
    return state[name]


@torch.no_grad()
def load_pytorch_checkpoint(net, state):
    for name, variable in net.named_parameters():
        array = pytorch_array(state, name)
        if name.endswith("kernel"):
            array = torch.transpose(array, 0, 1)
        variable.copy_(array)


def model():
    net = TFLongformerForTokenClassification()
    path = Path(__file__).with_name("weights.pt")
    load_pytorch_checkpoint(net, torch.load(path))
    return net


def forward(net, batch):
    return net(batch["ids"], batch["types"])


# ---------------------------------------------------------------------------- loss


def loss(output, batch):
    """Labels that are not counted have weight 0."""
    labels = torch.flatten(batch["labels"])
    logits = torch.reshape(output, (-1, output.shape[-1]))
    active = (labels != IGNORED).float()
    y_true = (labels[:, None] == torch.arange(logits.shape[-1])).float()
    true_logit = torch.sum(y_true * logits, dim=-1)
    crossentropy = torch.logsumexp(logits, dim=-1) - true_logit
    return torch.sum(crossentropy * active) / torch.sum(active)


# ----------------------------------------------------------------------- optimizer


class WarmUp:
    """In a line up to the rate, then the line that PolynomialDecay of power 1 gives."""

    def __init__(self, initial_learning_rate, warmup_steps, num_train_steps):
        self.initial_learning_rate = initial_learning_rate
        self.warmup_steps, self.num_train_steps = warmup_steps, num_train_steps

    def __call__(self, step):
        if step <= self.warmup_steps:
            return self.initial_learning_rate * step / self.warmup_steps
        decay_steps = self.num_train_steps - self.warmup_steps
        left = 1.0 - (step - self.warmup_steps) / decay_steps
        return self.initial_learning_rate * left


class AdamWeightDecay(torch.optim.Optimizer):
    def __init__(self, named_variables, learning_rate):
        named_variables = dict(named_variables)
        super().__init__(list(named_variables.values()), {})
        self.variables = named_variables
        self.learning_rate = learning_rate
        self.beta_1, self.beta_2, self.epsilon = 0.9, 0.98, 1e-6
        self.weight_decay_rate = 0.1
        self.exclude = ("gamma", "beta", "bias")
        self.clipnorm = 0.5
        self.iterations = 0

    def clipped(self, gradients):
        global_norm = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(g) for g in gradients])
        )
        scale = self.clipnorm / torch.clamp(global_norm, min=self.clipnorm)
        return [g * scale for g in gradients]

    @torch.no_grad()
    def step(self, closure=None):
        self.iterations += 1
        lr = self.learning_rate(self.iterations)
        correction = (1.0 - self.beta_2**self.iterations) ** 0.5
        alpha = lr * correction / (1.0 - self.beta_1**self.iterations)
        gradients = self.clipped([v.grad for v in self.variables.values()])
        for (name, var), gradient in zip(self.variables.items(), gradients):
            slot = self.state[var]
            if not slot:
                slot["m"], slot["v"] = torch.zeros_like(var), torch.zeros_like(var)
            if not name.endswith(self.exclude):
                var.sub_(lr * self.weight_decay_rate * var)
            slot["m"].add_((gradient - slot["m"]) * (1.0 - self.beta_1))
            slot["v"].add_((torch.square(gradient) - slot["v"]) * (1.0 - self.beta_2))
            denominator = torch.sqrt(slot["v"]) + self.epsilon * correction
            var.sub_(alpha * slot["m"] / denominator)


def optimizer(net):
    schedule = WarmUp(4e-3, warmup_steps=2, num_train_steps=10)
    return AdamWeightDecay(net.named_parameters(), schedule)
