"""After TensorFlow: feature columns by name, one matrix for all fields, dense sequences.

Sequences are padded in front. Row zero of the matrix is the default of every column, the
rows of a field follow from its offset. Kernels are [in, out].
"""

from pathlib import Path

import torch
from torch import nn

FLAGS = {
    "embedding_size": 8,
    "maxlen": 10,
    "aux_weight": 0.5,
    "l2_reg": 4e-3,
    "embedding_lr": 0.05,
    "embedding_decay_rate": 0.2,
    "initial_accumulator_value": 1e-4,
    "learning_rate": 4e-3,
    "decay_steps": 3,
    "decay_rate": 0.5,
}
VOCABULARY = {"age": 6, "category": 15, "hour": 24, "item": 120, "user": 40}
AGE_BOUNDARIES = [18, 25, 35, 45, 55]


# ------------------------------------------------------------ feature columns


def column_offsets():
    """The matrix's row for the first key of each column."""
    offsets, row = {}, 1
    for name in sorted(VOCABULARY):
        offsets[name] = row
        row += VOCABULARY[name]
    return offsets


OFFSETS = column_offsets()


def bucketized(values, boundaries):
    """How many boundaries are not above the value."""
    boundaries = torch.tensor(boundaries)
    return torch.sum(values[:, None] >= boundaries[None, :], dim=1)


def parse(features):
    """Keys of the columns, from one on; zero is what is missing."""
    user, age = features["user"], features["age"]
    hour = torch.remainder(torch.div(features["time"], 3600, rounding_mode="floor"), 24)
    bucket = torch.remainder(user, VOCABULARY["user"])
    group = bucketized(age, AGE_BOUNDARIES)
    return {
        "user": torch.where(user > 0, bucket + 1, torch.zeros_like(user)),
        "age": torch.where(age > 0, group + 1, torch.zeros_like(age)),
        "hour": hour + 1,
        "item": features["item"],
    }


def pad_sequences(values, lengths, maxlen):
    """As Keras does it: zeros in front, and what is too long loses its front."""
    position = torch.arange(maxlen)[None, :]
    ends = torch.cumsum(lengths, dim=0)[:, None]
    index = torch.clamp(ends - maxlen + position, min=0)
    is_real = position >= maxlen - lengths[:, None]
    return torch.where(is_real, torch.take(values, index), 0)


# -------------------------------------------------------------------- layers


class Dense(nn.Module):
    def __init__(self, inputs, units, use_bias=True):
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(inputs, units))
        self.bias = nn.Parameter(torch.zeros(units)) if use_bias else None

    def forward(self, x):
        x = torch.matmul(x, self.kernel)
        return x if self.bias is None else x + self.bias


class BatchNormalization(nn.Module):
    """Over all axes but the last; weights of nought leave places out of the moments."""

    def __init__(self, units, momentum=0.9, epsilon=1e-5, affine=True):
        super().__init__()
        self.momentum, self.epsilon = momentum, epsilon
        self.gamma = nn.Parameter(torch.ones(units)) if affine else None
        self.beta = nn.Parameter(torch.zeros(units)) if affine else None
        self.register_buffer("moving_mean", torch.zeros(units))
        self.register_buffer("moving_variance", torch.ones(units))

    def weighted_moments(self, x, weights):
        axes = tuple(range(x.ndim - 1))
        count = torch.sum(weights)
        mean = torch.sum(weights * x, dim=axes) / count
        squares = weights * torch.square(x - mean)
        variance = torch.sum(squares, dim=axes) / count
        self.assign_moving_average(mean, variance * count / (count - 1.0))
        return mean, variance

    @torch.no_grad()
    def assign_moving_average(self, mean, variance):
        for moving, value in (
            (self.moving_mean, mean),
            (self.moving_variance, variance),
        ):
            moving.sub_((moving - value) * (1.0 - self.momentum))

    def forward(self, x, weights=None):
        if weights is None:
            weights = torch.ones_like(x[..., :1])
        if self.training:
            mean, variance = self.weighted_moments(x, weights)
        else:
            mean, variance = self.moving_mean, self.moving_variance
        inv = torch.rsqrt(variance + self.epsilon)
        if self.gamma is None:
            return (x - mean) * inv
        inv = inv * self.gamma
        return x * inv + (self.beta - mean * inv)


