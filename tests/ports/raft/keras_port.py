"""RAFT for Keras: NHWC, kernels HWIO, flows as (dy, dx), recurrent cells with Keras's gates."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

hidden_dim = 12
context_dim = 8
corr_levels = 3
corr_radius = 2
iterations = 3


# Operators.


def same_padding(x, kernel_size):
    """The padding of the checkpoint: the same on both sides, whatever the strides."""
    top, left = (kernel_size[0] - 1) // 2, (kernel_size[1] - 1) // 2
    return F.pad(x, (0, 0, left, left, top, top))


def conv2d(x, kernel, strides=1):
    x = same_padding(x, kernel.shape[:2])
    x = F.conv2d(x.permute(0, 3, 1, 2), kernel.permute(3, 2, 0, 1), stride=strides)
    return x.permute(0, 2, 3, 1)


def average_pool(x):
    """(n, h, w) -> (n, h / 2, w / 2)."""
    n, h, w = x.shape
    return x.reshape(n, h // 2, 2, w // 2, 2).mean(dim=(2, 4))


def gather_pixels(image, y, x):
    """Pixels of (n, h, w) at (n, points); zeros outside."""
    n, h, w = image.shape
    inside = (y >= 0) & (y <= h - 1) & (x >= 0) & (x <= w - 1)
    index = torch.clip(y, 0, h - 1) * w + torch.clip(x, 0, w - 1)
    pixels = torch.gather(image.reshape(n, h * w), 1, index.long())
    return pixels * inside


def bilinear_sample(image, points):
    """Sample (n, h, w) at points (n, k, 2) of (y, x)."""
    y, x = torch.unbind(points, dim=-1)
    y0, x0 = torch.floor(y), torch.floor(x)
    wy, wx = y - y0, x - x0

    def row(yi):
        left = gather_pixels(image, yi, x0)
        return left + wx * (gather_pixels(image, yi, x0 + 1) - left)

    top, low = row(y0), row(y0 + 1)
    return top + wy * (low - top)


# Layers.


def variable(value):
    return nn.Parameter(value.contiguous().clone())


class Conv2D(nn.Module):
    def __init__(self, weights, name, strides=1, activation=None):
        super().__init__()
        self.kernel = variable(weights[name + "/kernel"])
        self.bias = variable(weights[name + "/bias"])
        self.strides = strides
        self.activation = activation

    def forward(self, x):
        x = conv2d(x, self.kernel, self.strides) + self.bias
        return x if self.activation is None else self.activation(x)


class BatchNormalization(nn.Module):
    """In inference mode, always."""

    def __init__(self, weights, name, epsilon=1e-5):
        super().__init__()
        self.gamma = variable(weights[name + "/gamma"])
        self.beta = variable(weights[name + "/beta"])
        self.register_buffer("moving_mean", weights[name + "/moving_mean"].clone())
        self.register_buffer(
            "moving_variance", weights[name + "/moving_variance"].clone()
        )
        self.epsilon = epsilon

    def forward(self, x):
        inv = self.gamma * torch.rsqrt(self.moving_variance + self.epsilon)
        return x * inv + (self.beta - self.moving_mean * inv)


class InstanceNormalization(nn.Module):
    def __init__(self, epsilon=1e-5):
        super().__init__()
        self.epsilon = epsilon

    def forward(self, x):
        mean = torch.mean(x, dim=(1, 2), keepdim=True)
        centered = x - mean
        variance = torch.mean(torch.square(centered), dim=(1, 2), keepdim=True)
        return centered / torch.sqrt(variance + self.epsilon)


class Encoder(nn.Module):
    """A stem and two residual blocks, the second with strides and a projection."""

    def __init__(self, weights, scope, batch_norm):
        super().__init__()

        def normalization(i):
            if not batch_norm:
                return InstanceNormalization()
            return BatchNormalization(
                weights, layer_name(scope, "batch_normalization", i)
            )

        for i, strides in enumerate((2, 1, 1, 2, 1, 2, 1)):
            conv = Conv2D(weights, layer_name(scope, "conv2d", i), strides)
            self.add_module(f"conv2d_{i}", conv)
        for i in range(6):
            self.add_module(f"norm_{i}", normalization(i))

    def forward(self, x):
        x = torch.relu(self.norm_0(self.conv2d_0(x)))
        shortcut = x
        x = torch.relu(self.norm_1(self.conv2d_1(x)))
        x = torch.relu(self.norm_2(self.conv2d_2(x)))
        x = torch.relu(shortcut + x)
        shortcut = self.norm_5(self.conv2d_5(x))
        x = torch.relu(self.norm_3(self.conv2d_3(x)))
        x = torch.relu(self.norm_4(self.conv2d_4(x)))
        x = torch.relu(shortcut + x)
        return self.conv2d_6(x)


class CorrelationPyramid:
    def __init__(self, fmap1, fmap2):
        n, h, w, c = fmap1.shape
        volume = torch.einsum("nijc,nklc->nijkl", fmap1, fmap2) / c**0.5
        volume = volume.reshape(n * h * w, h, w)
        self.pyramid = [volume]
        for _ in range(corr_levels - 1):
            volume = average_pool(volume)
            self.pyramid.append(volume)

    def lookup(self, coords):
        """Windows around the coordinates, row by row, of all levels."""
        n, h, w, _ = coords.shape
        r = torch.arange(-corr_radius, corr_radius + 1, dtype=coords.dtype)
        dy, dx = torch.meshgrid(r, r, indexing="ij")
        window = torch.stack([dy.flatten(), dx.flatten()], dim=-1)
        centers = coords.reshape(n * h * w, 1, 2)
        levels = []
        for i, volume in enumerate(self.pyramid):
            points = centers / 2**i + window
            levels.append(bilinear_sample(volume, points).reshape(n, h, w, -1))
        return torch.cat(levels, dim=3)


class MotionEncoder(nn.Module):
    def __init__(self, weights, scope):
        super().__init__()
        self.corr_1 = Conv2D(weights, scope + "/corr_1", activation=torch.relu)
        self.corr_2 = Conv2D(weights, scope + "/corr_2", activation=torch.relu)
        self.flow_1 = Conv2D(weights, scope + "/flow_1", activation=torch.relu)
        self.flow_2 = Conv2D(weights, scope + "/flow_2", activation=torch.relu)
        self.fuse = Conv2D(weights, scope + "/fuse", activation=torch.relu)

    def forward(self, flow, corr):
        both = torch.cat(
            [self.corr_2(self.corr_1(corr)), self.flow_2(self.flow_1(flow))], dim=3
        )
        return torch.cat([self.fuse(both), flow], dim=3)


class ConvGRU2DCell(nn.Module):
    """Gates z, r, h of one kernel; z is the share of the state that stays."""

    def __init__(self, weights, name):
        super().__init__()
        self.kernel = variable(weights[name + "/kernel"])
        self.recurrent_kernel = variable(weights[name + "/recurrent_kernel"])
        self.bias = variable(weights[name + "/bias"])

    def forward(self, x, h):
        x_z, x_r, x_h = torch.chunk(conv2d(x, self.kernel) + self.bias, 3, dim=3)
        k_z, k_r, k_h = torch.chunk(self.recurrent_kernel, 3, dim=3)
        z = torch.sigmoid(x_z + conv2d(h, k_z))
        r = torch.sigmoid(x_r + conv2d(h, k_r))
        hh = torch.tanh(x_h + conv2d(r * h, k_h))
        return z * h + (1 - z) * hh


class UpdateBlock(nn.Module):
    def __init__(self, weights, scope):
        super().__init__()
        self.motion_encoder = MotionEncoder(weights, scope + "/motion_encoder")
        self.gru_row = ConvGRU2DCell(weights, scope + "/gru_row")
        self.gru_column = ConvGRU2DCell(weights, scope + "/gru_column")
        self.flow_head_1 = Conv2D(
            weights, scope + "/flow_head_1", activation=torch.relu
        )
        self.flow_head_2 = Conv2D(weights, scope + "/flow_head_2")
        self.mask_1 = Conv2D(weights, scope + "/mask_1", activation=torch.relu)
        self.mask_2 = Conv2D(weights, scope + "/mask_2")

    def forward(self, state, context, corr, flow):
        motion = self.motion_encoder(flow, corr)
        x = torch.cat([context, motion], dim=3)
        state = self.gru_row(x, state)
        state = self.gru_column(x, state)
        delta = self.flow_head_2(self.flow_head_1(state))
        mask = 0.25 * self.mask_2(self.mask_1(state))
        return state, mask, delta


def extract_patches(x):
    """The 3 x 3 neighbours of each pixel: (n, h, w, 9, c), row by row."""
    n, h, w, c = x.shape
    x = F.pad(x, (0, 0, 1, 1, 1, 1))
    patches = [x[:, i : i + h, j : j + w] for i in range(3) for j in range(3)]
    return torch.stack(patches, dim=3)


def convex_upsample(flow, mask):
    n, h, w, _ = flow.shape
    weights = torch.softmax(mask.reshape(n, h, w, 9, 4, 4), dim=3)
    flow = torch.einsum("nhwkij,nhwkc->nhiwjc", weights, extract_patches(4 * flow))
    return flow.reshape(n, 4 * h, 4 * w, 2)


class RAFT(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.fnet = Encoder(weights, "fnet", batch_norm=False)
        self.cnet = Encoder(weights, "cnet", batch_norm=True)
        self.update = UpdateBlock(weights, "update")

    def forward(self, image1, image2):
        image1 = image1 / 127.5 - 1
        image2 = image2 / 127.5 - 1
        fmap1, fmap2 = self.fnet(image1), self.fnet(image2)
        correlation = CorrelationPyramid(fmap1, fmap2)

        state, context = torch.split(
            self.cnet(image1), [hidden_dim, context_dim], dim=3
        )
        state = torch.tanh(state)
        context = torch.relu(context)

        n, h, w, _ = fmap1.shape
        ys, xs = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        start = torch.stack([ys, xs], dim=-1).to(fmap1.dtype).tile(n, 1, 1, 1)
        coords = start
        predictions = []
        for _ in range(iterations):
            coords = coords.detach()  # tf.stop_gradient
            corr = correlation.lookup(coords)
            state, mask, delta = self.update(state, context, corr, coords - start)
            coords = coords + delta
            predictions.append(convex_upsample(coords - start, mask))
        return coords - start, predictions


# Weights of the checkpoint under the names of Keras.

ENCODER = "conv1 layer1.conv1 layer1.conv2 layer2.conv1 layer2.conv2 layer2.downsample.0 conv2"
NORMS = "norm1 layer1.norm1 layer1.norm2 layer2.norm1 layer2.norm2 layer2.downsample.1"
UPDATE = {
    "motion_encoder/corr_1": "encoder.convc1",
    "motion_encoder/corr_2": "encoder.convc2",
    "motion_encoder/flow_1": "encoder.convf1",
    "motion_encoder/flow_2": "encoder.convf2",
    "motion_encoder/fuse": "encoder.conv",
    "flow_head_1": "flow_head.conv1",
    "flow_head_2": "flow_head.conv2",
    "mask_1": "mask.0",
    "mask_2": "mask.2",
}
BATCH_NORM = {
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}


def layer_name(scope, kind, i):
    return f"{scope}/{kind}_{i}" if i else f"{scope}/{kind}"


def hwio(weight):
    return weight.permute(2, 3, 1, 0)


def encoder_weights(ckpt, scope):
    weights = {}
    for i, source in enumerate(ENCODER.split()):
        name = layer_name(scope, "conv2d", i)
        weights[name + "/kernel"] = hwio(ckpt[f"{scope}.{source}.weight"])
        weights[name + "/bias"] = ckpt[f"{scope}.{source}.bias"]
    for i, source in enumerate(NORMS.split()):
        if f"{scope}.{source}.weight" in ckpt:
            name = layer_name(scope, "batch_normalization", i)
            for key, value in BATCH_NORM.items():
                weights[f"{name}/{key}"] = ckpt[f"{scope}.{source}.{value}"]
    return weights


def cell_weights(ckpt, source, index):
    """The reference's z is the share that is new, so that of Keras has the other sign."""
    w = {gate: ckpt[f"{source}.conv{gate}{index}.weight"] for gate in "zrq"}
    b = {gate: ckpt[f"{source}.conv{gate}{index}.bias"] for gate in "zrq"}
    kernel = hwio(torch.cat([-w["z"], w["r"], w["q"]]))
    bias = torch.cat([-b["z"], b["r"], b["q"]])
    recurrent, rest, flow = kernel.split(
        [hidden_dim, kernel.shape[2] - hidden_dim - 2, 2], dim=2
    )
    return {
        "kernel": torch.cat([rest, flow.flip(2)], dim=2),
        "recurrent_kernel": recurrent,
        "bias": bias,
    }


