"""After PaddleClas: weights of linear layers are [in, out], q, k and v are one product.

The pictures stay red first: the kernels of the stem are turned when they are read.
"""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

CLASS_NUM = 6
NUM_HEADS = 4
EPSILON_SMOOTH = 0.1

# ------------------------------------------------------------------------- layers


class SwishFunction(torch.autograd.Function):
    """Keeps the input alone."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x / (1.0 + torch.exp(-x))

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        sig = torch.sigmoid(x)
        return dy * (sig + x * sig * (1.0 - sig))


class Swish(nn.Module):
    def forward(self, x):
        return SwishFunction.apply(x)


class Linear(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features))

    def forward(self, x):
        return torch.matmul(x, self.weight) + self.bias


class BatchNorm(nn.Module):
    def __init__(self, num_channels, momentum=0.9, epsilon=1e-05):
        super().__init__()
        self._momentum, self._epsilon = momentum, epsilon
        self.weight = nn.Parameter(torch.empty(num_channels))
        self.bias = nn.Parameter(torch.empty(num_channels))
        self.register_buffer("_mean", torch.zeros(num_channels))
        self.register_buffer("_variance", torch.ones(num_channels))

    def forward(self, x):
        if self.training:
            var, mean = torch.var_mean(x, dim=[0, 2, 3], correction=0)
            m, n = self._momentum, x.numel() / x.shape[1]
            with torch.no_grad():
                self._mean.copy_(m * self._mean + (1 - m) * mean)
                self._variance.copy_(m * self._variance + (1 - m) * var * n / (n - 1))
        else:
            mean, var = self.get_buffer("_mean"), self.get_buffer("_variance")
        scale = self.weight / torch.sqrt(var + self._epsilon)
        shift = self.bias - mean * scale
        return x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)


class LayerNorm(nn.Module):
    def __init__(self, normalized_shape, epsilon=1e-05):
        super().__init__()
        self._epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(normalized_shape))
        self.bias = nn.Parameter(torch.empty(normalized_shape))

    def forward(self, x):
        var, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
        return (x - mean) * torch.rsqrt(var + self._epsilon) * self.weight + self.bias


class ConvBnAct(nn.Module):
    def __init__(self, cin, cout, k, stride=1, groups=1, act=None):
        super().__init__()
        self.stride, self.padding, self.groups = stride, (k - 1) // 2, groups
        self.weight = nn.Parameter(torch.empty(cout, cin // groups, k, k))
        self.bn = BatchNorm(cout)
        self.act = act

    def forward(self, x):
        x = F.conv2d(
            x,
            self.weight,
            stride=self.stride,
            padding=self.padding,
            groups=self.groups,
        )
        x = self.bn(x)
        return x if self.act is None else self.act(x)


# -------------------------------------------------------------------------- model


class MV2Block(nn.Module):
    def __init__(self, inp, oup, stride=1, expansion=2):
        super().__init__()
        hidden_dim = inp * expansion
        self.use_res_connect = stride == 1 and inp == oup
        self.pw = ConvBnAct(inp, hidden_dim, 1, act=Swish())
        self.dw = ConvBnAct(
            hidden_dim, hidden_dim, 3, stride, groups=hidden_dim, act=Swish()
        )
        self.pwl = ConvBnAct(hidden_dim, oup, 1)

    def forward(self, x):
        y = self.pwl(self.dw(self.pw(x)))
        if self.use_res_connect:
            y = y + x
        return y


class Attention(nn.Module):
    """[b, p, n, d]: over n, for each p alone."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.dim_head = heads, dim // heads
        self.scale = self.dim_head**-0.5
        self.qkv = Linear(dim, 3 * dim)
        self.proj = Linear(dim, dim)

    def forward(self, x):
        b, p, n, d = x.shape
        qkv = self.qkv(x).reshape(b, p, n, 3, self.heads, self.dim_head)
        q, k, v = qkv.permute(3, 0, 1, 4, 2, 5)
        attn = torch.matmul(q * self.scale, k.transpose(-1, -2))
        attn = F.softmax(attn, dim=-1)
        out = torch.matmul(attn, v)
        out = out.transpose(2, 3).reshape(b, p, n, d)
        return self.proj(out)


class FeedForward(nn.Module):
    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.linear1 = Linear(dim, hidden_dim)
        self.act = Swish()
        self.linear2 = Linear(hidden_dim, dim)

    def forward(self, x):
        return self.linear2(self.act(self.linear1(x)))


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, mlp_dim):
        super().__init__()
        self.attn_norm = LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.ffn_norm = LayerNorm(dim)
        self.ffn = FeedForward(dim, mlp_dim)

    def forward(self, x):
        x = self.attn(self.attn_norm(x)) + x
        return self.ffn(self.ffn_norm(x)) + x


