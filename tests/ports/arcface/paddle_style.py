"""After Paddle: layers with linear weights [in, out], its norm, regularisers and schedulers.

Pictures are BGR. Scores are [rows, identities] by the margin of an angle.
"""

import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

Global = {"input_height": 40, "input_width": 32, "class_num": 20, "embedding_size": 32}
Stages = {"out_channels": (16, 32, 48, 64), "repeats": (2, 3)}
NormalizeImage = {"scale": 1.0 / 255.0, "mean": 0.5, "std": 0.5}
Loss = {"margin1": 1.0, "margin2": 0.8, "margin3": 0.0, "scale": 16.0}
ConsistencyWeight = 0.5
Optimizer = {
    "learning_rate": 0.1,
    "momentum": 0.9,
    "warmup_steps": 2,
    "total_steps": 10,
    "power": 2,
    "coeff": 0.02,
    "head_coeff": 0.08,
}

# -------------------------------------------------------------------------- layers


class ConvLayer(nn.Module):
    """Without a bias."""

    def __init__(self, weight, stride=1, padding=0, groups=1):
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self._stride, self._padding, self._groups = stride, padding, groups

    def forward(self, x):
        return F.conv2d(
            x, self.weight, None, self._stride, self._padding, 1, self._groups
        )


class BatchNorm(nn.Module):
    """Momentum is what stays of the old statistics."""

    _mean: torch.Tensor
    _variance: torch.Tensor

    def __init__(self, params, momentum=0.8, epsilon=1e-5, scale=True):
        super().__init__()
        self.weight = nn.Parameter(params["weight"].clone(), requires_grad=scale)
        self.bias = nn.Parameter(params["bias"].clone())
        self.register_buffer("_mean", params["running_mean"].clone())
        self.register_buffer("_variance", params["running_var"].clone())
        self._momentum, self._epsilon = momentum, epsilon

    def update(self, mean, variance, numel):
        with torch.no_grad():
            keep = self._momentum
            self._mean.mul_(keep).add_(mean, alpha=1 - keep)
            # The kernel there keeps the biased one, the trained model did not.
            sample = variance * (numel / (numel - 1))
            self._variance.mul_(keep).add_(sample, alpha=1 - keep)

    def forward(self, x, training):
        shape = [1, -1] + [1] * (x.ndim - 2)
        if training:
            flat = x.transpose(0, 1).flatten(1)
            variance, mean = torch.var_mean(flat, dim=1, unbiased=False)
            self.update(mean, variance, flat.shape[1])
        else:
            mean, variance = self._mean, self._variance
        factor = self.weight / torch.sqrt(variance + self._epsilon)
        shift = self.bias - mean * factor
        return x * factor.reshape(shape) + shift.reshape(shape)


class PRelu(nn.Module):
    """Mode channel."""

    def __init__(self, weight):
        super().__init__()
        self._weight = nn.Parameter(weight.clone())

    def forward(self, x):
        slope = self._weight.reshape(1, -1, 1, 1)
        return torch.where(x > 0, x, slope * x)


class ConvBNLayer(nn.Module):
    def __init__(self, params, stride=1, depthwise=False, act=True):
        super().__init__()
        weight = params["conv"]
        padding = 0 if weight.shape[2:] == (5, 4) else (weight.shape[2] - 1) // 2
        groups = weight.shape[0] if depthwise else 1
        self.conv = ConvLayer(weight, stride, padding, groups)
        self.bn = BatchNorm(params["bn"])
        self.act = PRelu(params["act"]) if act else None

    def forward(self, x, training):
        x = self.bn(self.conv(x), training)
        return x if self.act is None else self.act(x)


class InvertedResidual(nn.Module):
    """Units of stride 1."""

    def __init__(self, params):
        super().__init__()
        self.conv_pw = ConvBNLayer(params["pw"])
        self.conv_dw = ConvBNLayer(params["dw"], depthwise=True, act=False)
        self.conv_linear = ConvBNLayer(params["linear"])

    def forward(self, x, training):
        half = x.shape[1] // 2
        x1, x2 = torch.split(x, [half, half], dim=1)
        x2 = self.conv_pw(x2, training)
        x2 = self.conv_dw(x2, training)
        x2 = self.conv_linear(x2, training)
        return interleave(x1, x2)


class InvertedResidualDS(nn.Module):
    """Units of stride 2; the first branch has no point-wise convolution in front."""

    def __init__(self, params):
        super().__init__()
        self.conv_dw_1 = ConvBNLayer(params["dw_1"], 2, depthwise=True, act=False)
        self.conv_linear_1 = ConvBNLayer(params["linear_1"])
        self.conv_pw_2 = ConvBNLayer(params["pw"])
        self.conv_dw_2 = ConvBNLayer(params["dw"], 2, depthwise=True, act=False)
        self.conv_linear_2 = ConvBNLayer(params["linear"])

    def forward(self, inputs, training):
        x1 = self.conv_linear_1(self.conv_dw_1(inputs, training), training)
        x2 = self.conv_pw_2(inputs, training)
        x2 = self.conv_linear_2(self.conv_dw_2(x2, training), training)
        return interleave(x1, x2)