class Dice(nn.Module):
    def __init__(self, units):
        super().__init__()
        self.alphas = nn.Parameter(torch.zeros(units))
        self.bn = BatchNormalization(units, epsilon=1e-8, affine=False)

    def forward(self, x, weights=None):
        x_p = torch.sigmoid(self.bn(x, weights))
        return self.alphas * (1.0 - x_p) * x + x_p * x


class PRelu(nn.Module):
    def __init__(self, units):
        super().__init__()
        self.alphas = nn.Parameter(torch.zeros(units))

    def forward(self, x):
        pos = torch.relu(x)
        neg = self.alphas * (x - torch.abs(x)) * 0.5
        return pos + neg


def sigmoid_cross_entropy_with_logits(labels, logits):
    return (
        torch.relu(logits)
        - logits * labels
        + torch.log1p(torch.exp(-torch.abs(logits)))
    )


# --------------------------------------------------------------------- model


class DinAttention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size
        self.f1_att = Dense(4 * size, 24)
        self.dice = Dice(24)
        self.f2_att = Dense(24, 12)
        self.prelu = PRelu(12)
        self.f3_att = Dense(12, 1, use_bias=False)

    def forward(self, query, facts, mask):
        """[B, H], [B, T, H], [B, T] -> [B, H]"""
        queries = torch.tile(query[:, None, :], (1, facts.shape[1], 1))
        din_all = torch.cat([queries, facts, queries - facts, queries * facts], dim=-1)
        weights = mask[:, :, None].to(facts.dtype)
        hidden = self.dice(self.f1_att(din_all), weights)
        hidden = self.prelu(self.f2_att(hidden))
        scores = torch.permute(self.f3_att(hidden), (0, 2, 1))
        scores = scores / (self.size**0.5)
        paddings = torch.ones_like(scores) * (-(2**32) + 1)
        scores = torch.where(mask[:, None, :], scores, paddings)
        scores = torch.softmax(scores, dim=-1)
        return torch.matmul(scores, facts)[:, 0]


