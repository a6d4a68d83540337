"""After Keras and TensorFlow Probability: kernels [in, out], cells with constants, log_prob."""

import math
from pathlib import Path

import torch
from torch import nn

CONTEXT_STEPS = 11
PREDICTION_STEPS = 4
NUM_STEPS = CONTEXT_STEPS + PREDICTION_STEPS
LAG_INDICES = (1, 2, 5, 7)
VOCABULARIES = {"store": (9, 5), "product": (13, 7), "region": (4, 3)}
UNITS = 44
MIN_SCALE = 0.4
ACTIVITY_L2, TEMPORAL_L2 = 1.0, 2.0

# ------------------------------------------------------------------------- tf ops


def weight(*shape):
    return nn.Parameter(torch.zeros(shape))


def softplus(x):
    return torch.logaddexp(x, torch.zeros_like(x))


def log_sigmoid(x):
    return -softplus(-x)


def sigmoid(x):
    return torch.sigmoid(x)


def hard_sigmoid(x):
    return torch.clamp(0.2 * x + 0.5, 0.0, 1.0)


def divide_no_nan(x, y):
    safe = torch.where(y == 0, torch.ones_like(y), y)
    return torch.where(y == 0, torch.zeros_like(x), x / safe)


def sequence_mask(lengths, maxlen):
    return torch.arange(maxlen)[None, :] < lengths[:, None]


def lbeta(x, y):
    return torch.lgamma(x) + torch.lgamma(y) - torch.lgamma(x + y)


# ------------------------------------------------------------------ distributions


class StudentT:
    def __init__(self, df, loc, scale):
        self.df, self.loc, self.scale = df, loc, scale

    def log_prob(self, value):
        df = self.df
        y = (value - self.loc) / self.scale
        log_unnormalized_prob = -0.5 * (df + 1.0) * torch.log1p(y**2 / df)
        log_normalization = (
            torch.log(self.scale)
            + 0.5 * torch.log(df)
            + 0.5 * math.log(math.pi)
            + torch.lgamma(0.5 * df)
            - torch.lgamma(0.5 * (df + 1.0))
        )
        return log_unnormalized_prob - log_normalization


class NegativeBinomial:
    """Successes before there are total_count failures."""

    def __init__(self, total_count, logits):
        self.total_count, self.logits = total_count, logits

    def log_prob(self, value):
        log_unnormalized_prob = self.total_count * log_sigmoid(-self.logits)
        log_unnormalized_prob = log_unnormalized_prob + value * log_sigmoid(self.logits)
        total = self.total_count + value
        log_normalization = lbeta(1.0 + value, self.total_count) + torch.log(total)
        return log_unnormalized_prob - log_normalization


class Scale:
    """y = scale * x."""

    def __init__(self, scale):
        self.scale = scale

    def inverse(self, y):
        return y / self.scale

    def inverse_log_det_jacobian(self):
        return -torch.log(self.scale)


class TransformedDistribution:
    def __init__(self, distribution, bijector):
        self.distribution, self.bijector = distribution, bijector

    def log_prob(self, value):
        x = self.bijector.inverse(value)
        ildj = self.bijector.inverse_log_det_jacobian()
        return self.distribution.log_prob(x) + ildj


# ------------------------------------------------------------------------- layers


class Dense(nn.Module):
    def __init__(self, inputs, units):
        super().__init__()
        self.kernel = weight(inputs, units)
        self.bias = weight(units)

    def forward(self, inputs):
        return torch.matmul(inputs, self.kernel) + self.bias


class Embedding(nn.Module):
    def __init__(self, input_dim, output_dim):
        super().__init__()
        self.embeddings = weight(input_dim, output_dim)

    def forward(self, inputs):
        return self.embeddings[inputs]


class Normalization(nn.Module):
    """Keeps the variance, as Keras does."""

    def __init__(self, mean, variance):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean), persistent=False)
        self.register_buffer("variance", torch.tensor(variance), persistent=False)

    def forward(self, inputs):
        return (inputs - self.mean) / torch.sqrt(self.variance).clamp(min=1e-7)