def convert(ckpt):
    weights = encoder_weights(ckpt, "fnet") | encoder_weights(ckpt, "cnet")
    for name, source in UPDATE.items():
        weights[f"update/{name}/kernel"] = hwio(ckpt[f"update_block.{source}.weight"])
        weights[f"update/{name}/bias"] = ckpt[f"update_block.{source}.bias"]

    # windows of the reference run column by column
    kernel = weights["update/motion_encoder/corr_1/kernel"]
    side = 2 * corr_radius + 1
    kernel = (
        kernel.unflatten(2, (corr_levels, side, side)).transpose(3, 4).flatten(2, 4)
    )
    weights["update/motion_encoder/corr_1/kernel"] = kernel

    # (x, y) -> (y, x)
    flow_in, flow_out = "update/motion_encoder/flow_1", "update/flow_head_2"
    weights[flow_in + "/kernel"] = weights[flow_in + "/kernel"].flip(2)
    weights[flow_out + "/kernel"] = weights[flow_out + "/kernel"].flip(3)
    weights[flow_out + "/bias"] = weights[flow_out + "/bias"].flip(0)

    for name, index in (("row", 1), ("column", 2)):
        for key, value in cell_weights(ckpt, "update_block.gru", index).items():
            weights[f"update/gru_{name}/{key}"] = value
    return weights


def model():
    ckpt = torch.load(Path(__file__).with_name("weights.pt"))
    return RAFT(convert(ckpt)).eval()


def to_xy(flow):
    return torch.flip(flow, (3,)).permute(0, 3, 1, 2)


def forward(net, batch):
    flow_low, predictions = net(
        batch["image1"].permute(0, 2, 3, 1), batch["image2"].permute(0, 2, 3, 1)
    )
    output = {f"flow_{i}": to_xy(flow) for i, flow in enumerate(predictions)}
    return {"flow_low": to_xy(flow_low), **output}


def loss(output, batch, gamma=0.8, max_flow=9.0):
    magnitude = torch.linalg.vector_norm(batch["flow"], dim=1)
    valid = (batch["valid"] >= 0.5) & (magnitude < max_flow)
    total = 0.0
    for i in range(iterations):
        error = torch.abs(output[f"flow_{i}"] - batch["flow"])
        error = torch.where(valid.unsqueeze(1), error, 0.0)
        total = total + gamma ** (iterations - 1 - i) * torch.mean(error)
    return total