class DinModel(nn.Module):
    def __init__(self):
        super().__init__()
        size = FLAGS["embedding_size"]
        rows = 1 + sum(VOCABULARY.values())
        self.embedding_matrix = nn.Parameter(torch.zeros(rows, size))
        self.item_b = nn.Parameter(torch.zeros(VOCABULARY["item"]))
        self.register_buffer("cate_list", torch.zeros(121, dtype=torch.long))
        self.attention = DinAttention(2 * size)
        self.aux_1 = Dense(4 * size, 16)
        self.aux_2 = Dense(16, 1)
        self.bn1 = BatchNormalization(11 * size)
        self.f1 = Dense(11 * size, 40)
        self.dice_1 = Dice(40)
        self.f2 = Dense(40, 20)
        self.dice_2 = Dice(20)
        self.f3 = Dense(20, 1)

    def rows(self, column, keys):
        return torch.where(keys > 0, keys - 1 + OFFSETS[column], 0)

    def embedding_lookup(self, column, keys):
        rows = self.rows(column, keys)
        vectors = torch.index_select(self.embedding_matrix, 0, rows.flatten())
        vectors = torch.reshape(vectors, (*rows.shape, -1))
        return vectors * (rows > 0)[..., None]

    def item_vectors(self, items):
        """Columns by name: the category stands before the item."""
        cates = torch.take(self.cate_list, items)
        return torch.cat(
            [
                self.embedding_lookup("category", cates),
                self.embedding_lookup("item", items),
            ],
            dim=-1,
        )

    def input_layer(self, keys):
        keys = dict(keys, category=torch.take(self.cate_list, keys["item"]))
        columns = [self.embedding_lookup(name, keys[name]) for name in sorted(keys)]
        return torch.cat(columns, dim=-1)

    def auxiliary_net(self, inputs):
        return self.aux_2(torch.sigmoid(self.aux_1(inputs)))[..., 0]

    def auxiliary_loss(self, facts, noclick, mask):
        weights = mask.to(facts.dtype)
        count = torch.clamp(torch.cumsum(weights, dim=1), min=1.0)
        h_states = (torch.cumsum(facts, dim=1) / count[:, :, None])[:, :-1]
        click_input = torch.cat([h_states, facts[:, 1:]], dim=-1)
        noclick_input = torch.cat([h_states, noclick[:, 1:]], dim=-1)
        logits = self.auxiliary_net(torch.cat([click_input, noclick_input], dim=0))
        ones = torch.ones_like(weights[:, :-1])
        labels = torch.cat([ones, torch.zeros_like(ones)], dim=0)
        loss = sigmoid_cross_entropy_with_logits(labels, logits)
        weights = weights[:, :-1]
        loss = loss * torch.tile(weights, (2, 1))
        return torch.sum(loss) / torch.clamp(torch.sum(weights), min=1.0)

    def regularization_loss(self, keys, his, noclick):
        items = torch.cat([keys["item"], his.flatten(), noclick.flatten()])
        cates = torch.take(self.cate_list, items)
        rows = [self.rows("item", items), self.rows("category", cates)]
        rows += [self.rows(name, keys[name]) for name in ("user", "age", "hour")]
        unique = torch.unique(torch.cat(rows))
        vectors = torch.index_select(self.embedding_matrix, 0, unique)
        return torch.sum(torch.square(vectors)) / 2.0

    def forward(self, features):
        keys = parse(features)
        lengths, maxlen = features["lengths"], FLAGS["maxlen"]
        his = pad_sequences(features["visits"], lengths, maxlen)
        noclick = pad_sequences(features["negatives"], lengths, maxlen)
        mask = torch.not_equal(his, 0)

        query = self.item_vectors(keys["item"])
        facts = self.item_vectors(his)
        attention_output = self.attention(query, facts, mask)
        his_length = torch.clamp(torch.sum(mask, dim=1), min=1)
        his_mean = torch.sum(facts, dim=1) / his_length[:, None]

        inp = torch.cat(
            [self.input_layer(keys), attention_output, his_mean, query * his_mean],
            dim=-1,
        )
        net = self.dice_1(self.f1(self.bn1(inp)))
        net = self.dice_2(self.f2(net))
        bias = torch.index_select(self.item_b, 0, keys["item"] - 1)
        return {
            "logit": self.f3(net)[:, 0] + bias,
            "aux_loss": self.auxiliary_loss(facts, self.item_vectors(noclick), mask),
            "l2": self.regularization_loss(keys, his, noclick),
        }


# ---------------------------------------------------------------- checkpoint


def column_order(blocks):
    """Where the columns of these blocks of 8 come from."""
    size = FLAGS["embedding_size"]
    return torch.cat([torch.arange(size) + size * block for block in blocks])


# Torch: user, age, hour, then item and category of query, interest, mean and product.
INPUT_BLOCKS = [1, 4, 2, 3, 0, 6, 5, 8, 7, 10, 9]


