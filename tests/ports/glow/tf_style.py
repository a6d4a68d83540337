"""After TensorFlow: NHWC, HWIO kernels, an objective per example handed through the layers.

Channels come out of space_to_depth with the place in the block first. The first step of a
level takes them in that order; its 1x1 convolution gives them back in the order of torch.
"""

import math
from pathlib import Path

import torch
from torch import nn

HPS = {
    "n_bits_x": 5,
    "n_levels": 2,
    "depth": 2,
    "n_y": 4,
    "weight_y": 0.1,
    "logscale_factor": 3.0,
    "learning_rate": 1e-2,
    "warmup_steps": 5,
    "beta_1": 0.9,
    "beta_2": 0.98,
    "epsilon": 1e-7,
    "clipvalue": 0.2,
    "global_clipnorm": 0.8,
    "polyak_decay": 0.9,
}
N_BINS = 2.0 ** HPS["n_bits_x"]


# ----------------------------------------------------------------------- ops


def reduce_sum(x, axis=(1, 2, 3)):
    return torch.sum(x, dim=axis)


def int_shape(x):
    return list(x.shape)


def space_to_depth(x, block_size=2):
    batch, height, width, depth = int_shape(x)
    rows, columns = height // block_size, width // block_size
    x = torch.reshape(x, (batch, rows, block_size, columns, block_size, depth))
    x = torch.permute(x, (0, 1, 3, 2, 4, 5))
    return torch.reshape(x, (batch, rows, columns, block_size**2 * depth))


def conv2d_same(x, kernel):
    """NHWC and HWIO."""
    nchw = torch.permute(x, (0, 3, 1, 2))
    oihw = torch.permute(kernel, (3, 2, 0, 1))
    y = nn.functional.conv2d(nchw, oihw, padding="same")
    return torch.permute(y, (0, 2, 3, 1))


def pixel_matmul(x, w):
    """A 1x1 convolution; w is [in, out]."""
    batch, height, width, depth = int_shape(x)
    flat = torch.reshape(x, (batch * height * width, depth))
    return torch.reshape(torch.matmul(flat, w), (batch, height, width, -1))


class GaussianDiag:
    def __init__(self, mean, logvar):
        self.mean, self.logvar = mean, logvar

    def logps(self, x):
        squared = torch.square(x - self.mean) / torch.exp(self.logvar)
        return -0.5 * (math.log(2.0 * math.pi) + self.logvar + squared)

    def logp(self, x):
        return reduce_sum(self.logps(x))


# -------------------------------------------------------------------- layers


class Layer(nn.Module):
    """Variables are trained; constants are not."""

    def __init__(self, variables, constants=None):
        super().__init__()
        for name, value in variables.items():
            self.register_parameter(name, nn.Parameter(value.clone().contiguous()))
        for name, value in (constants or {}).items():
            self.register_buffer(name, value.clone().contiguous())


class Actnorm(Layer):
    def forward(self, x, objective=None):
        x = x + self.b
        x = x * torch.exp(self.logs)
        if objective is None:
            return x
        pixels = x.shape[1] * x.shape[2]
        return x, objective + pixels * torch.sum(self.logs)


class Invertible1x1Conv(Layer):
    """The kernel [in, out] is lower times upper times permutation, and its rows gathered."""

    def kernel(self):
        lower_mask = torch.tril(torch.ones_like(self.lower), -1)
        scale = self.sign_s * torch.exp(self.log_s)
        lower = self.lower * lower_mask + torch.diag(scale)
        upper = self.upper * lower_mask.T + torch.eye(len(scale))
        w = torch.matmul(lower, torch.matmul(upper, self.p))
        return torch.index_select(w, 0, self.rows)

    def forward(self, x, objective):
        pixels = x.shape[1] * x.shape[2]
        objective = objective + pixels * torch.sum(self.log_s)
        return pixel_matmul(x, self.kernel()), objective


class Conv2D(Layer):
    def forward(self, x):
        if self.kernel.ndim == 2:
            return pixel_matmul(x, self.kernel)
        return conv2d_same(x, self.kernel)


class Conv2DZeros(Layer):
    def forward(self, x):
        x = conv2d_same(x, self.kernel) + self.b
        return x * torch.exp(self.logs * HPS["logscale_factor"])


