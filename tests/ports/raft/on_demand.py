"""RAFT as functions of a flat dict: norms folded, correlations computed where looked up."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

HIDDEN, CONTEXT, MOTION = 12, 8, 16
STEPS, RADIUS, LEVELS = 3, 2, 3
FACTOR = 4


def conv(p, name, x, size, stride=1):
    """A convolution as a product with the patches; size: a number or (height, width)."""
    kh, kw = size if isinstance(size, tuple) else (size, size)
    ho, wo = -(-x.shape[2] // stride), -(-x.shape[3] // stride)
    cols = F.unfold(x, (kh, kw), padding=(kh // 2, kw // 2), stride=stride)
    y = p[name + "/w"] @ cols
    if name + "/b" in p:
        y = y + p[name + "/b"][:, None]
    return y.reshape(len(x), -1, ho, wo)


def conv_relu(p, name, x, size, stride=1):
    return conv(p, name, x, size, stride).clamp_min(0)


def standardize(x):
    """The instance norm of the feature network."""
    var, mean = torch.var_mean(x, dim=(2, 3), correction=0, keepdim=True)
    return (x - mean) * (var + 1e-5).rsqrt()


def encode(p, at, x, norm):
    """norm: what stands behind each convolution but the last."""
    x = norm(conv(p, at + "stem", x, 7, 2)).clamp_min(0)
    for block, stride in ((at + "block1/", 1), (at + "block2/", 2)):
        y = norm(conv(p, block + "a", x, 3, stride)).clamp_min(0)
        y = norm(conv(p, block + "b", y, 3)).clamp_min(0)
        if stride > 1:
            x = norm(conv(p, block + "skip", x, 1, stride))
        x = (x + y).clamp_min(0)
    return conv(p, at + "out", x, 1)


def pixel_grid(h, w, like):
    x = torch.arange(w).to(like).expand(h, w)
    y = torch.arange(h).to(like)[:, None].expand(h, w)
    return torch.stack([x, y])


def sample(image, x, y):
    """Bilinear samples of (b, c, h, w) at pixels x, y of (b, points, window)."""
    h, w = image.shape[2:]
    grid = torch.stack([(2 * x + 1) / w - 1, (2 * y + 1) / h - 1], dim=-1)
    return F.grid_sample(image, grid, align_corners=False)


def correlate(f1, pyramid, coords):
    """Products of each pixel's features with those in its window, of all levels."""
    b, c, h, w = f1.shape
    offsets = torch.arange(-RADIUS, RADIUS + 1).to(f1)
    off_x = offsets.repeat_interleave(len(offsets))
    off_y = offsets.repeat(len(offsets))
    x, y = coords.flatten(2)[..., None].unbind(1)
    found = []
    for level, f2 in enumerate(pyramid):
        scale = 0.5**level
        around = sample(f2, x * scale + off_x, y * scale + off_y)
        found.append(torch.einsum("bcp,bcpk->bkp", f1.flatten(2), around))
    return torch.cat(found, dim=1).reshape(b, -1, h, w) * c**-0.5


def motion_features(p, flow, corr):
    a = conv_relu(p, "motion/corr1", corr, 1)
    a = conv_relu(p, "motion/corr2", a, 3)
    f = conv_relu(p, "motion/flow1", flow, 7)
    f = conv_relu(p, "motion/flow2", f, 3)
    out = conv_relu(p, "motion/out", torch.cat([a, f], 1), 3)
    return torch.cat([out, flow], 1)


def gru(p, name, size, h, m, context):
    """context: what the context adds to z, r and q; it's the same in all steps."""
    add_zr, add_q = context.split([2 * HIDDEN, HIDDEN], 1)
    zr = conv(p, name + "/zr", torch.cat([h, m], 1), size) + add_zr
    z, r = zr.sigmoid().chunk(2, 1)
    q = conv(p, name + "/q", torch.cat([r * h, m], 1), size) + add_q
    return torch.lerp(h, q.tanh(), z)


def flow_update(p, h):
    return conv(p, "flow/2", conv_relu(p, "flow/1", h, 3), 3)


def upsample(p, h, flow):
    """Each fine pixel is a convex combination of 3 x 3 coarse ones."""
    logits = conv(p, "mask/2", conv_relu(p, "mask/1", h, 3), 1)
    share = F.pixel_shuffle(logits, FACTOR).softmax(1)
    padded = F.pad(flow * FACTOR, (1, 1, 1, 1))
    rows, columns = flow.shape[2:]
    fine = torch.zeros_like(flow[:, :1, :1, :1])
    for k in range(9):
        i, j = divmod(k, 3)
        coarse = padded[:, :, i : i + rows, j : j + columns]
        near = coarse.repeat_interleave(FACTOR, 2).repeat_interleave(FACTOR, 3)
        fine = fine + share[:, k : k + 1] * near
    return fine


