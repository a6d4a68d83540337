"""After GluonTS on MXNet: time-major cells, scalers and distributions that are hybridized."""

import math
from pathlib import Path

import torch
from torch import nn

context_length = 11
prediction_length = 4
lags_seq = [1, 2, 5, 7]
history_length = context_length + max(lags_seq)
cardinality = [9, 13, 4]
embedding_dimension = [5, 7, 3]
num_cells = 44
minimum_scale = 0.4
alpha_reg, beta_reg = 1.0, 2.0

# ------------------------------------------------------------------- operators


def FullyConnected(data, weight, bias=None):
    """flatten=False; weights are [num_hidden, in_units]."""
    out = torch.matmul(data, torch.swapaxes(weight, 0, 1))
    return out if bias is None else out + bias


def Activation(data, act_type):
    if act_type == "tanh":
        return torch.tanh(data)
    if act_type == "sigmoid":
        return torch.sigmoid(data)
    if act_type == "softrelu":
        return torch.clamp(data, min=0.0) + torch.log1p(torch.exp(-torch.abs(data)))
    raise ValueError(act_type)


def slice_axis(data, axis, begin, end):
    size = data.shape[axis]
    begin = begin % size
    end = size if end is None else (end % size or size)
    return torch.narrow(data, axis, begin, end - begin)


def SliceChannel(data, num_outputs, axis, squeeze_axis=False):
    parts = torch.chunk(data, num_outputs, dim=axis)
    return [torch.squeeze(p, axis) for p in parts] if squeeze_axis else list(parts)


def where(condition, x, y):
    """The condition is a number, as in MXNet."""
    return torch.where(condition != 0, x, y)


def gammaln(x):
    return torch.lgamma(x)


# ---------------------------------------------------------------------- blocks


class Block(nn.Module):
    def get(self, name, *shape, grad_req="write"):
        if grad_req == "null":
            self.register_buffer(name, torch.zeros(shape))
        else:
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


class Dense(Block):
    def __init__(self, units, in_units):
        super().__init__()
        self.get("weight", units, in_units)
        self.get("bias", units)

    def forward(self, x):
        return FullyConnected(x, self.weight, self.bias)


class Embedding(Block):
    def __init__(self, input_dim, output_dim):
        super().__init__()
        self.get("weight", input_dim, output_dim)

    def forward(self, x):
        return torch.index_select(self.weight, 0, x.reshape(-1)).reshape(*x.shape, -1)


class FeatureEmbedder(nn.Module):
    """One column of the categories for each table."""

    def __init__(self, cardinalities, embedding_dims):
        super().__init__()
        tables = [Embedding(c, d) for c, d in zip(cardinalities, embedding_dims)]
        self.embedders = nn.ModuleList(tables)

    def forward(self, features):
        slices = SliceChannel(features, len(self.embedders), axis=1, squeeze_axis=True)
        return torch.cat([e(s) for e, s in zip(self.embedders, slices)], dim=-1)


class LSTMCell(Block):
    """Gates: in, forget, transform, out."""

    def __init__(self, hidden_size, input_size):
        super().__init__()
        self.hidden_size = hidden_size
        self.get("i2h_weight", 4 * hidden_size, input_size)
        self.get("h2h_weight", 4 * hidden_size, hidden_size)
        self.get("i2h_bias", 4 * hidden_size)
        self.get("h2h_bias", 4 * hidden_size, grad_req="null")

    def begin_state(self, batch_size):
        return [torch.zeros(batch_size, self.hidden_size) for _ in range(2)]

    def forward(self, inputs, states):
        i2h = FullyConnected(inputs, self.i2h_weight, self.i2h_bias)
        h2h = FullyConnected(states[0], self.h2h_weight, self.h2h_bias)
        slices = SliceChannel(i2h + h2h, num_outputs=4, axis=1)
        in_gate = Activation(slices[0], "sigmoid")
        forget_gate = Activation(slices[1], "sigmoid")
        in_transform = Activation(slices[2], "tanh")
        out_gate = Activation(slices[3], "sigmoid")
        next_c = forget_gate * states[1] + in_gate * in_transform
        next_h = out_gate * Activation(next_c, "tanh")
        return next_h, [next_h, next_c]


