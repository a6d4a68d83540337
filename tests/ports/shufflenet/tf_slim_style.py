"""After TF-Slim: functions over a dict of variables, named by scopes; pictures are NHWC.

Kernels are HWIO, and (height, width, channels, 1) where they are depthwise. Each variable
has a shadow, as of tf.train.ExponentialMovingAverage.
"""

from pathlib import Path

import torch
from torch import nn

NUM_CLASSES = 6
IMAGE_SIZE = (24, 20)
BLOCKS = (("Stage2", 3), ("Stage3", 2))
RGB_MEANS = (123.675, 116.28, 103.53)
RGB_STDDEVS = (58.395, 57.12, 57.375)
PARAMS = {
    "initial_learning_rate": 0.1,
    "end_learning_rate": 0.004,
    "power": 2.0,
    "warmup_steps": 2,
    "num_steps": 9,
    "momentum": 0.9,
    "weight_decay": 0.02,
    "label_smoothing": 0.1,
    "moving_average_decay": 0.8,
}
BATCH_NORM = {"decay": 0.9, "epsilon": 1e-5}


# ------------------------------------------------------------- variables


class VariableStore(nn.Module):
    def __init__(self, values, shadows):
        super().__init__()
        self.names = list(values)
        for name, value in values.items():
            value = value.clone().contiguous()
            if "/moving_" in name:
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value))
        for name, value in shadows.items():
            self.register_buffer(shadow(name), value.clone().contiguous())

    def variables(self):
        return {name: getattr(self, name) for name in self.names}

    def forward(self, images):
        return shufflenet_v2(self.variables(), images)


def shadow(name):
    return name + "/ExponentialMovingAverage"


# ---------------------------------------------------------------- layers


def fixed_padding(inputs, kernel_size):
    """As many zeros on each side, whatever the size of the picture."""
    before = (kernel_size - 1) // 2
    after = kernel_size - 1 - before
    return nn.functional.pad(inputs, (0, 0, before, after, before, after))


def windows(padded, size, stride):
    """What each tap of a window sees, row by row."""
    rows = padded.shape[1] - size + 1
    columns = padded.shape[2] - size + 1
    for i in range(size):
        for j in range(size):
            yield padded[:, i : i + rows : stride, j : j + columns : stride]


def batch_norm(variables, inputs, scope, decay, epsilon):
    scope = scope + "/BatchNorm"
    mean = torch.mean(inputs, dim=(0, 1, 2))
    variance = torch.mean(torch.square(inputs - mean), dim=(0, 1, 2))
    count = inputs.shape[0] * inputs.shape[1] * inputs.shape[2]
    with torch.no_grad():
        # The fused kernel hands out the variance of a sample.
        sample_variance = variance * (count / (count - 1.0))
        for name, value in (
            ("moving_mean", mean),
            ("moving_variance", sample_variance),
        ):
            moving = variables[f"{scope}/{name}"]
            moving.sub_((moving - value) * (1.0 - decay))
    factor = torch.rsqrt(variance + epsilon) * variables[scope + "/gamma"]
    return inputs * factor + (variables[scope + "/beta"] - mean * factor)


def conv2d(variables, inputs, scope):
    """Stride 1; a norm and ReLU follow."""
    weights = variables[scope + "/weights"]
    if weights.shape[0] == 1:
        net = torch.matmul(inputs, weights[0, 0])
    else:
        size = weights.shape[0]
        taps = list(windows(fixed_padding(inputs, size), size, 1))
        net = torch.matmul(torch.cat(taps, dim=3), weights.flatten(0, 2))
    return torch.relu(batch_norm(variables, net, scope, **BATCH_NORM))


def depthwise_conv(variables, inputs, scope, stride, activation_fn=None):
    weights = variables[scope + "/depthwise_weights"]
    size = weights.shape[0]
    taps = torch.stack(list(windows(fixed_padding(inputs, size), size, stride)), dim=4)
    net = torch.einsum("nhwck,kc->nhwc", taps, weights.flatten(0, 1).squeeze(2))
    net = batch_norm(variables, net, scope, **BATCH_NORM)
    return net if activation_fn is None else activation_fn(net)


