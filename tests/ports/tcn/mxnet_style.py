"""After MXNet and GluonTS: blocks with collected parameters, NCW, projections of arguments."""

import math
import re
from pathlib import Path

import torch
from torch import nn

# ------------------------------------------------------------------- operators


def FullyConnected(data, weight, bias=None):
    """flatten=False; weights are [num_hidden, in_units]."""
    out = torch.matmul(data, torch.swapaxes(weight, 0, 1))
    return out if bias is None else out + bias


def Convolution(data, weight, bias, dilate=1, pad=0):
    return nn.functional.conv1d(data, weight, bias, dilation=dilate, padding=pad)


def Activation(data, act_type):
    if act_type == "relu":
        return torch.clamp(data, min=0.0)
    if act_type == "sigmoid":
        return torch.sigmoid(data)
    if act_type == "softrelu":
        return torch.clamp(data, min=0.0) + torch.log1p(torch.exp(-torch.abs(data)))
    raise ValueError(act_type)


def slice_axis(data, axis, begin, end):
    end = data.shape[axis] if end is None else end % data.shape[axis]
    return torch.narrow(data, axis, begin, end - begin)


def L2Normalization(data, eps=1e-10):
    """mode='instance': over all axes but the first."""
    squares = torch.sum(
        torch.square(data), dim=tuple(range(1, data.ndim)), keepdim=True
    )
    return data / torch.sqrt(squares + eps)


# ---------------------------------------------------------------------- blocks


class Block(nn.Module):
    def get(self, name, *shape, grad_req="write"):
        if grad_req == "null":
            self.register_buffer(name, torch.zeros(shape))
        else:
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


class Dense(Block):
    def __init__(self, units, in_units, activation=None):
        super().__init__()
        self.activation = activation
        self.get("weight", units, in_units)
        self.get("bias", units)

    def forward(self, x):
        out = FullyConnected(x, self.weight, self.bias)
        return Activation(out, self.activation) if self.activation else out


class Conv1x1(Block):
    def __init__(self, channels, in_channels):
        super().__init__()
        self.get("weight", channels, in_channels, 1)
        self.get("bias", channels)

    def forward(self, x):
        return Convolution(x, self.weight, self.bias)


class CausalConv1D(Block):
    """Pads both sides and cuts off what comes from the future; of normed weights."""

    def __init__(self, channels, in_channels, kernel_size, dilation):
        super().__init__()
        self.dilation = dilation
        self.padding = dilation * (kernel_size - 1)
        self.get("direction", channels, in_channels, kernel_size)
        self.get("gamma", channels)
        self.get("bias", channels)

    def forward(self, data):
        weight = self.gamma[:, None, None] * L2Normalization(self.direction)
        ct = Convolution(data, weight, self.bias, self.dilation, self.padding)
        return slice_axis(ct, axis=2, begin=0, end=-self.padding)


class SqueezeExcitation(Block):
    def __init__(self, channels, reduced):
        super().__init__()
        self.reduce = Dense(reduced, channels, activation="relu")
        self.expand = Dense(channels, reduced, activation="sigmoid")

    def forward(self, x):
        pooled = torch.mean(x, dim=-1)
        scale = self.expand(self.reduce(pooled))
        return x * torch.unsqueeze(scale, -1)


class GatedResidue(Block):
    """One projection gives what is added and what is skipped to the end."""

    def __init__(self, n_residue, n_skip, n_reduced, kernel_size, dilation):
        super().__init__()
        self.n_residue = n_residue
        self.conv = CausalConv1D(2 * n_residue, n_residue, kernel_size, dilation)
        self.se = SqueezeExcitation(n_residue, n_reduced)
        self.proj = Conv1x1(n_residue + n_skip, n_residue)

    def forward(self, x):
        val, gate = torch.chunk(self.conv(x), 2, dim=1)
        u = val * Activation(gate, "sigmoid")
        u = self.proj(self.se(u))
        residue = slice_axis(u, axis=1, begin=0, end=self.n_residue)
        skip = slice_axis(u, axis=1, begin=self.n_residue, end=None)
        return (x + residue) * math.sqrt(0.5), skip


class FeatureEmbedder(Block):
    def __init__(self, cardinalities, embedding_dims):
        super().__init__()
        self.names = []
        for i, (card, dim) in enumerate(zip(cardinalities, embedding_dims)):
            self.get(f"embed{i}_weight", card, dim)
            self.names.append(f"embed{i}_weight")

    def forward(self, features):
        """[batch, time, features] -> [batch, time, sum of the dimensions]"""
        embedded = [
            nn.functional.embedding(features[..., i], getattr(self, name))
            for i, name in enumerate(self.names)
        ]
        return torch.cat(embedded, dim=-1)