class RevNetStep(nn.Module):
    def __init__(self, layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def f(self, x):
        h = torch.relu(self.norm_1(self.conv_1(x)))
        h = torch.relu(self.norm_2(self.conv_2(h)))
        return self.conv_zeros(h)

    def forward(self, z, objective):
        z, objective = self.actnorm(z, objective)
        z, objective = self.invconv(z, objective)
        z1, z2 = torch.chunk(z, 2, dim=3)
        shift, logits = torch.chunk(self.f(z1), 2, dim=3)
        scale = torch.sigmoid(logits + 2.0)
        z2 = z2 + shift
        z2 = z2 * scale
        objective = objective + reduce_sum(torch.log(scale))
        return torch.cat([z1, z2], dim=3), objective


class Split2D(nn.Module):
    def __init__(self, conv_zeros):
        super().__init__()
        self.conv_zeros = conv_zeros

    def forward(self, z, objective):
        z1, z2 = torch.chunk(z, 2, dim=3)
        mean, logvar = torch.chunk(self.conv_zeros(z1), 2, dim=3)
        objective = objective + GaussianDiag(mean, logvar).logp(z2)
        return z1, objective


class TopPrior(Layer):
    def forward(self, y_onehot):
        mean = torch.matmul(y_onehot, self.mean)
        logvar = torch.matmul(y_onehot, self.logvar)
        return GaussianDiag(mean[:, None, None, :], logvar[:, None, None, :])


class Dense(Layer):
    def forward(self, x):
        return torch.matmul(x, self.kernel) + self.b


class GlowModel(nn.Module):
    def __init__(self, layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.shadow = Layer({}, {shadow_name(k): v for k, v in self.named_parameters()})

    def encoder(self, z, objective):
        for level in range(HPS["n_levels"]):
            z = space_to_depth(z)
            for step in range(HPS["depth"]):
                z, objective = getattr(self, f"revnet_{level}_{step}")(z, objective)
            if level < HPS["n_levels"] - 1:
                z, objective = getattr(self, f"pool_{level}")(z, objective)
        return z, objective

    def forward(self, x, y):
        y_onehot = nn.functional.one_hot(y, HPS["n_y"]).to(x.dtype)
        objective = torch.zeros(len(x), dtype=x.dtype)
        objective = objective - math.log(N_BINS) * math.prod(int_shape(x)[1:])
        z, objective = self.encoder(x, objective)
        objective = objective + self.prior(y_onehot).logp(z)
        return objective, self.classifier(torch.mean(z, dim=(1, 2)))


# ---------------------------------------------------------------- checkpoint


def shadow_name(name):
    return name.replace(".", "/") + "/ExponentialMovingAverage"


class TorchReader:
    def __init__(self, state):
        self.state = state

    def depth_order(self, channels):
        """Torch's number for each channel of space_to_depth."""
        return torch.arange(channels).reshape(-1, 4).T.flatten()

    def halves(self, value):
        """Torch has the two kinds of outputs by turns; here one comes after the other."""
        return torch.cat([value[0::2], value[1::2]])

    def actnorm(self, name, order=None):
        b = self.state[name + ".bias"].flatten()
        logs = self.state[name + ".logs"].flatten()
        if order is not None:
            b, logs = b[order], logs[order]
        return Actnorm({"b": b, "logs": logs})

    def invconv(self, name, order):
        """The weight is transposed, so lower and upper change places."""
        matrix = {k: self.state[f"{name}.{k}"].T for k in ("p", "lower", "upper")}
        variables = {
            "lower": matrix["upper"],
            "upper": matrix["lower"],
            "log_s": self.state[name + ".log_s"],
        }
        sign = self.state[name + ".sign_s"]
        constants = {"p": matrix["p"], "sign_s": sign, "rows": order}
        return Invertible1x1Conv(variables, constants)

    def conv(self, name):
        kernel = torch.permute(self.state[name + ".weight"], (2, 3, 1, 0))
        return Conv2D({"kernel": kernel[0, 0] if len(kernel) == 1 else kernel})

    def conv_zeros(self, name):
        kernel = self.halves(self.state[name + ".conv.weight"])
        variables = {
            "kernel": torch.permute(kernel, (2, 3, 1, 0)),
            "b": self.halves(self.state[name + ".conv.bias"]),
            "logs": self.halves(self.state[name + ".logs"].flatten()),
        }
        return Conv2DZeros(variables)

    def step(self, level, step):
        name = f"levels.{level}.{step}"
        channels = self.state[name + ".invconv.log_s"].numel()
        order = torch.arange(channels)
        if step == 0:
            order = self.depth_order(channels)
        return RevNetStep(
            {
                "actnorm": self.actnorm(name + ".actnorm", order),
                "invconv": self.invconv(name + ".invconv", order),
                "conv_1": self.conv(name + ".block.0"),
                "norm_1": self.actnorm(name + ".block.1"),
                "conv_2": self.conv(name + ".block.3"),
                "norm_2": self.actnorm(name + ".block.4"),
                "conv_zeros": self.conv_zeros(name + ".block.6"),
            }
        )

    def build(self):
        layers = {}
        for level in range(HPS["n_levels"]):
            for step in range(HPS["depth"]):
                layers[f"revnet_{level}_{step}"] = self.step(level, step)
            if level < HPS["n_levels"] - 1:
                layers[f"pool_{level}"] = Split2D(self.conv_zeros(f"priors.{level}"))
        mean, logvar = torch.chunk(self.state["class_prior.weight"], 2, dim=1)
        layers["prior"] = TopPrior({"mean": mean, "logvar": logvar})
        kernel, b = self.state["classifier.weight"].T, self.state["classifier.bias"]
        layers["classifier"] = Dense({"kernel": kernel, "b": b})
        return GlowModel(layers)


def model():
    return TorchReader(torch.load(Path(__file__).with_name("weights.pt"))).build()


# ------------------------------------------------------------------ training


def preprocess(image, noise):
    x = torch.floor_divide(image.to(torch.float32), 2.0 ** (8 - HPS["n_bits_x"]))
    x = x / N_BINS - 0.5
    x = x + noise / N_BINS
    return torch.permute(x, (0, 2, 3, 1))


def forward(net, batch):
    objective, logits = net(preprocess(batch["image"], batch["noise"]), batch["label"])
    return {"nll": -objective, "logits": logits}


def loss(output, batch):
    n_dims = math.prod(int_shape(batch["image"])[1:])
    bits_x = output["nll"] / (math.log(2.0) * n_dims)
    logits, y = output["logits"], batch["label"]
    picked = torch.gather(logits, 1, y[:, None])[:, 0]
    bits_y = torch.logsumexp(logits, dim=1) - picked
    return torch.mean(bits_x + HPS["weight_y"] * bits_y)


class Adamax(torch.optim.Optimizer):
    """Epsilon is inside of the maximum, as in torch."""

    def __init__(self, model):
        self.model = model
        self.named = dict(model.named_parameters())
        super().__init__(list(self.named.values()), {})
        self.iterations = 0

    def learning_rate(self):
        progress = (self.iterations + 1) / HPS["warmup_steps"]
        return HPS["learning_rate"] * min(progress, 1.0)

    def clip_gradients(self, gradients):
        value, norm = HPS["clipvalue"], HPS["global_clipnorm"]
        gradients = [torch.clamp(g, -value, value) for g in gradients]
        squares = torch.stack([torch.sum(torch.square(g)) for g in gradients])
        factor = norm / (torch.sqrt(torch.sum(squares)) + 1e-6)
        return [g * torch.clamp(factor, max=1.0) for g in gradients]

    def update_average(self, name, variable):
        decay = HPS["polyak_decay"]
        average = getattr(self.model.shadow, shadow_name(name))
        average.sub_((1.0 - decay) * (average - variable))

    @torch.no_grad()
    def step(self, closure=None):
        gradients = self.clip_gradients([v.grad for v in self.named.values()])
        learning_rate = self.learning_rate()
        beta_1, beta_2 = HPS["beta_1"], HPS["beta_2"]
        beta_1_power = beta_1 ** (self.iterations + 1)
        for (name, variable), gradient in zip(self.named.items(), gradients):
            slots = self.state[variable]
            if not slots:
                slots["m"] = torch.zeros_like(variable)
                slots["u"] = torch.zeros_like(variable)
            m, u = slots["m"], slots["u"]
            m.add_((gradient - m) * (1.0 - beta_1))
            size = torch.abs(gradient) + HPS["epsilon"]
            u.copy_(torch.maximum(beta_2 * u, size))
            variable.sub_(learning_rate * m / ((1.0 - beta_1_power) * u))
            self.update_average(name, variable)
        self.iterations += 1


def optimizer(net):
    return Adamax(net)
