"""As in ``keras.applications``: channels last, layers with the names of the summary.

Squeeze and excitation, the auxiliary head, and the optimizer are written out.
"""

from pathlib import Path

import torch
from torch import nn

BLOCKS = {"conv2": 3, "conv3": 3}
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
CLASS_WEIGHT = {0: 0.6, 1: 1.0, 2: 1.7, 3: 0.8, 4: 1.3, 5: 2.1, 6: 1.0}


# ---------------------------------------------------------------------- layers


class Layer(nn.Module):
    """Weights come as arrays, and have the shapes these have."""

    def __init__(self, arrays, state=()):
        super().__init__()
        for name, value in arrays.items():
            value = value.clone().contiguous()
            if name in state:
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value))


class Conv2D(Layer):
    """Valid; the kernel is (height, width, in, out)."""

    def __init__(self, arrays, strides=1):
        super().__init__(arrays)
        self.strides = strides

    def forward(self, inputs):
        x = torch.permute(inputs, (0, 3, 1, 2))
        kernel = torch.permute(self.kernel, (3, 2, 0, 1))
        y = nn.functional.conv2d(x, kernel, stride=self.strides)
        return torch.permute(y, (0, 2, 3, 1))


class Dense(Layer):
    def forward(self, inputs):
        return torch.matmul(inputs, self.kernel) + self.bias


class BatchNormalization(Layer):
    def __init__(self, arrays):
        super().__init__(arrays, state=("moving_mean", "moving_variance"))
        self.momentum = 0.9
        self.epsilon = 1e-5

    def forward(self, inputs):
        axes = (0, 1, 2)
        mean = torch.mean(inputs, dim=axes)
        variance = torch.mean(torch.square(inputs), dim=axes) - torch.square(mean)
        self.update(mean, variance, inputs[..., 0].numel())
        inv = torch.rsqrt(variance + self.epsilon) * self.gamma
        return inputs * inv + (self.beta - mean * inv)

    @torch.no_grad()
    def update(self, mean, variance, count):
        sample_variance = variance * (count / (count - 1))
        keep = self.momentum
        self.moving_mean.copy_(self.moving_mean * keep + mean * (1 - keep))
        self.moving_variance.copy_(
            self.moving_variance * keep + sample_variance * (1 - keep)
        )


def zero_padding(x, before, after):
    return nn.functional.pad(x, (0, 0, before, after, before, after))


def windows(x, size, strides):
    """(batch, height, width, channels, size, size)."""
    return x.unfold(1, size, strides).unfold(2, size, strides)


def max_pooling(x, size, strides):
    return torch.amax(windows(x, size, strides), dim=(-2, -1))


def average_pooling_same(x, size):
    """What lies outside does not count."""
    below, right = (-side % size for side in x.shape[1:3])
    pads = (0, 0, 0, right, 0, below)
    total = windows(nn.functional.pad(x, pads), size, size).sum(dim=(-2, -1))
    inside = nn.functional.pad(torch.ones_like(x), pads)
    count = windows(inside, size, size).sum(dim=(-2, -1))
    return total / count


def global_average_pooling(x):
    return torch.mean(x, dim=(1, 2))


# ----------------------------------------------------------------------- model


class Model(nn.Module):
    def __init__(self, weights):
        super().__init__()
        for name, arrays in weights.items():
            self.add_module(name, make_layer(name, arrays))

    def __getitem__(self, name):
        return getattr(self, name)

    def conv_block(self, x, name):
        x1 = torch.relu(self[name + "_0_bn"](x))
        x1 = self[name + "_1_conv"](x1)
        x1 = torch.relu(self[name + "_1_bn"](x1))
        x1 = self[name + "_2_conv"](zero_padding(x1, 1, 1))
        return torch.cat([x, x1], dim=-1)

    def dense_block(self, x, name):
        for i in range(1, BLOCKS[name] + 1):
            x = self.conv_block(x, f"{name}_block{i}")
        return x

    def squeeze_excite(self, x, name):
        squeezed = global_average_pooling(x)
        hidden = torch.relu(self[name + "_se_reduce"](squeezed))
        gate = torch.sigmoid(self[name + "_se_expand"](hidden))
        return x * gate[:, None, None, :]

    def transition_block(self, x, name):
        x = torch.relu(self[name + "_bn"](x))
        x = self[name + "_conv"](x)
        return average_pooling_same(x, 2)

    def forward(self, image):
        x = zero_padding(image, 1, 1)
        x = self.conv1_conv(x)
        x = torch.relu(self.conv1_bn(x))
        x = zero_padding(x, 1, 1)
        x = max_pooling(x, 3, strides=2)

        x = self.dense_block(x, "conv2")
        x = self.squeeze_excite(x, "conv2")
        x = self.transition_block(x, "pool2")
        aux = self.aux_predictions(global_average_pooling(x))

        x = self.dense_block(x, "conv3")
        x = self.squeeze_excite(x, "conv3")
        x = self.bn(x)
        x = torch.relu(x)
        x = global_average_pooling(x)
        return self.predictions(x), aux