def interleave(x1, x2):
    """Concatenation and shuffle of two groups in one: channels by turns."""
    return torch.stack([x1, x2], dim=2).flatten(1, 2)


class FaceNet(nn.Module):
    def __init__(self, params):
        super().__init__()
        self._conv1 = ConvBNLayer(params["conv1"], stride=2)
        blocks = []
        for stage, repeat in enumerate(Stages["repeats"]):
            for i in range(repeat):
                block = InvertedResidualDS if i == 0 else InvertedResidual
                blocks.append(block(params[f"stage_{stage}_{i}"]))
        self._block_list = nn.ModuleList(blocks)
        self._last_conv = ConvBNLayer(params["last_conv"])
        self._global = ConvBNLayer(params["global"], depthwise=True, act=False)
        self._fc = nn.Parameter(params["fc"].clone())
        self._bn = BatchNorm(params["neck"], epsilon=2e-5, scale=False)

    def forward(self, inputs, training):
        y = self._conv1(inputs, training)
        for block in self._block_list:
            y = block(y, training)
        y = self._last_conv(y, training)
        y = self._global(y, training)
        y = torch.matmul(torch.flatten(y, 1), self._fc)
        return self._bn(y, training)


class ArcMargin(nn.Module):
    """Weights [embedding, classes]; the label's logit alone is made anew."""

    def __init__(self, weight, margin1, margin2, margin3, scale):
        super().__init__()
        self.weight = nn.Parameter(weight.clone().contiguous())
        self.margin = (margin1, margin2, margin3)
        self.scale = scale

    def forward(self, inputs, label):
        inputs = inputs / torch.sqrt(torch.sum(inputs**2, dim=1, keepdim=True))
        norms = torch.sqrt(torch.sum(self.weight**2, dim=0, keepdim=True))
        cos = torch.matmul(inputs, self.weight / norms)
        margin1, margin2, margin3 = self.margin

        rows = torch.nonzero(label >= 0).flatten()
        columns = label[rows]
        target = cos[rows, columns]
        theta = torch.acos(torch.clamp(target, -1 + 1e-6, 1 - 1e-6))
        theta = margin1 * theta + margin2
        lowered = target - math.sin(margin2) * margin2
        phi = torch.where(theta < math.pi, torch.cos(theta) - margin3, lowered)
        logit = torch.index_put(cos, (rows, columns), phi)
        return logit * self.scale


