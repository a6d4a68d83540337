"""After the TensorFlow Model Garden: channels last, Keras layers, one-hot assignments.

Shapes are static: every query has a mask to learn, and those that match nothing weigh zero.
"""

import math
import re
from pathlib import Path

import torch
from torch import nn

hidden_size = 28
num_attention_heads = 4
intermediate_size = 44
num_layers = 4
num_levels = 3
num_queries = 9
num_classes = 5
fpn_feat_dims = 20
mask_dims = 18
backbone_filters = (16, 20, 26, 34)
norm_momentum = 0.9
norm_epsilon = 1e-5

# ------------------------------------------------------------------------- layers


def variable(*shape):
    return nn.Parameter(torch.zeros(shape))


def moments(x, axes):
    mean = torch.mean(x, dim=axes, keepdim=True)
    variance = torch.mean(torch.square(x - mean), dim=axes, keepdim=True)
    return mean, variance


def batch_normalization(x, mean, variance, offset, scale):
    inv = torch.rsqrt(variance + norm_epsilon) * scale
    return x * inv + (offset - mean * inv)


def pad_images(inputs, pads, value=0.0):
    return nn.functional.pad(inputs, (0, 0, *pads, *pads), value=value)


class Dense(nn.Module):
    def __init__(self, inputs, units):
        super().__init__()
        self.kernel, self.bias = variable(inputs, units), variable(units)

    def forward(self, inputs):
        return torch.tensordot(inputs, self.kernel, dims=1) + self.bias


class Conv2D(nn.Module):
    """Kernel: [height, width, in, out]; padding does not depend on the size."""

    def __init__(self, inputs, filters, kernel_size, strides=1, use_bias=False):
        super().__init__()
        self.kernel_size, self.strides = kernel_size, strides
        self.kernel = variable(kernel_size, kernel_size, inputs, filters)
        self.bias = variable(filters) if use_bias else None

    def forward(self, inputs):
        pad_total = self.kernel_size - 1
        pad_beg = pad_total // 2
        patches = pad_images(inputs, (pad_beg, pad_total - pad_beg))
        for axis in (1, 2):
            patches = patches.unfold(axis, self.kernel_size, self.strides)
        outputs = torch.einsum("bhwcij,ijcf->bhwf", patches, self.kernel)
        return outputs if self.bias is None else outputs + self.bias


class BatchNormalization(nn.Module):
    """Fused: what is kept of the variance is unbiased."""

    def __init__(self, units):
        super().__init__()
        self.gamma, self.beta = variable(units), variable(units)
        self.register_buffer("moving_mean", torch.zeros(units))
        self.register_buffer("moving_variance", torch.ones(units))

    @torch.no_grad()
    def assign_moving_average(self, moving, value):
        moving.sub_((moving - value.flatten()) * (1.0 - norm_momentum))

    def forward(self, inputs):
        mean, variance = self.moving_mean, self.moving_variance
        if self.training:
            mean, variance = moments(inputs, (0, 1, 2))
            count = inputs.numel() // inputs.shape[-1]
            self.assign_moving_average(self.moving_mean, mean)
            unbiased = variance * count / (count - 1)
            self.assign_moving_average(self.moving_variance, unbiased)
        return batch_normalization(inputs, mean, variance, self.beta, self.gamma)


class GroupNormalization(nn.Module):
    def __init__(self, groups, units):
        super().__init__()
        self.groups = groups
        self.gamma, self.beta = variable(units), variable(units)

    def forward(self, inputs):
        grouped = inputs.unflatten(-1, (self.groups, -1))
        mean, variance = moments(grouped, (1, 2, 4))
        gamma = self.gamma.reshape(self.groups, -1)
        beta = self.beta.reshape(self.groups, -1)
        outputs = batch_normalization(grouped, mean, variance, beta, gamma)
        return outputs.flatten(-2)


class LayerNormalization(nn.Module):
    def __init__(self, units):
        super().__init__()
        self.gamma, self.beta = variable(units), variable(units)

    def forward(self, inputs):
        mean, variance = moments(inputs, -1)
        return batch_normalization(inputs, mean, variance, self.beta, self.gamma)