def make_layer(name, arrays):
    if "gamma" in arrays:
        return BatchNormalization(arrays)
    if arrays["kernel"].dim() == 4:
        return Conv2D(arrays, strides=2 if name == "conv1_conv" else 1)
    return Dense(arrays)


# --------------------------------------------------------------------- weights


def convert(state):
    """State of the other library -> a dict of arrays for each layer."""

    def conv(name):
        return {"kernel": torch.permute(state[name + ".weight"], (2, 3, 1, 0))}

    def dense(name):
        kernel = state[name + ".weight"].flatten(1)
        return {"kernel": kernel.T, "bias": state[name + ".bias"]}

    def norm(name):
        return {
            "gamma": state[name + ".weight"],
            "beta": state[name + ".bias"],
            "moving_mean": state[name + ".running_mean"],
            "moving_variance": state[name + ".running_var"],
        }

    weights = {"conv1_conv": conv("conv0"), "conv1_bn": norm("norm0")}
    for index, (block, layers) in enumerate(BLOCKS.items(), 1):
        for i in range(1, layers + 1):
            source, target = f"denseblock{index}.denselayer{i}", f"{block}_block{i}"
            weights[target + "_0_bn"] = norm(source + ".norm1")
            weights[target + "_1_conv"] = conv(source + ".conv1")
            weights[target + "_1_bn"] = norm(source + ".norm2")
            weights[target + "_2_conv"] = conv(source + ".conv2")
        weights[block + "_se_reduce"] = dense(f"se{index}.fc1")
        weights[block + "_se_expand"] = dense(f"se{index}.fc2")
    weights["pool2_bn"] = norm("transition1.norm")
    weights["pool2_conv"] = conv("transition1.conv")
    weights["aux_predictions"] = dense("aux_classifier")
    weights["bn"] = norm("norm5")
    weights["predictions"] = dense("classifier")
    return weights


# -------------------------------------------------------------------- training


def model():
    state = torch.load(Path(__file__).with_name("weights.pt"))
    return Model(convert(state)).train()


def preprocess_input(image):
    x = torch.permute(image, (0, 2, 3, 1)) / 255.0
    return (x - torch.tensor(IMAGENET_MEAN)) / torch.tensor(IMAGENET_STD)


def forward(net, batch):
    predictions, aux = net(preprocess_input(batch["image"]))
    return {"logits": predictions, "aux": aux}


def categorical_crossentropy(label, logits, label_smoothing=0.1):
    classes = logits.shape[-1]
    class_weight = torch.tensor([CLASS_WEIGHT[i] for i in range(classes)])
    target = nn.functional.one_hot(label, classes).to(logits.dtype)
    target = target * (1.0 - label_smoothing) + label_smoothing / classes
    log_prob = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
    each = -torch.sum(class_weight * target * log_prob, dim=-1)
    return torch.sum(each) / torch.sum(class_weight[label])


def loss(output, batch):
    loss_weights = {"logits": 1.0, "aux": 0.4}
    losses = [
        weight * categorical_crossentropy(batch["label"], output[name])
        for name, weight in loss_weights.items()
    ]
    return sum(losses)


class SGD(torch.optim.Optimizer):
    """Steps are kept, not gradients: velocity has the sign of what is added."""

    def __init__(self, groups, learning_rate, momentum, nesterov):
        super().__init__(groups, {"learning_rate": learning_rate, "l2": 0.0})
        self.momentum = momentum
        self.nesterov = nesterov

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            rate = group["learning_rate"]
            for variable in group["params"]:
                if variable.grad is None:
                    continue
                gradient = variable.grad + group["l2"] * variable
                state = self.state[variable]
                if "velocity" not in state:
                    state["velocity"] = torch.zeros_like(variable)
                velocity = self.momentum * state["velocity"] - rate * gradient
                state["velocity"] = velocity
                if self.nesterov:
                    variable.add_(self.momentum * velocity - rate * gradient)
                else:
                    variable.add_(velocity)


def optimizer(net):
    kernels, others = [], []
    for name, variable in net.named_parameters():
        regularized = name.endswith("kernel")
        (kernels if regularized else others).append(variable)
    groups = [{"params": kernels, "l2": 1e-3}, {"params": others}]
    return SGD(groups, learning_rate=0.05, momentum=0.9, nesterov=True)