class ResidualCell(nn.Module):
    def __init__(self, base_cell):
        super().__init__()
        self.base_cell = base_cell

    def begin_state(self, batch_size):
        return self.base_cell.begin_state(batch_size)

    def forward(self, inputs, states):
        output, states = self.base_cell(inputs, states)
        return output + inputs, states


class SequentialRNNCell(nn.Module):
    def __init__(self, *cells):
        super().__init__()
        self.cells = nn.ModuleList(cells)

    def begin_state(self, batch_size):
        return [s for cell in self.cells for s in cell.begin_state(batch_size)]

    def forward(self, inputs, states):
        next_states = []
        for i, cell in enumerate(self.cells):
            inputs, state = cell(inputs, states[2 * i : 2 * i + 2])
            next_states.extend(state)
        return inputs, next_states

    def unroll(self, length, inputs, begin_state, mask):
        """inputs are TNC, mask is TN1: where it is 0 nothing moves and zeros come out."""
        states, outputs = begin_state, []
        for t in range(length):
            output, new_states = self(inputs[t], states)
            states = [where(mask[t], new, s) for new, s in zip(new_states, states)]
            outputs.append(output * mask[t])
        return torch.stack(outputs), states


# ----------------------------------------------------------------------- scaler


class MeanScaler:
    """Data and indicator are TNC; scales are 1NC."""

    def __init__(self, minimum_scale):
        self.minimum_scale = minimum_scale

    def __call__(self, data, observed_indicator):
        num_observed = torch.sum(observed_indicator, dim=0, keepdim=True)
        sum_observed = torch.sum(
            torch.abs(data) * observed_indicator, dim=0, keepdim=True
        )
        total_observed = torch.sum(num_observed, dim=1, keepdim=True)
        denominator = torch.clamp(total_observed, min=1.0)
        default_scale = torch.sum(sum_observed, dim=1, keepdim=True) / denominator
        denominator = torch.clamp(num_observed, min=1.0)
        scale = sum_observed / denominator
        scale = where(num_observed, scale, default_scale * torch.ones_like(scale))
        return torch.clamp(scale, min=self.minimum_scale)


# ---------------------------------------------------------------- distributions


class StudentT:
    """mu, sigma and nu; the scale is that of an affine transformation."""

    args_dim = {"mu": 1, "sigma": 1, "nu": 1}

    def __init__(self, mu, sigma, nu, scale):
        self.mu = mu * scale
        self.sigma = Activation(sigma, "softrelu") * scale
        self.nu = Activation(nu, "softrelu") + 2.0

    def log_prob(self, x):
        mu, sigma, nu = self.mu, self.sigma, self.nu
        nup1_half = (nu + 1.0) / 2.0
        part1 = 1.0 / nu * torch.square((x - mu) / sigma)
        Z = (
            gammaln(nup1_half)
            - gammaln(nu / 2.0)
            - 0.5 * torch.log(math.pi * nu)
            - torch.log(sigma)
        )
        return Z - nup1_half * torch.log1p(part1)


class NegativeBinomial:
    """mu is the mean, mu + alpha * mu ** 2 the variance."""

    args_dim = {"mu": 1, "alpha": 1}

    def __init__(self, mu, alpha, scale):
        self.mu = Activation(mu, "softrelu") * scale
        self.alpha = Activation(alpha, "softrelu") / torch.sqrt(scale)

    def log_prob(self, x):
        alpha_inv = 1.0 / self.alpha
        alpha_times_mu = self.alpha * self.mu
        return (
            x * torch.log(alpha_times_mu / (1.0 + alpha_times_mu))
            - alpha_inv * torch.log1p(alpha_times_mu)
            + gammaln(x + alpha_inv)
            - gammaln(x + 1.0)
            - gammaln(alpha_inv)
        )


