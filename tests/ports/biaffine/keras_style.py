"""After Keras: layers that own kernels [in, ...out] and hand a mask to the next one."""

from pathlib import Path

import torch
from torch import nn

mask_value = 0
oov_index = 1
vocabulary_size = 41
table_size = 61
letter_vocabulary = 27
num_labels = 9
word_dim, letter_dim, letter_filters = 20, 10, 14
units = 18
arc_units = (22, 24)
label_units = (15, 12)
order_units = (8, 5)

# ------------------------------------------------------------------------- backend


def weight(*shape):
    return nn.Parameter(torch.zeros(shape))


def switch(condition, then_expression, else_expression):
    """A condition with fewer axes stands before those of the others."""
    while condition.ndim < then_expression.ndim:
        condition = condition[..., None]
    return torch.where(condition, then_expression, else_expression)


def leaky_relu(x, negative_slope=0.3):
    return torch.relu(x) - negative_slope * torch.relu(-x)


def softplus(x):
    return torch.log1p(torch.exp(-torch.abs(x))) + torch.relu(x)


def gather_heads(tensor, heads):
    """As tf.gather with two axes of the batch: [b, d, h, ...] -> [b, d, ...]."""
    index = heads.reshape(*heads.shape, *[1] * (tensor.ndim - 2))
    index = index.expand(-1, -1, 1, *tensor.shape[3:])
    return torch.gather(tensor, 2, index).squeeze(2)


def rnn(step_function, inputs, states, mask, go_backwards=False):
    """Where the mask is off the states stay, and zeros come out.

    The outputs are in the order of the steps: going backwards the last place is first.
    """
    steps = range(inputs.shape[1])
    outputs = []
    for t in reversed(steps) if go_backwards else steps:
        output, new_states = step_function(inputs[:, t], states)
        on = mask[:, t]
        outputs.append(switch(on, output, torch.zeros_like(output)))
        states = [switch(on, new, old) for new, old in zip(new_states, states)]
    return torch.stack(outputs, dim=1)


# -------------------------------------------------------------------------- layers


class Embedding(nn.Module):
    def __init__(self, input_dim, output_dim, trainable=True):
        super().__init__()
        if trainable:
            self.embeddings = weight(input_dim, output_dim)
        else:
            self.register_buffer("embeddings", torch.zeros(input_dim, output_dim))

    def compute_mask(self, inputs):
        return torch.ne(inputs, mask_value)

    def forward(self, inputs):
        flat = torch.index_select(self.embeddings, 0, torch.flatten(inputs))
        return torch.reshape(flat, (*inputs.shape, -1))


class StringLookup(nn.Module):
    """What is beyond the vocabulary becomes the index for it."""

    def __init__(self, max_tokens):
        super().__init__()
        self.max_tokens = max_tokens

    def forward(self, inputs):
        return torch.where(inputs < self.max_tokens, inputs, oov_index)


