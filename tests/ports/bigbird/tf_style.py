"""After TensorFlow: Keras layers, one kernel for queries, keys and values, a simulated mask.

All scores are computed; those of blocks that are not seen are pushed down like padding.
"""

import math
from pathlib import Path

import torch
from torch import nn

bert_config = {
    "vocab_size": 37,
    "type_vocab_size": 2,
    "max_position_embeddings": 48,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_labels": 3,
    "block_size": 4,
    "num_blocks": 10,
    "num_rand_blocks": 2,
    "seed": 62,
    "layer_norm_epsilon": 1e-12,
}


# ----------------------------------------------------------------------------- masks


def get_rand_attn(seed):
    """For every head a dict of rows: the blocks drawn for the row."""
    num_blocks = bert_config["num_blocks"]
    generator = torch.Generator()
    generator.manual_seed(seed)
    rand_attn = []
    for _ in range(bert_config["num_attention_heads"]):
        plan = {}
        for row in range(1, num_blocks - 1):
            legal = list(range(1, row - 1)) + list(range(row + 2, num_blocks - 1))
            perm = torch.randperm(len(legal), generator=generator).tolist()
            plan[row] = [legal[p] for p in perm[: bert_config["num_rand_blocks"]]]
        rand_attn.append(plan)
    return rand_attn


def create_block_mask(seed):
    """[heads, blocks, blocks]: 1 where the block of a row sees that of a column."""
    num_blocks = bert_config["num_blocks"]
    index = torch.arange(num_blocks)
    distance = torch.abs(index[:, None] - index[None, :])
    band = (distance <= 1).float()
    band[0, :] = band[-1, :] = 1.0
    band[:, 0] = band[:, -1] = 1.0
    masks = []
    for plan in get_rand_attn(seed):
        mask = band.clone()
        for row, columns in plan.items():
            mask[row, columns] = 1.0
        masks.append(mask)
    return torch.stack(masks)


def block_to_token_mask(block_mask):
    size = bert_config["block_size"]
    mask = torch.repeat_interleave(block_mask, size, dim=1)
    return torch.repeat_interleave(mask, size, dim=2)


# ---------------------------------------------------------------------------- layers


def add_weight(*shape):
    return nn.Parameter(torch.zeros(shape))


def gelu(x):
    cdf = 0.5 * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return x * cdf


class DenseLayer(nn.Module):
    def __init__(self, input_size, output_size, activation=None):
        super().__init__()
        self.kernel = add_weight(input_size, output_size)
        self.bias = add_weight(output_size)
        self.activation = activation

    def forward(self, inputs):
        outputs = torch.matmul(inputs, self.kernel) + self.bias
        return outputs if self.activation is None else self.activation(outputs)


class NormLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = add_weight(bert_config["hidden_size"])
        self.beta = add_weight(bert_config["hidden_size"])
        self.epsilon = bert_config["layer_norm_epsilon"]

    def forward(self, inputs):
        variance, mean = torch.var_mean(inputs, dim=-1, correction=0, keepdim=True)
        inv = self.gamma / torch.sqrt(variance + self.epsilon)
        return inputs * inv + (self.beta - mean * inv)


class EmbeddingLayer(nn.Module):
    def __init__(self):
        super().__init__()
        width = bert_config["hidden_size"]
        self.word_embeddings = add_weight(bert_config["vocab_size"], width)
        self.token_type_table = add_weight(bert_config["type_vocab_size"], width)
        self.position_table = add_weight(bert_config["max_position_embeddings"], width)
        self.layer_norm = NormLayer()

    def forward(self, input_ids, segment_ids):
        output = torch.index_select(self.word_embeddings, 0, input_ids.flatten())
        output = output.reshape(*input_ids.shape, -1)
        # There are few types: a product with one-hot rows is fastest.
        one_hot = nn.functional.one_hot(segment_ids, bert_config["type_vocab_size"])
        output = output + torch.matmul(one_hot.float(), self.token_type_table)
        positions = self.position_table[0 : input_ids.shape[1]]
        output = output + torch.unsqueeze(positions, 0)
        return self.layer_norm(output)

    def linear(self, inputs):
        """Scores of all words."""
        return torch.matmul(inputs, torch.transpose(self.word_embeddings, 0, 1))