class LSTMCell(nn.Module):
    """One bias; gates i, f, c, o; what does not change in time has a kernel of its own."""

    def __init__(self, inputs, units, constants=0, recurrent_activation=sigmoid):
        super().__init__()
        self.recurrent_activation = recurrent_activation
        self.kernel = weight(inputs, 4 * units)
        self.recurrent_kernel = weight(units, 4 * units)
        self.constants_kernel = weight(constants, 4 * units) if constants else None
        self.bias = weight(4 * units)

    def forward(self, inputs, states, constants=None):
        h_tm1, c_tm1 = states
        z = torch.matmul(inputs, self.kernel)
        z = z + torch.matmul(h_tm1, self.recurrent_kernel)
        if self.constants_kernel is not None:
            z = z + torch.matmul(constants, self.constants_kernel)
        z0, z1, z2, z3 = torch.chunk(z + self.bias, 4, dim=1)
        i = self.recurrent_activation(z0)
        f = self.recurrent_activation(z1)
        c = f * c_tm1 + i * torch.tanh(z2)
        o = self.recurrent_activation(z3)
        h = o * torch.tanh(c)
        return h, [h, c]


class RNN(nn.Module):
    """return_sequences=True; a masked step repeats the output and the states before it."""

    def __init__(self, cell, units):
        super().__init__()
        self.cell = cell
        self.units = units

    def forward(self, inputs, mask, constants=None):
        states = [inputs.new_zeros(len(inputs), self.units) for _ in range(2)]
        output, outputs = states[0], []
        for time in range(inputs.shape[1]):
            keep = mask[:, time].unsqueeze(1)
            new_output, new_states = self.cell(inputs[:, time], states, constants)
            output = torch.where(keep, new_output, output)
            states = [torch.where(keep, n, s) for n, s in zip(new_states, states)]
            outputs.append(output)
        return torch.stack(outputs, dim=1)


# -------------------------------------------------------------------------- model


def make_lags(series):
    """[batch, time] to [batch, steps, lags]: rolled forward, then the last steps."""
    rolled = [torch.roll(series, lag, dims=1) for lag in LAG_INDICES]
    return torch.stack(rolled, dim=2)[:, -NUM_STEPS:]


def context_scale(values, weights):
    values = values[:, -NUM_STEPS:-PREDICTION_STEPS]
    weights = weights[:, -NUM_STEPS:-PREDICTION_STEPS]
    sums = torch.sum(torch.abs(values) * weights, dim=1, keepdim=True)
    counts = torch.sum(weights, dim=1, keepdim=True)
    overall = divide_no_nan(torch.sum(sums), torch.sum(counts))
    scale = torch.where(counts > 0, divide_no_nan(sums, counts), overall)
    return torch.maximum(scale, torch.tensor(MIN_SCALE))


def masked_mean(x, mask):
    """As compute_weighted_loss with SUM_BY_NONZERO_WEIGHTS."""
    weights = mask.to(x.dtype)
    return divide_no_nan(torch.sum(x * weights), torch.sum(weights))


class DeepAR(nn.Module):
    def __init__(self):
        super().__init__()
        tables = {n: Embedding(*shape) for n, shape in VOCABULARIES.items()}
        self.embeddings = nn.ModuleDict(tables)
        self.weekday = Embedding(7, 2)
        self.normalization = Normalization((3.2, 14.0, 0.3), (0.64, 36.0, 0.2025))
        static = 1 + sum(dim for _, dim in VOCABULARIES.values())
        dynamic = 3 + 2 + 1 + 2 * len(LAG_INDICES)
        self.lstm1 = RNN(LSTMCell(dynamic, UNITS, constants=static), UNITS)
        self.lstm2 = RNN(LSTMCell(UNITS, UNITS), UNITS)
        self.params_layer = Dense(UNITS, 5)

    def constants(self, categories, scale):
        columns = zip(self.embeddings.values(), torch.unbind(categories, dim=1))
        embedded = [layer(column) for layer, column in columns]
        return torch.cat([torch.log(scale), *embedded], dim=1)

    def dynamic_inputs(self, batch, series, weights, mask):
        """The week begins on Sunday here; the first day of a series has age 0."""
        known = self.normalization(batch["features"][:, -NUM_STEPS:])
        days = batch["day"][:, None] + torch.arange(weights.shape[1])
        weekday = self.weekday((days[:, -NUM_STEPS:] + 1) % 7)
        age = torch.cumsum(mask.float(), dim=1)[:, -NUM_STEPS:, None]
        age = torch.log(torch.clamp(age, min=1.0))
        lags, seen = make_lags(series), make_lags(weights)
        return torch.cat([known, weekday, age, lags, seen], dim=2)

    def make_distributions(self, h, scale):
        params = self.params_layer(h)
        df, loc, sigma, mean, dispersion = torch.unbind(params, dim=-1)
        student = StudentT(2.0 + softplus(df), loc, softplus(sigma))
        measures = TransformedDistribution(student, Scale(scale))
        mean = softplus(mean) * scale
        dispersion = softplus(dispersion) * torch.rsqrt(scale)
        total_count = torch.reciprocal(dispersion)
        logits = torch.log(mean) - torch.log(total_count)
        return measures, NegativeBinomial(total_count, logits)

    def activity_loss(self, h, mask):
        activity = masked_mean(torch.mean(h**2, dim=2), mask)
        steps = torch.mean(torch.diff(h, dim=1) ** 2, dim=2)
        both = torch.logical_and(mask[:, 1:], mask[:, :-1])
        return ACTIVITY_L2 * activity + TEMPORAL_L2 * masked_mean(steps, both)

    def forward(self, batch):
        weights = batch["observed"].float()
        values = torch.where(batch["observed"], batch["values"], torch.tensor(0.0))
        scale = context_scale(values, weights)
        total = values.shape[1]
        mask = torch.logical_not(sequence_mask(batch["start"], total))
        inputs = self.dynamic_inputs(batch, values / scale, weights, mask)
        mask = mask[:, -NUM_STEPS:]
        constants = self.constants(batch["categories"], scale)
        x = self.lstm1(inputs, mask, constants)
        h = self.lstm2(x, mask) + x

        measures, counts = self.make_distributions(h, scale)
        y_true = values[:, -NUM_STEPS:]
        is_count = batch["is_count"][:, None]
        y_count = torch.where(is_count, y_true, torch.tensor(0.0))
        log_prob = torch.where(
            is_count, counts.log_prob(y_count), measures.log_prob(y_true)
        )
        nll = masked_mean(-log_prob, batch["observed"][:, -NUM_STEPS:])
        return nll + self.activity_loss(h, mask)