class RecModel(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.backbone = FaceNet(params)
        self.head = ArcMargin(params["head"], **Loss)

    def forward(self, x, label):
        with torch.no_grad():
            reversed_x = torch.flip(x, [-1])
            stable = self.backbone(reversed_x, training=False)
        features = self.backbone(x, training=self.training)
        logits = self.head(features, label)
        return {"logits": logits, "embedding": features, "mirrored": stable}


# ------------------------------------------------------------------------- weights


def convert(state):
    """Weights of torch for each layer here."""

    def bn(key):
        kinds = ("weight", "bias", "running_mean", "running_var")
        return {kind: state[f"{key}.{kind}"] for kind in kinds}

    def conv_bn(key, start=0, act=True):
        params = {"conv": state[f"{key}.{start}.weight"]}
        params["bn"] = bn(f"{key}.{start + 1}")
        if act:
            params["act"] = state[f"{key}.{start + 2}.weight"]
        return params

    first = conv_bn("backbone.stem")
    # As read by OpenCV, colours are BGR.
    first["conv"] = first["conv"].flip(1)
    params = {"conv1": first}
    index = 0
    for stage, repeat in enumerate(Stages["repeats"]):
        for i in range(repeat):
            unit = f"backbone.units.{index}"
            block = {
                "pw": conv_bn(f"{unit}.branch2"),
                "dw": conv_bn(f"{unit}.branch2", 3, act=False),
                "linear": conv_bn(f"{unit}.branch2", 5),
            }
            if i == 0:
                block["dw_1"] = conv_bn(f"{unit}.branch1", act=False)
                block["linear_1"] = conv_bn(f"{unit}.branch1", 2)
            params[f"stage_{stage}_{i}"] = block
            index += 1
    params["last_conv"] = conv_bn("backbone.tail")
    params["global"] = {
        "conv": state["backbone.gdc.weight"],
        "bn": bn("backbone.gdc_bn"),
    }
    params["fc"] = state["backbone.fc.weight"].t().contiguous()
    params["neck"] = bn("backbone.neck")
    params["head"] = state["head.weight"].t()
    return params


def model():
    return RecModel(convert(torch.load(Path(__file__).with_name("weights.pt"))))


# ---------------------------------------------------------------------------- data


def random_crop_flip(images, corner, flip):
    """Indices of rows and columns for each picture."""
    height, width = Global["input_height"], Global["input_width"]
    rows = corner[:, :1] + torch.arange(height)
    columns = corner[:, 1:] + torch.arange(width)
    turned = corner[:, 1:] + width - 1 - torch.arange(width)
    columns = torch.where(flip[:, None], turned, columns)
    number = torch.arange(len(images))[:, None, None]
    return images[number, rows[:, :, None], columns[:, None, :]]


def preprocess(batch):
    bgr = torch.flip(batch["image"], [-1])
    bgr = random_crop_flip(bgr, batch["corner"], batch["mirror"])
    x = bgr.to(torch.float32) * NormalizeImage["scale"]
    x = (x - NormalizeImage["mean"]) / NormalizeImage["std"]
    return torch.permute(x, (0, 3, 1, 2))


def forward(net, batch):
    return net(preprocess(batch), batch["label"])


# ---------------------------------------------------------------------------- loss


def cross_entropy(logits, label, ignore_index):
    log_prob = F.log_softmax(logits, dim=1)
    valid = (label != ignore_index).float()
    index = torch.where(label != ignore_index, label, torch.zeros_like(label))
    nll = -torch.gather(log_prob, 1, index[:, None]).squeeze(1)
    return torch.sum(nll * valid) / torch.sum(valid)


def cosine_similarity(x1, x2):
    w12 = torch.sum(x1 * x2, dim=1)
    w1, w2 = torch.sum(x1 * x1, dim=1), torch.sum(x2 * x2, dim=1)
    return w12 / torch.sqrt(w1 * w2 + 1e-16)


def loss(output, batch):
    ce = cross_entropy(output["logits"], batch["label"], ignore_index=-1)
    similarity = cosine_similarity(output["embedding"], output["mirrored"])
    return ce + ConsistencyWeight * torch.mean(1.0 - similarity)


# ----------------------------------------------------------------------- optimizer


class PolynomialDecay:
    def __init__(self, learning_rate, decay_steps, end_lr=0.0, power=1.0):
        self.base_lr, self.decay_steps = learning_rate, decay_steps
        self.end_lr, self.power = end_lr, power

    def get_lr(self, epoch):
        left = 1.0 - min(epoch, self.decay_steps) / self.decay_steps
        return (self.base_lr - self.end_lr) * left**self.power + self.end_lr


class LinearWarmup:
    """From start_lr to end_lr, then the scheduler that it holds."""

    def __init__(self, learning_rate, warmup_steps, start_lr, end_lr):
        self.learning_rate, self.warmup_steps = learning_rate, warmup_steps
        self.start_lr, self.end_lr = start_lr, end_lr
        self.last_epoch = 0

    def get_lr(self):
        if self.last_epoch < self.warmup_steps:
            done = self.last_epoch / self.warmup_steps
            return self.start_lr + (self.end_lr - self.start_lr) * done
        return self.learning_rate.get_lr(self.last_epoch - self.warmup_steps)

    def step(self):
        self.last_epoch += 1


class L2Decay:
    def __init__(self, coeff):
        self.coeff = coeff

    def __call__(self, param, grad):
        return grad + self.coeff * param


class Momentum(torch.optim.Optimizer):
    """A parameter's own regulariser goes before that of the optimizer."""

    def __init__(self, learning_rate, momentum, parameters, weight_decay, own):
        super().__init__(parameters, {})
        self._learning_rate, self._momentum = learning_rate, momentum
        self._regularization, self._own = weight_decay, own
        self._accumulators = {}

    def _regularized(self, param):
        regularizer = self._own.get(param, self._regularization)
        return param.grad if regularizer is None else regularizer(param, param.grad)

    @torch.no_grad()
    def step(self, closure=None):
        lr = self._learning_rate.get_lr()
        for param in self.param_groups[0]["params"]:
            grad = self._regularized(param)
            if param not in self._accumulators:
                self._accumulators[param] = torch.zeros_like(param)
            velocity = self._accumulators[param]
            velocity.copy_(self._momentum * velocity + grad)
            param.sub_(lr * velocity)
        self._learning_rate.step()


def optimizer(net):
    rate, warmup = Optimizer["learning_rate"], Optimizer["warmup_steps"]
    poly = PolynomialDecay(
        rate, Optimizer["total_steps"] - warmup, power=Optimizer["power"]
    )
    # The first step has a part of the rate already.
    scheduler = LinearWarmup(poly, warmup - 1, start_lr=rate / warmup, end_lr=rate)
    parameters = [p for p in net.parameters() if p.requires_grad]
    own = dict.fromkeys(p for p in parameters if p.ndim == 1)
    own[net.head.weight] = L2Decay(Optimizer["head_coeff"])
    return Momentum(
        scheduler,
        Optimizer["momentum"],
        parameters,
        L2Decay(Optimizer["coeff"]),
        own,
    )
