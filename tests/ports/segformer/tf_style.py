"""After TensorFlow and Keras: channels last, kernels HWIO, masked losses over one-hot labels.

Weights are found by rules for names and axes, as between the two kinds of a library's models.
"""

import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

config: dict[str, Any] = {
    "image_size": (60, 76),
    "hidden_sizes": (16, 32, 64),
    "num_attention_heads": (2, 2, 4),
    "depths": (2, 2, 1),
    "mlp_ratios": (4, 4, 3),
    "sr_ratios": (4, 2, 1),
    "patch_sizes": (7, 3, 3),
    "strides": (4, 2, 2),
    "decoder_hidden_size": 32,
    "num_labels": 6,
    "semantic_loss_ignore_index": 255,
    "layer_norm_eps": 1e-6,
}


# ------------------------------------------------------------------------- layers


def variable(*shape):
    return nn.Parameter(torch.zeros(shape))


class Dense(nn.Module):
    def __init__(self, inputs, units, use_bias=True):
        super().__init__()
        self.kernel = variable(inputs, units)
        self.bias = variable(units) if use_bias else None

    def forward(self, inputs):
        outputs = torch.tensordot(inputs, self.kernel, dims=1)
        return outputs if self.bias is None else outputs + self.bias


class Conv2D(nn.Module):
    """NHWC and HWIO, without padding."""

    def __init__(self, inputs, filters, kernel_size, strides=1, use_bias=True):
        super().__init__()
        self.strides = strides
        self.kernel = variable(kernel_size, kernel_size, inputs, filters)
        self.bias = variable(filters) if use_bias else None

    def forward(self, inputs):
        nchw = torch.permute(inputs, (0, 3, 1, 2))
        oihw = torch.permute(self.kernel, (3, 2, 0, 1))
        outputs = nn.functional.conv2d(nchw, oihw, stride=self.strides)
        outputs = torch.permute(outputs, (0, 2, 3, 1))
        return outputs if self.bias is None else outputs + self.bias


