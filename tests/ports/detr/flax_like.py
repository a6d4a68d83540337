"""NHWC, heads as an axis of the kernels, boxes by coordinates."""

from pathlib import Path

import torch
from torch import nn

NOTHING = 4


class Module(nn.Module):
    def param(self, name, value):
        setattr(self, name, nn.Parameter(value.detach().clone().contiguous()))


class Dense(Module):
    def __init__(self, w, at):
        super().__init__()
        self.param("kernel", w[at + ".weight"].flatten(1).T)
        self.param("bias", w[at + ".bias"])

    def forward(self, x):
        return x @ self.kernel + self.bias


class LayerNorm(Module):
    def __init__(self, w, at):
        super().__init__()
        self.param("scale", w[at + ".weight"])
        self.param("bias", w[at + ".bias"])

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        mean2 = (x * x).mean(-1, keepdim=True)
        mul = torch.rsqrt(mean2 - mean * mean + 1e-5) * self.scale
        return (x - mean) * mul + self.bias


class MultiHead(Module):
    def __init__(self, w, at, heads=4):
        super().__init__()
        kernels = w[at + ".in_proj_weight"].chunk(3)
        biases = w[at + ".in_proj_bias"].chunk(3)
        for name, kernel, bias in zip(("query", "key", "value"), kernels, biases):
            self.param(name, kernel.T.reshape(len(kernel), heads, -1))
            self.param(name + "_bias", bias.reshape(heads, -1))
        out = w[at + ".out_proj.weight"].T
        self.param("out", out.reshape(heads, -1, out.shape[-1]))
        self.param("out_bias", w[at + ".out_proj.bias"])

    def forward(self, q, k, v, bias=None):
        q = torch.einsum("bqc,chd->bqhd", q, self.query) + self.query_bias
        k = torch.einsum("bkc,chd->bkhd", k, self.key) + self.key_bias
        v = torch.einsum("bkc,chd->bkhd", v, self.value) + self.value_bias
        q = q / q.shape[-1] ** 0.5
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k)
        if bias is not None:
            weights = weights + bias
        weights = torch.softmax(weights, -1)
        y = torch.einsum("bhqk,bkhd->bqhd", weights, v)
        return torch.einsum("bqhd,hdc->bqc", y, self.out) + self.out_bias


class MLP(Module):
    def __init__(self, w, names):
        super().__init__()
        self.layers = nn.ModuleList([Dense(w, name) for name in names])

    def forward(self, x):
        *first, last = self.layers
        for layer in first:
            x = torch.relu(layer(x))
        return last(x)


class Encoder(Module):
    def __init__(self, w):
        super().__init__()
        self.mha = MultiHead(w, "encoder.attention")
        self.ln_mha = LayerNorm(w, "encoder.norm1")
        self.mlp = MLP(w, ["encoder.linear1", "encoder.linear2"])
        self.ln_mlp = LayerNorm(w, "encoder.norm2")

    def forward(self, x, pos, bias):
        x = self.ln_mha(x + self.mha(x + pos, x + pos, x, bias))
        return self.ln_mlp(x + self.mlp(x))


class Decoder(Module):
    def __init__(self, w, at):
        super().__init__()
        self.mha = MultiHead(w, at + "self_attention")
        self.cross = MultiHead(w, at + "cross_attention")
        self.mlp = MLP(w, [at + "linear1", at + "linear2"])
        self.ln0 = LayerNorm(w, at + "norm1")
        self.ln1 = LayerNorm(w, at + "norm2")
        self.ln2 = LayerNorm(w, at + "norm3")

    def forward(self, x, memory, query_pos, pos, bias):
        qk = x + query_pos
        x = self.ln0(x + self.mha(qk, qk, x))
        x = self.ln1(x + self.cross(x + query_pos, memory + pos, memory, bias))
        return self.ln2(x + self.mlp(x))