def max_pool2d(inputs):
    """3x3 with strides of 2; minus infinity around the images."""
    padded = pad_images(inputs, (1, 1), -math.inf)
    pooled = nn.functional.max_pool2d(padded.permute(0, 3, 1, 2), 3, 2)
    return pooled.permute(0, 2, 3, 1)


def avg_pool2d_same(inputs):
    """2x2 with strides of 2; padding "same" does not count."""
    counts = torch.ones_like(inputs[:1, :, :, :1])
    sums = []
    for x in (inputs, counts):
        pads = (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2)
        x = nn.functional.pad(x, pads)
        x = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
        sums.append(torch.sum(x, dim=(2, 4)))
    return sums[0] / sums[1]


# ------------------------------------------------------------------------- resize


def resize_nearest(images, height, width):
    rows = torch.arange(height) * images.shape[1] // height
    columns = torch.arange(width) * images.shape[2] // width
    return images[:, rows][:, :, columns]


def bilinear_matrix(in_size, out_size):
    """[out, in]; pixels have half their size on each side of their centers."""
    centers = (torch.arange(out_size) + 0.5) * (in_size / out_size) - 0.5
    centers = torch.clamp(centers, 0.0, in_size - 1.0)
    distance = torch.abs(centers[:, None] - torch.arange(in_size))
    return torch.relu(1.0 - distance)


def resize_bilinear(images, height, width):
    rows = bilinear_matrix(images.shape[1], height)
    columns = bilinear_matrix(images.shape[2], width)
    return torch.einsum("yh,xw,bhwq->byxq", rows, columns, images)


# ----------------------------------------------------------------------- backbone


class ConvBN(nn.Module):
    def __init__(self, inputs, filters, kernel_size, strides=1):
        super().__init__()
        self.conv = Conv2D(inputs, filters, kernel_size, strides)
        self.bn = BatchNormalization(filters)

    def forward(self, inputs):
        return self.bn(self.conv(inputs))


class ResidualBlock(nn.Module):
    def __init__(self, inputs, filters, strides):
        super().__init__()
        self.strides = strides
        self.a = ConvBN(inputs, filters, 3, strides)
        self.b = ConvBN(filters, filters, 3)
        self.shortcut = ConvBN(inputs, filters, 1)

    def forward(self, inputs):
        shortcut = inputs if self.strides == 1 else avg_pool2d_same(inputs)
        shortcut = self.shortcut(shortcut)
        x = torch.relu(self.a(inputs))
        x = self.b(x)
        return torch.relu(x + shortcut)


class ResNet(nn.Module):
    """Endpoints by the power of two by which they are smaller."""

    def __init__(self):
        super().__init__()
        self.stem = ConvBN(3, 12, 3, strides=2)
        inputs, self.block_groups = 12, nn.ModuleDict()
        for level, filters in enumerate(backbone_filters, start=2):
            strides = 1 if level == 2 else 2
            self.block_groups[str(level)] = ResidualBlock(inputs, filters, strides)
            inputs = filters

    def forward(self, inputs):
        x = max_pool2d(torch.relu(self.stem(inputs)))
        endpoints = {}
        for level, block_group in self.block_groups.items():
            x = block_group(x)
            endpoints[level] = x
        return endpoints


# ------------------------------------------------------------------ pixel decoder


class ConvGN(nn.Module):
    def __init__(self, inputs, kernel_size):
        super().__init__()
        self.conv = Conv2D(inputs, fpn_feat_dims, kernel_size)
        self.group_norm = GroupNormalization(5, fpn_feat_dims)

    def forward(self, inputs):
        return self.group_norm(self.conv(inputs))


