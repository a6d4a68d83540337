"""As in Caffe: blobs, gathered columns, layers that have backward passes of their own.

Blobs are (channels, images, height, width): a kernel is a matrix on the left, and a dense
block one blob, into which each layer writes the channels that it adds. Colours are BGR.
"""

from pathlib import Path

import torch
from torch import nn
from torch.autograd import Function

GROWTH = 6
CLASS_WEIGHTS = (0.6, 1.0, 1.7, 0.8, 1.3, 2.1, 1.0)
SMOOTHING = 0.1
BN_EPS = 1e-5
BN_FRACTION = 0.1


# Columns.


def im2col(x, kernel, stride, pad):
    """(c, n, h, w) -> (c, kernel * kernel, n, rows, columns)."""
    c, n, h, w = x.shape
    rows, columns = ((side + 2 * pad - kernel) // stride + 1 for side in (h, w))
    padded = x.new_zeros(c, n, h + 2 * pad, w + 2 * pad)
    padded[:, :, pad : pad + h, pad : pad + w] = x
    col = x.new_empty(c, kernel * kernel, n, rows, columns)
    for k in range(kernel * kernel):
        i, j = divmod(k, kernel)
        down = slice(i, i + stride * (rows - 1) + 1, stride)
        across = slice(j, j + stride * (columns - 1) + 1, stride)
        col[:, k] = padded[:, :, down, across]
    return col


def col2im(col, size, kernel, stride, pad):
    """Adds up what ``im2col`` took from one place."""
    c, _, n, rows, columns = col.shape
    h, w = size
    padded = col.new_zeros(c, n, h + 2 * pad, w + 2 * pad)
    for k in range(kernel * kernel):
        i, j = divmod(k, kernel)
        down = slice(i, i + stride * (rows - 1) + 1, stride)
        across = slice(j, j + stride * (columns - 1) + 1, stride)
        padded[:, :, down, across] += col[:, k]
    return padded[:, :, pad : pad + h, pad : pad + w]


# Layers.


class Convolution(Function):
    """weight (out, in * kernel * kernel)."""

    @staticmethod
    def forward(ctx, bottom, weight, kernel, stride, pad):
        col = im2col(bottom, kernel, stride, pad)
        matrix = col.flatten(2).flatten(0, 1)
        top = weight.mm(matrix)
        ctx.save_for_backward(matrix, weight)
        ctx.layout = col.shape, bottom.shape[2:], kernel, stride, pad
        return top.view(len(weight), *col.shape[2:])

    @staticmethod
    def backward(ctx, top_diff):
        matrix, weight = ctx.saved_tensors
        shape, size, kernel, stride, pad = ctx.layout
        top_diff = top_diff.flatten(1)
        weight_diff = top_diff.mm(matrix.t())
        bottom_diff = None
        if ctx.needs_input_grad[0]:
            col_diff = weight.t().mm(top_diff).view(shape)
            bottom_diff = col2im(col_diff, size, kernel, stride, pad)
        return bottom_diff, weight_diff, None, None, None


class BatchNorm(Function):
    """Also returns what it has normalised with."""

    @staticmethod
    def forward(ctx, bottom):
        mean = bottom.mean((1, 2, 3), keepdim=True)
        centred = bottom - mean
        var = centred.square().mean((1, 2, 3), keepdim=True)
        inv_std = 1 / (var + BN_EPS).sqrt()
        top = centred * inv_std
        ctx.save_for_backward(top, inv_std)
        ctx.mark_non_differentiable(mean, var)
        return top, mean, var

    @staticmethod
    def backward(ctx, top_diff, _mean_diff, _var_diff):
        top, inv_std = ctx.saved_tensors
        common = top_diff.mean((1, 2, 3), keepdim=True)
        along = (top_diff * top).mean((1, 2, 3), keepdim=True)
        return (top_diff - common - top * along) * inv_std


class ScaleRelu(Function):
    """affine (2, channels): scale and shift."""

    @staticmethod
    def forward(ctx, bottom, affine):
        scale, shift = affine[:, :, None, None, None]
        top = torch.addcmul(shift, bottom, scale).clamp_(min=0)
        ctx.save_for_backward(bottom, scale, top)
        return top

    @staticmethod
    def backward(ctx, top_diff):
        bottom, scale, top = ctx.saved_tensors
        top_diff = top_diff.masked_fill(top <= 0, 0)
        scale_diff = (top_diff * bottom).sum((1, 2, 3))
        shift_diff = top_diff.sum((1, 2, 3))
        return top_diff * scale, torch.stack([scale_diff, shift_diff])


class MaxPool(Function):
    """Of a rectified blob: zeros outside never win."""

    @staticmethod
    def forward(ctx, bottom, kernel, stride, pad):
        col = im2col(bottom, kernel, stride, pad)
        top, switches = col.max(1, keepdim=True)
        ctx.save_for_backward(switches)
        ctx.layout = col.shape, bottom.shape[2:], kernel, stride, pad
        return top.squeeze(1)

    @staticmethod
    def backward(ctx, top_diff):
        (switches,) = ctx.saved_tensors
        shape, size, kernel, stride, pad = ctx.layout
        col_diff = top_diff.new_zeros(shape)
        col_diff.scatter_(1, switches, top_diff.unsqueeze(1))
        return col2im(col_diff, size, kernel, stride, pad), None, None, None


class AvePool(Function):
    """2 x 2; sizes are rounded up, and a window ends where the blob does."""

    @staticmethod
    def forward(ctx, bottom):
        c, n, h, w = bottom.shape
        top = bottom.new_zeros(c, n, (h + 1) // 2, (w + 1) // 2)
        for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
            part = bottom[:, :, i::2, j::2]
            top[:, :, : part.shape[2], : part.shape[3]] += part
        high = torch.full((top.shape[2],), 2.0)
        high[-1] = 2 - h % 2
        wide = torch.full((top.shape[3],), 2.0)
        wide[-1] = 2 - w % 2
        pool_size = torch.outer(high, wide)
        ctx.save_for_backward(pool_size)
        ctx.size = h, w
        return top / pool_size

    @staticmethod
    def backward(ctx, top_diff):
        (pool_size,) = ctx.saved_tensors
        h, w = ctx.size
        share = top_diff / pool_size
        spread = share.repeat_interleave(2, 2).repeat_interleave(2, 3)
        return spread[:, :, :h, :w]


class SoftmaxWithLoss(Function):
    """score (classes, n); label (n)."""

    @staticmethod
    def forward(ctx, score, label):
        classes, n = score.shape
        class_weight = torch.tensor(CLASS_WEIGHTS)
        score = score - score.amax(0)
        log_prob = score - score.exp().sum(0).log()
        target = torch.full_like(score, SMOOTHING / classes)
        target[label, torch.arange(n)] += 1 - SMOOTHING
        target = target * class_weight[:, None]
        normalizer = class_weight[label].sum()
        ctx.save_for_backward(log_prob, target, normalizer)
        return -(target * log_prob).sum() / normalizer

    @staticmethod
    def backward(ctx, top_diff):
        log_prob, target, normalizer = ctx.saved_tensors
        score_diff = log_prob.exp() * target.sum(0) - target
        return score_diff * (top_diff / normalizer), None


# The net.


class Net(nn.Module):
    def __init__(self, blobs, stats):
        super().__init__()
        for name, blob in blobs.items():
            self.register_parameter(name, nn.Parameter(blob.clone().contiguous()))
        for name, stat in stats.items():
            self.register_buffer(name, stat.clone().contiguous())

    def conv(self, name, bottom, kernel=1, stride=1):
        weight = getattr(self, name + "_w")
        return Convolution.apply(bottom, weight, kernel, stride, kernel // 2)

    def norm(self, name, bottom):
        """BatchNorm, Scale and ReLU."""
        normed, mean, var = BatchNorm.apply(bottom)
        with torch.no_grad():
            m = bottom[0].numel()
            batch = torch.stack([mean.flatten(), var.flatten() * m / (m - 1)])
            stat = getattr(self, name + "_stat")
            stat.add_(batch - stat, alpha=BN_FRACTION)
        return ScaleRelu.apply(normed, getattr(self, name + "_affine"))

    def inner_product(self, name, bottom):
        """(in, n) -> (out, n)."""
        bias = getattr(self, name + "_b")
        return torch.addmm(bias[:, None], getattr(self, name + "_w"), bottom)

    def dense_block(self, name, bottom, layers):
        used = len(bottom)
        top = bottom.new_zeros(used + layers * GROWTH, *bottom.shape[1:])
        top[:used] = bottom
        for i in range(layers):
            x = top[:used]
            x = self.conv(f"{name}_{i}_x1", self.norm(f"{name}_{i}_x1_bn", x))
            x = self.conv(f"{name}_{i}_x2", self.norm(f"{name}_{i}_x2_bn", x), 3)
            top[used : used + GROWTH] = x
            used += GROWTH
        return top

    def excite(self, name, bottom):
        h = self.inner_product(name + "_down", bottom.mean((2, 3))).relu()
        gate = self.inner_product(name + "_up", h).sigmoid()
        return torch.einsum("cnhw,cn->cnhw", bottom, gate)

    def forward(self, data):
        x = self.norm("conv1_bn", self.conv("conv1", data, 3, 2))
        x = MaxPool.apply(x, 3, 2, 1)
        x = self.excite("se2", self.dense_block("conv2", x, 3))
        x = self.conv("conv2_blk", self.norm("conv2_blk_bn", x))
        x = AvePool.apply(x)
        aux = self.inner_product("fc_aux", x.mean((2, 3)))
        x = self.excite("se3", self.dense_block("conv3", x, 3))
        x = self.norm("conv3_blk_bn", x)
        return self.inner_product("fc6", x.mean((2, 3))), aux


# Loading.


def read(state):
    """Return blobs that are learned, and those that are gathered."""
    blobs, stats = {}, {}

    def put_conv(name, source):
        blobs[name + "_w"] = state[source + ".weight"].flatten(1)

    def put_fc(name, source):
        put_conv(name, source)
        blobs[name + "_b"] = state[source + ".bias"]

    def put_norm(name, source):
        blobs[name + "_affine"] = torch.stack(
            [state[source + ".weight"], state[source + ".bias"]]
        )
        stats[name + "_stat"] = torch.stack(
            [state[source + ".running_mean"], state[source + ".running_var"]]
        )

    blobs["conv1_w"] = state["conv0.weight"].flip(1).flatten(1)
    put_norm("conv1_bn", "norm0")
    for block in (1, 2):
        target = f"conv{block + 1}"
        for i in range(3):
            source = f"denseblock{block}.denselayer{i + 1}"
            put_norm(f"{target}_{i}_x1_bn", source + ".norm1")
            put_conv(f"{target}_{i}_x1", source + ".conv1")
            put_norm(f"{target}_{i}_x2_bn", source + ".norm2")
            put_conv(f"{target}_{i}_x2", source + ".conv2")
        put_fc(f"se{block + 1}_down", f"se{block}.fc1")
        put_fc(f"se{block + 1}_up", f"se{block}.fc2")
    put_norm("conv2_blk_bn", "transition1.norm")
    put_conv("conv2_blk", "transition1.conv")
    put_fc("fc_aux", "aux_classifier")
    put_norm("conv3_blk_bn", "norm5")
    put_fc("fc6", "classifier")
    return blobs, stats


def model():
    return Net(*read(torch.load(Path(__file__).with_name("weights.pt"))))


def transform(image):
    """RGB bytes (n, 3, h, w) -> the data blob (3, n, h, w), BGR."""
    data = image.flip(1).transpose(0, 1)
    mean = torch.tensor([103.53, 116.28, 123.675])
    scale = torch.tensor([57.375, 57.12, 58.395])
    return (data - mean.view(3, 1, 1, 1)) / scale.view(3, 1, 1, 1)


def forward(net, batch):
    score, aux = net(transform(batch["image"]))
    return {"logits": score.t(), "aux": aux.t()}


def loss(output, batch):
    main = SoftmaxWithLoss.apply(output["logits"].t(), batch["label"])
    aux = SoftmaxWithLoss.apply(output["aux"].t(), batch["label"])
    return main + 0.4 * aux


class NesterovSolver(torch.optim.Optimizer):
    """The history has the rate in it."""

    def __init__(self, params, base_lr, momentum, weight_decay):
        super().__init__(params, {"decay_mult": 1.0})
        self.base_lr = base_lr
        self.momentum = momentum
        self.weight_decay = weight_decay

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            local_decay = self.weight_decay * group["decay_mult"]
            for blob in group["params"]:
                if blob.grad is None:
                    continue
                diff = blob.grad + local_decay * blob
                if blob not in self.state:
                    self.state[blob] = {"history": torch.zeros_like(blob)}
                history = self.state[blob]["history"]
                before = history.clone()
                history.mul_(self.momentum).add_(diff, alpha=self.base_lr)
                update = (1 + self.momentum) * history - self.momentum * before
                blob.sub_(update)


def optimizer(net):
    weights = [blob for name, blob in net.named_parameters() if name.endswith("_w")]
    rest = [blob for name, blob in net.named_parameters() if not name.endswith("_w")]
    params = [{"params": weights}, {"params": rest, "decay_mult": 0.0}]
    return NesterovSolver(params, base_lr=0.05, momentum=0.9, weight_decay=1e-3)
