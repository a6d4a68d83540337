"""After Keras: channels last, HWIO kernels, heads as axes of the kernels, boxes from the top.

Distances of the box net come as top, left, bottom, right.
"""

import math
import re
from pathlib import Path

import torch
from torch import nn

cfg = {
    "mean_rgb": (123.675, 116.28, 103.53),
    "stddev_rgb": (58.395, 57.12, 57.375),
    "num_classes": 5,
    "patch_size": 8,
    "hidden_size": 24,
    "mlp_dim": 48,
    "num_heads": 3,
    "pretrain_grid": 4,
    "window_sizes": (4, None, 4),
    "global_rel_size": 6,
    "fpn_filters": 16,
    "head_repeats": 2,
    "gn_groups": 4,
    "strides": (4, 8, 16),
    "regress_ranges": ((0.0, 12.0), (12.0, 24.0), (24.0, 1e8)),
    "center_radius": 1.5,
    "focal_alpha": 0.25,
    "focal_gamma": 2.0,
    "box_loss_weight": 2.0,
}


# ------------------------------------------------------------------------ ops


def gelu(x):
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def softmax(logits):
    unnormalized = torch.exp(logits - torch.amax(logits, dim=-1, keepdim=True))
    return unnormalized / torch.sum(unnormalized, dim=-1, keepdim=True)


def conv2d(x, kernel, padding="valid"):
    """NHWC, HWIO."""
    x, kernel = torch.permute(x, (0, 3, 1, 2)), torch.permute(kernel, (3, 2, 0, 1))
    return torch.permute(nn.functional.conv2d(x, kernel, padding=padding), (0, 2, 3, 1))


def max_pool2d(x, pool_size, strides):
    x = torch.permute(x, (0, 3, 1, 2))
    x = nn.functional.max_pool2d(x, pool_size, strides)
    return torch.permute(x, (0, 2, 3, 1))


def half_pixel_centers(out_size, in_size):
    return (torch.arange(out_size, dtype=torch.float32) + 0.5) * (
        in_size / out_size
    ) - 0.5


def keys_cubic(distance, a=-0.75):
    """The kernel of Keys; a is its slope at one."""
    d = torch.abs(distance)
    near = ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0
    far = ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a
    return torch.where(d <= 1.0, near, torch.where(d < 2.0, far, 0.0))


def cubic_matrix(out_size, in_size):
    """[out, in]; what lies outside is taken from the edge."""
    source = half_pixel_centers(out_size, in_size)
    matrix = torch.zeros(out_size, in_size)
    for tap in (-1, 0, 1, 2):
        place = torch.floor(source) + tap
        index = torch.clamp(place, 0, in_size - 1).to(torch.int64)
        weight = keys_cubic(source - place)
        matrix = matrix + nn.functional.one_hot(index, in_size) * weight[:, None]
    return matrix


def linear_matrix(out_size, in_size):
    source = torch.clamp(half_pixel_centers(out_size, in_size), 0.0, in_size - 1.0)
    return torch.relu(1.0 - torch.abs(source[:, None] - torch.arange(in_size)))


# --------------------------------------------------------------------- layers


def add_weight(*shape):
    return nn.Parameter(torch.zeros(shape))


class LayerNormalization(nn.Module):
    def __init__(self, units, epsilon=1e-6):
        super().__init__()
        self.gamma, self.beta = add_weight(units), add_weight(units)
        self.epsilon = epsilon

    def forward(self, inputs):
        mean = torch.mean(inputs, dim=-1, keepdim=True)
        variance = torch.mean(torch.square(inputs - mean), dim=-1, keepdim=True)
        inv = torch.rsqrt(variance + self.epsilon) * self.gamma
        return inputs * inv + (self.beta - mean * inv)


class GroupNormalization(nn.Module):
    def __init__(self, units, groups, epsilon=1e-5):
        super().__init__()
        self.gamma, self.beta = add_weight(units), add_weight(units)
        self.groups, self.epsilon = groups, epsilon

    def forward(self, inputs):
        grouped = torch.unflatten(inputs, -1, (self.groups, -1))
        mean = torch.mean(grouped, dim=(1, 2, 4), keepdim=True)
        centered = grouped - mean
        variance = torch.mean(torch.square(centered), dim=(1, 2, 4), keepdim=True)
        normalized = centered * torch.rsqrt(variance + self.epsilon)
        return torch.flatten(normalized, -2) * self.gamma + self.beta