class ArgProj(nn.Module):
    """A Dense for each argument of a distribution."""

    def __init__(self, distr, in_units):
        super().__init__()
        self.distr = distr
        dims = distr.args_dim.items()
        self.proj = nn.ModuleDict({name: Dense(dim, in_units) for name, dim in dims})

    def forward(self, x, scale):
        return self.distr(**{n: p(x) for n, p in self.proj.items()}, scale=scale)


# ---------------------------------------------------------------------- network


def weighted_average(x, weights):
    weighted = where(weights, x * weights, torch.zeros_like(x))
    return torch.sum(weighted) / torch.clamp(torch.sum(weights), min=1.0)


def get_lagged_subsequences(sequence, subsequences_length):
    """TNC with one channel to TNC with one for each lag."""
    lagged_values = []
    for lag_index in lags_seq:
        begin_index = -lag_index - subsequences_length
        end_index = -lag_index
        lagged_values.append(
            slice_axis(sequence, axis=0, begin=begin_index, end=end_index)
        )
    return torch.cat(lagged_values, dim=-1)


class DeepARTrainingNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedder = FeatureEmbedder(cardinality, embedding_dimension)
        self.day_embedder = Embedding(7, 2)
        input_size = 2 * len(lags_seq) + 6 + sum(embedding_dimension) + 1
        self.rnn = SequentialRNNCell(
            LSTMCell(num_cells, input_size),
            ResidualCell(LSTMCell(num_cells, num_cells)),
        )
        self.scaler = MeanScaler(minimum_scale)
        self.student = ArgProj(StudentT, num_cells)
        self.negative_binomial = ArgProj(NegativeBinomial, num_cells)

    def time_features(self, batch):
        """Day of the week, age and the given features of the unrolled steps."""
        length = context_length + prediction_length
        index = torch.arange(history_length - context_length, 22).unsqueeze(1)
        day = self.day_embedder(torch.remainder(batch["day"] + index, 7))
        age = torch.log(1.0 + torch.clamp(index - batch["start"], min=0).float())
        dynamic = slice_axis(torch.swapaxes(batch["features"], 0, 1), 0, -length, None)
        price = (dynamic[..., 0:1] - 3.2) / 0.8
        warmth = (dynamic[..., 1:2] - 14.0) / 6.0
        event = (dynamic[..., 2:3] - 0.3) / 0.45
        return torch.cat([day, age.unsqueeze(-1), price, warmth, event], dim=-1)

    def unroll_encoder(self, batch, target, observed):
        length = context_length + prediction_length
        past = slice_axis(target, 0, 0, history_length)
        past_observed = slice_axis(observed, 0, 0, history_length)
        scale = self.scaler(
            slice_axis(past, 0, -context_length, None),
            slice_axis(past_observed, 0, -context_length, None),
        )
        lags = get_lagged_subsequences(target, length) / scale
        indicators = get_lagged_subsequences(observed, length)
        embedded_cat = self.embedder(batch["categories"])
        static_feat = torch.cat([embedded_cat, torch.log(scale[0])], dim=1)
        repeated_static = torch.stack([static_feat] * length)
        time_feat = self.time_features(batch)
        inputs = torch.cat([lags, indicators, time_feat, repeated_static], dim=-1)

        index = torch.arange(history_length - context_length, 22).unsqueeze(1)
        mask = (index >= batch["start"]).float().unsqueeze(-1)
        state = self.rnn.begin_state(scale.shape[1])
        encoded, state = self.rnn.unroll(context_length, inputs, state, mask)
        decoded, _ = self.rnn.unroll(
            prediction_length, inputs[context_length:], state, mask[context_length:]
        )
        return torch.cat([encoded, decoded], dim=0), scale, mask

    def regularization(self, outputs, mask):
        """Activations, and how they change in time; the channels' mean for each step."""
        squares = torch.mean(torch.square(outputs), dim=-1, keepdim=True)
        activation = weighted_average(squares, mask)
        later, sooner = outputs[1:], outputs[:-1]
        squares = torch.mean(torch.square(later - sooner), dim=-1, keepdim=True)
        temporal = weighted_average(squares, mask[:-1])
        return alpha_reg * activation + beta_reg * temporal

    def forward(self, batch):
        observed = torch.swapaxes(batch["observed"], 0, 1).float().unsqueeze(-1)
        target = torch.swapaxes(batch["values"], 0, 1).unsqueeze(-1)
        target = where(observed, target, torch.zeros_like(target))
        outputs, scale, mask = self.unroll_encoder(batch, target, observed)

        length = context_length + prediction_length
        target = slice_axis(target, 0, -length, None)
        weights = slice_axis(observed, 0, -length, None)
        is_count = batch["is_count"].reshape(1, -1, 1)
        count = where(is_count, target, torch.zeros_like(target))
        measured = self.student(outputs, scale).log_prob(target)
        counted = self.negative_binomial(outputs, scale).log_prob(count)
        loss = -where(is_count, counted, measured)
        return weighted_average(loss, weights) + self.regularization(outputs, mask)