# ------------------------------------------------------------------------ weights


def cell_weights(src, number):
    """Torch has its gates in the order i, f, c, o as well; kernels are transposed."""
    prefix = f"rnn.cell{number}."
    kernel = src[prefix + "weight_ih"].T
    recurrent_kernel = src[prefix + "weight_hh"].T
    bias = src[prefix + "bias_ih"] + src[prefix + "bias_hh"]
    return kernel, recurrent_kernel, bias


def first_layer_weights(src):
    kernel, recurrent_kernel, bias = cell_weights(src, 1)
    sizes = [15, 1, 8, 3, 3]
    embedded, log_scale, lags, known, calendar = torch.split(kernel, sizes)
    return {
        "lstm1.cell.kernel": torch.cat([known, calendar, lags]),
        "lstm1.cell.constants_kernel": torch.cat([log_scale, embedded]),
        "lstm1.cell.recurrent_kernel": recurrent_kernel,
        "lstm1.cell.bias": bias,
    }


def second_layer_weights(src):
    kernel, recurrent_kernel, bias = cell_weights(src, 2)
    return {
        "lstm2.cell.kernel": kernel,
        "lstm2.cell.recurrent_kernel": recurrent_kernel,
        "lstm2.cell.bias": bias,
    }


def load_weights(net, path):
    src = torch.load(path)
    heads = ("student_head", "count_head")
    variables = {
        "weekday.embeddings": torch.roll(src["weekday.weight"], 1, dims=0),
        "params_layer.kernel": torch.cat([src[h + ".weight"] for h in heads]).T,
        "params_layer.bias": torch.cat([src[h + ".bias"] for h in heads]),
    }
    for i, name in enumerate(VOCABULARIES):
        variables[f"embeddings.{name}.embeddings"] = src[f"embeds.{i}.weight"]
    variables.update(first_layer_weights(src))
    variables.update(second_layer_weights(src))
    net.load_state_dict(variables)


def model():
    net = DeepAR()
    load_weights(net, Path(__file__).with_name("weights.pt"))
    return net


def forward(net, batch):
    return net(batch)


def loss(output, batch):
    return output


# ----------------------------------------------------------------------- training


class SGD(torch.optim.Optimizer):
    def __init__(self, variables, learning_rate, momentum, global_clipnorm):
        super().__init__(variables, {})
        self.learning_rate, self.momentum = learning_rate, momentum
        self.global_clipnorm = global_clipnorm

    @torch.no_grad()
    def step(self, closure=None):
        variables = self.param_groups[0]["params"]
        norm = torch.sqrt(sum(torch.sum(v.grad**2) for v in variables))
        factor = self.global_clipnorm / max(float(norm), self.global_clipnorm)
        for variable in variables:
            slots = self.state[variable]
            velocity = slots.get("velocity", torch.zeros_like(variable))
            update = self.learning_rate * variable.grad * factor
            slots["velocity"] = self.momentum * velocity - update
            variable.add_(slots["velocity"])


def optimizer(net):
    variables = list(net.parameters())
    return SGD(variables, learning_rate=0.02, momentum=0.9, global_clipnorm=1.0)