class Dense(nn.Module):
    def __init__(self, inputs, units):
        super().__init__()
        self.kernel, self.bias = add_weight(inputs, units), add_weight(units)

    def forward(self, inputs):
        return torch.matmul(inputs, self.kernel) + self.bias


class EinsumDense(nn.Module):
    def __init__(self, equation, kernel_shape, bias_shape=None):
        super().__init__()
        self.equation = equation
        self.kernel = add_weight(*kernel_shape)
        self.bias = add_weight(*bias_shape) if bias_shape else None

    def forward(self, inputs):
        outputs = torch.einsum(self.equation, inputs, self.kernel)
        return outputs if self.bias is None else outputs + self.bias


class Conv2D(nn.Module):
    def __init__(self, inputs, filters, kernel_size, use_bias=False):
        super().__init__()
        self.kernel = add_weight(kernel_size, kernel_size, inputs, filters)
        self.bias = add_weight(filters) if use_bias else None

    def forward(self, inputs):
        outputs = conv2d(inputs, self.kernel, padding="same")
        return outputs if self.bias is None else outputs + self.bias


class Conv2DTranspose(nn.Module):
    """Kernel [height, width, out, in]; strides as large as it, so nothing overlaps."""

    def __init__(self, inputs, filters, kernel_size):
        super().__init__()
        self.kernel = add_weight(kernel_size, kernel_size, filters, inputs)
        self.bias = add_weight(filters)

    def forward(self, inputs):
        outputs = torch.einsum("bhwi,yxoi->bhywxo", inputs, self.kernel)
        outputs = torch.flatten(torch.flatten(outputs, 3, 4), 1, 2)
        return outputs + self.bias


class RelativePosition(nn.Module):
    def __init__(self, length, depth):
        super().__init__()
        self.embeddings = add_weight(length, depth)

    def forward(self, size):
        """[query, key, depth]"""
        table = self.embeddings
        if table.shape[0] != 2 * size - 1:
            resize = linear_matrix(2 * size - 1, table.shape[0])
            table = torch.matmul(resize, table)
        query, key = torch.arange(size)[:, None], torch.arange(size)[None, :]
        relative = query - key + (size - 1)
        gathered = torch.index_select(table, 0, torch.flatten(relative))
        return torch.reshape(gathered, (size, size, -1))


class RelativeMultiHeadAttention(nn.Module):
    def __init__(self, dim, num_heads, rel_size):
        super().__init__()
        depth = dim // num_heads
        self.depth = depth
        split = (dim, num_heads, depth)
        self.query = EinsumDense("bhwc,cnd->bhwnd", split, (num_heads, depth))
        self.key = EinsumDense("bhwc,cnd->bhwnd", split)
        self.value = EinsumDense("bhwc,cnd->bhwnd", split, (num_heads, depth))
        merged = (num_heads, depth, dim)
        self.attention_output = EinsumDense("bhwnd,ndc->bhwc", merged, (dim,))
        self.height_bias = RelativePosition(2 * rel_size - 1, depth)
        self.width_bias = RelativePosition(2 * rel_size - 1, depth)

    def forward(self, inputs):
        _, height, width, _ = inputs.shape
        query, key, value = self.query(inputs), self.key(inputs), self.value(inputs)
        scaled = query / math.sqrt(self.depth)
        scores = torch.einsum("bijnd,bklnd->bnijkl", scaled, key)
        rows = torch.einsum("bijnd,ikd->bnijk", query, self.height_bias(height))
        columns = torch.einsum("bijnd,jld->bnijl", query, self.width_bias(width))
        scores = scores + rows[..., :, None] + columns[..., None, :]
        probs = softmax(torch.flatten(scores, -2))
        probs = torch.reshape(probs, scores.shape)
        context = torch.einsum("bnijkl,bklnd->bijnd", probs, value)
        return self.attention_output(context)


