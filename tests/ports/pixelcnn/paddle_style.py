"""After Paddle: layers that create their parameters, linear weights [in, out].

Gates come before what they let through. Kernels are cut to the part that has been seen and
the picture is padded at that side only. Projections to the next block and to the head are one.
"""

import math
import os

import torch
import torch.nn.functional as F
from torch import nn

IMG_CHANNELS = 2
COLOR_LEVELS = 8
LABELS = 5
LABEL_EMBED = 10
HIDDEN = 24
HEAD = 32
FILTERS = [5, 3, 3]


class Layer(nn.Module):
    def create_parameter(self, shape):
        return nn.Parameter(torch.zeros(shape))


class Embedding(Layer):
    def __init__(self, num_embeddings, embedding_dim):
        super().__init__()
        self.weight = self.create_parameter([num_embeddings, embedding_dim])

    def forward(self, ids):
        return torch.index_select(self.weight, 0, ids)


class Linear(Layer):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = self.create_parameter([in_features, out_features])

    def forward(self, x):
        return torch.matmul(x, self.weight)


class Conv1x1(Layer):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.weight = self.create_parameter([out_channels, in_channels, 1, 1])
        self.bias = self.create_parameter([out_channels])

    def forward(self, x):
        return F.conv2d(x, self.weight) + self.bias.reshape(1, -1, 1, 1)


def color_of(num_channels):
    """Image channel whose distribution the feature serves."""
    per_color = num_channels // IMG_CHANNELS
    return torch.arange(num_channels) // per_color


def color_mask(mask_type, in_color, out_color):
    if mask_type == "A":
        allowed = out_color.unsqueeze(1) > in_color.unsqueeze(0)
    else:
        allowed = out_color.unsqueeze(1) >= in_color.unsqueeze(0)
    return allowed.to(torch.float32)


class ColorConv1x1(Conv1x1):
    """Masked with type B; the outputs may be several, one behind the other."""

    def __init__(self, in_channels, *out_channels):
        super().__init__(in_channels, sum(out_channels))
        self.sections = list(out_channels)
        out_color = torch.cat([color_of(n) for n in out_channels])
        mask = color_mask("B", color_of(in_channels), out_color)
        self.register_buffer("mask", mask[:, :, None, None], persistent=False)

    def forward(self, x):
        y = F.conv2d(x, self.weight * self.mask, self.bias)
        return torch.split(y, self.sections, dim=1)


class VerticalConv2D(Layer):
    def __init__(self, in_channels, out_channels, kernel_size):
        super().__init__()
        shape = [out_channels, in_channels, kernel_size, kernel_size]
        self.weight = self.create_parameter(shape)
        self.bias = self.create_parameter([out_channels])
        self.reach = kernel_size // 2

    def forward(self, x):
        seen = self.weight[:, :, : self.reach + 1]
        x = F.pad(x, [self.reach, self.reach, self.reach, 0])
        return F.conv2d(x, seen, self.bias)


