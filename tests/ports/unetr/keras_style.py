"""After Keras: channels last, kernels [depth, height, width, in, out], layers that own them."""

import math
import re
from pathlib import Path

import torch
from torch import nn

image_shape = (12, 16, 20)
patch_size = 4
num_classes = 4
projection_dim = 24
num_heads = 3
transformer_layers = 3
filters = (8, 16)
ignore_class = 255

# -------------------------------------------------------------------------- layers


def weight(*shape):
    return nn.Parameter(torch.zeros(shape))


class Dense(nn.Module):
    def __init__(self, inputs, units):
        super().__init__()
        self.kernel = weight(inputs, units)
        self.bias = weight(units)

    def forward(self, inputs):
        return torch.matmul(inputs, self.kernel) + self.bias


class Conv3D(nn.Module):
    """Strides of 1, padding "same"."""

    def __init__(self, inputs, units, kernel_size, use_bias=True):
        super().__init__()
        self.kernel_size = kernel_size
        self.kernel = weight(*[kernel_size] * 3, inputs, units)
        self.bias = weight(units) if use_bias else None

    def forward(self, inputs):
        side = self.kernel_size // 2
        windows = nn.functional.pad(inputs, (0, 0, *[side] * 6))
        for axis in (1, 2, 3):
            windows = windows.unfold(axis, self.kernel_size, 1)
        outputs = torch.einsum("ndhwixyz,xyzio->ndhwo", windows, self.kernel)
        return outputs if self.bias is None else outputs + self.bias


class Conv3DTranspose(nn.Module):
    """Strides as large as the kernel [depth, height, width, out, in]."""

    def __init__(self, inputs, units, strides):
        super().__init__()
        self.kernel = weight(*[strides] * 3, units, inputs)

    def forward(self, inputs):
        outputs = torch.einsum("ndhwi,xyzoi->ndxhywzo", inputs, self.kernel)
        return outputs.flatten(5, 6).flatten(3, 4).flatten(1, 2)


class LayerNormalization(nn.Module):
    def __init__(self, units, epsilon=1e-3):
        super().__init__()
        self.epsilon = epsilon
        self.gamma, self.beta = weight(units), weight(units)

    def forward(self, inputs):
        mean = torch.mean(inputs, dim=-1, keepdim=True)
        variance = torch.mean(torch.square(inputs - mean), dim=-1, keepdim=True)
        inv = self.gamma * torch.rsqrt(variance + self.epsilon)
        return inputs * inv + (self.beta - mean * inv)


class InstanceNormalization(nn.Module):
    def __init__(self, units, epsilon=1e-3):
        super().__init__()
        self.epsilon = epsilon
        self.gamma, self.beta = weight(units), weight(units)

    def forward(self, inputs):
        axes = (1, 2, 3)
        mean = torch.mean(inputs, dim=axes, keepdim=True)
        variance = torch.mean(torch.square(inputs - mean), dim=axes, keepdim=True)
        normalized = (inputs - mean) / torch.sqrt(variance + self.epsilon)
        return normalized * self.gamma + self.beta


def leaky_relu(x, alpha=0.3):
    return torch.relu(x) - alpha * torch.relu(-x)


def gelu(x, approximate=False):
    if approximate:
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3))
        return 0.5 * x * (1.0 + torch.tanh(inner))
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def softmax(x):
    exps = torch.exp(x - torch.amax(x, dim=-1, keepdim=True).detach())
    return exps / torch.sum(exps, dim=-1, keepdim=True)


# ----------------------------------------------------------------------------- vit