class DETR(Module):
    def __init__(self, w):
        super().__init__()
        self.param("stem", w["stem.weight"].permute(2, 3, 1, 0))
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer("bn_" + name, w["frozen." + name].clone())
        self.proj = Dense(w, "project")
        self.param("row_embed", w["row.weight"])
        self.param("col_embed", w["column.weight"])
        self.encoder = Encoder(w)
        self.param("query_pos", w["query.weight"])
        self.decoder0 = Decoder(w, "decoder.0.")
        self.decoder1 = Decoder(w, "decoder.1.")
        self.ln = LayerNorm(w, "norm")
        self.class_head = Dense(w, "classes")
        self.box_head = MLP(w, ["box.0", "box.2", "box.4"])

    def backbone(self, image):
        kernel = self.stem.permute(3, 2, 0, 1)
        x = torch.conv2d(image, kernel, stride=2, padding=1).permute(0, 2, 3, 1)
        x = (x - self.bn_running_mean) / torch.sqrt(self.bn_running_var + 1e-5)
        return self.proj(torch.relu(x * self.bn_weight + self.bn_bias))

    def forward(self, image, is_pad):
        x = self.backbone(image)
        n, h, w, c = x.shape
        pos = torch.cat(
            [
                torch.tile(self.col_embed[None, :w], (h, 1, 1)),
                torch.tile(self.row_embed[:h, None], (1, w, 1)),
            ],
            dim=-1,
        ).reshape(1, h * w, c)
        pad = is_pad[:, ::2, ::2].reshape(n, 1, 1, h * w)
        bias = torch.where(pad, -torch.inf, 0.0).to(x.dtype)
        memory = self.encoder(x.reshape(n, h * w, c), pos, bias)
        q = torch.tile(self.query_pos[None], (n, 1, 1))
        y = torch.zeros_like(q)
        y = self.decoder0(y, memory, q, pos, bias)
        y = self.decoder1(y, memory, q, pos, bias)
        y = self.ln(y)
        boxes = 1 / (1 + torch.exp(-self.box_head(y)))
        return {"classes": self.class_head(y), "boxes": boxes}


def model():
    return DETR(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["image"], batch["is_pad"])


def giou(p, t):
    px1, py1 = p[:, 0] - p[:, 2] / 2, p[:, 1] - p[:, 3] / 2
    px2, py2 = p[:, 0] + p[:, 2] / 2, p[:, 1] + p[:, 3] / 2
    tx1, ty1 = t[:, 0] - t[:, 2] / 2, t[:, 1] - t[:, 3] / 2
    tx2, ty2 = t[:, 0] + t[:, 2] / 2, t[:, 1] + t[:, 3] / 2
    iw = torch.relu(torch.minimum(px2, tx2) - torch.maximum(px1, tx1))
    ih = torch.relu(torch.minimum(py2, ty2) - torch.maximum(py1, ty1))
    inter = iw * ih
    union = p[:, 2] * p[:, 3] + t[:, 2] * t[:, 3] - inter
    cw = torch.maximum(px2, tx2) - torch.minimum(px1, tx1)
    ch = torch.maximum(py2, ty2) - torch.minimum(py1, ty1)
    hull = cw * ch
    return inter / union - 1 + union / hull


def loss(output, batch):
    matched = batch["matched"]
    is_object = matched >= 0
    index = matched.clamp(min=0)
    labels = torch.gather(batch["kinds"], 1, index)
    labels = torch.where(is_object, labels, NOTHING)
    logp = output["classes"] - torch.logsumexp(output["classes"], -1, keepdim=True)
    nll = -torch.gather(logp, 2, labels[:, :, None])[:, :, 0]
    weight = torch.where(is_object, 1.0, 0.1).to(nll.dtype)
    class_loss = (nll * weight).sum() / weight.sum()
    boxes = torch.gather(batch["boxes"], 1, index[:, :, None].expand(-1, -1, 4))
    ours, target = output["boxes"][is_object], boxes[is_object]
    count = is_object.sum()
    l1 = (ours - target).abs().sum() / count
    overlap = (1 - giou(ours, target)).sum() / count
    return class_loss + 5.0 * l1 + 2.0 * overlap


def optimizer(net):
    others = [p for name, p in net.named_parameters() if name != "stem"]
    return torch.optim.AdamW(
        [dict(params=[net.stem], lr=1e-4), dict(params=others, lr=1e-3)],
        weight_decay=0.01,
    )
