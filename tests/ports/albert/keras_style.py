"""After Keras: layers that build their weights, kernels with axes for heads, added losses.

Words to be guessed are gathered before the head, as many for each example; those that only
fill up have no weight. Variables have paths, and the optimizer tells them by these.
"""

import math
import re
from pathlib import Path

import torch
from torch import nn

CONFIG = {
    "vocab_size": 150,
    "embedding_width": 16,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_layers": 3,
    "intermediate_size": 80,
    "max_sequence_length": 32,
    "type_vocab_size": 2,
}
MAX_PREDICTIONS_PER_SEQ = 4
PAD_ID, SEP_ID, MASK_ID = 0, 2, 3


# ------------------------------------------------------------------ layers


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.added_losses = []

    def add_weight(self, name, shape):
        self.register_parameter(name, nn.Parameter(torch.zeros(*shape)))

    def add_loss(self, value):
        self.added_losses.append(value)

    def forward(self, *inputs, **options):
        return self.call(*inputs, **options)


def gelu(x):
    cdf = 1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3)))
    return x * 0.5 * cdf


def linear(x):
    return x


class EinsumDense(Layer):
    """The output's last axes are given; the bias has the axes that are named."""

    def __init__(self, equation, output_shape, bias_axes, activation=linear):
        super().__init__()
        self.equation, self.output_shape = equation, output_shape
        self.bias_axes, self.activation = bias_axes, activation

    def build(self, input_shape):
        inputs, kernel, output = re.split(",|->", self.equation)
        sizes = dict(zip(inputs, input_shape))
        sizes |= dict(zip(output[-len(self.output_shape) :], self.output_shape))
        self.add_weight("kernel", [sizes[axis] for axis in kernel])
        self.add_weight("bias", [sizes[axis] for axis in self.bias_axes])

    def call(self, inputs):
        outputs = torch.einsum(self.equation, inputs, self.kernel)
        return self.activation(outputs + self.bias)


class LayerNormalization(Layer):
    def __init__(self, epsilon=1e-12):
        super().__init__()
        self.epsilon = epsilon

    def build(self, input_shape):
        self.add_weight("gamma", input_shape[-1:])
        self.add_weight("beta", input_shape[-1:])

    def call(self, inputs):
        mean = torch.mean(inputs, dim=-1, keepdim=True)
        squares = torch.square(inputs - mean.detach())
        variance = torch.mean(squares, dim=-1, keepdim=True)
        inv = torch.rsqrt(variance + self.epsilon) * self.gamma
        return inputs * inv + (self.beta - mean * inv)


class Embedding(Layer):
    def __init__(self, input_dim, output_dim, use_one_hot=False):
        super().__init__()
        self.input_dim, self.output_dim = input_dim, output_dim
        self.use_one_hot = use_one_hot

    def build(self, input_shape):
        self.add_weight("embeddings", (self.input_dim, self.output_dim))

    def call(self, ids):
        if self.use_one_hot:
            one_hot = nn.functional.one_hot(ids, self.input_dim)
            return torch.matmul(one_hot.to(self.embeddings.dtype), self.embeddings)
        return self.embeddings[ids]


class PositionEmbedding(Layer):
    def __init__(self, max_length, width):
        super().__init__()
        self.max_length, self.width = max_length, width

    def build(self, input_shape):
        self.add_weight("embeddings", (self.max_length, self.width))

    def call(self, inputs):
        batch_size, seq_length, width = inputs.shape
        table = self.embeddings[:seq_length]
        return torch.broadcast_to(table, (batch_size, seq_length, width))