class PatchEncoder(nn.Module):
    """A volume to tokens, depth before height before width."""

    def __init__(self):
        super().__init__()
        self.kernel = weight(*[patch_size] * 3, 2, projection_dim)
        self.bias = weight(projection_dim)
        self.position_embedding = weight(
            *(side // patch_size for side in image_shape), projection_dim
        )

    def forward(self, images):
        patches = images
        for axis in (1, 2, 3):
            patches = patches.unfold(axis, patch_size, patch_size)
        encoded = torch.einsum("ndhwcxyz,xyzce->ndhwe", patches, self.kernel)
        encoded = encoded + self.bias + self.position_embedding
        return torch.flatten(encoded, 1, 3)


class MultiHeadAttention(nn.Module):
    def __init__(self, heads, key_dim, units):
        super().__init__()
        self.key_dim = key_dim
        self.query_kernel = weight(units, heads, key_dim)
        self.key_kernel = weight(units, heads, key_dim)
        self.value_kernel = weight(units, heads, key_dim)
        self.output_kernel = weight(heads, key_dim, units)
        self.output_bias = weight(units)

    def forward(self, inputs):
        query = torch.einsum("abc,cde->abde", inputs, self.query_kernel)
        key = torch.einsum("abc,cde->abde", inputs, self.key_kernel)
        value = torch.einsum("abc,cde->abde", inputs, self.value_kernel)
        query = query * (1.0 / math.sqrt(self.key_dim))
        scores = torch.einsum("aecd,abcd->acbe", key, query)
        scores = softmax(scores)
        outputs = torch.einsum("acbe,aecd->abcd", scores, value)
        outputs = torch.einsum("abcd,cde->abe", outputs, self.output_kernel)
        return outputs + self.output_bias


class LayerScale(nn.Module):
    def __init__(self, units):
        super().__init__()
        self.scale = weight(units)

    def forward(self, inputs):
        return inputs * self.scale


class TransformerBlock(nn.Module):
    def __init__(self, units):
        super().__init__()
        self.norm_attention = LayerNormalization(units, epsilon=1e-6)
        self.attention = MultiHeadAttention(num_heads, units // num_heads, units)
        self.scale_attention = LayerScale(units)
        self.norm_mlp = LayerNormalization(units, epsilon=1e-6)
        self.expand = Dense(units, 2 * units)
        self.contract = Dense(2 * units, units)
        self.scale_mlp = LayerScale(units)

    def forward(self, encoded_patches):
        x1 = self.norm_attention(encoded_patches)
        x2 = encoded_patches + self.scale_attention(self.attention(x1))
        x3 = self.norm_mlp(x2)
        x3 = self.contract(gelu(self.expand(x3)))
        return self.scale_mlp(x3) + x2


# ------------------------------------------------------------------------- decoder


class Upsample(nn.Module):
    def __init__(self, inputs, units):
        super().__init__()
        self.deconv = Conv3DTranspose(inputs, units, strides=2)
        self.norm = InstanceNormalization(units, epsilon=1e-5)

    def forward(self, x):
        return leaky_relu(self.norm(self.deconv(x)), alpha=0.01)


class ResidualBlock(nn.Module):
    def __init__(self, inputs, units):
        super().__init__()
        self.conv_a = Conv3D(inputs, units, 3, use_bias=False)
        self.norm_a = InstanceNormalization(units, epsilon=1e-5)
        self.conv_b = Conv3D(units, units, 3, use_bias=False)
        self.norm_b = InstanceNormalization(units, epsilon=1e-5)
        self.conv_shortcut = Conv3D(inputs, units, 1, use_bias=False)
        self.norm_shortcut = InstanceNormalization(units, epsilon=1e-5)

    def forward(self, x):
        shortcut = self.norm_shortcut(self.conv_shortcut(x))
        x = leaky_relu(self.norm_a(self.conv_a(x)), alpha=0.01)
        x = self.norm_b(self.conv_b(x))
        return leaky_relu(x + shortcut, alpha=0.01)


class UNETR(nn.Module):
    def __init__(self):
        super().__init__()
        fine, coarse = filters
        self.patch_encoder = PatchEncoder()
        self.transformer = nn.Sequential(
            *[TransformerBlock(projection_dim) for _ in range(transformer_layers)]
        )
        self.encoder_norm = LayerNormalization(projection_dim, epsilon=1e-6)
        self.image_skip = ResidualBlock(2, fine)
        self.early_skip = nn.Sequential(
            Upsample(projection_dim, coarse), Upsample(coarse, fine)
        )
        self.middle_skip = Upsample(projection_dim, coarse)
        self.coarse_up = Upsample(projection_dim, coarse)
        self.coarse_block = ResidualBlock(2 * coarse, coarse)
        self.fine_up = Upsample(coarse, fine)
        self.fine_block = ResidualBlock(3 * fine, fine)
        self.coarse_logits = Conv3D(coarse, num_classes, 1)
        self.fine_logits = Conv3D(fine, num_classes, 1)

    def to_grid(self, tokens):
        grid = [side // patch_size for side in image_shape]
        return torch.reshape(tokens, (-1, *grid, projection_dim))

    def forward(self, images):
        encoded = self.patch_encoder(images)
        features = []
        for layer in self.transformer:
            encoded = layer(encoded)
            features.append(self.to_grid(encoded))
        bottleneck = self.to_grid(self.encoder_norm(encoded))

        skip = self.middle_skip(features[1])
        x = torch.cat([self.coarse_up(bottleneck), skip], dim=-1)
        x = self.coarse_block(x)
        coarse_logits = self.coarse_logits(x)

        skips = [self.early_skip(features[0]), self.image_skip(images)]
        x = torch.cat([self.fine_up(x), *skips], dim=-1)
        x = self.fine_block(x)
        return self.fine_logits(x), coarse_logits


# ------------------------------------------------------------------------- weights

LAYERS = {
    "patch_embed.proj": "patch_encoder",
    "norm": "encoder_norm",
    "stem": "image_skip",
    "skip1": "early_skip",
    "skip2": "middle_skip",
    "up2": "coarse_up",
    "dec2": "coarse_block",
    "up1": "fine_up",
    "dec1": "fine_block",
    "head_half": "coarse_logits",
    "head_full": "fine_logits",
}
SUBLAYERS = {
    "norm1": "norm_attention",
    "norm2": "norm_mlp",
    "ls1": "scale_attention",
    "ls2": "scale_mlp",
    "fc1": "expand",
    "fc2": "contract",
}
RESIDUAL = {"1": "a", "2": "b", "3": "shortcut"}


def set_weights(layer, kernel, bias=None):
    if isinstance(layer, LayerNormalization | InstanceNormalization):
        layer.gamma.copy_(kernel)
        layer.beta.copy_(bias)
        return
    if isinstance(layer, Dense):
        kernel = kernel.T
    elif kernel.ndim == 5:
        kernel = kernel.permute(2, 3, 4, 1, 0)
    layer.kernel.copy_(kernel)
    if bias is not None:
        layer.bias.copy_(bias)


def set_attention(layer, qkv, kernel, bias):
    """[3 * heads * key_dim, units] -> three of [units, heads, key_dim]."""
    q, k, v = qkv.reshape(3, num_heads, -1, projection_dim).permute(0, 3, 1, 2)
    layer.query_kernel.copy_(q)
    layer.key_kernel.copy_(k)
    layer.value_kernel.copy_(v)
    layer.output_kernel.copy_(kernel.T.unflatten(0, (num_heads, -1)))
    layer.output_bias.copy_(bias)


def layer_name(torch_name):
    block = re.match(r"blocks\.(\d)\.(\w+)$", torch_name)
    if block:
        return f"transformer.{block[1]}.{SUBLAYERS[block[2]]}"
    for theirs, ours in LAYERS.items():
        if torch_name == theirs or torch_name.startswith(theirs + "."):
            name = ours + torch_name[len(theirs) :]
            break
    else:
        raise KeyError(torch_name)
    name = re.sub(r"\.(conv|norm)(\d)$", lambda m: f".{m[1]}_{RESIDUAL[m[2]]}", name)
    return re.sub(r"\.conv$", ".deconv", name)


@torch.no_grad()
def load_torch_weights(net, state):
    layers = dict(net.named_modules())
    grid = net.patch_encoder.position_embedding.shape
    net.patch_encoder.position_embedding.copy_(
        state["patch_embed.pos_embed"].reshape(grid)
    )
    for i, block in enumerate(net.transformer):
        prefix = f"blocks.{i}.attn."
        set_attention(
            block.attention,
            state[prefix + "qkv.weight"],
            state[prefix + "proj.weight"],
            state[prefix + "proj.bias"],
        )
        block.scale_attention.scale.copy_(state[f"blocks.{i}.ls1.gamma"])
        block.scale_mlp.scale.copy_(state[f"blocks.{i}.ls2.gamma"])
    for key, value in state.items():
        name, _, leaf = key.rpartition(".")
        if leaf == "weight" and ".attn" not in name:
            set_weights(layers[layer_name(name)], value, state.get(name + ".bias"))


def model():
    net = UNETR()
    load_torch_weights(net, torch.load(Path(__file__).with_name("weights.pt")))
    return net


# ---------------------------------------------------------------------------- data


def standardize(images):
    """[batch, depth, height, width, contrasts]; dark voxels outside of bodies stay 0."""
    foreground = torch.any(images > 0, dim=-1, keepdim=True)
    mask = foreground.to(images.dtype)
    voxels = torch.sum(mask, dim=(1, 2, 3), keepdim=True)
    mean = torch.sum(images * mask, dim=(1, 2, 3), keepdim=True) / voxels
    squares = torch.square(images - mean) * mask
    variance = torch.sum(squares, dim=(1, 2, 3), keepdim=True) / voxels
    return torch.where(foreground, (images - mean) * torch.rsqrt(variance), 0.0)


def channels_first(x):
    return torch.permute(x, (0, 4, 1, 2, 3))


def channels_last(x):
    return torch.permute(x, (0, 2, 3, 4, 1))


def forward(net, batch):
    fine, coarse = net(standardize(channels_last(batch["image"])))
    return {"full": channels_first(fine), "half": channels_first(coarse)}


# ---------------------------------------------------------------------------- loss

class_weights = (0.4, 1.2, 0.9, 1.5)
label_smoothing = 0.1
loss_weights = (2.0 / 3.0, 1.0 / 3.0)


def log_softmax(x):
    shifted = x - torch.amax(x, dim=-1, keepdim=True).detach()
    return shifted - torch.log(torch.sum(torch.exp(shifted), dim=-1, keepdim=True))


def sample_labels(labels, shape):
    """Every so many-th voxel."""
    for axis, size in enumerate(shape, start=1):
        every = labels.shape[axis] // size
        labels = torch.index_select(labels, axis, torch.arange(size) * every)
    return labels


def categorical_crossentropy(y_true, logits, mask):
    class_weight = torch.tensor(class_weights)
    smooth = y_true * (1.0 - label_smoothing) + label_smoothing / num_classes
    losses = -torch.sum(smooth * log_softmax(logits) * class_weight, dim=-1)
    sample_weight = torch.sum(y_true * class_weight, dim=-1)
    return torch.sum(losses * mask) / torch.sum(sample_weight * mask)


def dice(y_true, logits, mask, smooth=1.0):
    y_true = (y_true * mask[..., None])[..., 1:]
    y_pred = (softmax(logits) * mask[..., None])[..., 1:]
    axes = (0, 1, 2, 3)
    intersection = torch.sum(y_true * y_pred, dim=axes)
    union = torch.sum(y_true, dim=axes) + torch.sum(y_pred, dim=axes)
    return 1.0 - torch.mean((2.0 * intersection + smooth) / (union + smooth))


def loss(output, batch):
    total = 0.0
    for name, loss_weight in zip(("full", "half"), loss_weights):
        logits = channels_last(output[name])
        labels = sample_labels(batch["label"].to(torch.int64), logits.shape[1:4])
        mask = torch.ne(labels, ignore_class).to(logits.dtype)
        y_true = (labels[..., None] == torch.arange(num_classes)).to(logits.dtype)
        value = categorical_crossentropy(y_true, logits, mask)
        value = value + dice(y_true, logits, mask)
        total = total + loss_weight * value
    return total


# ----------------------------------------------------------------------- optimizer


class PolynomialDecay:
    def __init__(self, initial_learning_rate, decay_steps, power):
        self.initial_learning_rate = initial_learning_rate
        self.decay_steps, self.power = decay_steps, power

    def __call__(self, step):
        remaining = 1.0 - min(step, self.decay_steps) / self.decay_steps
        return self.initial_learning_rate * remaining**self.power


class AdamW(torch.optim.Optimizer):
    def __init__(
        self,
        variables,
        learning_rate,
        weight_decay=0.004,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-7,
        global_clipnorm=None,
    ):
        variables = list(variables)
        super().__init__([variable for _, variable in variables], {})
        self.names = [name for name, _ in variables]
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.global_clipnorm = global_clipnorm
        self.excluded = []
        self.iterations = 0

    def exclude_from_weight_decay(self, var_names):
        self.excluded = [re.compile(name) for name in var_names]

    def clipped(self, gradients):
        norm = torch.sqrt(sum(torch.sum(torch.square(g)) for g in gradients))
        factor = self.global_clipnorm / max(float(norm), self.global_clipnorm)
        return [gradient * factor for gradient in gradients]

    @torch.no_grad()
    def step(self, closure=None):
        variables = self.param_groups[0]["params"]
        gradients = self.clipped([variable.grad for variable in variables])
        lr = self.learning_rate(self.iterations)
        self.iterations += 1
        beta_1_power = self.beta_1**self.iterations
        beta_2_power = self.beta_2**self.iterations
        for name, variable, gradient in zip(self.names, variables, gradients):
            if not any(pattern.search(name) for pattern in self.excluded):
                variable.sub_(variable * self.weight_decay * lr)
            slots = self.state[variable]
            if not slots:
                slots["m"] = torch.zeros_like(variable)
                slots["v"] = torch.zeros_like(variable)
            m, v = slots["m"], slots["v"]
            m.add_((gradient - m) * (1.0 - self.beta_1))
            v.add_((torch.square(gradient) - v) * (1.0 - self.beta_2))
            m_hat, v_hat = m / (1.0 - beta_1_power), v / (1.0 - beta_2_power)
            variable.sub_(lr * m_hat / (torch.sqrt(v_hat) + self.epsilon))


def optimizer(net):
    adamw = AdamW(
        net.named_parameters(),
        PolynomialDecay(4e-3, decay_steps=10, power=0.9),
        weight_decay=0.2,
        beta_2=0.98,
        epsilon=1e-6,
        global_clipnorm=0.5,
    )
    adamw.exclude_from_weight_decay(["gamma$", "beta$", "position_embedding$"])
    return adamw