class EncoderBlock(nn.Module):
    def __init__(self, window_size):
        super().__init__()
        dim = cfg["hidden_size"]
        self.window_size = window_size
        self.layer_norm1 = LayerNormalization(dim)
        self.self_attention = RelativeMultiHeadAttention(
            dim, cfg["num_heads"], window_size or cfg["global_rel_size"]
        )
        self.layer_norm2 = LayerNormalization(dim)
        self.mlp_dense1 = Dense(dim, cfg["mlp_dim"])
        self.mlp_dense2 = Dense(cfg["mlp_dim"], dim)

    def windowed_attention(self, x):
        size = self.window_size
        _, height, width, dim = x.shape
        rows, columns = math.ceil(height / size), math.ceil(width / size)
        bottom, right = rows * size - height, columns * size - width
        x = nn.functional.pad(x, (0, 0, 0, right, 0, bottom))
        x = torch.reshape(x, (-1, rows, size, columns, size, dim))
        x = torch.permute(x, (0, 1, 3, 2, 4, 5))
        x = self.self_attention(torch.reshape(x, (-1, size, size, dim)))
        x = torch.reshape(x, (-1, rows, columns, size, size, dim))
        x = torch.permute(x, (0, 1, 3, 2, 4, 5))
        x = torch.reshape(x, (-1, rows * size, columns * size, dim))
        return x[:, :height, :width, :]

    def forward(self, inputs):
        x = self.layer_norm1(inputs)
        if self.window_size is None:
            x = self.self_attention(x)
        else:
            x = self.windowed_attention(x)
        x = x + inputs
        y = self.layer_norm2(x)
        y = gelu(self.mlp_dense1(y))
        y = self.mlp_dense2(y)
        return x + y


class PatchAndEmbed(nn.Module):
    def __init__(self):
        super().__init__()
        patch, dim = cfg["patch_size"], cfg["hidden_size"]
        self.patch_size, self.grid = patch, cfg["pretrain_grid"]
        self.kernel, self.bias = add_weight(patch, patch, 3, dim), add_weight(dim)
        self.position_embedding = add_weight(1 + self.grid**2, dim)

    def forward(self, images):
        _, height, width, _ = images.shape
        rows, columns = height // self.patch_size, width // self.patch_size
        blocks = (-1, rows, self.patch_size, columns, self.patch_size, 3)
        patches = torch.reshape(images, blocks)
        x = torch.einsum("bhywxc,yxcd->bhwd", patches, self.kernel) + self.bias
        table = torch.reshape(self.position_embedding[1:], (self.grid, self.grid, -1))
        table = torch.einsum("hp,pqd->hqd", cubic_matrix(rows, self.grid), table)
        table = torch.einsum("wq,hqd->hwd", cubic_matrix(columns, self.grid), table)
        return x + table


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = PatchAndEmbed()
        for i, window_size in enumerate(cfg["window_sizes"]):
            self.add_module(f"layer_{i}", EncoderBlock(window_size))

    def forward(self, images):
        x = self.embed(images)
        for i in range(len(cfg["window_sizes"])):
            x = getattr(self, f"layer_{i}")(x)
        return x