def resample(x, h, w):
    """Bilinear; beyond the edge its pixels go on."""
    theta = torch.eye(2, 3).expand(x.shape[0], 2, 3)
    grid = F.affine_grid(theta, [*x.shape[:2], h, w], align_corners=False)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


class MobileViTBlock(nn.Module):
    def __init__(self, channel, dim, depth=2, patch=2):
        super().__init__()
        self.patch = patch
        self.conv1 = ConvBnAct(channel, channel, 3, act=Swish())
        self.conv2 = nn.Conv2d(channel, dim, 1, bias=False)
        self.transformer = nn.Sequential(
            *[EncoderLayer(dim, NUM_HEADS, 2 * dim) for _ in range(depth)]
        )
        self.norm = LayerNorm(dim)
        self.conv3 = ConvBnAct(dim, channel, 1, act=Swish())
        self.conv4 = ConvBnAct(2 * channel, channel, 3, act=Swish())

    def to_patches(self, x):
        """[b, d, h, w] -> [b, p, n, d]; a p is every second row and column."""
        s = self.patch
        parts = [x[:, :, i::s, j::s] for i in range(s) for j in range(s)]
        return torch.stack(parts, dim=1).flatten(3).permute(0, 1, 3, 2)

    def from_patches(self, x, h, w):
        x = x.permute(0, 3, 1, 2).flatten(1, 2)
        x = x.unflatten(-1, (h // self.patch, w // self.patch))
        return F.pixel_shuffle(x, self.patch)

    def forward(self, x):
        shortcut = x
        x = self.conv2(self.conv1(x))
        h, w = x.shape[-2:]
        new_h, new_w = h + h % self.patch, w + w % self.patch
        if (new_h, new_w) != (h, w):
            x = resample(x, new_h, new_w)
        x = self.to_patches(x)
        x = self.norm(self.transformer(x))
        x = self.from_patches(x, new_h, new_w)
        if (new_h, new_w) != (h, w):
            x = resample(x, h, w)
        x = self.conv3(x)
        return self.conv4(torch.concat([shortcut, x], dim=1))


class MobileViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = ConvBnAct(3, 8, 3, stride=2, act=Swish())
        self.mv2_1 = MV2Block(8, 12)
        self.mv2_2 = MV2Block(12, 16, stride=2)
        self.mv2_3 = MV2Block(16, 16)
        self.mvit_1 = MobileViTBlock(16, 20)
        self.mv2_4 = MV2Block(16, 24, stride=2)
        self.mvit_2 = MobileViTBlock(24, 24)
        self.conv2 = ConvBnAct(24, 48, 1, act=Swish())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = Linear(48, CLASS_NUM)

    def forward(self, x):
        x = self.conv1(x)
        x = self.mv2_3(self.mv2_2(self.mv2_1(x)))
        x = self.mvit_1(x)
        x = self.mvit_2(self.mv2_4(x))
        x = self.pool(self.conv2(x))
        return self.fc(x.flatten(1))


# ------------------------------------------------------------------------ weights


class Converter:
    """Fills a dict of Paddle from one of torch."""

    def __init__(self, torch_params):
        self.src, self.dst = torch_params, {}

    def norm(self, name, src):
        self.dst[f"{name}.weight"] = self.src[f"{src}.weight"]
        self.dst[f"{name}.bias"] = self.src[f"{src}.bias"]
        if f"{src}.running_mean" in self.src:
            self.dst[f"{name}._mean"] = self.src[f"{src}.running_mean"]
            self.dst[f"{name}._variance"] = self.src[f"{src}.running_var"]

    def conv(self, name, src):
        self.dst[f"{name}.weight"] = self.src[f"{src}.conv.weight"]
        self.norm(f"{name}.bn", f"{src}.norm")

    def linear(self, name, src):
        self.dst[f"{name}.weight"] = self.src[f"{src}.weight"].t()
        self.dst[f"{name}.bias"] = self.src[f"{src}.bias"]

    def qkv(self, name, src):
        weights = [self.src[f"{src}.{one}.weight"].t() for one in "qkv"]
        biases = [self.src[f"{src}.{one}.bias"] for one in "qkv"]
        self.dst[f"{name}.weight"] = torch.concat(weights, dim=1)
        self.dst[f"{name}.bias"] = torch.concat(biases)

    def mv2(self, name, src):
        self.conv(f"{name}.pw", f"{src}.exp_1x1")
        self.conv(f"{name}.dw", f"{src}.conv_3x3")
        self.conv(f"{name}.pwl", f"{src}.red_1x1")

    def layer(self, name, src):
        self.norm(f"{name}.attn_norm", f"{src}.norm1")
        self.qkv(f"{name}.attn.qkv", f"{src}.attn")
        self.linear(f"{name}.attn.proj", f"{src}.attn.proj")
        self.norm(f"{name}.ffn_norm", f"{src}.norm2")
        self.linear(f"{name}.ffn.linear1", f"{src}.fc1")
        self.linear(f"{name}.ffn.linear2", f"{src}.fc2")

    def mvit(self, name, src):
        self.conv(f"{name}.conv1", f"{src}.local_3x3")
        self.dst[f"{name}.conv2.weight"] = self.src[f"{src}.local_1x1.weight"]
        for i in range(2):
            self.layer(f"{name}.transformer.{i}", f"{src}.layers.{i}")
        self.norm(f"{name}.norm", f"{src}.norm")
        self.conv(f"{name}.conv3", f"{src}.conv_proj")
        self.conv(f"{name}.conv4", f"{src}.fusion")

    def run(self):
        self.conv("conv1", "stem")
        self.dst["conv1.weight"] = self.dst["conv1.weight"].flip(1)
        self.mv2("mv2_1", "layer_1.0")
        self.mv2("mv2_2", "layer_2.0")
        self.mv2("mv2_3", "layer_2.1")
        self.mvit("mvit_1", "layer_3.0")
        self.mv2("mv2_4", "layer_4.0")
        self.mvit("mvit_2", "layer_4.1")
        self.conv("conv2", "exp_1x1")
        self.linear("fc", "classifier")
        return self.dst


def model():
    net = MobileViT()
    torch_params = torch.load(Path(__file__).with_name("weights.pt"))
    net.load_state_dict(Converter(torch_params).run())
    return net


# --------------------------------------------------------------------------- data

NORMALIZE = {"scale": 1.0 / 255.0, "mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0]}


def normalize_image(img):
    mean, std = torch.tensor(NORMALIZE["mean"]), torch.tensor(NORMALIZE["std"])
    return (img.float() * NORMALIZE["scale"] - mean) / std


def to_chw(img):
    return img.permute(0, 3, 1, 2).contiguous()


def forward(net, batch):
    return net(to_chw(normalize_image(batch["image"])))


# --------------------------------------------------------------------------- loss


def label_smooth(one_hot, epsilon):
    return (1.0 - epsilon) * one_hot + epsilon / one_hot.shape[-1]


class CELoss:
    def __init__(self, epsilon, ignore_index=-1):
        self.epsilon, self.ignore_index = epsilon, ignore_index

    def __call__(self, x, label):
        known = label != self.ignore_index
        x, label = x[known], label[known]
        target = label_smooth(F.one_hot(label, CLASS_NUM).float(), self.epsilon)
        log_probs = F.log_softmax(x, dim=-1)
        return torch.sum(-target * log_probs, dim=-1).mean()


def loss(output, batch):
    return CELoss(EPSILON_SMOOTH)(output, batch["label"])


# ---------------------------------------------------------------------- optimizer


class CosineAnnealing:
    def __init__(self, learning_rate, step_each, eta_min):
        self.learning_rate, self.eta_min = learning_rate, eta_min
        self.step_each = step_each

    def get_lr(self, epoch):
        cos = math.cos(math.pi * min(epoch, self.step_each) / self.step_each)
        return self.eta_min + (self.learning_rate - self.eta_min) * (1 + cos) / 2


class LinearWarmup:
    def __init__(self, after, warmup_steps, start_lr, end_lr):
        self.after, self.warmup_steps = after, warmup_steps
        self.start_lr, self.end_lr = start_lr, end_lr
        self.last_epoch = 0

    def get_lr(self):
        if self.last_epoch >= self.warmup_steps:
            return self.after.get_lr(self.last_epoch - self.warmup_steps)
        share = self.last_epoch / self.warmup_steps
        return self.end_lr * share + self.start_lr * (1.0 - share)

    def step(self):
        self.last_epoch += 1


class Momentum(torch.optim.Optimizer):
    """Nesterov; L2 decay, but not of what has one dimension."""

    def __init__(self, scheduler, momentum, parameters, l2_decay):
        super().__init__(parameters, {})
        self.scheduler, self.mu, self.l2_decay = scheduler, momentum, l2_decay

    def regularized(self, param):
        if len(param.shape) == 1:
            return param.grad
        return param.grad + self.l2_decay * param

    @torch.no_grad()
    def step(self, closure=None):
        lr = self.scheduler.get_lr()
        for param in self.param_groups[0]["params"]:
            g = self.regularized(param)
            accumulators = self.state[param]
            velocity = accumulators.get("velocity_0")
            velocity = g.clone() if velocity is None else self.mu * velocity + g
            accumulators["velocity_0"] = velocity
            param.copy_(param - (g + velocity * self.mu) * lr)
        self.scheduler.step()


def optimizer(net):
    cosine = CosineAnnealing(0.1, step_each=36, eta_min=0.01)
    scheduler = LinearWarmup(cosine, warmup_steps=4, start_lr=0.01, end_lr=0.1)
    return Momentum(scheduler, 0.9, net.parameters(), l2_decay=0.05)