class MultiHeadedAttentionLayer(nn.Module):
    def __init__(self, seed):
        super().__init__()
        width = bert_config["hidden_size"]
        self.num_heads = bert_config["num_attention_heads"]
        self.size_per_head = width // self.num_heads
        self.qkv_kernel = add_weight(width, 3 * width)
        self.query_bias = add_weight(width)
        self.value_bias = add_weight(width)
        self.rand_mask = block_to_token_mask(create_block_mask(seed))

    def transpose_for_scores(self, tensor):
        batch_size, seq_length, _ = tensor.shape
        tensor = tensor.reshape(
            batch_size, seq_length, self.num_heads, self.size_per_head
        )
        return torch.permute(tensor, (0, 2, 1, 3))

    def forward(self, inputs, input_mask):
        qkv = torch.matmul(inputs, self.qkv_kernel)
        query, key, value = torch.split(qkv, inputs.shape[-1], dim=-1)
        query = self.transpose_for_scores(query + self.query_bias)
        key = self.transpose_for_scores(key)
        value = self.transpose_for_scores(value + self.value_bias)

        attention_scores = torch.matmul(query, torch.transpose(key, 2, 3))
        attention_scores = attention_scores * (1.0 / math.sqrt(self.size_per_head))
        to_mask = input_mask[:, None, None, :]
        attention_mask = self.rand_mask[None] * to_mask
        adder = (1.0 - attention_mask) * -10000.0
        attention_scores = attention_scores + adder
        log_probs = attention_scores - torch.logsumexp(
            attention_scores, dim=-1, keepdim=True
        )
        attention_probs = torch.exp(log_probs)

        context_layer = torch.matmul(attention_probs, value)
        context_layer = torch.permute(context_layer, (0, 2, 1, 3))
        context_layer = context_layer.reshape(inputs.shape)
        return context_layer * input_mask[:, :, None]


class PostNormEncoderLayer(nn.Module):
    def __init__(self, seed):
        super().__init__()
        width, inner = bert_config["hidden_size"], bert_config["intermediate_size"]
        self.attn_layer = MultiHeadedAttentionLayer(seed)
        self.projection_layer = DenseLayer(width, width)
        self.attention_layer_norm = NormLayer()
        self.expand_layer = DenseLayer(width, inner, activation=gelu)
        self.contract_layer = DenseLayer(inner, width)
        self.output_layer_norm = NormLayer()

    def forward(self, layer_input, input_mask):
        attention_output = self.attn_layer(layer_input, input_mask)
        attention_output = self.projection_layer(attention_output)
        attention_output = self.attention_layer_norm(attention_output + layer_input)
        intermediate_output = self.expand_layer(attention_output)
        layer_output = self.contract_layer(intermediate_output)
        return self.output_layer_norm(layer_output + attention_output)


class MaskedLMLayer(nn.Module):
    def __init__(self):
        super().__init__()
        width = bert_config["hidden_size"]
        self.extra_layer = DenseLayer(width, width)
        self.norm_layer = NormLayer()
        self.output_bias = add_weight(bert_config["vocab_size"])

    def forward(self, input_tensor, embedder):
        input_tensor = self.norm_layer(gelu(self.extra_layer(input_tensor)))
        return embedder.linear(input_tensor) + self.output_bias


class BertModel(nn.Module):
    def __init__(self):
        super().__init__()
        width = bert_config["hidden_size"]
        self.embedder = EmbeddingLayer()
        self.encoder_layers = nn.ModuleList(
            PostNormEncoderLayer(bert_config["seed"] + i)
            for i in range(bert_config["num_hidden_layers"])
        )
        self.pooler = DenseLayer(width, width, activation=torch.tanh)
        self.simple_classifier = DenseLayer(width, bert_config["num_labels"])
        self.masked_lm = MaskedLMLayer()

    def forward(self, features):
        input_ids, segment_ids = features["input_ids"], features["segment_ids"]
        sequence_output = self.embedder(input_ids, segment_ids)
        for layer in self.encoder_layers:
            sequence_output = layer(sequence_output, features["input_mask"])
        first_token_tensor = sequence_output[:, 0, :]
        logits = self.simple_classifier(self.pooler(first_token_tensor))
        return logits, self.masked_lm(sequence_output, self.embedder)


# ------------------------------------------------------------------------ checkpoint

DENSE = {
    "projection_layer": "attention_output",
    "expand_layer": "intermediate",
    "contract_layer": "output",
}
NORMS = {
    "attention_layer_norm": "attention_norm",
    "output_layer_norm": "output_norm",
}


