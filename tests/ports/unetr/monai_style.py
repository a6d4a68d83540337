"""After MONAI: volumes are [batch, channel, x, y, z], patches go through a linear layer.

What comes in is [batch, channel, z, y, x], and predictions are turned back to that.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

ROI_SIZE = (20, 16, 12)
PATCH_SIZE = (4, 4, 4)
IN_CHANNELS, OUT_CHANNELS = 2, 4
HIDDEN_SIZE, MLP_DIM, NUM_HEADS, NUM_LAYERS = 24, 48, 3, 3
FEATURE_SIZE = 8
UNLABELLED = 255

# --------------------------------------------------------------------- transformer


class PatchEmbeddingBlock(nn.Module):
    """The "perceptron" kind: a patch is flattened as (p1 p2 p3 c)."""

    def __init__(self, in_channels, img_size, patch_size, hidden_size):
        super().__init__()
        self.patch_size = patch_size
        self.grid = [side // p for side, p in zip(img_size, patch_size)]
        n_patches = self.grid[0] * self.grid[1] * self.grid[2]
        patch_dim = in_channels * patch_size[0] * patch_size[1] * patch_size[2]
        self.patch_embeddings = nn.Linear(patch_dim, hidden_size)
        self.position_embeddings = nn.Parameter(torch.zeros(n_patches, hidden_size))

    def forward(self, x):
        (h, w, d), (p1, p2, p3) = self.grid, self.patch_size
        b, c = x.shape[:2]
        x = x.reshape(b, c, h, p1, w, p2, d, p3)
        x = x.permute(0, 2, 4, 6, 3, 5, 7, 1)
        x = x.reshape(b, h * w * d, p1 * p2 * p3 * c)
        return self.patch_embeddings(x) + self.position_embeddings


class MLPBlock(nn.Module):
    def __init__(self, hidden_size, mlp_dim):
        super().__init__()
        self.linear1 = nn.Linear(hidden_size, mlp_dim)
        self.linear2 = nn.Linear(mlp_dim, hidden_size)
        self.fn = nn.GELU()

    def forward(self, x):
        return self.linear2(self.fn(self.linear1(x)))


class SABlock(nn.Module):
    """Each head has its query, key and value side by side in the fused layer."""

    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.qkv = nn.Linear(hidden_size, hidden_size * 3, bias=False)
        self.out_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (self.num_heads, 3, self.head_dim))
        q, k, v = torch.unbind(qkv, dim=3)
        att_mat = torch.einsum("bxhd,byhd->bhxy", q, k) / self.head_dim**0.5
        att_mat = torch.softmax(att_mat, dim=-1)
        x = torch.einsum("bhxy,byhd->bxhd", att_mat, v)
        return self.out_proj(x.flatten(2))


class TransformerBlock(nn.Module):
    def __init__(self, hidden_size, mlp_dim, num_heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size, eps=1e-6)
        self.attn = SABlock(hidden_size, num_heads)
        self.norm2 = nn.LayerNorm(hidden_size, eps=1e-6)
        self.mlp = MLPBlock(hidden_size, mlp_dim)
        self.attn_gain = nn.Parameter(torch.ones(hidden_size))
        self.mlp_gain = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x):
        x = torch.addcmul(x, self.attn(self.norm1(x)), self.attn_gain)
        return torch.addcmul(x, self.mlp(self.norm2(x)), self.mlp_gain)


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embedding = PatchEmbeddingBlock(
            IN_CHANNELS, ROI_SIZE, PATCH_SIZE, HIDDEN_SIZE
        )
        self.blocks = nn.ModuleList()
        for _ in range(NUM_LAYERS):
            self.blocks.append(TransformerBlock(HIDDEN_SIZE, MLP_DIM, NUM_HEADS))
        self.norm = nn.LayerNorm(HIDDEN_SIZE, eps=1e-6)

    def forward(self, x):
        x = self.patch_embedding(x)
        hidden_states_out = []
        for blk in self.blocks:
            x = blk(x)
            hidden_states_out.append(x)
        return self.norm(x), hidden_states_out


# ------------------------------------------------------------------------- decoder


class InstanceNorm(nn.Module):
    """A group norm with a group for each channel."""

    def __init__(self, num_features, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))

    def forward(self, x):
        return F.group_norm(x, x.shape[1], self.weight, self.bias, self.eps)


def get_act_layer():
    return nn.LeakyReLU(negative_slope=0.01)


def get_conv_layer(in_channels, out_channels, kernel_size=3, bias=False):
    return nn.Conv3d(
        in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=bias
    )


class UnetResBlock(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv1 = get_conv_layer(in_channels, out_channels)
        self.conv2 = get_conv_layer(out_channels, out_channels)
        self.conv3 = get_conv_layer(in_channels, out_channels, kernel_size=1)
        self.norm1 = InstanceNorm(out_channels)
        self.norm2 = InstanceNorm(out_channels)
        self.norm3 = InstanceNorm(out_channels)
        self.lrelu = get_act_layer()

    def forward(self, inp):
        residual = self.norm3(self.conv3(inp))
        out = self.lrelu(self.norm1(self.conv1(inp)))
        out = self.norm2(self.conv2(out))
        out = out + residual
        return self.lrelu(out)


class UnetrPrUpBlock(nn.Module):
    """Transposed convolutions, one for each doubling."""

    def __init__(self, in_channels: int, widths: Sequence[int]):
        super().__init__()
        self.blocks = nn.ModuleList()
        for width in widths:
            self.blocks.append(
                nn.Sequential(
                    nn.ConvTranspose3d(in_channels, width, 2, 2, bias=False),
                    InstanceNorm(width),
                    get_act_layer(),
                )
            )
            in_channels = width

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class UnetrUpBlock(nn.Module):
    def __init__(self, in_channels, out_channels, num_skips):
        super().__init__()
        self.transp_conv = UnetrPrUpBlock(in_channels, [out_channels])
        self.conv_block = UnetResBlock((1 + num_skips) * out_channels, out_channels)

    def forward(self, inp, *skips):
        out = self.transp_conv(inp)
        return self.conv_block(torch.cat((out, *skips), dim=1))


class UNETR(nn.Module):
    def __init__(self):
        super().__init__()
        fs = FEATURE_SIZE
        self.feat_size = tuple(r // p for r, p in zip(ROI_SIZE, PATCH_SIZE))
        self.vit = ViT()
        self.encoder1 = UnetResBlock(IN_CHANNELS, fs)
        self.encoder2 = UnetrPrUpBlock(HIDDEN_SIZE, [2 * fs, fs])
        self.encoder3 = UnetrPrUpBlock(HIDDEN_SIZE, [2 * fs])
        self.decoder3 = UnetrUpBlock(HIDDEN_SIZE, 2 * fs, num_skips=1)
        self.decoder2 = UnetrUpBlock(2 * fs, fs, num_skips=2)
        self.out = get_conv_layer(fs, OUT_CHANNELS, kernel_size=1, bias=True)
        self.out_ds = get_conv_layer(2 * fs, OUT_CHANNELS, kernel_size=1, bias=True)

    def proj_feat(self, x):
        x = x.view(x.size(0), *self.feat_size, x.size(-1))
        return x.permute(0, 4, 1, 2, 3).contiguous()

    def forward(self, x_in):
        x, hidden_states_out = self.vit(x_in)
        enc1 = self.encoder1(x_in)
        enc2 = self.encoder2(self.proj_feat(hidden_states_out[0]))
        enc3 = self.encoder3(self.proj_feat(hidden_states_out[1]))
        dec3 = self.decoder3(self.proj_feat(x), enc3)
        dec2 = self.decoder2(dec3, enc2, enc1)
        return self.out(dec2), self.out_ds(dec3)


# ------------------------------------------------------------------------- weights


def reversed_axes(weight):
    """Kernels have x first here."""
    return weight.permute(0, 1, 4, 3, 2)


def vit_weights(state):
    grid = [r // p for r, p in zip(ROI_SIZE, PATCH_SIZE)]
    proj = state["patch_embed.proj.weight"].permute(0, 4, 3, 2, 1)
    pos = state["patch_embed.pos_embed"][0].view(*grid[::-1], HIDDEN_SIZE)
    new = {
        "patch_embedding.patch_embeddings.weight": proj.flatten(1),
        "patch_embedding.patch_embeddings.bias": state["patch_embed.proj.bias"],
        "patch_embedding.position_embeddings": pos.permute(2, 1, 0, 3).flatten(0, 2),
        "norm.weight": state["norm.weight"],
        "norm.bias": state["norm.bias"],
    }
    for i in range(NUM_LAYERS):
        qkv = state[f"blocks.{i}.attn.qkv.weight"]
        qkv = qkv.view(3, NUM_HEADS, -1, HIDDEN_SIZE).transpose(0, 1)
        new[f"blocks.{i}.attn.qkv.weight"] = qkv.reshape(-1, HIDDEN_SIZE)
        new[f"blocks.{i}.attn_gain"] = state[f"blocks.{i}.ls1.gamma"]
        new[f"blocks.{i}.mlp_gain"] = state[f"blocks.{i}.ls2.gamma"]
        for ours, theirs in (
            ("norm1", "norm1"),
            ("norm2", "norm2"),
            ("attn.out_proj", "attn.proj"),
            ("mlp.linear1", "fc1"),
            ("mlp.linear2", "fc2"),
        ):
            for leaf in ("weight", "bias"):
                new[f"blocks.{i}.{ours}.{leaf}"] = state[f"blocks.{i}.{theirs}.{leaf}"]
    return {f"vit.{key}": value for key, value in new.items()}


DECODER_KEYS = {
    "encoder1": "stem",
    "encoder2.blocks.0": "skip1.0",
    "encoder2.blocks.1": "skip1.1",
    "encoder3.blocks.0": "skip2",
    "decoder3.transp_conv.blocks.0": "up2",
    "decoder3.conv_block": "dec2",
    "decoder2.transp_conv.blocks.0": "up1",
    "decoder2.conv_block": "dec1",
    "out": "head_full",
    "out_ds": "head_half",
}
TRANSP_KEYS = {".0.weight": ".conv.weight", ".1.": ".norm."}


def decoder_weights(state, names):
    new = {}
    for name in names:
        prefix = max((k for k in DECODER_KEYS if name.startswith(k + ".")), key=len)
        rest = name[len(prefix) :]
        if ".blocks." in prefix:
            for ours, theirs in TRANSP_KEYS.items():
                rest = rest.replace(ours, theirs)
        weight = state[DECODER_KEYS[prefix] + rest]
        new[name] = reversed_axes(weight) if weight.ndim == 5 else weight
    return new


def model():
    net = UNETR()
    state = torch.load(Path(__file__).with_name("weights.pt"))
    names = [name for name in net.state_dict() if not name.startswith("vit.")]
    net.load_state_dict(vit_weights(state) | decoder_weights(state, names))
    return net


# ---------------------------------------------------------------------------- data


class NormalizeIntensity:
    """For each channel, by the voxels of the foreground; the others become 0."""

    def __call__(self, img):
        out = torch.zeros_like(img)
        slices = torch.amax(img, dim=0) > 0
        for i, channel in enumerate(img):
            inside = channel[slices]
            std, mean = torch.std_mean(inside, correction=0)
            out[i][slices] = (inside - mean) / std
        return out


def swap_zx(x):
    """(z, y, x) <-> (x, y, z)."""
    return torch.transpose(x, 2, 4).contiguous()


def forward(net, batch):
    transform = NormalizeIntensity()
    img = torch.stack([transform(item) for item in batch["image"]])
    full, half = net(swap_zx(img))
    return {"full": swap_zx(full), "half": swap_zx(half)}


# ---------------------------------------------------------------------------- loss


class MaskedDiceCELoss(nn.Module):
    def __init__(self, ce_weight, label_smoothing, smooth_nr, smooth_dr):
        super().__init__()
        self.ce_weight = torch.tensor(ce_weight)
        self.label_smoothing = label_smoothing
        self.smooth_nr, self.smooth_dr = smooth_nr, smooth_dr
        self.include_background = False

    def ce(self, log_prob, target, mask):
        """[voxels, classes], [voxels]; the mean is over the weights of the targets."""
        n_pred_ch = log_prob.shape[1]
        weight = self.ce_weight[target] * mask
        nll = -log_prob.gather(1, target[:, None]).squeeze(1) * weight
        smooth = -(log_prob @ self.ce_weight) * mask / n_pred_ch
        eps = self.label_smoothing
        total = (1.0 - eps) * nll.sum() + eps * smooth.sum()
        return total / weight.sum()

    def dice(self, prob, target, mask):
        """All volumes of the batch together."""
        one_hot = torch.eye(prob.shape[1])[target] * mask[:, None]
        prob = prob * mask[:, None]
        if not self.include_background:
            prob, one_hot = prob[:, 1:], one_hot[:, 1:]
        intersection = torch.sum(prob * one_hot, dim=0)
        denominator = torch.sum(one_hot, dim=0) + torch.sum(prob, dim=0)
        f = 1.0 - (2.0 * intersection + self.smooth_nr) / (denominator + self.smooth_dr)
        return torch.mean(f)

    def forward(self, pred, label):
        log_prob = torch.log_softmax(pred.movedim(1, -1).flatten(0, -2), dim=-1)
        label = label.flatten().long()
        mask = (label != UNLABELLED).float()
        label = label.masked_fill(label == UNLABELLED, 0)
        return self.ce(log_prob, label, mask) + self.dice(log_prob.exp(), label, mask)


class DeepSupervisionLoss(nn.Module):
    """Each scale counts half of the one above it; together they come to 1."""

    def __init__(self, base):
        super().__init__()
        self.loss = base

    def forward(self, preds, label):
        weights = [0.5**i for i in range(len(preds))]
        total = 0.0
        for i, (w, pred) in enumerate(zip(weights, preds)):
            step = 2**i
            target = label[:, ::step, ::step, ::step]
            total = total + w / sum(weights) * self.loss(pred, target)
        return total


loss_function = DeepSupervisionLoss(
    MaskedDiceCELoss(
        ce_weight=[0.4, 1.2, 0.9, 1.5],
        label_smoothing=0.1,
        smooth_nr=1.0,
        smooth_dr=1.0,
    )
)


def loss(output, batch):
    return loss_function([output["full"], output["half"]], batch["label"])


# ----------------------------------------------------------------------- optimizer


class Trainer(torch.optim.AdamW):
    """AdamW that clips by the norm and lets its rate fall after every iteration."""

    def __init__(self, groups, initial_lr, max_steps, max_norm, **kwargs):
        super().__init__(groups, lr=initial_lr, **kwargs)
        self.initial_lr, self.max_steps, self.max_norm = initial_lr, max_steps, max_norm
        self.current_step = 0

    def grads(self):
        return [p.grad for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        grads = self.grads()
        norm = torch.sqrt(sum(torch.sum(g * g) for g in grads))
        scale = torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)
        for g in grads:
            g.mul_(scale)
        result = super().step(closure)
        self.current_step += 1
        for group in self.param_groups:
            ratio = 1.0 - self.current_step / self.max_steps
            group["lr"] = self.initial_lr * ratio**0.9
        return result


def optimizer(net):
    skip = set()
    for mod_name, mod in net.named_modules():
        if isinstance(mod, nn.LayerNorm | InstanceNorm):
            skip.update((f"{mod_name}.weight", f"{mod_name}.bias"))
    skip.add("vit.patch_embedding.position_embeddings")
    named = dict(net.named_parameters())
    return Trainer(
        [
            {"params": [p for n, p in named.items() if n not in skip]},
            {"params": [p for n, p in named.items() if n in skip], "weight_decay": 0.0},
        ],
        initial_lr=4e-3,
        max_steps=10,
        max_norm=0.5,
        betas=(0.9, 0.98),
        eps=1e-6,
        weight_decay=0.2,
    )