class Dense(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.kernel = weight(inputs, outputs)
        self.bias = weight(outputs)

    def forward(self, inputs):
        return torch.tensordot(inputs, self.kernel, dims=1) + self.bias


class Conv1D(nn.Module):
    """Kernel [width, in, out], padding "same"."""

    def __init__(self, inputs, filters, kernel_size):
        super().__init__()
        self.kernel_size = kernel_size
        self.kernel = weight(kernel_size, inputs, filters)
        self.bias = weight(filters)

    def forward(self, inputs):
        side = self.kernel_size // 2
        windows = nn.functional.pad(inputs, (0, 0, side, side))
        windows = windows.unfold(1, self.kernel_size, 1)
        return torch.einsum("bscw,wcf->bsf", windows, self.kernel) + self.bias


class LayerNormalization(nn.Module):
    def __init__(self, size, epsilon=1e-3):
        super().__init__()
        self.epsilon = epsilon
        self.gamma, self.beta = weight(size), weight(size)

    def forward(self, inputs):
        mean = torch.mean(inputs, dim=-1, keepdim=True)
        variance = torch.mean(torch.square(inputs - mean), dim=-1, keepdim=True)
        normalized = (inputs - mean) / torch.sqrt(variance + self.epsilon)
        return normalized * self.gamma + self.beta


class TimeDistributed(nn.Module):
    """Folds time into the batch for a layer that knows no time."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, inputs):
        batch, steps = inputs.shape[:2]
        outputs = self.layer(torch.reshape(inputs, (-1, *inputs.shape[2:])))
        return torch.reshape(outputs, (batch, steps, *outputs.shape[1:]))


class LSTMCell(nn.Module):
    """Gates i, f, c, o; the states to start with are weights too."""

    def __init__(self, inputs):
        super().__init__()
        self.kernel = weight(inputs, 4 * units)
        self.recurrent_kernel = weight(units, 4 * units)
        self.bias = weight(4 * units)
        self.initial_h, self.initial_c = weight(1, units), weight(1, units)

    def get_initial_state(self, batch_size):
        return [
            torch.tile(self.initial_h, (batch_size, 1)),
            torch.tile(self.initial_c, (batch_size, 1)),
        ]

    def forward(self, inputs, states):
        h_tm1, c_tm1 = states
        z = torch.matmul(inputs, self.kernel)
        z = z + torch.matmul(h_tm1, self.recurrent_kernel) + self.bias
        z0, z1, z2, z3 = torch.split(z, units, dim=1)
        i = torch.sigmoid(z0)
        f = torch.sigmoid(z1)
        c = f * c_tm1 + i * torch.tanh(z2)
        o = torch.sigmoid(z3)
        h = o * torch.tanh(c)
        return h, [h, c]


class RNN(nn.Module):
    def __init__(self, cell, go_backwards=False):
        super().__init__()
        self.cell = cell
        self.go_backwards = go_backwards

    def forward(self, inputs, mask):
        states = self.cell.get_initial_state(inputs.shape[0])
        return rnn(self.cell, inputs, states, mask, self.go_backwards)


class Bidirectional(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.forward_layer = RNN(LSTMCell(inputs))
        self.backward_layer = RNN(LSTMCell(inputs), go_backwards=True)

    def forward(self, inputs, mask):
        y = self.forward_layer(inputs, mask)
        y_rev = torch.flip(self.backward_layer(inputs, mask), dims=(1,))
        return torch.cat([y, y_rev], dim=-1)


class LetterEncoder(nn.Module):
    """[words, letters] -> [words, filters]."""

    def __init__(self):
        super().__init__()
        self.embedding = Embedding(letter_vocabulary, letter_dim)
        self.conv = Conv1D(letter_dim, letter_filters, 3)

    def forward(self, inputs):
        mask = self.embedding.compute_mask(inputs)[..., None]
        x = switch(mask, self.embedding(inputs), torch.tensor(0.0))
        x = torch.tanh(self.conv(x))
        x = x + (1.0 - mask.to(x.dtype)) * -1e9
        x = torch.amax(x, dim=1)
        return switch(torch.any(mask, dim=1), x, torch.zeros_like(x))


class BiaffineScores(nn.Module):
    """Kernel [dependents + 1, heads (+ 1), outputs]."""

    def __init__(self, dep_units, head_units, outputs, use_head_bias=True):
        super().__init__()
        self.use_head_bias = use_head_bias
        self.kernel = weight(dep_units + 1, head_units + int(use_head_bias), outputs)

    def with_bias(self, inputs):
        return nn.functional.pad(inputs, (0, 1), value=1.0)

    def forward(self, dependents, heads):
        dependents = self.with_bias(dependents)
        if self.use_head_bias:
            heads = self.with_bias(heads)
        left = torch.einsum("bdi,ijl->bdlj", dependents, self.kernel)
        return torch.einsum("bdlj,bhj->bdhl", left, heads)


class Projection(nn.Module):
    """Two views of each word: as a dependent and as a head."""

    def __init__(self, sizes):
        super().__init__()
        self.dependent = TimeDistributed(Dense(2 * units, sizes[0]))
        self.head = TimeDistributed(Dense(2 * units, sizes[1]))

    def forward(self, inputs):
        dependent = leaky_relu(self.dependent(inputs), negative_slope=0.1)
        head = leaky_relu(self.head(inputs), negative_slope=0.1)
        return dependent, head


# --------------------------------------------------------------------------- model


class BiaffineParser(nn.Module):
    def __init__(self):
        super().__init__()
        self.lookup = StringLookup(vocabulary_size)
        self.word_embedding = Embedding(vocabulary_size, word_dim)
        self.word_vectors = Embedding(table_size, word_dim, trainable=False)
        self.letter_encoder = TimeDistributed(LetterEncoder())
        self.normalization = LayerNormalization(word_dim + letter_filters, epsilon=1e-5)
        self.bilstm_1 = Bidirectional(word_dim + letter_filters)
        self.bilstm_2 = Bidirectional(2 * units)
        self.arc_projection = Projection(arc_units)
        self.label_projection = Projection(label_units)
        self.order_projection = Projection(order_units)
        self.arc_scores = BiaffineScores(*arc_units, 1, use_head_bias=False)
        self.label_scores = BiaffineScores(*label_units, num_labels)
        self.order_scores = BiaffineScores(*order_units, 1)

    def features(self, words, letters):
        trained = self.word_embedding(self.lookup(words))
        x = trained + self.word_vectors(words)
        x = torch.cat([x, self.letter_encoder(letters)], dim=-1)
        x = self.normalization(x)
        mask = self.word_vectors.compute_mask(words)
        x = self.bilstm_1(x, mask=mask)
        return self.bilstm_2(x, mask=mask)

    def forward(self, words, letters):
        x = self.features(words, letters)
        arc_dep, arc_head = self.arc_projection(x)
        arcs = self.arc_scores(arc_dep, arc_head)[..., 0]
        arcs = arcs * arc_units[1] ** -0.5
        labels = self.label_scores(*self.label_projection(x))
        order = self.order_scores(*self.order_projection(x))[..., 0]
        return arcs + self.log_side(order).detach(), labels, order

    def log_side(self, order):
        """How probable it is that a head is on the side where it is."""
        steps = order.shape[1]
        ones = torch.ones(steps, steps)
        direction = torch.triu(ones, 1) - torch.tril(ones, -1)
        return -softplus(-order * direction)


# ------------------------------------------------------------------------- weights

DENSE = {
    "arc_dep": "arc_projection.dependent",
    "arc_head": "arc_projection.head",
    "label_dep": "label_projection.dependent",
    "label_head": "label_projection.head",
    "order_dep": "order_projection.dependent",
    "order_head": "order_projection.head",
}


def set_weights(layer, *values):
    for variable, value in zip([*layer.parameters(), *layer.buffers()], values):
        variable.copy_(value)


def lstm_weights(state, layer, direction):
    """PyTorch's gates have our order; it has two biases where we have one."""
    suffix = f"l{layer}" + ("_reverse" if direction == "backward" else "")
    prefix = "encoder.lstm."
    row = 2 * layer + int(direction == "backward")
    return (
        state[f"{prefix}weight_ih_{suffix}"].T,
        state[f"{prefix}weight_hh_{suffix}"].T,
        state[f"{prefix}bias_ih_{suffix}"] + state[f"{prefix}bias_hh_{suffix}"],
        state["encoder.h_init"][row],
        state["encoder.c_init"][row],
    )


@torch.no_grad()
def load_torch_weights(net, state):
    set_weights(net.word_embedding, state["words.weight"])
    set_weights(net.word_vectors, state["pretrained"])
    letters = net.letter_encoder.layer
    set_weights(letters.embedding, state["letters.embed.weight"])
    kernel = state["letters.conv.weight"].permute(2, 1, 0)
    set_weights(letters.conv, kernel, state["letters.conv.bias"])
    set_weights(net.normalization, state["norm.weight"], state["norm.bias"])
    for i, bilstm in enumerate((net.bilstm_1, net.bilstm_2)):
        set_weights(bilstm.forward_layer.cell, *lstm_weights(state, i, "forward"))
        set_weights(bilstm.backward_layer.cell, *lstm_weights(state, i, "backward"))
    for theirs, ours in DENSE.items():
        kernel, bias = (
            state[f"{theirs}.linear.weight"].T,
            state[f"{theirs}.linear.bias"],
        )
        set_weights(net.get_submodule(ours).layer, kernel, bias)
    for theirs in ("arcs", "labels", "order"):
        kernel = state[f"{theirs}.weight"].permute(1, 2, 0)
        set_weights(net.get_submodule(f"{theirs.rstrip('s')}_scores"), kernel)


def model():
    net = BiaffineParser()
    load_torch_weights(net, torch.load(Path(__file__).with_name("weights.pt")))
    return net


# ---------------------------------------------------------------------------- loss

loss_weights = {"arcs": 1.0, "labels": 0.7, "order": 0.5}


def forward(net, batch):
    arcs, labels, order = net(batch["words"], batch["letters"])
    return {"arcs": arcs, "labels": labels, "order": order}


def sparse_categorical_crossentropy(y_true, logits):
    y_true = (y_true[..., None] == torch.arange(logits.shape[-1])).to(logits.dtype)
    top = torch.amax(logits, dim=-1).detach()
    total = torch.sum(torch.exp(logits - top[..., None]), dim=-1)
    return torch.log(total) + top - torch.sum(y_true * logits, dim=-1)


def sigmoid_cross_entropy(y_true, logits):
    return (
        torch.relu(logits)
        - logits * y_true
        + torch.log1p(torch.exp(-torch.abs(logits)))
    )


def weighted_mean(values, sample_weight):
    return torch.sum(values * sample_weight) / torch.sum(sample_weight)


def mask_arcs(arcs, words):
    """Neither padding nor the word itself can be a head."""
    steps = words.shape[1]
    padding = torch.eq(words, mask_value).to(arcs.dtype)
    forbidden = torch.clamp(padding[:, None, :] + torch.eye(steps), max=1.0)
    return arcs * (1.0 - forbidden) - 1e9 * forbidden


def loss(output, batch):
    words, heads = batch["words"], batch["heads"]
    steps = torch.arange(words.shape[1])[None, :]
    sample_weight = (torch.ne(words, mask_value) & (steps > 0)).to(torch.float32)
    arcs = mask_arcs(output["arcs"], words)
    labels = gather_heads(output["labels"], heads)
    order = gather_heads(output["order"], heads)
    right = torch.greater(heads, steps).to(order.dtype)
    losses = {
        "arcs": sparse_categorical_crossentropy(heads, arcs),
        "labels": sparse_categorical_crossentropy(batch["labels"], labels),
        "order": sigmoid_cross_entropy(right, order),
    }
    total = 0.0
    for name, values in losses.items():
        total = total + loss_weights[name] * weighted_mean(values, sample_weight)
    return total


# ----------------------------------------------------------------------- optimizer


class ExponentialDecay:
    def __init__(self, initial_learning_rate, decay_steps, decay_rate):
        self.initial_learning_rate = initial_learning_rate
        self.decay_steps, self.decay_rate = decay_steps, decay_rate

    def __call__(self, step):
        return self.initial_learning_rate * self.decay_rate ** (step / self.decay_steps)


class Adam(torch.optim.Optimizer):
    def __init__(self, variables, learning_rate, beta_1, beta_2, epsilon, clipnorm):
        super().__init__(variables, {})
        self.learning_rate, self.epsilon = learning_rate, epsilon
        self.beta_1, self.beta_2 = beta_1, beta_2
        self.global_clipnorm = clipnorm
        self.iterations = 0

    def clipped(self, gradients):
        norm = torch.sqrt(sum(torch.sum(torch.square(g)) for g in gradients))
        factor = self.global_clipnorm / max(float(norm), self.global_clipnorm)
        return [gradient * factor for gradient in gradients]

    @torch.no_grad()
    def step(self, closure=None):
        variables = self.param_groups[0]["params"]
        gradients = self.clipped([variable.grad for variable in variables])
        lr = self.learning_rate(self.iterations)
        self.iterations += 1
        beta_1_power = self.beta_1**self.iterations
        beta_2_power = self.beta_2**self.iterations
        for variable, gradient in zip(variables, gradients):
            slots = self.state[variable]
            if not slots:
                slots["m"] = torch.zeros_like(variable)
                slots["v"] = torch.zeros_like(variable)
            m, v = slots["m"], slots["v"]
            m.add_((gradient - m) * (1.0 - self.beta_1))
            v.add_((torch.square(gradient) - v) * (1.0 - self.beta_2))
            m_hat, v_hat = m / (1.0 - beta_1_power), v / (1.0 - beta_2_power)
            variable.sub_(lr * m_hat / (torch.sqrt(v_hat) + self.epsilon))


def optimizer(net):
    schedule = ExponentialDecay(2e-3, decay_steps=50, decay_rate=0.75)
    return Adam(net.parameters(), schedule, 0.9, 0.9, epsilon=1e-6, clipnorm=1.0)