class ReversibleScaler(Block):
    def __init__(self, num_series, num_variables, momentum=0.9, minimum_variance=1e-5):
        super().__init__()
        self.momentum = momentum
        self.minimum_variance = minimum_variance
        self.get("gamma", num_variables)
        self.get("beta", num_variables)
        self.get("moving_loc", num_series, num_variables, grad_req="null")
        self.get("moving_scale", num_series, num_variables, grad_req="null")

    def forward(self, data, observed):
        """Return loc and scale, [batch, 1, variables]."""
        num_observed = torch.sum(observed, dim=1, keepdim=True)
        num_observed = torch.clamp(num_observed, min=1.0)
        loc = torch.sum(data * observed, dim=1, keepdim=True) / num_observed
        deviation = (data - loc) * observed
        variance = (
            torch.sum(torch.square(deviation), dim=1, keepdim=True) / num_observed
        )
        return loc, torch.sqrt(variance + self.minimum_variance)

    def static_feat(self, item, loc, scale):
        hot = nn.functional.one_hot(item, len(self.moving_loc)).to(loc.dtype)
        loc, scale = torch.squeeze(loc, 1), torch.squeeze(scale, 1)
        usual_loc, usual_scale = hot @ self.moving_loc, hot @ self.moving_scale
        feat_loc = (loc - usual_loc) / usual_scale
        feat_scale = torch.log(scale / usual_scale)
        if self.training:
            self.update_moving("moving_loc", hot, loc)
            self.update_moving("moving_scale", hot, scale)
        return torch.cat([feat_loc, feat_scale], dim=-1)

    @torch.no_grad()
    def update_moving(self, name, hot, value):
        moving = getattr(self, name)
        new = moving * self.momentum + (hot.T @ value) * (1.0 - self.momentum)
        in_batch = torch.sum(hot, dim=0)[:, None] > 0
        moving.copy_(torch.where(in_batch, new, moving))

    def scaled(self, data, loc, scale):
        return self.gamma * (data - loc) / scale + self.beta

    def unscaled(self, data, loc, scale):
        return loc + scale * ((data - self.beta) / self.gamma)


class QuantileOutput(Block):
    """The lowest quantile and the distances from each to the next."""

    def __init__(self, in_units, num_variables, quantiles):
        super().__init__()
        self.steps_shape = (num_variables, len(quantiles) - 1)
        self.lowest = Dense(num_variables, in_units)
        self.steps = Dense(num_variables * (len(quantiles) - 1), in_units)

    def forward(self, x):
        """[..., in_units] -> [quantiles, ..., variables]"""
        lowest = self.lowest(x)[..., None]
        steps = Activation(self.steps(x), "softrelu")
        steps = torch.reshape(steps, (*x.shape[:-1], *self.steps_shape))
        above = lowest + torch.cumsum(steps, dim=-1)
        return torch.movedim(torch.cat([lowest, above], dim=-1), -1, 0)


class StudentTOutput(Block):
    """Projects each argument on its own and maps it to its domain."""

    args_dim = ("mu", "sigma", "nu")

    def __init__(self, in_units, num_variables):
        super().__init__()
        for arg in self.args_dim:
            self.add_module(arg, Dense(num_variables, in_units))

    def forward(self, x):
        sigma = Activation(self.sigma(x), "softrelu") + 1e-3
        nu = Activation(self.nu(x), "softrelu") + 2.0
        return self.mu(x), sigma, nu