# --------------------------------------------------------------------- parameters


def reorder_inputs(weight):
    """Columns: lags, masks, weekday, age, features, categories, scale."""
    static, lags, given, day, age = torch.split(weight, [16, 8, 3, 2, 1], dim=1)
    return torch.cat([lags, day, age, given, static], dim=1)


def cell_params(src, number, prefix):
    source = f"rnn.cell{number}."
    i2h = src[source + "weight_ih"]
    return {
        prefix + "i2h_weight": reorder_inputs(i2h) if number == 1 else i2h,
        prefix + "h2h_weight": src[source + "weight_hh"],
        prefix + "i2h_bias": src[source + "bias_ih"],
        prefix + "h2h_bias": src[source + "bias_hh"],
    }


def arg_params(src, head, prefix, names):
    """Rows of the head in this order."""
    params = {}
    for row, name in enumerate(names):
        params[f"{prefix}.proj.{name}.weight"] = src[head + ".weight"][row : row + 1]
        params[f"{prefix}.proj.{name}.bias"] = src[head + ".bias"][row : row + 1]
    return params


def load_parameters(net, filename):
    src = torch.load(filename)
    params = {"day_embedder.weight": src["weekday.weight"]}
    for i in range(len(cardinality)):
        params[f"embedder.embedders.{i}.weight"] = src[f"embeds.{i}.weight"]
    params |= cell_params(src, 1, "rnn.cells.0.")
    params |= cell_params(src, 2, "rnn.cells.1.base_cell.")
    params |= arg_params(src, "student_head", "student", ("nu", "mu", "sigma"))
    params |= arg_params(src, "count_head", "negative_binomial", ("mu", "alpha"))
    net.load_state_dict(params)


def model():
    net = DeepARTrainingNetwork()
    load_parameters(net, Path(__file__).with_name("weights.pt"))
    return net


def forward(net, batch):
    return net(batch)


def loss(output, batch):
    return output


# ------------------------------------------------------------------------ trainer


def clip_global_norm(arrays, max_norm):
    total_norm = torch.sqrt(sum(torch.sum(torch.square(a)) for a in arrays))
    scale = torch.clamp(max_norm / (total_norm + 1e-8), max=1.0)
    return [array * scale for array in arrays]


class Trainer(torch.optim.Optimizer):
    """SGD with momentum: the state holds the step itself."""

    def __init__(self, params, learning_rate, momentum, clip_gradient):
        super().__init__(params, {})
        self.lr, self.momentum = learning_rate, momentum
        self.clip_gradient = clip_gradient

    @torch.no_grad()
    def step(self, closure=None):
        weights = self.param_groups[0]["params"]
        grads = clip_global_norm([w.grad for w in weights], self.clip_gradient)
        for weight, grad in zip(weights, grads):
            state = self.state[weight]
            mom = state.get("mom", torch.zeros_like(weight))
            state["mom"] = self.momentum * mom - self.lr * grad
            weight.add_(state["mom"])


def optimizer(net):
    params = list(net.parameters())
    return Trainer(params, learning_rate=0.02, momentum=0.9, clip_gradient=1.0)