class PyramidLevel(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        filters = cfg["fpn_filters"]
        self.lateral = Conv2D(inputs, filters, 1)
        self.lateral_norm = LayerNormalization(filters)
        self.output = Conv2D(filters, filters, 3)
        self.output_norm = LayerNormalization(filters)

    def forward(self, x):
        x = self.lateral_norm(self.lateral(x))
        return self.output_norm(self.output(x))


class SimplePyramid(nn.Module):
    def __init__(self):
        super().__init__()
        dim = cfg["hidden_size"]
        self.upsample = Conv2DTranspose(dim, dim // 2, 2)
        self.level_2 = PyramidLevel(dim // 2)
        self.level_3 = PyramidLevel(dim)
        self.level_4 = PyramidLevel(dim)

    def forward(self, x):
        return {
            "2": self.level_2(self.upsample(x)),
            "3": self.level_3(x),
            "4": self.level_4(max_pool2d(x, pool_size=2, strides=2)),
        }


class PredictionNet(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        filters = cfg["fpn_filters"]
        for i in range(cfg["head_repeats"]):
            self.add_module(f"conv_{i}", Conv2D(filters, filters, 3))
            self.add_module(f"norm_{i}", GroupNormalization(filters, cfg["gn_groups"]))
        self.predict = Conv2D(filters, outputs, 3, use_bias=True)

    def forward(self, x):
        for i in range(cfg["head_repeats"]):
            x = getattr(self, f"conv_{i}")(x)
            x = torch.relu(getattr(self, f"norm_{i}")(x))
        return torch.flatten(self.predict(x), 1, 2)


class DenseDetector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.decoder = SimplePyramid()
        self.class_net = PredictionNet(cfg["num_classes"])
        self.box_net = PredictionNet(4)
        self.level_scales = add_weight(len(cfg["strides"]))

    def forward(self, images):
        features = self.decoder(self.backbone(images))
        classes, boxes = [], []
        for i, feature in enumerate(features.values()):
            classes.append(self.class_net(feature))
            raw = self.box_net(feature) * self.level_scales[i]
            boxes.append(torch.exp(raw) * cfg["strides"][i])
        return torch.cat(classes, dim=1), torch.cat(boxes, dim=1)


# ----------------------------------------------------------------- checkpoint


def hwio(weight):
    return torch.permute(weight, (2, 3, 1, 0))


class Converter:
    """From the checkpoint of torch to variables by name."""

    def __init__(self, state):
        self.state, self.variables = state, {}

    def norm(self, name, source):
        self.variables[name + ".gamma"] = self.state[source + ".weight"]
        self.variables[name + ".beta"] = self.state[source + ".bias"]

    def conv(self, name, source, use_bias=False):
        self.variables[name + ".kernel"] = hwio(self.state[source + ".weight"])
        if use_bias:
            self.variables[name + ".bias"] = self.state[source + ".bias"]

    def dense(self, name, source):
        self.variables[name + ".kernel"] = self.state[source + ".weight"].T
        self.variables[name + ".bias"] = self.state[source + ".bias"]

    def attention(self, name, source):
        heads = (cfg["num_heads"], cfg["hidden_size"] // cfg["num_heads"])
        query, key, value = torch.chunk(self.state[source + ".qkv.weight"], 3, dim=0)
        for part, weight in (("query", query), ("key", key), ("value", value)):
            kernel = torch.unflatten(weight.T, 1, heads)
            self.variables[f"{name}.{part}.kernel"] = kernel
        for part, bias in (("query", "q_bias"), ("value", "v_bias")):
            split = torch.reshape(self.state[f"{source}.{bias}"], heads)
            self.variables[f"{name}.{part}.bias"] = split
        kernel = self.state[source + ".proj.weight"].T
        self.variables[name + ".attention_output.kernel"] = kernel.unflatten(0, heads)
        self.variables[name + ".attention_output.bias"] = self.state[
            source + ".proj.bias"
        ]
        for part, table in (("height_bias", "rel_pos_h"), ("width_bias", "rel_pos_w")):
            embeddings = self.state[f"{source}.{table}"]
            self.variables[f"{name}.{part}.embeddings"] = embeddings

    def backbone(self):
        self.conv("backbone.embed", "backbone.patch_embed", use_bias=True)
        table = self.state["backbone.pos_embed"][0]
        self.variables["backbone.embed.position_embedding"] = table
        for i in range(len(cfg["window_sizes"])):
            name, source = f"backbone.layer_{i}", f"backbone.blocks.{i}"
            self.norm(name + ".layer_norm1", source + ".norm1")
            self.attention(name + ".self_attention", source + ".attn")
            self.norm(name + ".layer_norm2", source + ".norm2")
            self.dense(name + ".mlp_dense1", source + ".mlp.fc1")
            self.dense(name + ".mlp_dense2", source + ".mlp.fc2")

    def decoder(self):
        self.conv("decoder.upsample", "fpn.stages.0.0", use_bias=True)
        for i in range(3):
            name, source = f"decoder.level_{i + 2}", f"fpn.stages.{i}"
            self.conv(name + ".lateral", source + ".1")
            self.norm(name + ".lateral_norm", source + ".2")
            self.conv(name + ".output", source + ".3")
            self.norm(name + ".output_norm", source + ".4")

    def head(self):
        for name, tower, last in (
            ("class_net", "cls_tower", "cls_logits"),
            ("box_net", "bbox_tower", "bbox_pred"),
        ):
            for i in range(cfg["head_repeats"]):
                self.conv(f"{name}.conv_{i}", f"head.{tower}.{3 * i}")
                self.norm(f"{name}.norm_{i}", f"head.{tower}.{3 * i + 1}")
            self.conv(name + ".predict", "head." + last, use_bias=True)
        for kind in ("kernel", "bias"):
            key = "box_net.predict." + kind
            self.variables[key] = self.variables[key][..., [1, 0, 3, 2]]
        self.variables["level_scales"] = self.state["head.scales"]

    def convert(self):
        self.backbone()
        self.decoder()
        self.head()
        return {k: v.clone().contiguous() for k, v in self.variables.items()}


def model():
    net = DenseDetector()
    state = torch.load(Path(__file__).with_name("weights.pt"))
    net.load_state_dict(Converter(state).convert())
    return net


# ----------------------------------------------------------------------- data


def preprocess(images):
    """BGR bytes to normalized RGB, whole patches."""
    images = images[..., [2, 1, 0]].to(torch.float32)
    images = (images - torch.tensor(cfg["mean_rgb"])) / torch.tensor(cfg["stddev_rgb"])
    height, width = images.shape[1:3]
    patch = cfg["patch_size"]
    bottom = math.ceil(height / patch) * patch - height
    right = math.ceil(width / patch) * patch - width
    return nn.functional.pad(images, (0, 0, 0, right, 0, bottom))


def forward(net, batch):
    class_outputs, box_outputs = net(preprocess(batch["image"]))
    return {"logits": class_outputs, "distances": box_outputs[..., [1, 0, 3, 2]]}


# ----------------------------------------------------------------------- loss


def anchor_points(height, width):
    """[points, 2] as y and x, and a stride and the range of each."""
    patch = cfg["patch_size"]
    rows, columns = math.ceil(height / patch), math.ceil(width / patch)
    yx, strides, ranges = [], [], []
    for stride, limits in zip(cfg["strides"], cfg["regress_ranges"]):
        y = stride * (torch.arange(rows * patch // stride) + 0.5)
        x = stride * (torch.arange(columns * patch // stride) + 0.5)
        grid = torch.stack(torch.meshgrid(y, x, indexing="ij"), dim=-1)
        yx.append(torch.reshape(grid, (-1, 2)))
        strides.append(torch.full((yx[-1].shape[0],), float(stride)))
        ranges.append(torch.tensor(limits).repeat(yx[-1].shape[0], 1))
    return torch.cat(yx), torch.cat(strides), torch.cat(ranges)


def label_points(batch):
    """One-hot classes, matched boxes [ymin, xmin, ymax, xmax] and a mask, [batch, points]."""
    yx, strides, ranges = anchor_points(*batch["image"].shape[1:3])
    gt = batch["boxes"][:, None, :, [1, 0, 3, 2]]
    valid = (batch["labels"] >= 0)[:, None, :]
    place = yx[None, :, None, :]
    sides = torch.cat([place - gt[..., :2], gt[..., 2:] - place], dim=-1)
    center = 0.5 * (gt[..., :2] + gt[..., 2:])
    offset = torch.amax(torch.abs(place - center), dim=-1)
    is_near = offset < cfg["center_radius"] * strides[None, :, None]
    is_inside = torch.amin(sides, dim=-1) > 0.0
    reach = torch.amax(sides, dim=-1)
    fits = (reach >= ranges[None, :, None, 0]) & (reach <= ranges[None, :, None, 1])
    candidates = valid & is_near & is_inside & fits
    area = torch.prod(gt[..., 2:] - gt[..., :2], dim=-1)
    cost = torch.where(candidates, area, float("inf"))
    matched = torch.argmin(cost, dim=-1)
    positive = torch.any(candidates, dim=-1)
    classes = torch.gather(batch["labels"], 1, matched)
    one_hot = (classes[..., None] == torch.arange(cfg["num_classes"])).to(torch.float32)
    one_hot = one_hot * positive[..., None]
    index = matched[..., None].expand(-1, -1, 4)
    boxes = torch.gather(gt[:, 0], 1, index)
    return one_hot, boxes, positive.to(torch.float32), yx


def focal_loss(y_true, logits):
    alpha, gamma = cfg["focal_alpha"], cfg["focal_gamma"]
    log_p = -nn.functional.softplus(-logits)
    log_not_p = -nn.functional.softplus(logits)
    positive = alpha * torch.pow(torch.exp(log_not_p), gamma) * log_p
    negative = (1.0 - alpha) * torch.pow(torch.exp(log_p), gamma) * log_not_p
    return -(y_true * positive + (1.0 - y_true) * negative)


def box_area(boxes):
    return torch.prod(torch.relu(boxes[..., 2:] - boxes[..., :2]), dim=-1)


def giou_loss(y_true, y_pred):
    upper = torch.maximum(y_true[..., :2], y_pred[..., :2])
    lower = torch.minimum(y_true[..., 2:], y_pred[..., 2:])
    intersection = box_area(torch.cat([upper, lower], dim=-1))
    union = box_area(y_true) + box_area(y_pred) - intersection
    enclose_upper = torch.minimum(y_true[..., :2], y_pred[..., :2])
    enclose_lower = torch.maximum(y_true[..., 2:], y_pred[..., 2:])
    enclosing = box_area(torch.cat([enclose_upper, enclose_lower], dim=-1))
    iou = intersection / union
    return 1.0 - (iou - (enclosing - union) / enclosing)


def centerness_targets(boxes, yx):
    top_left, bottom_right = yx - boxes[..., :2], boxes[..., 2:] - yx
    smaller = torch.minimum(top_left, bottom_right)
    larger = torch.maximum(top_left, bottom_right)
    return torch.sqrt(torch.relu(torch.prod(smaller / larger, dim=-1)))


def loss(output, batch):
    with torch.no_grad():
        one_hot, boxes, mask, yx = label_points(batch)
        boxes = torch.where(mask[..., None] > 0, boxes, torch.cat([yx - 1, yx + 1], -1))
        weights = centerness_targets(boxes, yx) * mask
    num_positives = torch.clamp(torch.sum(mask), min=1.0)
    class_loss = torch.sum(focal_loss(one_hot, output["logits"])) / num_positives
    tlbr = output["distances"][..., [1, 0, 3, 2]]
    predicted = torch.cat([yx - tlbr[..., :2], yx + tlbr[..., 2:]], dim=-1)
    box_loss = torch.sum(weights * giou_loss(boxes, predicted))
    box_loss = box_loss / torch.clamp(torch.sum(weights), min=1e-6)
    return class_loss + cfg["box_loss_weight"] * box_loss


# ------------------------------------------------------------------ optimizer


class AdamWithLayerDecay(torch.optim.Optimizer):
    no_decay = ("bias$", "gamma$", "beta$", "embeddings$", "embedding$", "scales$")

    def __init__(self, net):
        self.named = dict(net.named_parameters())
        super().__init__(list(self.named.values()), {})
        self.learning_rate, self.warmup_steps = 4e-3, 4
        self.layer_decay, self.weight_decay = 0.7, 0.2
        self.beta_1, self.beta_2, self.epsilon = 0.9, 0.999, 1e-8
        self.iterations = 0

    def rate(self, name):
        warmup = min((self.iterations + 1) / self.warmup_steps, 1.0)
        depth = len(cfg["window_sizes"])
        layer = re.match(r"backbone\.layer_(\d+)", name)
        if layer:
            above = depth - int(layer[1])
        else:
            above = depth + 1 if name.startswith("backbone.embed") else 0
        return self.learning_rate * warmup * self.layer_decay**above

    @torch.no_grad()
    def step(self, closure=None):
        rates = {name: self.rate(name) for name in self.named}
        self.iterations += 1
        for name, variable in self.named.items():
            gradient, slots = variable.grad, self.state[variable]
            if len(slots) == 0:
                slots["momentum"] = torch.zeros_like(variable)
                slots["velocity"] = torch.zeros_like(variable)
            if not any(re.search(pattern, name) for pattern in self.no_decay):
                variable.sub_(rates[name] * self.weight_decay * variable)
            m, v = slots["momentum"], slots["velocity"]
            m.copy_(self.beta_1 * m + (1.0 - self.beta_1) * gradient)
            v.copy_(self.beta_2 * v + (1.0 - self.beta_2) * torch.square(gradient))
            m_hat = m / (1.0 - self.beta_1**self.iterations)
            v_hat = v / (1.0 - self.beta_2**self.iterations)
            variable.sub_(rates[name] * m_hat / (torch.sqrt(v_hat) + self.epsilon))


def optimizer(net):
    return AdamWithLayerDecay(net)