def network(p, first, second):
    first, second = (first - 127.5) / 127.5, (second - 127.5) / 127.5
    f1 = encode(p, "features/", first, standardize)
    f2 = encode(p, "features/", second, standardize)
    pyramid = [f2]
    for _ in range(LEVELS - 1):
        pyramid.append(F.avg_pool2d(pyramid[-1], 2))

    hc = encode(p, "context/", first, nn.Identity())
    h, c = hc[:, :HIDDEN].tanh(), hc[:, HIDDEN:].clamp_min(0)
    context1 = conv(p, "gru1/context", c, (1, 5))
    context2 = conv(p, "gru2/context", c, (5, 1))

    origin = pixel_grid(f1.shape[2], f1.shape[3], f1)
    flow = torch.zeros_like(f1[:, :2])
    states, flows = [], []
    for _ in range(STEPS):
        known = flow.detach()
        corr = correlate(f1, pyramid, origin + known)
        m = motion_features(p, known, corr)
        h = gru(p, "gru1", (1, 5), h, m, context1)
        h = gru(p, "gru2", (5, 1), h, m, context2)
        flow = known + flow_update(p, h)
        states.append(h)
        flows.append(flow)
    # the masks of all steps are made at once
    fine = upsample(p, torch.cat(states), torch.cat(flows))
    return flow, fine.unflatten(0, (STEPS, -1))


def flat(weight):
    """(out, in, h, w) -> (out, in * h * w), as the patches are."""
    return weight.flatten(1)


def put(p, name, weight, bias=None):
    p[name + "/w"] = flat(weight)
    if bias is not None:
        p[name + "/b"] = bias


def folded(w, conv_at, norm_at, eps=1e-5):
    """A convolution with the batch norm behind it."""
    scale = w[norm_at + ".weight"] / torch.sqrt(w[norm_at + ".running_var"] + eps)
    shift = w[norm_at + ".bias"] - w[norm_at + ".running_mean"] * scale
    weight = w[conv_at + ".weight"] * scale[:, None, None, None]
    return weight, w[conv_at + ".bias"] * scale + shift


def plain(w, at):
    return w[at + ".weight"], w[at + ".bias"]


ENCODER = (
    ("stem", "conv1", "norm1"),
    ("block1/a", "layer1.conv1", "layer1.norm1"),
    ("block1/b", "layer1.conv2", "layer1.norm2"),
    ("block2/a", "layer2.conv1", "layer2.norm1"),
    ("block2/b", "layer2.conv2", "layer2.norm2"),
    ("block2/skip", "layer2.downsample.0", "layer2.downsample.1"),
)


def params(w):
    p = {}
    for name, conv_at, norm_at in ENCODER:
        put(p, "features/" + name, *plain(w, "fnet." + conv_at))
        put(p, "context/" + name, *folded(w, "cnet." + conv_at, "cnet." + norm_at))
    put(p, "features/out", *plain(w, "fnet.conv2"))
    put(p, "context/out", *plain(w, "cnet.conv2"))

    at = "update_block.encoder."
    for name, source in (
        ("corr1", "convc1"),
        ("corr2", "convc2"),
        ("flow1", "convf1"),
        ("flow2", "convf2"),
        ("out", "conv"),
    ):
        put(p, "motion/" + name, *plain(w, at + source))

    for i in (1, 2):
        at = "update_block.gru.conv"
        gates = [w[f"{at}{gate}{i}.weight"] for gate in "zrq"]
        bias = torch.cat([w[f"{at}{gate}{i}.bias"] for gate in "zrq"])
        both = torch.cat(gates)
        state, context, motion = both.split([HIDDEN, CONTEXT, MOTION], dim=1)
        weight = torch.cat([state, motion], dim=1)
        put(p, f"gru{i}/zr", weight[: 2 * HIDDEN])
        put(p, f"gru{i}/q", weight[2 * HIDDEN :])
        put(p, f"gru{i}/context", context, bias)

    put(p, "flow/1", *plain(w, "update_block.flow_head.conv1"))
    put(p, "flow/2", *plain(w, "update_block.flow_head.conv2"))
    put(p, "mask/1", *plain(w, "update_block.mask.0"))
    # the factor that balances the gradients is in the weights here
    put(p, "mask/2", *(0.25 * value for value in plain(w, "update_block.mask.2")))
    return p


class Params(nn.Module):
    def __init__(self, values):
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value.clone().contiguous()))


def model():
    return Params(params(torch.load(Path(__file__).with_name("weights.pt"))))


def forward(net, batch):
    p = dict(net.named_parameters())
    flow, fine = network(p, batch["image1"], batch["image2"])
    return {"flow_low": flow} | {f"flow_{i}": step for i, step in enumerate(fine)}


def loss(output, batch):
    target = batch["flow"]
    steps = torch.stack([output[f"flow_{i}"] for i in range(STEPS)])
    used = (batch["valid"] > 0.5) & ((target**2).sum(1) < 9.0**2)
    errors = ((steps - target).abs() * used[:, None]).mean((1, 2, 3, 4))
    weights = 0.8 ** torch.arange(STEPS - 1, -1, -1).to(errors)
    return weights @ errors
