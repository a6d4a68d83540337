"""After TensorFlow: feature columns with a table each, Keras layers, kernels [in, out].

The interaction network runs over slices of the embedding, as in DeepCTR.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn


class SparseFeat(NamedTuple):
    name: str
    vocabulary_size: int
    maxlen: int = 1


class DenseFeat(NamedTuple):
    name: str
    mean: float
    stddev: float


SPARSE_COLUMNS = (
    SparseFeat("user", 41),
    SparseFeat("item", 61),
    SparseFeat("city", 13),
    SparseFeat("device", 7),
    SparseFeat("hour", 24),
)
VARLEN_COLUMN = SparseFeat("genre", 19, maxlen=5)
ALL_SPARSE = (*SPARSE_COLUMNS, VARLEN_COLUMN)
DENSE_COLUMNS = (
    DenseFeat("views", 2.1, 1.2),
    DenseFeat("clicks", 0.9, 0.7),
    DenseFeat("seconds", 4.0, 1.6),
    DenseFeat("days", 1.4, 0.5),
)
EMBEDDING_DIM = 8
DENSE_CLIP = 2.0

# ------------------------------------------------------------------- input pipeline


def hash_bucket(inputs, salt, num_bins):
    """Bin 0 is for what is missing."""
    state = torch.remainder(inputs * 2654435761 + 40503 * salt, 4294967296)
    state = torch.bitwise_xor(state, torch.bitwise_right_shift(state, 15))
    bins = torch.remainder(state, num_bins - 1) + 1
    return torch.where(torch.ge(inputs, 0), bins, torch.zeros_like(bins))


def sequence_mask(lengths, maxlen):
    return (torch.arange(maxlen)[None, :] < lengths[:, None]).to(torch.float32)


def normalizer_fn(column, value):
    present = torch.ge(value, 0.0)
    log_value = torch.log(torch.where(present, value, 0.0) + 1.0)
    score = (log_value - column.mean) / column.stddev
    score = torch.minimum(score, torch.tensor(DENSE_CLIP))
    score = torch.maximum(score, torch.tensor(-DENSE_CLIP))
    return torch.where(present, score, torch.zeros_like(score))


def parse_example(batch):
    """Raw columns -> a dictionary of features by name."""
    features = {}
    for i, column in enumerate(SPARSE_COLUMNS):
        raw = batch["ids"][:, i]
        features[column.name] = hash_bucket(raw, i + 1, column.vocabulary_size)
    salt = len(SPARSE_COLUMNS) + 1
    genre = hash_bucket(batch["genres"], salt, VARLEN_COLUMN.vocabulary_size)
    features["genre"] = genre
    features["genre_mask"] = sequence_mask(batch["genre_count"], VARLEN_COLUMN.maxlen)
    for i, dense in enumerate(DENSE_COLUMNS):
        features[dense.name] = normalizer_fn(dense, batch["numbers"][:, i : i + 1])
    return features


# --------------------------------------------------------------------------- layers


def weight(*shape):
    return nn.Parameter(torch.zeros(shape))


class Embedding(nn.Module):
    def __init__(self, input_dim, output_dim):
        super().__init__()
        self.embeddings = weight(input_dim, output_dim)

    def forward(self, inputs):
        flat = torch.index_select(self.embeddings, 0, torch.reshape(inputs, (-1,)))
        return torch.reshape(flat, (*inputs.shape, self.embeddings.shape[1]))


class SequencePoolingLayer(nn.Module):
    """Mean of the places that count; zeros where none does."""

    def forward(self, seq_embed, mask):
        hist = torch.sum(seq_embed * mask[:, :, None], dim=1, keepdim=True)
        seq_length = torch.sum(mask, dim=1)[:, None, None]
        return hist / torch.maximum(seq_length, torch.ones_like(seq_length))


class Dense(nn.Module):
    def __init__(self, inputs, units, use_bias=True):
        super().__init__()
        self.kernel = weight(inputs, units)
        self.bias = weight(units) if use_bias else None

    def forward(self, inputs):
        outputs = torch.matmul(inputs, self.kernel)
        return outputs if self.bias is None else outputs + self.bias


class BatchNormalization(nn.Module):
    def __init__(self, units, momentum=0.95, epsilon=1e-3):
        super().__init__()
        self.momentum, self.epsilon = momentum, epsilon
        self.gamma, self.beta = weight(units), weight(units)
        self.register_buffer("moving_mean", torch.zeros(units))
        self.register_buffer("moving_variance", torch.ones(units))

    @torch.no_grad()
    def assign_moving(self, mean, variance, count):
        variance = variance * (count / (count - 1))
        decay = 1.0 - self.momentum
        self.moving_mean.sub_((self.moving_mean - mean) * decay)
        self.moving_variance.sub_((self.moving_variance - variance) * decay)

    def forward(self, inputs):
        mean, variance = self.moving_mean, self.moving_variance
        if self.training:
            mean = torch.mean(inputs, dim=0)
            variance = torch.mean(torch.square(inputs - mean), dim=0)
            self.assign_moving(mean, variance, inputs.shape[0])
        inv = torch.rsqrt(variance + self.epsilon) * self.gamma
        return inputs * inv + (self.beta - mean * inv)


class PReLU(nn.Module):
    def __init__(self, units):
        super().__init__()
        self.alpha = weight(units)

    def forward(self, inputs):
        return torch.relu(inputs) - self.alpha * torch.relu(-inputs)


class DNN(nn.Module):
    def __init__(self, inputs, hidden_units):
        super().__init__()
        widths = (inputs, *hidden_units)
        self.denses = nn.ModuleList(
            Dense(a, b, use_bias=False) for a, b in zip(widths, hidden_units)
        )
        self.bn_layers = nn.ModuleList(BatchNormalization(n) for n in hidden_units)
        self.activation_layers = nn.ModuleList(PReLU(n) for n in hidden_units)

    def forward(self, inputs):
        deep_input = inputs
        for i, dense in enumerate(self.denses):
            fc = self.bn_layers[i](dense(deep_input))
            deep_input = self.activation_layers[i](fc)
        return deep_input


class FM(nn.Module):
    def forward(self, inputs):
        square_of_sum = torch.square(torch.sum(inputs, dim=1, keepdim=True))
        sum_of_square = torch.sum(inputs * inputs, dim=1, keepdim=True)
        cross_term = square_of_sum - sum_of_square
        return 0.5 * torch.sum(cross_term, dim=2, keepdim=False)


class CIN(nn.Module):
    """Filters are [1, fields * hidden, maps]."""

    def __init__(self, field_size, layer_size):
        super().__init__()
        self.layer_size = layer_size
        self.filters, self.biases = nn.ParameterList(), nn.ParameterList()
        last = field_size
        for size in layer_size:
            self.filters.append(weight(1, field_size * last, size))
            self.biases.append(weight(size))
            last = size // 2

    def forward(self, inputs):
        final_result = []
        # [dim, batch, fields, 1]
        split_tensor0 = torch.stack(torch.split(inputs, 1, dim=2))
        split_tensor = split_tensor0
        for idx, size in enumerate(self.layer_size):
            dot_result = torch.matmul(split_tensor0, split_tensor.transpose(2, 3))
            dot_result = torch.flatten(dot_result, 2)
            dot_result = torch.permute(dot_result, (1, 0, 2))
            curr_out = torch.matmul(dot_result, self.filters[idx][0])
            curr_out = torch.relu(curr_out + self.biases[idx])
            curr_out = torch.permute(curr_out, (0, 2, 1))
            direct_connect = curr_out
            if idx != len(self.layer_size) - 1:
                next_hidden, direct_connect = torch.split(curr_out, size // 2, dim=1)
                split_tensor = torch.stack(torch.split(next_hidden, 1, dim=2))
            final_result.append(direct_connect)
        return torch.sum(torch.cat(final_result, dim=1), dim=-1)


class CrossNetMix(nn.Module):
    """Vectors are columns; U and V are [experts, dim, low_rank]."""

    def __init__(self, dim, low_rank=8, num_experts=3, layer_num=2):
        super().__init__()
        self.layer_num, self.num_experts = layer_num, num_experts
        for i in range(layer_num):
            setattr(self, f"U_{i}", weight(num_experts, dim, low_rank))
            setattr(self, f"V_{i}", weight(num_experts, dim, low_rank))
            setattr(self, f"C_{i}", weight(num_experts, low_rank, low_rank))
            setattr(self, f"bias_{i}", weight(dim, 1))
        self.gating = nn.ModuleList(Dense(dim, num_experts) for _ in range(layer_num))

    def forward(self, inputs):
        x_0 = torch.unsqueeze(inputs, 2)
        x_l = x_0
        for i in range(self.layer_num):
            v, c = getattr(self, f"V_{i}"), getattr(self, f"C_{i}")
            u, bias = getattr(self, f"U_{i}"), getattr(self, f"bias_{i}")
            scores = self.gating[i](torch.squeeze(x_l, 2))
            scores = torch.exp(scores - torch.amax(scores, dim=1, keepdim=True))
            gating = scores / torch.sum(scores, dim=1, keepdim=True)
            output_of_experts = []
            for expert_id in range(self.num_experts):
                v_x = torch.tanh(torch.matmul(v[expert_id].T, x_l))
                v_x = torch.tanh(torch.matmul(c[expert_id], v_x))
                uv_x = torch.matmul(u[expert_id], v_x)
                output_of_experts.append(torch.squeeze(x_0 * (uv_x + bias), 2))
            experts = torch.stack(output_of_experts, dim=2)
            moe_out = torch.matmul(experts, torch.unsqueeze(gating, 2))
            x_l = moe_out + x_l
        return torch.squeeze(x_l, 2)


class XDeepFM(nn.Module):
    def __init__(self):
        super().__init__()
        fields = len(ALL_SPARSE) + len(DENSE_COLUMNS)
        dnn_dim = len(ALL_SPARSE) * EMBEDDING_DIM + len(DENSE_COLUMNS)
        self.sparse_emb = nn.ModuleDict(
            {c.name: Embedding(c.vocabulary_size, EMBEDDING_DIM) for c in ALL_SPARSE}
        )
        self.linear_emb = nn.ModuleDict(
            {c.name: Embedding(c.vocabulary_size, 1) for c in ALL_SPARSE}
        )
        self.dense_emb = nn.ParameterDict(
            {c.name: weight(1, EMBEDDING_DIM) for c in DENSE_COLUMNS}
        )
        self.pooling = SequencePoolingLayer()
        self.linear = Dense(len(DENSE_COLUMNS), 1)
        self.fm = FM()
        self.cin = CIN(fields, (16, 12))
        self.cin_logit = Dense(20, 1, use_bias=False)
        self.crossnet = CrossNetMix(dnn_dim)
        self.dnn = DNN(dnn_dim, (48, 32, 24))
        self.final_logit = Dense(dnn_dim + 24, 1, use_bias=False)

    def embedding_lookup(self, tables, features):
        """A list of [batch, 1, units]."""
        group = [tables[c.name](features[c.name][:, None]) for c in SPARSE_COLUMNS]
        genre = tables["genre"](features["genre"])
        return [*group, self.pooling(genre, features["genre_mask"])]

    def forward(self, features):
        dense_list = [features[c.name] for c in DENSE_COLUMNS]
        dense_value = torch.cat(dense_list, dim=1)
        embedding_list = self.embedding_lookup(self.sparse_emb, features)
        dense_emb_list = [
            torch.unsqueeze(features[c.name] * self.dense_emb[c.name], 1)
            for c in DENSE_COLUMNS
        ]
        fm_input = torch.cat(embedding_list + dense_emb_list, dim=1)

        linear_list = self.embedding_lookup(self.linear_emb, features)
        linear_logit = torch.sum(torch.cat(linear_list, dim=1), dim=1)
        linear_logit = linear_logit + self.linear(dense_value)

        sparse_value = torch.cat(embedding_list, dim=1)
        dnn_input = torch.cat([torch.flatten(sparse_value, 1), dense_value], dim=1)
        stack_out = torch.cat([self.crossnet(dnn_input), self.dnn(dnn_input)], dim=1)

        logits = linear_logit + self.fm(fm_input)
        logits = logits + self.cin_logit(self.cin(fm_input))
        logits = logits + self.final_logit(stack_out)
        return logits, sparse_value


# ------------------------------------------------------------------------- weights


def split_table(table):
    """One table -> a table for each column."""
    sizes = [column.vocabulary_size for column in ALL_SPARSE]
    return dict(zip([c.name for c in ALL_SPARSE], torch.split(table, sizes)))


def cin_filter(conv_weight, fields):
    """[maps, hidden * fields, 1] -> [1, fields * hidden, maps]."""
    maps = conv_weight.shape[0]
    pairs = torch.reshape(conv_weight, (maps, -1, fields))
    return torch.reshape(torch.permute(pairs, (2, 1, 0)), (1, -1, maps))


def convert(ckpt):
    values = {}
    for name, rows in split_table(ckpt["features.embedding.weight"]).items():
        values[f"sparse_emb.{name}.embeddings"] = rows
    for name, rows in split_table(ckpt["features.first_order.weight"]).items():
        values[f"linear_emb.{name}.embeddings"] = rows
    for i, column in enumerate(DENSE_COLUMNS):
        vector = ckpt["features.number_vectors"][i : i + 1]
        values[f"dense_emb.{column.name}"] = vector
    values["linear.kernel"] = ckpt["linear.weight"].T
    values["linear.bias"] = ckpt["linear.bias"]
    fields = len(ALL_SPARSE) + len(DENSE_COLUMNS)
    for i in range(2):
        values[f"cin.filters.{i}"] = cin_filter(ckpt[f"cin.convs.{i}.weight"], fields)
        values[f"cin.biases.{i}"] = ckpt[f"cin.convs.{i}.bias"]
    values["cin_logit.kernel"] = ckpt["cin.out.weight"].T
    for i in range(2):
        values[f"crossnet.U_{i}"] = torch.transpose(ckpt[f"cross.{i}.u"], 1, 2)
        values[f"crossnet.V_{i}"] = ckpt[f"cross.{i}.v"]
        values[f"crossnet.C_{i}"] = torch.transpose(ckpt[f"cross.{i}.c"], 1, 2)
        values[f"crossnet.bias_{i}"] = ckpt[f"cross.{i}.bias"][:, None]
        values[f"crossnet.gating.{i}.kernel"] = ckpt[f"cross.{i}.gate.weight"].T
        values[f"crossnet.gating.{i}.bias"] = ckpt[f"cross.{i}.gate.bias"]
    for i in range(3):
        values[f"dnn.denses.{i}.kernel"] = ckpt[f"deep.{3 * i}.weight"].T
        norm = f"deep.{3 * i + 1}"
        values[f"dnn.bn_layers.{i}.gamma"] = ckpt[f"{norm}.weight"]
        values[f"dnn.bn_layers.{i}.beta"] = ckpt[f"{norm}.bias"]
        values[f"dnn.bn_layers.{i}.moving_mean"] = ckpt[f"{norm}.running_mean"]
        values[f"dnn.bn_layers.{i}.moving_variance"] = ckpt[f"{norm}.running_var"]
        slopes = ckpt[f"deep.{3 * i + 2}.weight"]
        values[f"dnn.activation_layers.{i}.alpha"] = slopes
    values["final_logit.kernel"] = ckpt["head.weight"].T
    return values


def model():
    net = XDeepFM()
    net.load_state_dict(convert(torch.load(Path(__file__).with_name("weights.pt"))))
    return net


def forward(net, batch):
    logits, sparse_value = net(parse_example(batch))
    return {"logit": torch.squeeze(logits, 1), "embedded": sparse_value}


# ---------------------------------------------------------------------------- loss

POS_WEIGHT = 2.0
CALIBRATION_WEIGHT = 0.3
L2_REG_EMBEDDING = 0.02


def weighted_cross_entropy_with_logits(labels, logits, pos_weight):
    log_weight = 1.0 + (pos_weight - 1.0) * labels
    softplus = torch.log1p(torch.exp(-torch.abs(logits))) + torch.relu(-logits)
    return (1.0 - labels) * logits + log_weight * softplus


def calibration_loss(labels, logits, sample_weight):
    """Square of the log of predicted over observed clicks."""
    odds = torch.exp(logits) / POS_WEIGHT
    predicted = torch.sum(sample_weight * odds / (1.0 + odds))
    observed = torch.sum(sample_weight * labels)
    return torch.square(torch.log(predicted) - torch.log(observed))


def loss(output, batch):
    labels, sample_weight = batch["label"], batch["weight"]
    logits = output["logit"]
    per_example = weighted_cross_entropy_with_logits(labels, logits, POS_WEIGHT)
    click = torch.sum(per_example * sample_weight) / torch.sum(sample_weight)
    calibration = calibration_loss(labels, logits, sample_weight)
    l2_loss = torch.sum(torch.square(output["embedded"])) / 2.0
    l2_loss = l2_loss / labels.shape[0]
    return click + CALIBRATION_WEIGHT * calibration + L2_REG_EMBEDDING * l2_loss


# ----------------------------------------------------------------------- optimizer


def clip_by_global_norm(grads, clip_norm):
    global_norm = torch.sqrt(sum(torch.sum(torch.square(g)) for g in grads))
    scale = torch.minimum(clip_norm / global_norm, torch.tensor(1.0))
    return [g * scale for g in grads]


class Adam(torch.optim.Optimizer):
    def __init__(self, var_groups, beta_1=0.9, beta_2=0.99, epsilon=1e-3):
        defaults = {"beta_1": beta_1, "beta_2": beta_2, "epsilon": epsilon}
        super().__init__(var_groups, {**defaults, "clipnorm": 0.5})
        self.iterations = 0

    def apply_gradient(self, var, grad, group):
        slots = self.state[var]
        if not slots:
            slots["m"], slots["v"] = torch.zeros_like(var), torch.zeros_like(var)
        beta_1, beta_2 = group["beta_1"], group["beta_2"]
        slots["m"] = beta_1 * slots["m"] + (1.0 - beta_1) * grad
        slots["v"] = beta_2 * slots["v"] + (1.0 - beta_2) * torch.square(grad)
        m_hat = slots["m"] / (1.0 - beta_1**self.iterations)
        v_hat = slots["v"] / (1.0 - beta_2**self.iterations)
        update = m_hat / (torch.sqrt(v_hat) + group["epsilon"])
        var.sub_(group["lr"] * update)

    @torch.no_grad()
    def step(self, closure=None):
        self.iterations += 1
        pairs = [(v, group) for group in self.param_groups for v in group["params"]]
        clip_norm = self.param_groups[0]["clipnorm"]
        grads = clip_by_global_norm([v.grad for v, _ in pairs], clip_norm)
        for (var, group), grad in zip(pairs, grads):
            self.apply_gradient(var, grad, group)


def optimizer(net):
    sparse = [*net.sparse_emb.parameters(), *net.linear_emb.parameters()]
    known = {id(v) for v in sparse}
    dense = [v for v in net.parameters() if id(v) not in known]
    return Adam([{"params": sparse, "lr": 0.02}, {"params": dense, "lr": 0.005}])