class TemporalConvolutionalNetwork(Block):
    def __init__(
        self,
        num_series,
        num_variables,
        context_length,
        prediction_length,
        quantiles,
        n_residue=24,
        n_skip=28,
        n_reduced=6,
        n_hidden=32,
        kernel_size=3,
        dilation_depth=3,
        cardinality=(24, 7),
        embedding_dimension=(6, 4),
    ):
        super().__init__()
        self.context_length = context_length
        self.prediction_length = prediction_length
        n_time_feat = sum(embedding_dimension)
        self.scaler = ReversibleScaler(num_series, num_variables)
        self.embedder = FeatureEmbedder(cardinality, embedding_dimension)
        self.conv_project = Conv1x1(n_residue, n_time_feat + 2 * num_variables)
        self.residuals = nn.ModuleList()
        for d in range(dilation_depth):
            self.residuals.append(
                GatedResidue(n_residue, n_skip, n_reduced, kernel_size, 2**d)
            )
        n_decoder = n_skip + n_residue + 2 * num_variables + n_time_feat
        self.decoder = Dense(n_hidden, n_decoder, activation="relu")
        self.quantile_output = QuantileOutput(n_hidden, num_variables, quantiles)
        self.distr_output = StudentTOutput(n_hidden, num_variables)

    def time_features(self, start):
        length = self.context_length + self.prediction_length
        index = torch.unsqueeze(start, 1) + torch.arange(length)
        hour_of_day = torch.remainder(index, 24)
        day_of_week = torch.remainder(index // 24, 7)
        return torch.stack([hour_of_day, day_of_week], dim=-1)

    def forward(self, past_target, past_observed_values, start, item_id):
        observed = past_observed_values.to(past_target.dtype)
        loc, scale = self.scaler(past_target, observed)
        static_feat = self.scaler.static_feat(item_id, loc, scale)
        target = self.scaler.scaled(past_target, loc, scale) * observed
        time_feat = self.embedder(self.time_features(start))
        past_feat = slice_axis(time_feat, axis=1, begin=0, end=self.context_length)
        future_feat = slice_axis(time_feat, axis=1, begin=self.context_length, end=None)

        inputs = torch.cat([past_feat, target, observed], dim=-1)
        o = self.conv_project(torch.swapaxes(inputs, 1, 2))
        skip_outs = []
        for residual in self.residuals:
            o, skip = residual(o)
            skip_outs.append(skip)
        y = torch.stack(skip_outs).sum(dim=0)
        y = Activation(torch.cat([y, o], dim=1), "relu")[..., -1]

        state = torch.cat([y, static_feat], dim=-1)
        state = torch.unsqueeze(state, 1)
        state = torch.tile(state, (1, self.prediction_length, 1))
        hidden = self.decoder(torch.cat([state, future_feat], dim=-1))

        quantiles = self.quantile_output(hidden)
        mu, sigma, nu = self.distr_output(hidden)
        return {
            "quantiles": torch.movedim(
                self.scaler.unscaled(quantiles, loc, scale), 0, -1
            ),
            "df": nu,
            "loc": self.scaler.unscaled(mu, loc, scale),
            "scale": sigma * (scale / self.scaler.gamma),
        }


# ------------------------------------------------------------------ parameters

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
NUM_VARIABLES = 3


def convert_residual(source, prefix):
    weight_norm = prefix + "conv.parametrizations.weight."
    return {
        "conv.gamma": source[weight_norm + "original0"].flatten(),
        "conv.direction": source[weight_norm + "original1"],
        "conv.bias": source[prefix + "conv.bias"],
        "se.reduce.weight": source[prefix + "squeeze.weight"],
        "se.reduce.bias": source[prefix + "squeeze.bias"],
        "se.expand.weight": source[prefix + "excite.weight"],
        "se.expand.bias": source[prefix + "excite.bias"],
        **{
            f"proj.{kind}": torch.cat(
                [source[f"{prefix}residual.{kind}"], source[f"{prefix}skip.{kind}"]]
            )
            for kind in ("weight", "bias")
        },
    }


def convert_heads(source):
    arg_params = {}
    for kind in ("weight", "bias"):
        array = source[f"quantile_head.{kind}"]
        array = torch.unflatten(array, 0, (NUM_VARIABLES, len(QUANTILES)))
        arg_params[f"quantile_output.lowest.{kind}"] = array[:, 0]
        arg_params[f"quantile_output.steps.{kind}"] = array[:, 1:].flatten(0, 1)
        args = torch.split(source[f"student_head.{kind}"], NUM_VARIABLES)
        for arg, array in zip(("nu", "mu", "sigma"), args):
            arg_params[f"distr_output.{arg}.{kind}"] = array
    return arg_params


def convert(source):
    project = source["inputs.weight"]
    n_target = 2 * NUM_VARIABLES
    arg_params = {
        "scaler.gamma": source["norm.weight"],
        "scaler.beta": source["norm.bias"],
        "embedder.embed0_weight": source["calendar.hour.weight"],
        "embedder.embed1_weight": source["calendar.weekday.weight"],
        "conv_project.weight": torch.roll(project, -n_target, dims=1),
        "conv_project.bias": source["inputs.bias"],
        "decoder.weight": torch.cat(
            [source["context.weight"], source["future.weight"]], 1
        ),
        "decoder.bias": source["context.bias"],
        **convert_heads(source),
    }
    for i in range(3):
        for name, array in convert_residual(source, f"blocks.{i}.").items():
            arg_params[f"residuals.{i}.{name}"] = array
    aux_params = {
        "scaler.moving_loc": source["norm.running_mean"],
        "scaler.moving_scale": source["norm.running_std"],
    }
    return arg_params | aux_params


def model():
    net = TemporalConvolutionalNetwork(
        num_series=8,
        num_variables=NUM_VARIABLES,
        context_length=26,
        prediction_length=6,
        quantiles=QUANTILES,
    )
    source = torch.load(Path(__file__).with_name("weights.pt"))
    net.load_state_dict(convert(source))
    return net


def forward(net, batch):
    return net(batch["past"], batch["past_observed"], batch["start"], batch["series"])


# ------------------------------------------------------------------------ loss


class QuantileLoss:
    """Weighted by what was observed, and divided by the size of that."""

    def __init__(self, quantiles):
        self.quantiles = torch.tensor(quantiles)

    def __call__(self, y_true, y_pred, sample_weight):
        diff = y_pred - torch.unsqueeze(y_true, -1)
        below = (diff < 0).to(diff.dtype)
        qt_loss = 2.0 * diff * (1.0 - self.quantiles - below)
        qt_loss = torch.mean(qt_loss, dim=-1) * sample_weight
        abs_target = torch.abs(y_true) * sample_weight
        return torch.sum(qt_loss) / torch.sum(abs_target)


class StudentT:
    def __init__(self, mu, sigma, nu):
        self.mu, self.sigma, self.nu = mu, sigma, nu

    def log_prob(self, x):
        nup1_half = (self.nu + 1.0) / 2.0
        part1 = 1.0 / self.nu * torch.square((x - self.mu) / self.sigma)
        Z = (
            torch.special.gammaln(nup1_half)
            - torch.special.gammaln(self.nu / 2.0)
            - 0.5 * torch.log(math.pi * self.nu)
            - torch.log(self.sigma)
        )
        return Z - nup1_half * torch.log1p(part1)


def weighted_average(x, weights):
    weighted_tensor = x * weights
    return torch.sum(weighted_tensor) / torch.sum(weights)


def loss(output, batch):
    future_target = batch["future"]
    horizon = torch.arange(future_target.shape[1])
    discount = torch.exp(math.log(0.9) * horizon)
    weights = discount[:, None] * batch["future_observed"].to(discount.dtype)
    quantile_loss = QuantileLoss(QUANTILES)
    distr = StudentT(output["loc"], output["scale"], output["df"])
    nll = weighted_average(-distr.log_prob(future_target), weights)
    return quantile_loss(future_target, output["quantiles"], weights) + 0.3 * nll


# --------------------------------------------------------------------- trainer


def clip_global_norm(arrays, max_norm):
    total_norm = torch.sqrt(sum(torch.sum(torch.square(array)) for array in arrays))
    scale = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    return [array * scale for array in arrays]


class RMSProp:
    """gamma1 is the decay of the squares, gamma2 the momentum."""

    def __init__(self, learning_rate, gamma1, gamma2, epsilon, wd):
        self.lr, self.wd = learning_rate, wd
        self.gamma1, self.gamma2, self.epsilon = gamma1, gamma2, epsilon

    def create_state(self, weight):
        return torch.zeros_like(weight), torch.zeros_like(weight)

    def update(self, weight, grad, state, wd_mult):
        n, delta = state
        grad = grad + self.wd * wd_mult * weight
        n.copy_((1.0 - self.gamma1) * torch.square(grad) + self.gamma1 * n)
        scaled = grad / (torch.sqrt(n) + self.epsilon)
        delta.copy_(self.gamma2 * delta - self.lr * scaled)
        weight.add_(delta)


class Trainer(torch.optim.Optimizer):
    def __init__(self, params, rule, clip_gradient):
        self.names = list(params)
        super().__init__(list(params.values()), {})
        self.rule, self.clip_gradient = rule, clip_gradient
        self.wd_mult = dict.fromkeys(self.names, 1.0)
        self.states = {n: rule.create_state(params[n].detach()) for n in self.names}

    def set_wd_mult(self, pattern, value):
        for name in self.names:
            if re.search(pattern, name):
                self.wd_mult[name] = value

    @torch.no_grad()
    def step(self, closure=None):
        weights = self.param_groups[0]["params"]
        grads = clip_global_norm([w.grad for w in weights], self.clip_gradient)
        for name, weight, grad in zip(self.names, weights, grads):
            self.rule.update(weight, grad, self.states[name], self.wd_mult[name])


def optimizer(net):
    rule = RMSProp(2e-3, gamma1=0.95, gamma2=0.9, epsilon=1e-4, wd=1e-2)
    trainer = Trainer(dict(net.named_parameters()), rule, clip_gradient=0.25)
    trainer.set_wd_mult(r"(bias|beta|gamma)$", 0.0)
    trainer.set_wd_mult(r"^embedder\.", 0.0)
    return trainer