class Checkpoint:
    """What PyTorch saved, under the names of this file."""

    def __init__(self, path):
        self.reader = torch.load(path)
        self.values = {}

    def dense(self, ours, theirs):
        kernel = self.reader[theirs + ".weight"]
        self.values[ours + ".kernel"] = torch.transpose(kernel, 0, 1)
        self.values[ours + ".bias"] = self.reader[theirs + ".bias"]

    def norm(self, ours, theirs):
        self.values[ours + ".gamma"] = self.reader[theirs + ".weight"]
        self.values[ours + ".beta"] = self.reader[theirs + ".bias"]

    def attention(self, ours, theirs):
        names = ("query", "key", "value")
        kernels = [self.reader[f"{theirs}.{name}.weight"] for name in names]
        self.values[ours + ".qkv_kernel"] = torch.cat([k.T for k in kernels], dim=1)
        self.values[ours + ".query_bias"] = self.reader[theirs + ".query.bias"]
        self.values[ours + ".value_bias"] = self.reader[theirs + ".value.bias"]

    def embeddings(self):
        found = {
            "word_embeddings": "word_embeddings",
            "position_table": "position_embeddings",
            "token_type_table": "token_type_embeddings",
        }
        for ours, theirs in found.items():
            value = self.reader[f"embeddings.{theirs}.weight"]
            self.values[f"embedder.{ours}"] = value
        self.norm("embedder.layer_norm", "embeddings.norm")

    def encoder_layer(self, index):
        ours, theirs = f"encoder_layers.{index}", f"layers.{index}"
        self.attention(f"{ours}.attn_layer", f"{theirs}.attention")
        for name, source in DENSE.items():
            self.dense(f"{ours}.{name}", f"{theirs}.{source}")
        for name, source in NORMS.items():
            self.norm(f"{ours}.{name}", f"{theirs}.{source}")

    def read(self):
        self.embeddings()
        for index in range(bert_config["num_hidden_layers"]):
            self.encoder_layer(index)
        self.dense("pooler", "pooler")
        self.dense("simple_classifier", "classifier")
        self.dense("masked_lm.extra_layer", "predictions.transform")
        self.norm("masked_lm.norm_layer", "predictions.norm")
        self.values["masked_lm.output_bias"] = self.reader["predictions.bias"]
        return self.values


def model():
    net = BertModel()
    values = Checkpoint(Path(__file__).parent / "weights.pt").read()
    with torch.no_grad():
        for name, var in net.named_parameters():
            if name in values:
                var.copy_(values[name])
    return net


# ----------------------------------------------------------------------------- input


def pad_to_length(tensor, length):
    padded = tensor.new_zeros(tensor.shape[0], length)
    padded[:, : tensor.shape[1]] = tensor
    return padded


def forward(net, batch):
    length = bert_config["block_size"] * bert_config["num_blocks"]
    features = {
        "input_ids": pad_to_length(batch["input_ids"], length),
        "segment_ids": pad_to_length(batch["token_type_ids"], length),
        "input_mask": pad_to_length(batch["attention_mask"], length).float(),
    }
    logits, lm_logits = net(features)
    lm_logits = lm_logits[:, : batch["input_ids"].shape[1]]
    return {"class_logits": logits, "token_logits": lm_logits}


# ------------------------------------------------------------------------------ loss


def per_example_loss(logits, labels, depth):
    """Zero for labels that are no class."""
    one_hot_labels = (labels[..., None] == torch.arange(depth)).float()
    log_probs = torch.log_softmax(logits, dim=-1)
    return -torch.sum(one_hot_labels * log_probs, dim=-1)


def loss(output, batch):
    label_weights = (batch["token_labels"] != -100).float()
    lm_losses = per_example_loss(
        output["token_logits"], batch["token_labels"], bert_config["vocab_size"]
    )
    numerator = torch.sum(label_weights * lm_losses)
    denominator = torch.sum(label_weights)
    masked_lm_loss = numerator / denominator
    class_losses = per_example_loss(
        output["class_logits"], batch["label"], bert_config["num_labels"]
    )
    return masked_lm_loss + 0.5 * torch.mean(class_losses)


# ------------------------------------------------------------------------- optimizer


class AdamWeightDecayOptimizer(torch.optim.Optimizer):
    """Decay stays outside the moments; variables whose names match are left out of it."""

    def __init__(self, net, learning_rate, weight_decay_rate, exclude):
        super().__init__(net.parameters(), {})
        self.variable_names = {var: name for name, var in net.named_parameters()}
        self.learning_rate, self.weight_decay_rate = learning_rate, weight_decay_rate
        self.exclude_from_weight_decay = exclude
        self.beta_1, self.beta_2, self.epsilon = 0.9, 0.98, 1e-6
        self.iterations = 0

    def do_use_weight_decay(self, name):
        return not any(part in name for part in self.exclude_from_weight_decay)

    @torch.no_grad()
    def step(self, closure=None):
        self.iterations += 1
        power_1 = 1.0 - self.beta_1**self.iterations
        power_2 = math.sqrt(1.0 - self.beta_2**self.iterations)
        rate = self.learning_rate * power_2 / power_1
        for param, name in self.variable_names.items():
            grad, next_param = param.grad, param
            if self.do_use_weight_decay(name):
                decay = self.weight_decay_rate * param
                next_param = param - self.learning_rate * decay
            slot = self.state[param]
            if len(slot) == 0:
                slot["m"] = torch.zeros_like(param)
                slot["v"] = torch.zeros_like(param)
            slot["m"] = self.beta_1 * slot["m"] + (1.0 - self.beta_1) * grad
            slot["v"] = self.beta_2 * slot["v"] + (1.0 - self.beta_2) * grad**2
            update = slot["m"] / (torch.sqrt(slot["v"]) + self.epsilon * power_2)
            param.copy_(next_param - rate * update)


def optimizer(net):
    return AdamWeightDecayOptimizer(
        net,
        learning_rate=5e-3,
        weight_decay_rate=0.1,
        exclude=("gamma", "beta", "bias"),
    )
