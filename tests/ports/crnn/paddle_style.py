"""After Paddle: linear weights are [in, out], cells over time, costs and gradients of CTC at once.

Channels come first; the sequence part has steps first, as the library of the costs wants them.
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

Global = {"image_shape": (1, 16), "class_dim": 11, "hidden_size": 48}
NormalizeImage = {"scale": 1.0 / 255.0, "mean": 0.5, "std": 0.5}
Optimizer = {
    "learning_rate": 1.5,
    "rho": 0.95,
    "epsilon": 1.0e-6,
    "clip_norm": 3.0,
    "regularizer": 0.01,
    "warmup_steps": 2,
    "decay_steps": 10,
    "power": 0.9,
}

# ------------------------------------------------------------------------ backbone


class ConvLayer(nn.Module):
    def __init__(self, params, padding):
        super().__init__()
        self.weight = nn.Parameter(params["weight"].clone())
        self.bias = nn.Parameter(params["bias"].clone()) if "bias" in params else None
        self._padding = padding

    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias, 1, self._padding)


class BatchNorm2D(nn.Module):
    """Momentum is what stays of the old statistics."""

    _mean: torch.Tensor
    _variance: torch.Tensor

    def __init__(self, params, momentum=0.9, epsilon=1e-05):
        super().__init__()
        self.weight = nn.Parameter(params["weight"].clone())
        self.bias = nn.Parameter(params["bias"].clone())
        self.register_buffer("_mean", params["running_mean"].clone())
        self.register_buffer("_variance", params["running_var"].clone())
        self._momentum, self._epsilon = momentum, epsilon

    @torch.no_grad()
    def _update(self, mean, variance):
        old, new = self._momentum, 1.0 - self._momentum
        self._mean.copy_(self._mean * old + mean * new)
        self._variance.copy_(self._variance * old + variance * new)

    def forward(self, x):
        mean, variance = self._mean, self._variance
        if self.training:
            count = x.numel() // x.shape[1]
            mean = x.mean(dim=(0, 2, 3))
            variance = (x * x).mean(dim=(0, 2, 3)) - mean * mean
            # The other program keeps the variance of a sample.
            self._update(mean, variance * (count / (count - 1.0)))
        scale = self.weight / (variance + self._epsilon).sqrt()
        shift = self.bias - mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


class MaxPool2D(nn.Module):
    """Windows as columns; each takes its first greatest value."""

    def __init__(self, kernel_size, stride, padding=(0, 0)):
        super().__init__()
        self._kernel_size, self._stride = kernel_size, stride
        self._padding = padding

    def forward(self, x):
        rows, columns = self._padding
        x = F.pad(x, (columns, columns, rows, rows), value=float("-inf"))
        x = x.unfold(2, self._kernel_size[0], self._stride[0])
        x = x.unfold(3, self._kernel_size[1], self._stride[1]).flatten(4)
        index = x.argmax(dim=4, keepdim=True)
        return x.gather(4, index).squeeze(4)


class ConvBNLayer(nn.Module):
    def __init__(self, params, padding=1):
        super().__init__()
        self.conv = ConvLayer(params["conv"], padding)
        self.bn = BatchNorm2D(params["bn"])

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)))


class Backbone(nn.Module):
    """Height goes from 16 to 1."""

    def __init__(self, params):
        super().__init__()
        self.conv0 = ConvLayer(params["conv0"], padding=1)
        self.pool0 = MaxPool2D((2, 2), (2, 2))
        self.conv1 = ConvBNLayer(params["conv1"])
        self.pool1 = MaxPool2D((2, 2), (2, 1), padding=(0, 1))
        self.conv2 = ConvBNLayer(params["conv2"])
        self.pool2 = MaxPool2D((2, 2), (2, 1), padding=(0, 1))
        self.conv3 = ConvBNLayer(params["conv3"], padding=0)

    def forward(self, x):
        x = self.pool0(F.relu(self.conv0(x)))
        x = self.pool1(self.conv1(x))
        x = self.pool2(self.conv2(x))
        return self.conv3(x)


# ---------------------------------------------------------------------------- neck


class Im2Seq(nn.Module):
    def forward(self, x):
        """[N, C, 1, W] -> [W, N, C]"""
        n, c, h, w = x.shape
        assert h == 1
        return x.reshape(n, c, w).permute(2, 0, 1)


class LSTMCell(nn.Module):
    """Its weights are [4 * hidden, in], with two biases."""

    def __init__(self, params):
        super().__init__()
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value.clone()))

    def forward(self, inputs, states):
        pre_hidden, pre_cell = states
        gates = inputs @ self.weight_ih.t() + self.bias_ih
        gates = gates + pre_hidden @ self.weight_hh.t() + self.bias_hh
        i, f, g, o = gates.split(Global["hidden_size"], dim=-1)
        c = torch.sigmoid(f) * pre_cell + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, c


class RNN(nn.Module):
    """Runs a cell over steps, from the last to the first where it is reversed."""

    def __init__(self, cell, is_reverse=False):
        super().__init__()
        self.cell = cell
        self.is_reverse = is_reverse

    def forward(self, inputs, mask):
        """inputs [T, N, C], mask [T, N, 1] of ones and zeros"""
        h = inputs.new_zeros(inputs.shape[1], Global["hidden_size"])
        c = h
        order = list(range(len(inputs)))
        if self.is_reverse:
            order.reverse()
        outputs = [h] * len(inputs)
        for t in order:
            m = mask[t]
            new_h, new_c = self.cell(inputs[t], (h, c))
            h = m * new_h + (1.0 - m) * h
            c = m * new_c + (1.0 - m) * c
            outputs[t] = m * new_h
        return torch.stack(outputs)


class BiRNN(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.rnn_fw = RNN(LSTMCell(params["fw"]))
        self.rnn_bw = RNN(LSTMCell(params["bw"]), is_reverse=True)

    def forward(self, inputs, mask):
        return torch.cat([self.rnn_fw(inputs, mask), self.rnn_bw(inputs, mask)], -1)


class Linear(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.weight = nn.Parameter(params["weight"].clone().contiguous())
        self.bias = nn.Parameter(params["bias"].clone())

    def forward(self, x):
        return torch.matmul(x, self.weight) + self.bias


class SequenceEncoder(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.lstm1 = BiRNN(params["lstm1"])
        self.fc1 = Linear(params["fc1"])
        self.lstm2 = BiRNN(params["lstm2"])

    def forward(self, x, mask):
        return self.lstm2(self.fc1(self.lstm1(x, mask)), mask)


class RecModel(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.backbone = Backbone(params)
        self.im2seq = Im2Seq()
        self.neck = SequenceEncoder(params)
        self.head = Linear(params["head"])

    def forward(self, x, lens):
        x = self.im2seq(self.backbone(x))
        mask = (torch.arange(len(x))[:, None] < lens).float().unsqueeze(2)
        return self.head(self.neck(x, mask))


# --------------------------------------------------------------------- pretrained


def convert(state):
    def under(prefix):
        return {
            name.removeprefix(prefix): value
            for name, value in state.items()
            if name.startswith(prefix)
        }

    def linear(prefix):
        weight, bias = state[f"{prefix}.weight"], state[f"{prefix}.bias"]
        return {"weight": weight.t(), "bias": bias}

    def lstm(prefix):
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        suffixes = {"fw": "_l0", "bw": "_l0_reverse"}
        return {
            way: {kind: state[f"{prefix}.{kind}{suffix}"] for kind in kinds}
            for way, suffix in suffixes.items()
        }

    params = {"conv0": under("cnn.0.")}
    for i, number in enumerate((3, 5, 7), start=1):
        conv, bn = under(f"cnn.{number}.conv."), under(f"cnn.{number}.norm.")
        params[f"conv{i}"] = {"conv": conv, "bn": bn}
    params["lstm1"] = lstm("rnn.0.rnn")
    params["fc1"] = linear("rnn.0.embedding")
    params["lstm2"] = lstm("rnn.1.rnn")
    params["head"] = linear("rnn.1.embedding")
    return params


def model():
    return RecModel(convert(torch.load(Path(__file__).with_name("weights.pt"))))


# ---------------------------------------------------------------------------- data


def resize_norm_img(batch):
    """Normalized lines on a canvas of zeros."""
    canvas = torch.zeros(batch["image"].shape).unsqueeze(1)
    for i, w in enumerate(batch["width"].tolist()):
        line = batch["image"][i, :, :w].float() * NormalizeImage["scale"]
        line = (line - NormalizeImage["mean"]) / NormalizeImage["std"]
        canvas[i, 0, :, :w] = line
    return canvas


def valid_steps(batch):
    return (batch["width"] + 2) // 2


def forward(net, batch):
    return net(resize_norm_img(batch), valid_steps(batch))


# ---------------------------------------------------------------------------- loss


class WarpCTC(torch.autograd.Function):
    """Costs [N] of logits [T, N, C]; their gradients are made with them and kept."""

    @staticmethod
    def forward(ctx, logits, labels, logits_length, labels_length, blank):
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            costs = F.ctc_loss(
                logits.log_softmax(-1),
                labels,
                logits_length,
                labels_length,
                blank=blank,
                reduction="none",
            )
            (logits_grad,) = torch.autograd.grad(costs.sum(), logits)
        ctx.save_for_backward(logits_grad)
        return costs.detach()

    @staticmethod
    def backward(ctx, loss_grad):
        (logits_grad,) = ctx.saved_tensors
        return logits_grad * loss_grad[:, None], None, None, None, None


def labels_of(batch):
    """Texts as rows, with zeros behind; and how many letters come twice in turn."""
    lens = batch["length"].tolist()
    labels = torch.zeros(len(lens), max(lens), dtype=torch.long)
    for row, text in zip(labels, batch["text"].split(lens)):
        row[: len(text)] = text
    twice = (labels[:, 1:] == labels[:, :-1]) & (labels[:, 1:] > 0)
    return labels, twice.sum(dim=1)


def loss(output, batch):
    labels, repeats = labels_of(batch)
    logits_length, labels_length = valid_steps(batch), batch["length"]
    fits = logits_length >= labels_length + repeats
    costs = WarpCTC.apply(
        output[:, fits], labels[fits], logits_length[fits], labels_length[fits], 0
    )
    return costs.sum() / len(fits)


# ----------------------------------------------------------------------- optimizer


class PolynomialDecay:
    def __init__(self, learning_rate, decay_steps, power, end_lr=0.0):
        self.base_lr, self.end_lr = learning_rate, end_lr
        self.decay_steps, self.power = decay_steps, power

    def get_lr(self, epoch):
        left = 1.0 - min(epoch, self.decay_steps) / self.decay_steps
        return (self.base_lr - self.end_lr) * left**self.power + self.end_lr


class LinearWarmup:
    def __init__(self, learning_rate, warmup_steps):
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.last_epoch = 0

    def get_lr(self):
        if self.last_epoch < self.warmup_steps:
            end_lr = self.learning_rate.base_lr
            return end_lr * (self.last_epoch + 1) / self.warmup_steps
        return self.learning_rate.get_lr(self.last_epoch - self.warmup_steps)

    def step(self):
        self.last_epoch += 1


class ClipGradByGlobalNorm:
    def __init__(self, clip_norm):
        self.clip_norm = clip_norm

    def __call__(self, grads):
        global_norm = torch.cat([g.flatten() for g in grads]).norm()
        factor = self.clip_norm / max(global_norm, self.clip_norm)
        return [g * factor for g in grads]


class Adadelta(torch.optim.Optimizer):
    """Clips first; the regularizer adds to what is left."""

    def __init__(self, learning_rate, epsilon, rho, parameters, coeff, grad_clip):
        super().__init__(parameters, {})
        self._learning_rate = learning_rate
        self._epsilon, self._rho = epsilon, rho
        self._coeff, self._grad_clip = coeff, grad_clip

    @torch.no_grad()
    def step(self, closure=None):
        lr = self._learning_rate.get_lr()
        parameters = self.param_groups[0]["params"]
        grads = self._grad_clip([p.grad for p in parameters])
        for p, grad in zip(parameters, grads):
            if p.ndim > 1:
                grad = grad + self._coeff * p
            self._adadelta(p, grad, lr)
        self._learning_rate.step()

    def _adadelta(self, p, grad, lr):
        state = self.state[p]
        avg_squared_grad = state.get("avg_squared_grad", torch.zeros_like(p))
        avg_squared_update = state.get("avg_squared_update", torch.zeros_like(p))
        avg_squared_grad = self._rho * avg_squared_grad + (1 - self._rho) * grad**2
        ratio = (avg_squared_update + self._epsilon) / (
            avg_squared_grad + self._epsilon
        )
        update = -ratio.sqrt() * grad
        avg_squared_update = (
            self._rho * avg_squared_update + (1 - self._rho) * update**2
        )
        p.add_(update, alpha=lr)
        state["avg_squared_grad"] = avg_squared_grad
        state["avg_squared_update"] = avg_squared_update


def optimizer(net):
    decay = PolynomialDecay(
        Optimizer["learning_rate"], Optimizer["decay_steps"], Optimizer["power"]
    )
    return Adadelta(
        LinearWarmup(decay, Optimizer["warmup_steps"]),
        Optimizer["epsilon"],
        Optimizer["rho"],
        list(net.parameters()),
        Optimizer["regularizer"],
        ClipGradByGlobalNorm(Optimizer["clip_norm"]),
    )