class DepthwiseConv2D(nn.Module):
    """A kernel of [height, width, channels, 1]; zeros around keep the size."""

    def __init__(self, channels, kernel_size):
        super().__init__()
        self.depthwise_kernel = variable(kernel_size, kernel_size, channels, 1)
        self.bias = variable(channels)

    def forward(self, inputs):
        size = self.depthwise_kernel.shape[0]
        height, width = inputs.shape[1:3]
        padded = pad_same(inputs, size // 2)
        outputs = torch.zeros_like(inputs)
        for row in range(size):
            for col in range(size):
                window = padded[:, row : row + height, col : col + width]
                outputs = outputs + window * self.depthwise_kernel[row, col, :, 0]
        return outputs + self.bias


class LayerNormalization(nn.Module):
    def __init__(self, units, epsilon=1e-5, center=True):
        super().__init__()
        self.epsilon = epsilon
        self.gamma = variable(units)
        self.beta = variable(units) if center else None

    def forward(self, inputs):
        mean = torch.mean(inputs, dim=-1, keepdim=True)
        variance = torch.mean(torch.square(inputs - mean), dim=-1, keepdim=True)
        scale = torch.rsqrt(variance + self.epsilon) * self.gamma
        outputs = inputs * scale - mean * scale
        return outputs if self.beta is None else outputs + self.beta


class BatchNormalization(nn.Module):
    def __init__(self, units, momentum=0.9, epsilon=1e-5):
        super().__init__()
        self.momentum, self.epsilon = momentum, epsilon
        self.gamma, self.beta = variable(units), variable(units)
        self.register_buffer("moving_mean", torch.zeros(units))
        self.register_buffer("moving_variance", torch.ones(units))

    @torch.no_grad()
    def assign_moving_average(self, moving, value):
        moving.sub_((moving - value) * (1.0 - self.momentum))

    def forward(self, inputs):
        mean, variance = self.moving_mean, self.moving_variance
        if self.training:
            mean = torch.mean(inputs, dim=(0, 1, 2))
            variance = torch.mean(torch.square(inputs - mean), dim=(0, 1, 2))
            count = inputs.numel() // inputs.shape[-1]
            # The fused kernel keeps the variance of a sample.
            unbiased = variance * (count / (count - 1))
            self.assign_moving_average(self.moving_mean, mean)
            self.assign_moving_average(self.moving_variance, unbiased)
        inv = torch.rsqrt(variance + self.epsilon) * self.gamma
        return inputs * inv + (self.beta - mean * inv)


def pad_same(inputs, pad):
    """As much before as behind, also where SAME has less before."""
    return nn.functional.pad(inputs, (0, 0, pad, pad, pad, pad))


def gelu(features):
    return 0.5 * features * (1.0 + torch.erf(features / math.sqrt(2.0)))


def softmax(logits, axis):
    shifted = logits - torch.amax(logits, dim=axis, keepdim=True)
    exps = torch.exp(shifted)
    return exps / torch.sum(exps, dim=axis, keepdim=True)


def interpolation_weights(out_size, in_size):
    """Neighbours of each place of the output and the share of the upper one."""
    scale = in_size / out_size
    source = (torch.arange(out_size) + 0.5) * scale - 0.5
    floor = torch.floor(source)
    lower = torch.clamp(floor, min=0).long()
    upper = torch.clamp(floor + 1, max=in_size - 1).long()
    return lower, upper, source - floor


def resize_bilinear(images, size):
    """Centres of pixels are at halves."""
    top, bottom, y_lerp = interpolation_weights(size[0], images.shape[1])
    left, right, x_lerp = interpolation_weights(size[1], images.shape[2])
    x_lerp, y_lerp = x_lerp[:, None], y_lerp[:, None, None]
    upper = torch.index_select(images, 1, top)
    lower = torch.index_select(images, 1, bottom)
    rows = upper + (lower - upper) * y_lerp
    first = torch.index_select(rows, 2, left)
    second = torch.index_select(rows, 2, right)
    return first + (second - first) * x_lerp


# -------------------------------------------------------------------------- model


class TFSegformerOverlapPatchEmbeddings(nn.Module):
    def __init__(self, patch_size, strides, channels, hidden_size):
        super().__init__()
        self.pad = patch_size // 2
        self.proj = Conv2D(channels, hidden_size, patch_size, strides)
        self.layer_norm = LayerNormalization(hidden_size)

    def forward(self, pixel_values):
        embeddings = self.proj(pad_same(pixel_values, self.pad))
        return self.layer_norm(embeddings)


class TFSegformerAttention(nn.Module):
    def __init__(self, hidden_size, num_heads, sr_ratio):
        super().__init__()
        self.num_heads, self.sr_ratio = num_heads, sr_ratio
        self.head_size = hidden_size // num_heads
        self.query = Dense(hidden_size, hidden_size)
        self.key_value = Dense(hidden_size, 2 * hidden_size, use_bias=False)
        self.out = Dense(hidden_size, hidden_size)
        if sr_ratio > 1:
            self.sr = Conv2D(hidden_size, hidden_size, sr_ratio, sr_ratio)
            self.layer_norm = LayerNormalization(hidden_size)

    def split_heads(self, tensor):
        """[batch, height, width, units] -> [batch, heads, tokens, head_size]."""
        shape = (tensor.shape[0], -1, self.num_heads, self.head_size)
        return torch.permute(torch.reshape(tensor, shape), (0, 2, 1, 3))

    def forward(self, hidden_states):
        query = self.split_heads(self.query(hidden_states))
        reduced = hidden_states
        if self.sr_ratio > 1:
            reduced = self.layer_norm(self.sr(hidden_states))
        key, value = torch.chunk(self.key_value(reduced), 2, dim=-1)
        key, value = self.split_heads(key), self.split_heads(value)
        scores = torch.matmul(query, torch.transpose(key, 2, 3))
        scores = scores / math.sqrt(self.head_size)
        context = torch.matmul(softmax(scores, axis=-1), value)
        context = torch.permute(context, (0, 2, 1, 3))
        return self.out(torch.reshape(context, hidden_states.shape))


class TFSegformerMixFFN(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.dense1 = Dense(hidden_size, intermediate_size)
        self.dwconv = DepthwiseConv2D(intermediate_size, 3)
        self.dense2 = Dense(intermediate_size, hidden_size)

    def forward(self, hidden_states):
        hidden_states = self.dense1(hidden_states)
        hidden_states = gelu(self.dwconv(hidden_states))
        return self.dense2(hidden_states)


class TFSegformerLayer(nn.Module):
    def __init__(self, stage):
        super().__init__()
        units, eps = config["hidden_sizes"][stage], config["layer_norm_eps"]
        self.layer_norm_1 = LayerNormalization(units, eps)
        self.attention = TFSegformerAttention(
            units, config["num_attention_heads"][stage], config["sr_ratios"][stage]
        )
        self.layer_norm_2 = LayerNormalization(units, eps)
        self.mlp = TFSegformerMixFFN(units, units * config["mlp_ratios"][stage])

    def forward(self, hidden_states):
        attention_output = self.attention(self.layer_norm_1(hidden_states))
        hidden_states = hidden_states + attention_output
        mlp_output = self.mlp(self.layer_norm_2(hidden_states))
        return hidden_states + mlp_output


class TFSegformerEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        sizes, eps = config["hidden_sizes"], config["layer_norm_eps"]
        stages = range(len(sizes))
        self.patch_embeddings = nn.ModuleList(
            TFSegformerOverlapPatchEmbeddings(
                config["patch_sizes"][i],
                config["strides"][i],
                sizes[i - 1] if i else 3,
                sizes[i],
            )
            for i in stages
        )
        self.block = nn.ModuleList(
            nn.Sequential(*(TFSegformerLayer(i) for _ in range(config["depths"][i])))
            for i in stages
        )
        self.layer_norm = nn.ModuleList(
            LayerNormalization(sizes[i], eps, center=i < stages[-1]) for i in stages
        )

    def forward(self, pixel_values):
        all_hidden_states = []
        hidden_states = pixel_values
        for embed, block, norm in zip(
            self.patch_embeddings, self.block, self.layer_norm
        ):
            hidden_states = embed(hidden_states)
            hidden_states = norm(block(hidden_states))
            all_hidden_states.append(hidden_states)
        return all_hidden_states


class TFSegformerDecodeHead(nn.Module):
    def __init__(self):
        super().__init__()
        units, sizes = config["decoder_hidden_size"], config["hidden_sizes"]
        self.mlps = nn.ModuleList(Dense(size, units, use_bias=False) for size in sizes)
        self.linear_fuse = Conv2D(len(sizes) * units, units, 1, use_bias=False)
        self.batch_norm = BatchNormalization(units)
        self.classifier = Conv2D(units, config["num_labels"], 1)

    def forward(self, encoder_hidden_states):
        target_size = encoder_hidden_states[0].shape[1:3]
        all_hidden_states = []
        for state, mlp in zip(encoder_hidden_states, self.mlps):
            all_hidden_states.append(resize_bilinear(mlp(state), target_size))
        hidden_states = torch.cat(all_hidden_states[::-1], dim=-1)
        hidden_states = self.batch_norm(self.linear_fuse(hidden_states))
        return self.classifier(torch.relu(hidden_states))


class TFSegformerForSemanticSegmentation(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = TFSegformerEncoder()
        self.decode_head = TFSegformerDecodeHead()

    def forward(self, pixel_values):
        return self.decode_head(self.encoder(pixel_values))


# ------------------------------------------------------------------------ weights

RENAMED = (
    (r"^encoder\.patch_embeddings\.(\d)\.", r"backbone.stages.\1.patch_embed."),
    (r"^encoder\.block\.(\d)\.(\d)\.", r"backbone.stages.\1.blocks.\2."),
    (r"^encoder\.layer_norm\.(\d)\.", r"backbone.stages.\1.norm."),
    (r"\.layer_norm_(\d)\.", r".norm\1."),
    (r"\.layer_norm\.", ".norm."),
    (r"\.attention\.", ".attn."),
    (r"\.query\.", ".q."),
    (r"\.key_value\.", ".kv."),
    (r"\.out\.", ".proj."),
    (r"\.dense(\d)\.", r".fc\1."),
    (r"\.mlps\.", ".linear_c."),
    (r"\.batch_norm\.", ".bn."),
    (r"\.classifier\.", ".linear_pred."),
    (r"\.(kernel|depthwise_kernel|gamma)$", ".weight"),
    (r"\.beta$", ".bias"),
    (r"\.moving_mean$", ".running_mean"),
    (r"\.moving_variance$", ".running_var"),
)


def pt_name(name):
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def transposed(name, array):
    if name.endswith("depthwise_kernel"):
        return torch.permute(array, (2, 3, 0, 1))
    if array.ndim == 4:
        return torch.permute(array, (2, 3, 1, 0))
    return array.T if array.ndim == 2 else array


def load_pytorch_weights_in_tf2_model(tf_model, pt_state_dict):
    weights = [*tf_model.named_parameters(), *tf_model.named_buffers()]
    with torch.no_grad():
        for name, symbolic_weight in weights:
            array = pt_state_dict[pt_name(name)]
            symbolic_weight.copy_(transposed(name, array))


def model():
    net = TFSegformerForSemanticSegmentation()
    state = torch.load(Path(__file__).with_name("weights.pt"))
    load_pytorch_weights_in_tf2_model(net, state)
    return net


# --------------------------------------------------------------------------- data

IMAGE_MEAN = (123.675, 116.28, 103.53)
IMAGE_STD = (58.395, 57.12, 57.375)


def pad_to_bounding_box(image, value):
    """[height, width, channels]; the picture is at the upper left."""
    height, width = config["image_size"]
    below, right = height - image.shape[0], width - image.shape[1]
    return nn.functional.pad(image, (0, 0, 0, right, 0, below), value=value)


def parse_image(image, flip):
    image = image[..., [2, 1, 0]].to(torch.float32)
    image = (image - torch.tensor(IMAGE_MEAN)) / torch.tensor(IMAGE_STD)
    if flip:
        image = torch.flip(image, (1,))
    return pad_to_bounding_box(image, 0.0)


def parse_mask(label, flip):
    """Without a name: 0 -> ignored; the others move down by one."""
    ignore_index = config["semantic_loss_ignore_index"]
    mask = label.to(torch.int32)[..., None]
    mask = torch.where(mask == 0, ignore_index, mask - 1)
    if flip:
        mask = torch.flip(mask, (1,))
    return pad_to_bounding_box(mask, ignore_index)


def map_batch(function, *columns):
    return torch.stack([function(*row) for row in zip(*columns)])


def forward(net, batch):
    pixel_values = map_batch(parse_image, batch["image"], batch["flip"])
    logits = net(pixel_values)
    return torch.permute(logits, (0, 3, 1, 2))


# --------------------------------------------------------------------------- loss

CLASS_WEIGHT = (0.5, 1.2, 0.9, 1.6, 0.8, 1.3)
LABEL_SMOOTHING = 0.1
DICE_LOSS_WEIGHT = 0.7


def resize_nearest(masks, size):
    rows = torch.arange(size[0]) * masks.shape[1] // size[0]
    cols = torch.arange(size[1]) * masks.shape[2] // size[1]
    return torch.index_select(torch.index_select(masks, 1, rows), 2, cols)


def categorical_crossentropy(y_true, logits, mask):
    """Mean over the weights of the labels that count."""
    class_weight = torch.tensor(CLASS_WEIGHT)
    num_labels = logits.shape[-1]
    log_probs = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
    smooth = y_true * (1.0 - LABEL_SMOOTHING) + LABEL_SMOOTHING / num_labels
    unmasked_loss = -torch.sum(smooth * class_weight * log_probs, dim=-1)
    sample_weight = torch.sum(y_true * class_weight, dim=-1) * mask
    return torch.sum(unmasked_loss * mask) / torch.sum(sample_weight)


def dice_loss(y_true, logits, mask):
    y_pred = softmax(logits, axis=-1) * mask[..., None]
    y_true = y_true * mask[..., None]
    intersection = torch.sum(y_true * y_pred, dim=(1, 2))
    union = torch.sum(torch.square(y_true), dim=(1, 2))
    union = union + torch.sum(torch.square(y_pred), dim=(1, 2))
    dice = (2.0 * intersection + 1.0) / (union + 1.0)
    return 1.0 - torch.mean(dice)


def loss(output, batch):
    logits = torch.permute(output, (0, 2, 3, 1))
    masks = map_batch(parse_mask, batch["label"], batch["flip"])
    labels = resize_nearest(masks, logits.shape[1:3])[..., 0]
    mask = (labels != config["semantic_loss_ignore_index"]).float()
    classes = torch.arange(config["num_labels"])
    y_true = (labels[..., None] == classes).float()
    crossentropy = categorical_crossentropy(y_true, logits, mask)
    return crossentropy + DICE_LOSS_WEIGHT * dice_loss(y_true, logits, mask)


# ---------------------------------------------------------------------- optimizer


class WarmUpPolynomialDecay:
    def __init__(self, initial_learning_rate, warmup_steps, decay_steps, power):
        self.initial_learning_rate = initial_learning_rate
        self.warmup_steps, self.decay_steps = warmup_steps, decay_steps
        self.power = power
        self.warmup_ratio = 0.3

    def __call__(self, step):
        if step < self.warmup_steps:
            progress = step / self.warmup_steps
            ratio = self.warmup_ratio + (1.0 - self.warmup_ratio) * progress
            return self.initial_learning_rate * ratio
        step = min(step - self.warmup_steps, self.decay_steps)
        return (
            self.initial_learning_rate * (1.0 - step / self.decay_steps) ** self.power
        )


class AdamW(torch.optim.Optimizer):
    """Bias corrections are in the rate; epsilon goes along with them."""

    def __init__(self, named_variables, learning_rate, weight_decay):
        named_variables = list(named_variables)
        super().__init__([v for _, v in named_variables], {})
        self.names = [name for name, _ in named_variables]
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.beta_1, self.beta_2, self.epsilon = 0.9, 0.999, 1e-8
        self.excluded, self.multipliers = (), {}
        self.iterations = 0

    def exclude_from_weight_decay(self, var_names):
        self.excluded = tuple(var_names)

    def set_lr_multiplier(self, prefix, multiplier):
        self.multipliers[prefix] = multiplier

    def use_weight_decay(self, name):
        return not any(re.search(pattern, name) for pattern in self.excluded)

    def variable_rate(self, name):
        rate = self.learning_rate(self.iterations)
        for prefix, multiplier in self.multipliers.items():
            if name.startswith(prefix):
                rate = rate * multiplier
        return rate

    @torch.no_grad()
    def step(self, closure=None):
        local_step = self.iterations + 1
        correction = math.sqrt(1.0 - self.beta_2**local_step)
        for name, var in zip(self.names, self.param_groups[0]["params"]):
            lr = self.variable_rate(name)
            if self.use_weight_decay(name):
                var.sub_(var * self.weight_decay * lr)
            slots = self.state[var]
            if not slots:
                slots["m"], slots["v"] = torch.zeros_like(var), torch.zeros_like(var)
            m, v, gradient = slots["m"], slots["v"], var.grad
            m.add_((gradient - m) * (1.0 - self.beta_1))
            v.add_((torch.square(gradient) - v) * (1.0 - self.beta_2))
            alpha = lr * correction / (1.0 - self.beta_1**local_step)
            var.sub_(alpha * m / (torch.sqrt(v) + self.epsilon * correction))
        self.iterations += 1


def optimizer(net):
    schedule = WarmUpPolynomialDecay(2e-3, warmup_steps=2, decay_steps=10, power=0.9)
    adamw = AdamW(net.named_parameters(), schedule, weight_decay=0.1)
    adamw.exclude_from_weight_decay(["gamma$", "beta$", "bias$"])
    adamw.set_lr_multiplier("decode_head", 10.0)
    return adamw