class HorizontalConv2D(Layer):
    def __init__(self, mask_type, in_channels, out_channels, kernel_size):
        super().__init__()
        shape = [out_channels, in_channels, 1, kernel_size]
        self.weight = self.create_parameter(shape)
        self.reach = kernel_size // 2
        out_color = color_of(out_channels // 2).tile([2])
        mask = color_mask(mask_type, color_of(in_channels), out_color)
        self.register_buffer("mask", mask[:, :, None, None], persistent=False)

    def forward(self, x):
        left, here, _ = torch.split(self.weight, [self.reach, 1, self.reach], dim=3)
        kernel = torch.cat([left, here * self.mask], dim=3)
        x = F.pad(x, [self.reach, 0, 0, 0])
        return F.conv2d(x, kernel)


class GatedUnit(Layer):
    def __init__(self):
        super().__init__()
        self.condition = Linear(LABEL_EMBED, 2 * HIDDEN)

    def forward(self, x, embedded):
        bias = self.condition(embedded).unsqueeze(-1).unsqueeze(-1)
        gate_bias, value_bias = bias.chunk(2, dim=1)
        gate, value = x.chunk(2, dim=1)
        gate = torch.sigmoid(gate + gate_bias)
        value = torch.tanh(value + value_bias)
        return gate * value


class GatedLayer(Layer):
    def __init__(self, mask_type, in_channels, kernel_size, is_last):
        super().__init__()
        self.has_shortcut = in_channels == HIDDEN
        self.vertical = VerticalConv2D(in_channels, 2 * HIDDEN, kernel_size)
        self.vertical_gate = GatedUnit()
        self.link = Conv1x1(HIDDEN, 2 * HIDDEN)
        self.horizontal = HorizontalConv2D(
            mask_type, in_channels, 2 * HIDDEN, kernel_size
        )
        self.horizontal_gate = GatedUnit()
        widths = [HEAD] if is_last else [HIDDEN, HEAD]
        self.project = ColorConv1x1(HIDDEN, *widths)

    def forward(self, v_stack, h_stack, embedded):
        v_stack = self.vertical_gate(self.vertical(v_stack), embedded)
        linked = self.link(v_stack.roll(1, dims=2) * self.not_first_row(v_stack))
        features = linked + self.horizontal(h_stack)
        features = self.horizontal_gate(features, embedded)
        *out, skip = self.project(features)
        if out and self.has_shortcut:
            out = [out[0] + h_stack]
        return v_stack, *out, skip

    @staticmethod
    def not_first_row(x):
        rows = torch.arange(x.shape[2]).reshape(1, 1, -1, 1)
        return (rows > 0).to(x.dtype)


class GatedPixelCNN(Layer):
    def __init__(self):
        super().__init__()
        self.embedding = Embedding(LABELS, LABEL_EMBED)
        layers = []
        for depth, kernel_size in enumerate(FILTERS):
            mask_type = "A" if depth == 0 else "B"
            in_channels = IMG_CHANNELS if depth == 0 else HIDDEN
            is_last = depth == len(FILTERS) - 1
            layers.append(GatedLayer(mask_type, in_channels, kernel_size, is_last))
        self.layers = nn.ModuleList(layers)
        self.head_hidden = ColorConv1x1(HEAD, HEAD)
        self.head_logits = ColorConv1x1(HEAD, IMG_CHANNELS * COLOR_LEVELS)

    def forward(self, image, label):
        embedded = self.embedding(label)
        highest = COLOR_LEVELS - 1
        x = (image.to(torch.float32) - highest / 2) / (highest / 2)
        v_stack, h_stack = x, [x]
        total = torch.zeros([])
        for layer in self.layers:
            v_stack, *h_stack, skip = layer(v_stack, *h_stack, embedded)
            total = total + skip
        (hidden,) = self.head_hidden(total.clamp(min=0))
        (logits,) = self.head_logits(hidden.clamp(min=0))
        batch, _, height, width = logits.shape
        return logits.reshape(batch, IMG_CHANNELS, COLOR_LEVELS, height, width)


# weights ------------------------------------------------------------------------------


def gate_first(value):
    """Exchange the halves of the outputs, which come first in torch."""
    signal, gate = value.chunk(2, dim=0)
    return torch.cat([gate, signal], dim=0)


def linear_weight(value):
    return gate_first(value).t()


def paddle_state_dict(torch_state):
    renamed = {"embedding.weight": torch_state["label_embed.weight"]}
    for depth in range(len(FILTERS)):
        source = {
            key.split(".", 2)[2]: value
            for key, value in torch_state.items()
            if key.startswith(f"blocks.{depth}.")
        }
        layer = {
            "vertical.weight": gate_first(source["v_conv.weight"]),
            "vertical.bias": gate_first(source["v_conv.bias"]),
            "vertical_gate.condition.weight": linear_weight(source["v_label.weight"]),
            "link.weight": gate_first(source["v_to_h.weight"]),
            "link.bias": gate_first(source["v_to_h.bias"]),
            "horizontal.weight": gate_first(source["h_conv.weight"]),
            "horizontal_gate.condition.weight": linear_weight(source["h_label.weight"]),
        }
        for kind in ("weight", "bias"):
            parts = [source[f"h_skip.{kind}"]]
            if depth < len(FILTERS) - 1:
                parts = [source[f"h_out.{kind}"]] + parts
            layer[f"project.{kind}"] = torch.cat(parts, dim=0)
        renamed.update({f"layers.{depth}.{key}": v for key, v in layer.items()})
    for kind in ("weight", "bias"):
        renamed[f"head_hidden.{kind}"] = torch_state[f"head1.{kind}"]
        renamed[f"head_logits.{kind}"] = torch_state[f"head2.{kind}"]
    return renamed


def model():
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "weights.pt")
    network = GatedPixelCNN()
    network.load_state_dict(paddle_state_dict(torch.load(path)))
    return network


# training -----------------------------------------------------------------------------


def forward(network, batch):
    return network(batch["image"], batch["label"])


def loss(output, batch):
    target = batch["image"].to(torch.int64).unsqueeze(2)
    log_norm = torch.logsumexp(output, dim=2, keepdim=True)
    log_prob = torch.take_along_dim(output, target, dim=2) - log_norm
    return -log_prob.mean() * math.log2(math.e)


class ExponentialDecay:
    def __init__(self, learning_rate, gamma):
        self.last_lr = learning_rate
        self.gamma = gamma

    def step(self):
        self.last_lr = self.last_lr * self.gamma


class Adam(torch.optim.Optimizer):
    def __init__(self, scheduler, parameters, beta1, beta2, epsilon, weight_decay=0.0):
        super().__init__(parameters, {"weight_decay": weight_decay})
        self.scheduler = scheduler
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.beta1_pow, self.beta2_pow = 1.0, 1.0

    @torch.no_grad()
    def step(self, closure=None):
        self.beta1_pow *= self.beta1
        self.beta2_pow *= self.beta2
        correction = math.sqrt(1 - self.beta2_pow)
        lr = self.scheduler.last_lr * correction / (1 - self.beta1_pow)
        for group in self.param_groups:
            for param in group["params"]:
                grad = param.grad + group["weight_decay"] * param
                slot = self.state[param]
                if len(slot) == 0:
                    slot["moment1"] = torch.zeros_like(param)
                    slot["moment2"] = torch.zeros_like(param)
                moment1, moment2 = slot["moment1"], slot["moment2"]
                moment1.lerp_(grad, 1 - self.beta1)
                moment2.lerp_(grad * grad, 1 - self.beta2)
                denominator = moment2.sqrt() + self.epsilon * correction
                param.add_(moment1 / denominator, alpha=-lr)
        self.scheduler.step()


def optimizer(network):
    scheduler = ExponentialDecay(learning_rate=4e-3, gamma=0.5 ** (1 / 3))
    return Adam(
        scheduler,
        network.parameters(),
        beta1=0.95,
        beta2=0.9995,
        epsilon=1e-4,
    )