class TransformerFPN(nn.Module):
    def __init__(self):
        super().__init__()
        self.lateral = nn.ModuleDict()
        self.conv = nn.ModuleDict()
        for level, filters in zip("234", backbone_filters):
            self.lateral[level] = ConvGN(filters, 1)
            self.conv[level] = ConvGN(fpn_feat_dims, 3)
        self.conv["5"] = ConvGN(backbone_filters[-1], 3)
        self.mask_conv = Conv2D(fpn_feat_dims, mask_dims, 3, use_bias=True)

    def forward(self, multilevel_features):
        features = {"5": torch.relu(self.conv["5"](multilevel_features["5"]))}
        for level in "432":
            lateral = self.lateral[level](multilevel_features[level])
            above = features[str(int(level) + 1)]
            fused = lateral + resize_nearest(above, *lateral.shape[1:3])
            features[level] = torch.relu(self.conv[level](fused))
        mask_features = self.mask_conv(features.pop("2"))
        return features, mask_features


# -------------------------------------------------------------------- transformer


def position_embedding_sine(attention_mask, num_pos_features, temperature=10000.0):
    """attention_mask [batch, height, width] -> [batch, height * width, 2 * features]."""
    eps, scale = 1e-6, 2.0 * math.pi
    y_embedding = torch.cumsum(attention_mask, dim=1)
    x_embedding = torch.cumsum(attention_mask, dim=2)
    y_embedding = y_embedding / (y_embedding[:, -1:, :] + eps) * scale
    x_embedding = x_embedding / (x_embedding[:, :, -1:] + eps) * scale
    dim_t = torch.arange(num_pos_features) // 2 * 2 / num_pos_features
    dim_t = torch.pow(torch.tensor(temperature), dim_t)
    embeddings = []
    for embedding in (y_embedding, x_embedding):
        pos = embedding[..., None] / dim_t
        pairs = [torch.sin(pos[..., 0::2]), torch.cos(pos[..., 1::2])]
        embeddings.append(torch.stack(pairs, dim=4).flatten(3))
    return torch.cat(embeddings, dim=-1).flatten(1, 2)


class MultiHeadAttention(nn.Module):
    """Kernels have the heads as an axis: [units, heads, size], [heads, size, units]."""

    def __init__(self):
        super().__init__()
        size_per_head = hidden_size // num_attention_heads
        shape = (hidden_size, num_attention_heads, size_per_head)
        self.query_kernel = variable(*shape)
        self.key_kernel = variable(*shape)
        self.value_kernel = variable(*shape)
        self.output_kernel = variable(*shape[1:], shape[0])
        self.output_bias = variable(hidden_size)

    def forward(self, query, value, key, attention_mask=None):
        query = torch.einsum("BFE,ENH->BFNH", query, self.query_kernel)
        key = torch.einsum("BTE,ENH->BTNH", key, self.key_kernel)
        value = torch.einsum("BTE,ENH->BTNH", value, self.value_kernel)
        scores = torch.einsum("BTNH,BFNH->BNFT", key, query)
        scores = scores * (1.0 / math.sqrt(query.shape[-1]))
        if attention_mask is not None:
            adder = (1.0 - attention_mask[:, None]) * -1e9
            scores = scores + adder
        probs = torch.exp(scores - torch.logsumexp(scores, dim=-1, keepdim=True))
        outputs = torch.einsum("BNFT,BTNH->BFNH", probs, value)
        outputs = torch.einsum("BFNH,NHE->BFE", outputs, self.output_kernel)
        return outputs + self.output_bias


class TransformerDecoderBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.encdec_attention = MultiHeadAttention()
        self.encdec_attention_norm = LayerNormalization(hidden_size)
        self.self_attention = MultiHeadAttention()
        self.self_attention_norm = LayerNormalization(hidden_size)
        self.intermediate = Dense(hidden_size, intermediate_size)
        self.output = Dense(intermediate_size, hidden_size)
        self.output_norm = LayerNormalization(hidden_size)

    def forward(self, inputs, memory, input_pos_embed, memory_pos_embed, mask):
        attention = self.encdec_attention(
            query=inputs + input_pos_embed,
            value=memory,
            key=memory + memory_pos_embed,
            attention_mask=mask,
        )
        x = self.encdec_attention_norm(inputs + attention)
        with_pos = x + input_pos_embed
        attention = self.self_attention(query=with_pos, value=x, key=with_pos)
        x = self.self_attention_norm(x + attention)
        intermediate = torch.relu(self.intermediate(x))
        return self.output_norm(x + self.output(intermediate))


class MLPHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.class_dense = Dense(hidden_size, num_classes + 1)
        units = (hidden_size, 32, 24, mask_dims)
        self.mlp = nn.ModuleList([Dense(i, o) for i, o in zip(units, units[1:])])

    def class_logits(self, features):
        return self.class_dense(features)

    def mask_logits(self, features, mask_features):
        """[batch, height, width, queries]."""
        x = features
        for dense in self.mlp[:-1]:
            x = torch.relu(dense(x))
        return torch.einsum("bhwc,bqc->bhwq", mask_features, self.mlp[-1](x))


class MaskFormerTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_proj = nn.ModuleDict()
        for level in "543":
            self.input_proj[level] = Conv2D(
                fpn_feat_dims, hidden_size, 1, use_bias=True
            )
        self.level_embedding = variable(num_levels, hidden_size)
        self.query_features = variable(num_queries, hidden_size)
        self.query_embedding = variable(num_queries, hidden_size)
        self.decoder = nn.ModuleList(
            [TransformerDecoderBlock() for _ in range(num_layers)]
        )
        self.output_norm = LayerNormalization(hidden_size)
        self.head = MLPHead()

    def memory(self, features, level):
        """What is attended to, its positions and its height and width."""
        batch, height, width, _ = features.shape
        pos_embed = position_embedding_sine(
            torch.ones(batch, height, width), hidden_size // 2
        )
        inputs = torch.reshape(features, (batch, height * width, hidden_size))
        return inputs + self.level_embedding[level], pos_embed, (height, width)

    def attention_mask(self, mask_logits, size):
        """[batch, queries, height * width]: one where a query attends."""
        logits = resize_bilinear(mask_logits.detach(), *size)
        mask = (torch.sigmoid(logits) >= 0.5).to(logits.dtype)
        mask = torch.permute(torch.flatten(mask, 1, 2), (0, 2, 1))
        empty = torch.sum(mask, dim=-1, keepdim=True) == 0
        return torch.where(empty, 1.0, mask)

    def forward(self, features, mask_features):
        memories = [
            self.memory(self.input_proj[key](features[key]), level)
            for level, key in enumerate("543")
        ]
        batch = mask_features.shape[0]
        x = torch.broadcast_to(self.query_features, (batch, num_queries, hidden_size))
        hidden = [self.output_norm(x)]
        masks = [self.head.mask_logits(hidden[0], mask_features)]
        for i, block in enumerate(self.decoder):
            memory, pos_embed, size = memories[i % num_levels]
            attention_mask = self.attention_mask(masks[-1], size)
            x = block(x, memory, self.query_embedding, pos_embed, attention_mask)
            hidden.append(self.output_norm(x))
            masks.append(self.head.mask_logits(hidden[-1], mask_features))
        return self.head.class_logits(torch.stack(hidden)), torch.stack(masks)