def max_pool2d(inputs, size, stride):
    """Behind ReLU zeros may stand around the picture."""
    padded = fixed_padding(inputs, size)
    taps = torch.stack(list(windows(padded, size, stride)), dim=4)
    return torch.amax(taps, dim=4)


# --------------------------------------------------------------- network


def concat_shuffle(x, y):
    n, h, w, depth = x.shape
    z = torch.stack([x, y], dim=4)
    return torch.reshape(z, (n, h, w, 2 * depth))


def main_branch(variables, inputs, scope, stride):
    net = conv2d(variables, inputs, scope + "/conv1x1_before")
    net = depthwise_conv(variables, net, scope + "/depthwise", stride)
    return conv2d(variables, net, scope + "/conv1x1_after")


def basic_unit(variables, inputs, scope):
    shortcut, net = torch.split(inputs, inputs.shape[3] // 2, dim=3)
    net = main_branch(variables, net, scope, stride=1)
    return concat_shuffle(shortcut, net)


def downsampling_unit(variables, inputs, scope):
    net = main_branch(variables, inputs, scope, stride=2)
    second = scope + "/second_branch"
    shortcut = depthwise_conv(variables, inputs, second + "/depthwise", stride=2)
    shortcut = conv2d(variables, shortcut, second + "/conv1x1_after")
    return concat_shuffle(shortcut, net)


def shufflenet_v2(variables, images):
    net = conv2d(variables, images, "Conv1")
    net = max_pool2d(net, 3, stride=2)
    for block, num_units in BLOCKS:
        net = downsampling_unit(variables, net, f"{block}/unit_1")
        for number in range(2, num_units + 1):
            net = basic_unit(variables, net, f"{block}/unit_{number}")
    net = conv2d(variables, net, "Conv5")
    net = torch.mean(net, dim=(1, 2))
    return torch.matmul(net, variables["logits/weights"]) + variables["logits/biases"]


# ------------------------------------------------------------ checkpoint


def restore(state, root):
    values = {}

    def norm(scope, name):
        scope = scope + "/BatchNorm"
        values[scope + "/gamma"] = state[f"{root}.{name}.weight"]
        values[scope + "/beta"] = state[f"{root}.{name}.bias"]
        values[scope + "/moving_mean"] = state[f"{root}.{name}.running_mean"]
        values[scope + "/moving_variance"] = state[f"{root}.{name}.running_var"]

    def full(scope, name):
        kernel = state[f"{root}.{name}.0.weight"]
        values[scope + "/weights"] = torch.permute(kernel, (2, 3, 1, 0))
        norm(scope, f"{name}.1")

    def pointwise(scope, name, index):
        kernel = state[f"{root}.{name}.{index}.weight"]
        outputs, inputs = kernel.shape[:2]
        matrix = torch.transpose(torch.reshape(kernel, (outputs, inputs)), 0, 1)
        values[scope + "/weights"] = torch.reshape(matrix, (1, 1, inputs, outputs))
        norm(scope, f"{name}.{index + 1}")

    def depthwise(scope, name, index):
        kernel = state[f"{root}.{name}.{index}.weight"]
        values[scope + "/depthwise_weights"] = torch.permute(kernel, (2, 3, 0, 1))
        norm(scope, f"{name}.{index + 1}")

    full("Conv1", "conv1")
    for block, num_units in BLOCKS:
        for number in range(1, num_units + 1):
            scope = f"{block}/unit_{number}"
            name = f"{block.lower()}.{number - 1}"
            pointwise(scope + "/conv1x1_before", name + ".branch2", 0)
            depthwise(scope + "/depthwise", name + ".branch2", 3)
            pointwise(scope + "/conv1x1_after", name + ".branch2", 5)
        scope = f"{block}/unit_1/second_branch"
        depthwise(scope + "/depthwise", f"{block.lower()}.0.branch1", 0)
        pointwise(scope + "/conv1x1_after", f"{block.lower()}.0.branch1", 2)
    pointwise("Conv5", "conv5", 0)
    values["logits/weights"] = torch.transpose(state[f"{root}.fc.weight"], 0, 1)
    values["logits/biases"] = state[f"{root}.fc.bias"]
    return values


def model():
    state = torch.load(Path(__file__).with_name("weights.pt"))
    return VariableStore(restore(state, "network"), restore(state, "average"))


# ----------------------------------------------------------------- input


def preprocess(image, offset, flip, gain):
    """One picture, 0 to 255."""
    offset_height, offset_width = offset.tolist()
    target_height, target_width = IMAGE_SIZE
    image = image[offset_height : offset_height + target_height]
    image = image[:, offset_width : offset_width + target_width]
    if flip:
        image = torch.flip(image, (1,))
    image = image.to(torch.float32) * gain
    image = torch.clamp(image, 0.0, 255.0)
    return (image - torch.tensor(RGB_MEANS)) / torch.tensor(RGB_STDDEVS)


def forward(net, batch):
    parts = zip(batch["image"], batch["offset"], batch["flip"], batch["gain"])
    return net(torch.stack([preprocess(*part) for part in parts]))


# -------------------------------------------------------------- training


def loss(output, batch):
    smoothing = PARAMS["label_smoothing"]
    onehot_labels = nn.functional.one_hot(batch["label"], NUM_CLASSES)
    labels = onehot_labels * (1.0 - smoothing) + smoothing / NUM_CLASSES
    shifted = output - torch.amax(output, dim=1, keepdim=True).detach()
    log_sum = torch.log(torch.sum(torch.exp(shifted), dim=1, keepdim=True))
    losses = torch.sum(labels * (log_sum - shifted), dim=1)
    return torch.sum(losses) / losses.shape[0]


def polynomial_decay(learning_rate, global_step, decay_steps, end, power):
    fraction = min(global_step, decay_steps) / decay_steps
    return (learning_rate - end) * (1.0 - fraction) ** power + end


def learning_rate(global_step):
    """``global_step`` counts from one."""
    initial, warmup = PARAMS["initial_learning_rate"], PARAMS["warmup_steps"]
    if global_step < warmup:
        return initial * global_step / warmup
    return polynomial_decay(
        initial,
        global_step - warmup,
        PARAMS["num_steps"] - warmup,
        end=PARAMS["end_learning_rate"],
        power=PARAMS["power"],
    )


class ExponentialMovingAverage:
    """Of the variables of the model, those that are not trained as well."""

    def __init__(self, decay, num_updates=None):
        self.decay = decay
        self.num_updates = num_updates

    def apply(self, store):
        decay = self.decay
        if self.num_updates is not None:
            decay = min(decay, (1.0 + self.num_updates) / (10.0 + self.num_updates))
        for name, value in store.variables().items():
            average = getattr(store, shadow(name))
            average.sub_((1.0 - decay) * (average - value))


class MomentumOptimizer(torch.optim.Optimizer):
    def __init__(self, store, momentum, use_nesterov=False):
        self.store = store
        self.trainable = dict(store.named_parameters())
        super().__init__(list(self.trainable.values()), {})
        self.momentum, self.use_nesterov = momentum, use_nesterov
        self.global_step = 0

    def compute_gradients(self):
        """With those of the regulariser of the kernels."""
        gradients = {}
        for name, variable in self.trainable.items():
            gradients[name] = variable.grad
            if name.endswith("weights"):
                gradients[name] = variable.grad + PARAMS["weight_decay"] * variable
        return gradients

    @torch.no_grad()
    def step(self, closure=None):
        gradients = self.compute_gradients()
        self.global_step += 1
        lr = learning_rate(self.global_step)
        for name, variable in self.trainable.items():
            gradient = gradients[name]
            slots = self.state[variable]
            if "momentum" not in slots:
                slots["momentum"] = torch.zeros_like(variable)
            accum = slots["momentum"].mul_(self.momentum).add_(gradient)
            if self.use_nesterov:
                variable.sub_(gradient * lr + accum * self.momentum * lr)
            else:
                variable.sub_(accum * lr)
        ema = ExponentialMovingAverage(PARAMS["moving_average_decay"])
        ema.apply(self.store)


def optimizer(net):
    return MomentumOptimizer(net, PARAMS["momentum"], use_nesterov=True)