@torch.no_grad()
def restore(net, reader):
    def dense(layer, name, order=None):
        kernel = torch.transpose(reader[name + ".weight"], 0, 1)
        layer.kernel.copy_(kernel if order is None else kernel[order])
        if layer.bias is not None:
            layer.bias.copy_(reader[name + ".bias"])

    def moving(layer, name, order=slice(None)):
        layer.moving_mean.copy_(reader[name + ".running_mean"][order])
        layer.moving_variance.copy_(reader[name + ".running_var"][order])

    def dice(layer, name):
        layer.alphas.copy_(reader[name + ".alpha"])
        moving(layer.bn, name + ".norm")

    for name, offset in OFFSETS.items():
        table = reader[name + ".weight"][1:]
        net.embedding_matrix[offset : offset + VOCABULARY[name]] = table
    net.item_b.copy_(reader["item_bias.weight"][1:, 0])
    net.cate_list.copy_(reader["category_of"])

    swapped = column_order([1, 0, 3, 2, 5, 4, 7, 6])
    dense(net.attention.f1_att, "attention.mlp.0", swapped)
    dice(net.attention.dice, "attention.mlp.1")
    dense(net.attention.f2_att, "attention.mlp.2")
    net.attention.prelu.alphas.copy_(reader["attention.mlp.3.weight"])
    dense(net.attention.f3_att, "attention.mlp.4")
    dense(net.aux_1, "next_item.0", column_order([1, 0, 3, 2]))
    dense(net.aux_2, "next_item.2")

    order = column_order(INPUT_BLOCKS)
    net.bn1.gamma.copy_(reader["deep.0.weight"][order])
    net.bn1.beta.copy_(reader["deep.0.bias"][order])
    moving(net.bn1, "deep.0", order)
    dense(net.f1, "deep.1", order)
    dice(net.dice_1, "deep.2")
    dense(net.f2, "deep.3")
    dice(net.dice_2, "deep.4")
    dense(net.f3, "deep.5")


def model():
    net = DinModel()
    restore(net, torch.load(Path(__file__).with_name("weights.pt")))
    return net


# ------------------------------------------------------------------ training


def forward(net, batch):
    return net(batch)


def loss(output, batch):
    losses = sigmoid_cross_entropy_with_logits(batch["clicked"], output["logit"])
    ctr_loss = torch.mean(losses * batch["weight"])
    total = ctr_loss + FLAGS["aux_weight"] * output["aux_loss"]
    return total + FLAGS["l2_reg"] * output["l2"]


def exponential_decay(learning_rate, global_step, decay_steps, decay_rate):
    return learning_rate * decay_rate ** (global_step / decay_steps)


def inverse_time_decay(learning_rate, global_step, decay_steps, decay_rate):
    return learning_rate / (1.0 + decay_rate * global_step / decay_steps)


class TrainOp(torch.optim.Optimizer):
    """Adagrad for the variables of the columns, Adam for those of the layers."""

    beta1, beta2, epsilon = 0.9, 0.999, 1e-8

    def __init__(self, named):
        self.names, variables = zip(*named)
        super().__init__(variables, {})
        self.global_step = 0

    def apply_adagrad(self, var, grad):
        lr = inverse_time_decay(
            FLAGS["embedding_lr"], self.global_step, 1, FLAGS["embedding_decay_rate"]
        )
        slots = self.state[var]
        if not slots:
            start = FLAGS["initial_accumulator_value"]
            slots["accumulator"] = torch.full_like(var, start)
        accum = slots["accumulator"]
        accum.add_(torch.square(grad))
        var.sub_(lr * grad * torch.rsqrt(accum))

    def apply_adam(self, var, grad):
        lr = exponential_decay(
            FLAGS["learning_rate"],
            self.global_step,
            FLAGS["decay_steps"],
            FLAGS["decay_rate"],
        )
        slots = self.state[var]
        if not slots:
            slots["m"], slots["v"] = torch.zeros_like(var), torch.zeros_like(var)
        beta1_power = self.beta1 ** (self.global_step + 1)
        beta2_power = self.beta2 ** (self.global_step + 1)
        correction = (1.0 - beta2_power) ** 0.5
        lr_t = lr * correction / (1.0 - beta1_power)
        m, v = slots["m"], slots["v"]
        m.add_((grad - m) * (1.0 - self.beta1))
        v.add_((torch.square(grad) - v) * (1.0 - self.beta2))
        var.sub_(lr_t * m / (torch.sqrt(v) + self.epsilon * correction))

    @torch.no_grad()
    def step(self, closure=None):
        for name, var in zip(self.names, self.param_groups[0]["params"]):
            if name in ("embedding_matrix", "item_b"):
                self.apply_adagrad(var, var.grad)
            else:
                self.apply_adam(var, var.grad)
        self.global_step += 1


def optimizer(net):
    return TrainOp(net.named_parameters())