class MaskFormer(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = ResNet()
        self.pixel_decoder = TransformerFPN()
        self.transformer = MaskFormerTransformer()

    def forward(self, images):
        features, mask_features = self.pixel_decoder(self.backbone(images))
        return self.transformer(features, mask_features)


# ------------------------------------------------------------------------ weights

LEAVES = {
    "weight": "gamma",
    "bias": "beta",
    "running_mean": "moving_mean",
    "running_var": "moving_variance",
}
RENAMED = [
    (r"^backbone\.(conv|norm)\.", r"backbone.stem.\1."),
    (r"^backbone\.stages\.(\d)", lambda m: f"backbone.block_groups.{int(m[1]) + 2}"),
    (r"\.(conv|norm)1\.", r".a.\1."),
    (r"\.(conv|norm)2\.", r".b.\1."),
    (r"\.(conv|norm)3\.", r".shortcut.\1."),
    (r"\.output\.(\d)", lambda m: f".conv.{int(m[1]) + 2}"),
    (r"\.lateral\.(\d)", lambda m: f".lateral.{int(m[1]) + 2}"),
    (r"\.mask_features\.", ".mask_conv."),
]
BLOCK = {
    "norm1": "encdec_attention_norm",
    "norm2": "self_attention_norm",
    "norm3": "output_norm",
}


def convolution_variables(state):
    """Of backbone and pixel decoder, by their names."""
    new = {}
    for name, value in state.items():
        if name.startswith("decoder.") or name.endswith("num_batches_tracked"):
            continue
        ours = name
        for pattern, replacement in RENAMED:
            ours = re.sub(pattern, replacement, ours)
        outer, _, leaf = ours.rpartition(".")
        if value.ndim == 4:
            new[f"{outer}.kernel"] = value.permute(2, 3, 1, 0)
        elif outer.endswith("mask_conv"):
            new[f"{outer}.bias"] = value
        else:
            norm = "bn" if outer.startswith("backbone") else "group_norm"
            new[f"{outer[: -len('norm')]}{norm}.{LEAVES[leaf]}"] = value
    return new


def dense_variables(state, theirs, ours):
    return {
        f"{ours}.kernel": state[f"{theirs}.weight"].T,
        f"{ours}.bias": state[f"{theirs}.bias"],
    }


def attention_variables(state, theirs, ours):
    """[heads * size, units] -> [units, heads, size]."""
    heads = (num_attention_heads, -1)
    new = {
        f"{ours}.output_kernel": state[f"{theirs}.out_proj.weight"].T.unflatten(
            0, heads
        ),
        f"{ours}.output_bias": state[f"{theirs}.out_proj.bias"],
    }
    for name in ("query", "key", "value"):
        kernel = state[f"{theirs}.{name[0]}_proj.weight"].T
        new[f"{ours}.{name}_kernel"] = kernel.unflatten(1, heads)
    return new


def block_variables(state, theirs, ours):
    new = attention_variables(
        state, f"{theirs}.cross_attention", f"{ours}.encdec_attention"
    )
    new |= attention_variables(
        state, f"{theirs}.self_attention", f"{ours}.self_attention"
    )
    new |= dense_variables(state, f"{theirs}.fc1", f"{ours}.intermediate")
    new |= dense_variables(state, f"{theirs}.fc2", f"{ours}.output")
    for norm, name in BLOCK.items():
        new[f"{ours}.{name}.gamma"] = state[f"{theirs}.{norm}.weight"]
        new[f"{ours}.{name}.beta"] = state[f"{theirs}.{norm}.bias"]
    return new


def transformer_variables(state):
    new = {
        "transformer.level_embedding": state["decoder.level.weight"],
        "transformer.query_features": state["decoder.query.weight"],
        "transformer.query_embedding": state["decoder.query_pos.weight"],
        "transformer.output_norm.gamma": state["decoder.norm.weight"],
        "transformer.output_norm.beta": state["decoder.norm.bias"],
    }
    for i, level in enumerate("543"):
        proj, ours = f"decoder.project.{i}", f"transformer.input_proj.{level}"
        new[f"{ours}.kernel"] = state[f"{proj}.weight"].permute(2, 3, 1, 0)
        new[f"{ours}.bias"] = state[f"{proj}.bias"]
    for i in range(num_layers):
        new |= block_variables(state, f"decoder.layers.{i}", f"transformer.decoder.{i}")
    new |= dense_variables(state, "decoder.class_head", "transformer.head.class_dense")
    for i in range(3):
        ours = f"transformer.head.mlp.{i}"
        new |= dense_variables(state, f"decoder.mask_head.layers.{i}", ours)
    return new


def convert(state):
    return convolution_variables(state) | transformer_variables(state)


def model():
    net = MaskFormer()
    net.load_state_dict(convert(torch.load(Path(__file__).with_name("weights.pt"))))
    return net


# --------------------------------------------------------------------------- data

MEAN_RGB = (0.485 * 255, 0.456 * 255, 0.406 * 255)
STDDEV_RGB = (0.229 * 255, 0.224 * 255, 0.225 * 255)


def normalize_image(image):
    """Channels last."""
    return (image - torch.tensor(MEAN_RGB)) / torch.tensor(STDDEV_RGB)


def sequence_mask(lengths, maxlen):
    return torch.arange(maxlen) < lengths[:, None]


def forward(net, batch):
    images = normalize_image(torch.permute(batch["image"], (0, 2, 3, 1)))
    rows = sequence_mask(batch["extent"][:, 0], images.shape[1])
    columns = sequence_mask(batch["extent"][:, 1], images.shape[2])
    inside = rows[:, :, None, None] & columns[:, None, :, None]
    class_logits, mask_logits = net(torch.where(inside, images, 0.0))
    return {
        "classes": class_logits,
        "masks": torch.permute(mask_logits, (0, 1, 4, 2, 3)).contiguous(),
    }


# --------------------------------------------------------------------------- loss

num_candidates = 26
num_uncertain = 11
background_class_weight = 0.1
focal_alpha, focal_gamma = 0.25, 2.0
loss_weights = {"cls": 2.0, "focal": 10.0, "dice": 3.0}


def one_hot(indices, depth):
    """All zeros where an index is negative."""
    return (indices[..., None] == torch.arange(depth)).float()


def gather_pixels(images, y, x):
    """Zero where a place is outside."""
    height, width = images.shape[-2:]
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    indices = torch.clamp(y, 0, height - 1) * width + torch.clamp(x, 0, width - 1)
    pixels = torch.take_along_dim(torch.flatten(images, -2), indices.long(), dim=-1)
    return torch.where(inside, pixels, 0.0)


def bilinear_sample(images, points):
    """images [..., height, width], points [..., p, 2] from 0 to 1 -> [..., p]."""
    height, width = images.shape[-2:]
    x = points[..., 0] * width - 0.5
    y = points[..., 1] * height - 0.5
    x_floor, y_floor = torch.floor(x), torch.floor(y)
    x_lerp, y_lerp = x - x_floor, y - y_floor
    top_left = gather_pixels(images, y_floor, x_floor)
    top_right = gather_pixels(images, y_floor, x_floor + 1)
    bottom_left = gather_pixels(images, y_floor + 1, x_floor)
    bottom_right = gather_pixels(images, y_floor + 1, x_floor + 1)
    top = top_left + (top_right - top_left) * x_lerp
    bottom = bottom_left + (bottom_right - bottom_left) * x_lerp
    return top + (bottom - top) * y_lerp


@torch.no_grad()
def sample_points(mask_logits, points):
    """The most uncertain candidates of each layer, and points anywhere."""
    candidates, anywhere = (
        points[..., :num_candidates, :],
        points[..., num_candidates:, :],
    )
    uncertainty = -torch.abs(bilinear_sample(mask_logits, candidates))
    indices = torch.topk(uncertainty, num_uncertain).indices
    uncertain = torch.take_along_dim(candidates, indices[..., None], dim=-2)
    anywhere = torch.broadcast_to(
        anywhere, (*uncertain.shape[:-2], *anywhere.shape[-2:])
    )
    return torch.cat([uncertain, anywhere], dim=-2)


def classification_loss(class_logits, y_true):
    """Softmax cross entropy, [layers]."""
    class_weights = torch.ones(num_classes + 1)
    class_weights[num_classes] = background_class_weight
    log_probs = class_logits - torch.logsumexp(class_logits, dim=-1, keepdim=True)
    losses = -torch.sum(y_true * log_probs * class_weights, dim=(-3, -2, -1))
    return losses / torch.sum(y_true * class_weights)


def focal_loss(y_pred, y_true):
    """Mean over the points."""
    log_p = -torch.logaddexp(-y_pred, torch.zeros_like(y_pred))
    log_not_p = log_p - y_pred
    cross_entropy = -(y_true * log_p + (1.0 - y_true) * log_not_p)
    probs = torch.exp(log_p)
    pt = y_true * probs + (1.0 - y_true) * (1.0 - probs)
    alpha = focal_alpha * y_true + (1.0 - focal_alpha) * (1.0 - y_true)
    losses = alpha * torch.pow(1.0 - pt, focal_gamma) * cross_entropy
    return torch.mean(losses, dim=-1)


def dice_loss(y_pred, y_true):
    probs = torch.sigmoid(y_pred)
    numerator = 2.0 * torch.sum(probs * y_true, dim=-1) + 1.0
    denominator = torch.sum(probs + y_true, dim=-1) + 1.0
    return (denominator - numerator) / denominator


def loss(output, batch):
    """All layers at once: [layers, batch, queries]."""
    assignment = one_hot(batch["matched"], batch["kinds"].shape[1])
    matched = torch.sum(assignment, dim=-1)
    num_masks = torch.clamp(torch.sum(matched), min=1.0)

    classes = one_hot(batch["kinds"], num_classes)
    foreground = torch.einsum("bqt,btk->bqk", assignment, classes)
    y_true = torch.cat([foreground, 1.0 - matched[..., None]], dim=-1)
    cls_loss = classification_loss(output["classes"], y_true)

    points = torch.einsum("bqt,btpc->bqpc", assignment, batch["points"])
    masks = torch.einsum("bqt,bthw->bqhw", assignment, batch["masks"])
    points = sample_points(output["masks"], points[None])
    targets = bilinear_sample(masks[None], points)
    logits = bilinear_sample(output["masks"], points)
    focal = torch.sum(focal_loss(logits, targets) * matched, dim=(1, 2)) / num_masks
    dice = torch.sum(dice_loss(logits, targets) * matched, dim=(1, 2)) / num_masks

    total = loss_weights["cls"] * cls_loss
    total = total + loss_weights["focal"] * focal + loss_weights["dice"] * dice
    return torch.sum(total)


# ---------------------------------------------------------------------- optimizer


class PolynomialDecay:
    def __init__(self, initial_learning_rate, decay_steps, power):
        self.initial_learning_rate = initial_learning_rate
        self.decay_steps, self.power = decay_steps, power

    def __call__(self, step):
        remaining = 1.0 - min(step, self.decay_steps) / self.decay_steps
        return self.initial_learning_rate * remaining**self.power


def clip_by_global_norm(gradients, clip_norm):
    squares = [torch.sum(torch.square(gradient)) for gradient in gradients]
    global_norm = torch.sqrt(torch.sum(torch.stack(squares)))
    scale = clip_norm * torch.minimum(1.0 / global_norm, torch.tensor(1.0 / clip_norm))
    return [gradient * scale for gradient in gradients]


class AdamWeightDecay(torch.optim.Optimizer):
    def __init__(self, variables, schedule, weight_decay_rate, excluded, slow):
        named = list(variables)
        super().__init__([value for _, value in named], {})
        self.names = [name for name, _ in named]
        self.schedule, self.weight_decay_rate = schedule, weight_decay_rate
        self.excluded, self.slow = re.compile(excluded), re.compile(slow)
        self.beta_1, self.beta_2, self.epsilon = 0.9, 0.98, 1e-6
        self.iterations = 0

    def update(self, var, grad, lr):
        slots = self.state[var]
        if not slots:
            slots["m"], slots["v"] = torch.zeros_like(var), torch.zeros_like(var)
        m, v = slots["m"], slots["v"]
        m.add_((grad - m) * (1.0 - self.beta_1))
        v.add_((torch.square(grad) - v) * (1.0 - self.beta_2))
        m_hat = m / (1.0 - self.beta_1**self.iterations)
        v_hat = v / (1.0 - self.beta_2**self.iterations)
        var.sub_(lr * m_hat / (torch.sqrt(v_hat) + self.epsilon))

    @torch.no_grad()
    def step(self, closure=None):
        variables = self.param_groups[0]["params"]
        gradients = clip_by_global_norm([var.grad for var in variables], 0.5)
        base = self.schedule(self.iterations)
        self.iterations += 1
        for name, var, grad in zip(self.names, variables, gradients):
            lr = base * 0.1 if self.slow.search(name) else base
            if not self.excluded.search(name):
                var.sub_(lr * self.weight_decay_rate * var)
            self.update(var, grad, lr)


def optimizer(net):
    return AdamWeightDecay(
        net.named_parameters(),
        PolynomialDecay(2e-3, decay_steps=10, power=0.9),
        weight_decay_rate=0.05,
        excluded=r"gamma$|beta$|_embedding$|query_features$",
        slow=r"^backbone\.",
    )