class MultiHeadAttention(Layer):
    def __init__(self, num_heads, key_dim, width):
        super().__init__()
        self.key_dim = key_dim
        heads = (num_heads, key_dim)
        self.query = EinsumDense("abc,cde->abde", heads, "de")
        self.key = EinsumDense("abc,cde->abde", heads, "de")
        self.value = EinsumDense("abc,cde->abde", heads, "de")
        self.attention_output = EinsumDense("abcd,cde->abe", (width,), "e")
        self.heads = heads

    def build(self, input_shape):
        for layer in (self.query, self.key, self.value):
            layer.build(input_shape)
        self.attention_output.build((*input_shape[:-1], *self.heads))

    def call(self, inputs, mask):
        query, key, value = self.query(inputs), self.key(inputs), self.value(inputs)
        query = query * (1.0 / math.sqrt(float(self.key_dim)))
        scores = torch.einsum("aecd,abcd->acbe", key, query)
        adder = (1.0 - mask.to(scores.dtype)) * -1e9
        scores = scores + adder[:, None, None, :]
        scores = torch.softmax(scores, dim=-1)
        context = torch.einsum("acbe,aecd->abcd", scores, value)
        return self.attention_output(context)


class TransformerBlock(Layer):
    def __init__(self, width, num_heads, inner):
        super().__init__()
        self.self_attention = MultiHeadAttention(num_heads, width // num_heads, width)
        self.self_attention_layer_norm = LayerNormalization()
        self.intermediate = EinsumDense("abc,cd->abd", (inner,), "d", gelu)
        self.output = EinsumDense("abc,cd->abd", (width,), "d")
        self.output_layer_norm = LayerNormalization()
        self.inner = inner

    def build(self, input_shape):
        self.self_attention.build(input_shape)
        self.self_attention_layer_norm.build(input_shape)
        self.intermediate.build(input_shape)
        self.output.build((*input_shape[:-1], self.inner))
        self.output_layer_norm.build(input_shape)

    def call(self, inputs, mask):
        attention = self.self_attention(inputs, mask=mask)
        attention = self.self_attention_layer_norm(inputs + attention)
        layer_output = self.output(self.intermediate(attention))
        return self.output_layer_norm(layer_output + attention)


class AlbertEncoder(Layer):
    def __init__(self, config):
        super().__init__()
        narrow, width = config["embedding_width"], config["hidden_size"]
        self.narrow, self.width = narrow, width
        self.num_layers = config["num_layers"]
        self.word_embeddings = Embedding(config["vocab_size"], narrow)
        self.position_embedding = PositionEmbedding(
            config["max_sequence_length"], narrow
        )
        self.type_embeddings = Embedding(
            config["type_vocab_size"], narrow, use_one_hot=True
        )
        self.embeddings_layer_norm = LayerNormalization()
        self.embedding_projection = EinsumDense("abc,cd->abd", (width,), "d")
        self.transformer = TransformerBlock(
            width, config["num_attention_heads"], config["intermediate_size"]
        )
        self.pooler_transform = EinsumDense(
            "ac,cd->ad", (width,), "d", activation=torch.tanh
        )

    def build(self, input_shape):
        narrow, wide = (*input_shape, self.narrow), (*input_shape, self.width)
        self.word_embeddings.build(input_shape)
        self.position_embedding.build(narrow)
        self.type_embeddings.build(input_shape)
        self.embeddings_layer_norm.build(narrow)
        self.embedding_projection.build(narrow)
        self.transformer.build(wide)
        self.pooler_transform.build((wide[0], wide[2]))

    def call(self, word_ids, mask, type_ids):
        embeddings = self.word_embeddings(word_ids)
        embeddings = embeddings + self.position_embedding(embeddings)
        embeddings = embeddings + self.type_embeddings(type_ids)
        embeddings = self.embeddings_layer_norm(embeddings)
        data = self.embedding_projection(embeddings)
        for _ in range(self.num_layers):
            data = self.transformer(data, mask=mask)
        pooled = self.pooler_transform(data[:, 0])
        return data, pooled


class MaskedLM(Layer):
    def __init__(self, vocab_size, width):
        super().__init__()
        self.vocab_size, self.width = vocab_size, width
        self.dense = EinsumDense("ac,cd->ad", (width,), "d", activation=gelu)
        self.layer_norm = LayerNormalization()

    def build(self, input_shape):
        self.dense.build((None, input_shape[-1]))
        self.layer_norm.build((None, self.width))
        self.add_weight("output_bias", (self.vocab_size,))

    def call(self, sequence_data, embedding_table, masked_positions):
        masked_lm_input = self.gather_indexes(sequence_data, masked_positions)
        lm_data = self.layer_norm(self.dense(masked_lm_input))
        logits = torch.matmul(lm_data, embedding_table.T) + self.output_bias
        return torch.reshape(logits, (*masked_positions.shape, self.vocab_size))

    def gather_indexes(self, sequence_tensor, positions):
        batch_size, seq_length, width = sequence_tensor.shape
        flat_offsets = torch.reshape(torch.arange(batch_size) * seq_length, (-1, 1))
        flat_positions = torch.reshape(positions + flat_offsets, (-1,))
        flat_sequence = torch.reshape(sequence_tensor, (batch_size * seq_length, width))
        return torch.index_select(flat_sequence, 0, flat_positions)


class SparseCategoricalCrossentropy:
    """Of each element: nothing is reduced here."""

    def __init__(self, from_logits=False):
        self.from_logits = from_logits

    def __call__(self, y_true, y_pred):
        if self.from_logits:
            log_probs = y_pred - torch.logsumexp(y_pred, dim=-1, keepdim=True)
        else:
            log_probs = torch.log(torch.clamp(y_pred, 1e-7, 1.0 - 1e-7))
        return -torch.gather(log_probs, -1, y_true[..., None])[..., 0]


class AlbertPretrainer(Layer):
    def __init__(self, config):
        super().__init__()
        self.encoder = AlbertEncoder(config)
        self.masked_lm = MaskedLM(config["vocab_size"], config["embedding_width"])
        self.sentence_order = EinsumDense("ac,cd->ad", (2,), "d")
        self.width = config["hidden_size"]
        self.build((None, None))

    def build(self, input_shape):
        self.encoder.build(input_shape)
        self.masked_lm.build((*input_shape, self.width))
        self.sentence_order.build((input_shape[0], self.width))

    def call(self, features):
        self.added_losses.clear()
        sequence_output, pooled_output = self.encoder(
            features["input_word_ids"],
            features["input_mask"],
            features["input_type_ids"],
        )
        table = self.encoder.word_embeddings.embeddings
        lm_output = self.masked_lm(
            sequence_output, table, features["masked_lm_positions"]
        )
        order_output = self.sentence_order(pooled_output)
        self.add_lm_loss(lm_output, features)
        self.add_order_loss(order_output, features)
        return lm_output, order_output

    def add_lm_loss(self, lm_output, features):
        weights = features["masked_lm_weights"].to(lm_output.dtype)
        loss_fn = SparseCategoricalCrossentropy(from_logits=True)
        lm_losses = loss_fn(features["masked_lm_ids"], lm_output)
        lm_numerator = torch.sum(lm_losses * weights)
        lm_denominator = torch.sum(weights)
        self.add_loss(lm_numerator / lm_denominator)

    def add_order_loss(self, order_output, features):
        order_fn = SparseCategoricalCrossentropy(from_logits=True)
        self.add_loss(torch.mean(order_fn(features["order_labels"], order_output)))


# ----------------------------------------------------------------- weights


def variable_name(path):
    return path.replace(".", "/") + ":0"


def dense(state, name):
    """(out, in) -> kernel (in, out)."""
    return {"kernel": state[name + ".weight"].T, "bias": state[name + ".bias"]}


def norm(state, name):
    return {"gamma": state[name + ".weight"], "beta": state[name + ".bias"]}


def heads_out(state, name, heads):
    """Kernel (width, heads, depth) and bias (heads, depth)."""
    kernel = state[name + ".weight"].T
    return {
        "kernel": torch.reshape(kernel, (kernel.shape[0], heads, -1)),
        "bias": torch.reshape(state[name + ".bias"], (heads, -1)),
    }


def heads_in(state, name, heads):
    """Kernel (heads, depth, width)."""
    kernel = state[name + ".weight"].T
    return {
        "kernel": torch.reshape(kernel, (heads, -1, kernel.shape[1])),
        "bias": state[name + ".bias"],
    }


def converted(state):
    heads = CONFIG["num_attention_heads"]
    layer, attention = "encoder.layer", "encoder.layer.attention"
    mapping = "encoder.embedding_hidden_mapping_in"
    block = "encoder/transformer/"
    attend = block + "self_attention/"

    def table(name):
        return {"embeddings": state[f"embeddings.{name}_embeddings.weight"]}

    layers = {
        "encoder/word_embeddings": table("word"),
        "encoder/position_embedding": table("position"),
        "encoder/type_embeddings": table("token_type"),
        "encoder/embeddings_layer_norm": norm(state, "embeddings.LayerNorm"),
        "encoder/embedding_projection": dense(state, mapping),
        attend + "query": heads_out(state, attention + ".query", heads),
        attend + "key": heads_out(state, attention + ".key", heads),
        attend + "value": heads_out(state, attention + ".value", heads),
        attend + "attention_output": heads_in(state, attention + ".dense", heads),
        block + "self_attention_layer_norm": norm(state, attention + ".LayerNorm"),
        block + "intermediate": dense(state, layer + ".ffn"),
        block + "output": dense(state, layer + ".ffn_output"),
        block + "output_layer_norm": norm(state, layer + ".full_layer_layer_norm"),
        "encoder/pooler_transform": dense(state, "pooler"),
        "masked_lm/dense": dense(state, "predictions.dense"),
        "masked_lm/layer_norm": norm(state, "predictions.LayerNorm"),
        "masked_lm": {"output_bias": state["predictions.bias"]},
        "sentence_order": dense(state, "sop_classifier"),
    }
    return {
        f"{at}/{name}:0": value
        for at, weights in layers.items()
        for name, value in weights.items()
    }


def model():
    net = AlbertPretrainer(CONFIG)
    weights = converted(torch.load(Path(__file__).with_name("weights.pt")))
    with torch.no_grad():
        for path, variable in net.named_parameters():
            value = weights.pop(variable_name(path))
            assert value.shape == variable.shape, path
            variable.copy_(value)
    assert not weights, list(weights)
    return net


# -------------------------------------------------------------------- data


def cumsum(x, exclusive=False):
    total = torch.cumsum(x, dim=1)
    return total - x if exclusive else total


def corrupted(batch):
    dice, word_ids = batch["dice"], batch["tokens"]
    inputs = torch.where(dice < 0.8, MASK_ID, word_ids)
    inputs = torch.where(dice >= 0.9, batch["other"], inputs)
    return torch.where(batch["chosen"], inputs, word_ids)


def create_features(batch):
    word_ids = batch["tokens"]
    input_mask = torch.ne(word_ids, PAD_ID).to(torch.int64)
    segment = cumsum(torch.eq(word_ids, SEP_ID).to(torch.int64), exclusive=True)
    chosen = batch["chosen"].to(torch.int64)
    order = torch.argsort(chosen, dim=1, descending=True, stable=True)
    positions = order[:, :MAX_PREDICTIONS_PER_SEQ]
    return {
        "input_word_ids": corrupted(batch),
        "input_mask": input_mask,
        "input_type_ids": torch.minimum(segment, input_mask),
        "masked_lm_positions": positions,
        "masked_lm_ids": torch.gather(word_ids, 1, positions),
        "masked_lm_weights": torch.gather(chosen, 1, positions),
        "order_labels": batch["order"],
    }


class Outputs(dict):
    """What the model gives by name, and the losses that were added on the way."""

    losses: list[torch.Tensor]


def forward(net, batch):
    features = create_features(batch)
    lm_output, order_output = net(features)
    weighted = torch.ne(features["masked_lm_weights"], 0)
    outputs = Outputs(words=lm_output[weighted], order=order_output)
    outputs.losses = list(net.added_losses)
    return outputs


def loss(output, batch):
    return sum(output.losses)


# ---------------------------------------------------------------- training


class PolynomialDecay:
    def __init__(self, initial_learning_rate, decay_steps):
        self.initial_learning_rate = initial_learning_rate
        self.decay_steps = decay_steps

    def __call__(self, step):
        return self.initial_learning_rate * (1.0 - step / self.decay_steps)


class WarmUp:
    def __init__(self, initial_learning_rate, decay_schedule_fn, warmup_steps):
        self.initial_learning_rate = initial_learning_rate
        self.decay_schedule_fn = decay_schedule_fn
        self.warmup_steps = warmup_steps

    def __call__(self, step):
        if step < self.warmup_steps:
            return self.initial_learning_rate * (step + 1) / self.warmup_steps
        return self.decay_schedule_fn(step - self.warmup_steps)


class GradientAccumulator:
    def __init__(self):
        self.gradients = []
        self.step = 0

    def __call__(self, gradients):
        if not self.gradients:
            self.gradients = [torch.zeros_like(g) for g in gradients]
        for accumulated, gradient in zip(self.gradients, gradients):
            accumulated.add_(gradient)
        self.step += 1

    def mean(self):
        return [g / self.step for g in self.gradients]

    def reset(self):
        self.step = 0
        for gradient in self.gradients:
            gradient.zero_()


def clip_by_global_norm(t_list, clip_norm):
    squares = torch.stack([torch.sum(torch.square(t)) for t in t_list])
    global_norm = torch.sqrt(torch.sum(squares)) + 1e-6
    scale = clip_norm / torch.clamp(global_norm, min=clip_norm)
    return [t * scale for t in t_list]


class LAMB(torch.optim.Optimizer):
    """Layer-wise adaptive moments; variables without decay are not adapted either."""

    def __init__(
        self,
        variables,
        learning_rate,
        weight_decay_rate,
        exclude_from_weight_decay,
        accumulation_steps,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-6,
        clip_norm=1.0,
    ):
        self.variables = {variable_name(path): v for path, v in variables}
        super().__init__(self.variables.values(), {})
        self.slots = {
            name: {"m": torch.zeros_like(v), "v": torch.zeros_like(v)}
            for name, v in self.variables.items()
        }
        self.learning_rate, self.weight_decay_rate = learning_rate, weight_decay_rate
        self.exclude_from_weight_decay = exclude_from_weight_decay
        self.accumulation_steps = accumulation_steps
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.clip_norm = clip_norm
        self.accumulator = GradientAccumulator()
        self.iterations = 0

    def do_use_weight_decay(self, name):
        return not any(re.search(r, name) for r in self.exclude_from_weight_decay)

    @torch.no_grad()
    def step(self, closure=None):
        self.accumulator([v.grad for v in self.variables.values()])
        if self.accumulator.step == self.accumulation_steps:
            gradients = clip_by_global_norm(self.accumulator.mean(), self.clip_norm)
            self.apply_gradients(gradients)
            self.accumulator.reset()

    def apply_gradients(self, gradients):
        lr = self.learning_rate(self.iterations)
        self.iterations += 1
        for (name, variable), gradient in zip(self.variables.items(), gradients):
            self.resource_apply_dense(name, variable, gradient, lr)

    def resource_apply_dense(self, name, variable, gradient, lr):
        m, v = self.slots[name]["m"], self.slots[name]["v"]
        m.copy_(m * self.beta_1 + gradient * (1.0 - self.beta_1))
        v.copy_(v * self.beta_2 + torch.square(gradient) * (1.0 - self.beta_2))
        m_hat = m / (1.0 - self.beta_1**self.iterations)
        v_hat = v / (1.0 - self.beta_2**self.iterations)
        update = m_hat / (torch.sqrt(v_hat) + self.epsilon)
        if self.do_use_weight_decay(name):
            update = update + self.weight_decay_rate * variable
            update = update * self.trust_ratio(variable, update)
        variable.sub_(lr * update)

    def trust_ratio(self, variable, update):
        w_norm = torch.sqrt(torch.sum(torch.square(variable)))
        g_norm = torch.sqrt(torch.sum(torch.square(update)))
        ratio = torch.where(g_norm > 0, w_norm / g_norm, 1.0)
        return torch.where(w_norm > 0, ratio, 1.0)


def optimizer(net):
    decay = PolynomialDecay(initial_learning_rate=2e-2, decay_steps=10)
    return LAMB(
        net.named_parameters(),
        learning_rate=WarmUp(2e-2, decay, warmup_steps=2),
        weight_decay_rate=0.05,
        exclude_from_weight_decay=["layer_norm", "bias"],
        accumulation_steps=2,
    )
