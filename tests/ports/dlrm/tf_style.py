"""After TensorFlow: ragged rows, segment sums, Keras layers, slots of the optimizers.

Embeddings come first here and the dense vector last, so whatever reads the concatenated
fields is turned by the reader of the checkpoint.
"""

from pathlib import Path

import torch
from torch import nn

EMBEDDING_DIM = 8
SPARSE_FEATURES = ("genres", "history", "tags", "device", "queries")
VOCABULARY = {"genres": 19, "history": 41, "tags": 23, "device": 6, "queries": 29}
COMBINER = {
    "genres": "mean",
    "history": "sum",
    "tags": "mean",
    "device": "sum",
    "queries": "sum",
}
NUM_FIELDS = len(SPARSE_FEATURES) + 1
NUM_CROSS = 3
HASH_MULTIPLIER, HASH_OFFSET = 31, 7
HALF_LIFE = 5.0


# -------------------------------------------------------------------- ragged


class Ragged:
    """Values, and for each the row that it belongs to."""

    def __init__(self, values, row_ids, nrows, weights=None):
        self.values, self.row_ids, self.nrows = values, row_ids, nrows
        self.weights = weights

    @classmethod
    def from_row_starts(cls, values, starts, weights=None):
        limits = torch.cat([starts[1:], torch.tensor([len(values)])])
        row_ids = torch.repeat_interleave(torch.arange(len(starts)), limits - starts)
        return cls(values, row_ids, len(starts), weights)

    @classmethod
    def from_padded(cls, tensor, padding=0):
        row_ids, columns = torch.nonzero(tensor != padding, as_tuple=True)
        return cls(tensor[row_ids, columns], row_ids, len(tensor))


def unsorted_segment_sum(data, segment_ids, num_segments):
    result = torch.zeros((num_segments, *data.shape[1:]), dtype=data.dtype)
    return result.index_add(0, segment_ids, data)


def safe_embedding_lookup_sparse(params, ragged, combiner):
    """Empty rows are zeros."""
    embedded = torch.index_select(params, 0, ragged.values)
    if ragged.weights is not None:
        embedded = embedded * ragged.weights[:, None]
    summed = unsorted_segment_sum(embedded, ragged.row_ids, ragged.nrows)
    if combiner == "sum":
        return summed
    ones = torch.ones(len(ragged.values))
    counts = unsorted_segment_sum(ones, ragged.row_ids, ragged.nrows)
    return torch.div(summed, torch.clamp(counts, min=1.0)[:, None])


# -------------------------------------------------------------------- layers


class Layer(nn.Module):
    def __init__(self, trainable, frozen=None):
        super().__init__()
        for name, value in trainable.items():
            self.register_parameter(name, nn.Parameter(value.clone().contiguous()))
        for name, value in (frozen or {}).items():
            self.register_buffer(name, value.clone())


class Embedding(Layer):
    def forward(self, ragged, combiner):
        return safe_embedding_lookup_sparse(self.embeddings, ragged, combiner)


class Normalization(Layer):
    def forward(self, inputs):
        return (inputs - self.mean) / torch.sqrt(self.variance)


class Dense(Layer):
    def __init__(self, trainable, activation=None):
        super().__init__(trainable)
        self.activation = activation

    def forward(self, inputs):
        outputs = torch.matmul(inputs, self.kernel)
        if hasattr(self, "bias"):
            outputs = outputs + self.bias
        return outputs if self.activation is None else self.activation(outputs)


class BatchNormalization(Layer):
    momentum, epsilon = 0.9, 1e-5

    def forward(self, inputs):
        mean, variance = self.moving_mean, self.moving_variance
        if self.training:
            mean = torch.mean(inputs, dim=0)
            variance = torch.mean(torch.square(inputs - mean), dim=0)
            bessel = len(inputs) / (len(inputs) - 1)
            self.assign_moving_average(self.moving_mean, mean)
            self.assign_moving_average(self.moving_variance, variance * bessel)
        inv = self.gamma * torch.rsqrt(variance + self.epsilon)
        return inputs * inv + (self.beta - mean * inv)

    @torch.no_grad()
    def assign_moving_average(self, variable, value):
        variable.sub_((variable - value) * (1.0 - self.momentum))


class DotInteraction(nn.Module):
    """What is below the diagonal, row by row."""

    def forward(self, features):
        xactions = torch.matmul(features, torch.transpose(features, 1, 2))
        ones = torch.ones(features.shape[1], features.shape[1])
        lower_tri_mask = torch.tril(ones, diagonal=-1).to(torch.bool)
        flat = xactions.reshape(len(features), -1)
        return flat[:, lower_tri_mask.reshape(-1)]


class MixtureCross(Layer):
    """v is [experts, dim, rank], c [experts, rank, rank], u [experts, rank, dim]."""

    def forward(self, x0, x):
        projected = torch.tanh(torch.matmul(x[None], self.v))
        projected = torch.tanh(torch.matmul(projected, self.c))
        expanded = torch.matmul(projected, self.u) + self.bias
        expert_outputs = x0[None] * expanded
        logits = torch.matmul(x, self.gating)
        logits = logits - torch.amax(logits, dim=-1, keepdim=True).detach()
        exps = torch.exp(logits)
        gating = exps / torch.sum(exps, dim=-1, keepdim=True)
        weighted = expert_outputs * torch.transpose(gating, 0, 1)[:, :, None]
        return torch.sum(weighted, dim=0) + x


class RankingModel(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embedding = nn.ModuleDict(layers["embedding"])
        self.normalization = layers["normalization"]
        self.bottom = nn.ModuleDict(layers["bottom"])
        self.interaction = DotInteraction()
        self.crosses = nn.ModuleList(layers["crosses"])
        self.top = nn.ModuleDict(layers["top"])

    def forward(self, inputs):
        counts = torch.maximum(inputs["counts"], torch.zeros(()))
        dense = self.normalization(torch.log(1.0 + counts))
        dense = torch.relu(self.bottom["norm"](self.bottom["dense_0"](dense)))
        dense = self.bottom["dense_1"](dense)
        embedded = [
            self.embedding[name](inputs[name], COMBINER[name])
            for name in SPARSE_FEATURES
        ]
        fields = torch.stack([*embedded, dense], dim=1)
        interacted = self.interaction(fields)
        x0 = fields.reshape(len(fields), NUM_FIELDS * EMBEDDING_DIM)
        crossed = x0
        for cross in self.crosses:
            crossed = cross(x0, crossed)
        outputs = torch.cat([crossed, interacted, dense], dim=-1)
        for layer in self.top.values():
            outputs = layer(outputs)
        return outputs[:, 0]


# ---------------------------------------------------------------- checkpoint


class CheckpointReader:
    def __init__(self, state):
        self.state = state

    def dense_last(self, value, dim):
        """The dense vector stood before the embeddings."""
        return torch.roll(value, -EMBEDDING_DIM, dims=dim)

    def pair_order(self):
        """Places of the pairs of this order among those of the checkpoint."""
        place = {}
        for row in range(NUM_FIELDS):
            for column in range(row):
                place[row, column] = len(place)
        order = []
        for row in range(NUM_FIELDS):
            for column in range(row):
                old = sorted(((i + 1) % NUM_FIELDS for i in (row, column)))
                order.append(place[old[1], old[0]])
        return torch.tensor(order)

    def dense(self, name, activation=None):
        trainable = {"kernel": self.state[name + ".weight"].T}
        if name + ".bias" in self.state:
            trainable["bias"] = self.state[name + ".bias"]
        return Dense(trainable, activation)

    def batch_norm(self, name):
        return BatchNormalization(
            {
                "gamma": self.state[name + ".weight"],
                "beta": self.state[name + ".bias"],
            },
            {
                "moving_mean": self.state[name + ".running_mean"],
                "moving_variance": self.state[name + ".running_var"],
            },
        )

    def cross(self, index):
        name = f"cross.{index}"
        v = torch.transpose(self.state[name + ".v"], 1, 2)
        c = torch.transpose(self.state[name + ".c"], 1, 2)
        u = torch.transpose(self.state[name + ".u"], 1, 2)
        return MixtureCross(
            {
                "v": self.dense_last(v, 1),
                "c": c,
                "u": self.dense_last(u, 2),
                "bias": self.dense_last(self.state[name + ".bias"], 0),
                "gating": self.dense_last(self.state[name + ".gate.weight"].T, 0),
            }
        )

    def first_top(self):
        """Rows for the crossed fields, the pairs and the dense vector."""
        kernel = self.state["top.hidden.0.weight"].T
        sizes = (EMBEDDING_DIM, len(self.pair_order()), NUM_FIELDS * EMBEDDING_DIM)
        dense, pairs, crossed = torch.split(kernel, sizes)
        pairs = pairs[self.pair_order()]
        kernel = torch.cat([self.dense_last(crossed, 0), pairs, dense])
        bias = self.state["top.hidden.0.bias"]
        return Dense({"kernel": kernel, "bias": bias}, torch.relu)

    def build(self):
        mean, std = self.state["count_mean"], self.state["count_std"]
        return RankingModel(
            {
                "embedding": {
                    name: Embedding({"embeddings": self.state[f"tables.{name}.weight"]})
                    for name in SPARSE_FEATURES
                },
                "normalization": Normalization(
                    {}, {"mean": mean, "variance": torch.square(std)}
                ),
                "bottom": {
                    "dense_0": self.dense("bottom.fc1"),
                    "norm": self.batch_norm("bottom.bn"),
                    "dense_1": self.dense("bottom.fc2", torch.relu),
                },
                "crosses": [self.cross(i) for i in range(NUM_CROSS)],
                "top": {
                    "dense_0": self.first_top(),
                    "dense_1": self.dense("top.hidden.1", torch.relu),
                    "logits": self.dense("top.out"),
                },
            }
        )


def model():
    return CheckpointReader(torch.load(Path(__file__).with_name("weights.pt"))).build()


# ------------------------------------------------------------------ training


def preprocess(batch):
    genres, history, queries = batch["genres"], batch["history"], batch["queries"]
    buckets = history["ids"] * HASH_MULTIPLIER + HASH_OFFSET
    buckets = torch.remainder(buckets, VOCABULARY["history"])
    recency = torch.exp2(-history["age"] / HALF_LIFE)
    return {
        "counts": batch["counts"],
        "genres": Ragged.from_row_starts(genres["ids"], genres["offsets"]),
        "history": Ragged.from_row_starts(buckets, history["offsets"], recency),
        "tags": Ragged.from_padded(batch["tags"]),
        "device": Ragged(
            batch["device"], torch.arange(len(batch["device"])), len(batch["device"])
        ),
        "queries": Ragged.from_row_starts(queries["ids"], queries["offsets"]),
    }


def forward(net, batch):
    return net(preprocess(batch))


def weighted_cross_entropy_with_logits(labels, logits, pos_weight):
    log_weight = 1.0 + (pos_weight - 1.0) * labels
    softplus = torch.log1p(torch.exp(-torch.abs(logits))) + torch.relu(-logits)
    return (1.0 - labels) * logits + log_weight * softplus


def loss(output, batch):
    sample_weight = torch.pow(batch["position"].to(torch.float32), 0.7)
    sample_weight = torch.minimum(sample_weight, torch.tensor(3.0))
    losses = weighted_cross_entropy_with_logits(batch["click"], output, 2.5)
    return torch.sum(losses * sample_weight) / torch.sum(sample_weight)


class Warmup:
    def __init__(self, target, warmup_steps=4):
        self.target, self.warmup_steps = target, warmup_steps

    def __call__(self, iterations):
        return self.target * min((iterations + 1) / self.warmup_steps, 1.0)


class Adagrad:
    def __init__(self, learning_rate, initial_accumulator_value=0.1, epsilon=1e-8):
        self.learning_rate, self.epsilon = learning_rate, epsilon
        self.initial_accumulator_value = initial_accumulator_value

    def build(self, variable):
        return {
            "accumulator": torch.full_like(variable, self.initial_accumulator_value)
        }

    def update_step(self, gradient, variable, slots, iterations):
        accumulator = slots["accumulator"]
        accumulator.add_(torch.square(gradient))
        step = gradient / (torch.sqrt(accumulator) + self.epsilon)
        variable.sub_(self.learning_rate(iterations) * step)


class Adam:
    """Corrections of both moments stand apart, so that epsilon is that of the paper's text."""

    def __init__(self, learning_rate, beta_1=0.9, beta_2=0.99, epsilon=1e-7):
        self.learning_rate, self.epsilon = learning_rate, epsilon
        self.beta_1, self.beta_2 = beta_1, beta_2

    def build(self, variable):
        return {"m": torch.zeros_like(variable), "v": torch.zeros_like(variable)}

    def update_step(self, gradient, variable, slots, iterations):
        local_step = iterations + 1
        m, v = slots["m"], slots["v"]
        m.add_((gradient - m) * (1.0 - self.beta_1))
        v.add_((torch.square(gradient) - v) * (1.0 - self.beta_2))
        m_hat = m / (1.0 - self.beta_1**local_step)
        v_hat = v / (1.0 - self.beta_2**local_step)
        step = m_hat / (torch.sqrt(v_hat) + self.epsilon)
        variable.sub_(self.learning_rate(iterations) * step)


class CompositeOptimizer(torch.optim.Optimizer):
    """Each variable has the first optimizer whose predicate takes its name."""

    def __init__(self, optimizers, named):
        super().__init__([variable for _, variable in named], {})
        self.rules = [
            (variable, next(opt for opt, takes in optimizers if takes(name)))
            for name, variable in named
        ]
        self.iterations = 0

    @torch.no_grad()
    def step(self, closure=None):
        for variable, rule in self.rules:
            if not self.state[variable]:
                self.state[variable].update(rule.build(variable))
            slots = self.state[variable]
            rule.update_step(variable.grad, variable, slots, self.iterations)
        self.iterations += 1


def optimizer(net):
    optimizers = [
        (Adagrad(Warmup(0.05)), lambda name: name.startswith("embedding.")),
        (Adam(Warmup(5e-3)), lambda name: True),
    ]
    return CompositeOptimizer(optimizers, list(net.named_parameters()))
