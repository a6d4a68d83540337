"""After fairseq: the encoder has time before batch, and q, k and v are one projection."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class HubertConfig:
    conv_feature_layers: str = "[(16, 10, 5), (24, 4, 2), (24, 3, 2)]"
    extractor_groups: int = 4
    encoder_layers: int = 3
    encoder_embed_dim: int = 32
    encoder_ffn_embed_dim: int = 48
    encoder_attention_heads: int = 4
    conv_pos: int = 8
    conv_pos_groups: int = 4
    num_buckets: int = 12
    max_distance: int = 23
    final_dim: int = 12
    num_classes: int = 10
    logit_temp: float = 0.1
    mask_length: int = 4
    feature_grad_mult: float = 0.1
    pred_masked_weight: float = 1.0
    pred_nomask_weight: float = 0.3
    features_pen_weight: float = 2.0
    lr: float = 2e-3
    adam_betas: tuple = (0.9, 0.98)
    adam_eps: float = 1e-6
    weight_decay: float = 0.1
    warmup_updates: int = 3
    total_num_update: int = 20


CFG = HubertConfig()


class GradMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, None


class Fp32GroupNorm(nn.GroupNorm):
    def forward(self, x):
        output = F.group_norm(
            x.float(), self.num_groups, self.weight, self.bias, self.eps
        )
        return output.type_as(x)


class SamePad(nn.Module):
    def __init__(self, kernel_size):
        super().__init__()
        self.remove = 1 if kernel_size % 2 == 0 else 0

    def forward(self, x):
        if self.remove > 0:
            x = x[:, :, : -self.remove]
        return x


class ConvFeatureExtractionModel(nn.Module):
    def __init__(self, conv_layers, groups):
        super().__init__()
        in_d = 1
        self.conv_layers = nn.ModuleList()
        for i, (dim, k, stride) in enumerate(conv_layers):
            mods = [nn.Conv1d(in_d, dim, k, stride=stride, bias=i > 0)]
            if i == 0:
                mods.append(Fp32GroupNorm(groups, dim))
            mods.append(nn.GELU())
            self.conv_layers.append(nn.Sequential(*mods))
            in_d = dim

    def forward(self, x):
        x = x.unsqueeze(1)
        for conv in self.conv_layers:
            x = conv(x)
        return x


class WeightNormConv1d(nn.Module):
    """One length for each place of the kernel."""

    def __init__(self, dim, kernel_size, groups):
        super().__init__()
        self.groups = groups
        self.padding = kernel_size // 2
        self.weight_g = nn.Parameter(torch.ones(kernel_size))
        self.weight_v = nn.Parameter(torch.zeros(dim, dim // groups, kernel_size))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        norm = self.weight_v.pow(2).sum(dim=(0, 1)).sqrt()
        weight = self.weight_v * (self.weight_g / norm)
        return F.conv1d(x, weight, self.bias, 1, self.padding, 1, self.groups)


class MultiheadAttention(nn.Module):
    """Self-attention with the gated relative positions of WavLM."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        self.q_bias = nn.Parameter(torch.empty(embed_dim))
        self.v_bias = nn.Parameter(torch.empty(embed_dim))
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.grep_linear = nn.Linear(self.head_dim, 8)
        self.grep_a = nn.Parameter(torch.ones(num_heads))

    def fold(self, x):
        """T x B x C -> B*H x T x head_dim"""
        tgt_len, bsz, _ = x.shape
        x = x.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim)
        return x.transpose(0, 1)

    def relative_gate(self, query):
        bsz = query.size(1)
        gate = self.grep_linear(self.fold(query))
        gate = torch.sigmoid(gate.view(*gate.shape[:-1], 2, 4).sum(-1))
        gate_a, gate_b = gate.chunk(2, dim=-1)
        grep_a = self.grep_a.repeat(bsz).view(-1, 1, 1)
        return gate_a * (gate_b * grep_a - 1.0) + 2.0

    def forward(self, query, position_bias, key_padding_mask):
        tgt_len, bsz, embed_dim = query.shape
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        qkv = F.linear(query, self.in_proj_weight, bias)
        q, k, v = qkv.chunk(3, dim=-1)
        q = self.fold(q * self.scaling)
        k, v = self.fold(k), self.fold(v)

        attn_mask_rel_pos = self.relative_gate(query) * position_bias
        attn_weights = torch.baddbmm(attn_mask_rel_pos, q, k.transpose(1, 2))
        attn_weights = attn_weights.view(bsz, self.num_heads, tgt_len, tgt_len)
        attn_weights = attn_weights.masked_fill(
            key_padding_mask.unsqueeze(1).unsqueeze(2), float("-inf")
        )
        attn_weights = attn_weights.view(bsz * self.num_heads, tgt_len, tgt_len)
        attn_probs = F.softmax(attn_weights, dim=-1)

        attn = torch.bmm(attn_probs, v)
        attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        return self.out_proj(attn)


class TransformerSentenceEncoderLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        dim = cfg.encoder_embed_dim
        self.self_attn = MultiheadAttention(dim, cfg.encoder_attention_heads)
        self.self_attn_layer_norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, cfg.encoder_ffn_embed_dim)
        self.fc2 = nn.Linear(cfg.encoder_ffn_embed_dim, dim)
        self.final_layer_norm = nn.LayerNorm(dim)

    def forward(self, x, position_bias, padding_mask):
        residual = x
        x = self.self_attn(x, position_bias, padding_mask)
        x = residual + x
        x = self.self_attn_layer_norm(x)

        residual = x
        x = F.gelu(self.fc1(x))
        x = self.fc2(x)
        x = residual + x
        return self.final_layer_norm(x)


class TransformerEncoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        dim = cfg.encoder_embed_dim
        self.num_heads = cfg.encoder_attention_heads
        self.num_buckets = cfg.num_buckets
        self.max_distance = cfg.max_distance
        self.pos_conv = nn.Sequential(
            WeightNormConv1d(dim, cfg.conv_pos, cfg.conv_pos_groups),
            SamePad(cfg.conv_pos),
            nn.GELU(),
        )
        self.layer_norm = nn.LayerNorm(dim)
        self.relative_attention_bias = nn.Embedding(self.num_buckets, self.num_heads)
        self.layers = nn.ModuleList(
            [TransformerSentenceEncoderLayer(cfg) for _ in range(cfg.encoder_layers)]
        )

    def _relative_positions_bucket(self, relative_positions):
        num_buckets = self.num_buckets // 2
        relative_buckets = (relative_positions > 0).to(torch.long) * num_buckets
        relative_positions = torch.abs(relative_positions)
        max_exact = num_buckets // 2
        is_small = relative_positions < max_exact
        # The log of zero is never taken: is_small stands there.
        scale = (num_buckets - max_exact) / math.log(self.max_distance / max_exact)
        large = torch.log(relative_positions.float() / max_exact) * scale
        large = torch.where(is_small, torch.zeros_like(large), large)
        large = max_exact + large.to(torch.long)
        large = torch.clamp(large, max=num_buckets - 1)
        return relative_buckets + torch.where(is_small, relative_positions, large)

    def compute_bias(self, length, bsz):
        context_position = torch.arange(length)[:, None]
        memory_position = torch.arange(length)[None, :]
        buckets = self._relative_positions_bucket(memory_position - context_position)
        values = self.relative_attention_bias(buckets)
        values = values.permute(2, 0, 1).unsqueeze(0)
        return values.repeat(bsz, 1, 1, 1).view(bsz * self.num_heads, length, length)

    def forward(self, x, padding_mask):
        x = x.masked_fill(padding_mask.unsqueeze(-1), 0)
        x_conv = self.pos_conv(x.transpose(1, 2))
        x = x + x_conv.transpose(1, 2)
        x = self.layer_norm(x)
        # B x T x C -> T x B x C
        x = x.transpose(0, 1)
        pos_bias = self.compute_bias(x.size(0), x.size(1))
        for layer in self.layers:
            x = layer(x, pos_bias, padding_mask)
        return x.transpose(0, 1)


class HubertModel(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        layers = eval(cfg.conv_feature_layers)  # noqa: S307 - as it is done there
        self.feature_extractor = ConvFeatureExtractionModel(
            layers, cfg.extractor_groups
        )
        self.embed = layers[-1][0]
        self.layer_norm = nn.LayerNorm(self.embed)
        self.post_extract_proj = nn.Linear(self.embed, cfg.encoder_embed_dim)
        self.mask_emb = nn.Parameter(torch.empty(cfg.encoder_embed_dim))
        self.encoder = TransformerEncoder(cfg)
        self.final_proj = nn.Linear(cfg.encoder_embed_dim, cfg.final_dim)
        self.label_embs_concat = nn.Parameter(
            torch.empty(cfg.num_classes, cfg.final_dim)
        )

    def forward_features(self, source):
        features = self.feature_extractor(source)
        if self.cfg.feature_grad_mult != 1.0:
            features = GradMultiply.apply(features, self.cfg.feature_grad_mult)
        return features

    def apply_mask(self, x, mask_indices):
        x = x.clone()
        x[mask_indices] = self.mask_emb
        return x

    def compute_pred(self, proj_x):
        proj_x = F.normalize(proj_x, dim=-1)
        label_embs = F.normalize(self.label_embs_concat, dim=-1)
        logits = torch.matmul(proj_x, label_embs.transpose(0, 1))
        return logits / self.cfg.logit_temp

    def forward(self, source, padding_mask, mask_indices):
        features = self.forward_features(source)
        features_pen = features.float().pow(2).mean()
        features = features.transpose(1, 2)
        features = self.layer_norm(features)
        features = self.post_extract_proj(features)
        x = self.apply_mask(features, mask_indices)
        x = self.encoder(x, padding_mask)
        proj_x = self.final_proj(x)
        return {"logits": self.compute_pred(proj_x), "penalty": features_pen}


def upgrade_state_dict(state):
    """Rename the weights, and join the three projections."""
    renames = [
        (
            r"^feature_extractor\.layers\.(\d)\.conv\.",
            r"feature_extractor.conv_layers.\1.0.",
        ),
        (
            r"^feature_extractor\.layers\.(\d)\.norm\.",
            r"feature_extractor.conv_layers.\1.1.",
        ),
        (r"^feature_projection\.norm\.", "layer_norm."),
        (r"^feature_projection\.proj\.", "post_extract_proj."),
        (r"^norm\.", "encoder.layer_norm."),
        (r"^positions\.table\.", "encoder.relative_attention_bias."),
        (r"^codes$", "label_embs_concat"),
        (r"^pos_conv\.conv\.", "encoder.pos_conv.0."),
        (r"^layers\.", "encoder.layers."),
        (r"\.attn\.", ".self_attn."),
        (r"\.norm1\.", ".self_attn_layer_norm."),
        (r"\.norm2\.", ".final_layer_norm."),
        (r"\.out\.", ".out_proj."),
        (r"\.gate\.", ".grep_linear."),
        (r"\.gate_const$", ".grep_a"),
    ]
    upgraded = {}
    for key, value in state.items():
        for pattern, replacement in renames:
            key = re.sub(pattern, replacement, key)
        upgraded[key] = value

    for key in [k for k in upgraded if k.endswith(".self_attn.q.weight")]:
        prefix = key[: -len("q.weight")]
        q, k, v = (upgraded.pop(prefix + f"{name}.weight") for name in "qkv")
        upgraded[prefix + "in_proj_weight"] = torch.cat([q, k, v])
        upgraded[prefix + "q_bias"] = upgraded.pop(prefix + "q.bias")
        upgraded[prefix + "v_bias"] = upgraded.pop(prefix + "v.bias")
        upgraded[prefix + "grep_a"] = upgraded[prefix + "grep_a"].flatten()

    conv = "encoder.pos_conv.0."
    weight_g = upgraded.pop(conv + "parametrizations.weight.original0")
    weight_v = upgraded.pop(conv + "parametrizations.weight.original1")
    upgraded[conv + "weight_g"] = weight_g.flatten()
    upgraded[conv + "weight_v"] = weight_v
    return upgraded


def model():
    net = HubertModel(CFG)
    state = torch.load(Path(__file__).with_name("weights.pt"))
    net.load_state_dict(upgrade_state_dict(state))
    return net


def get_padding_mask(lengths):
    for _, kernel_size, stride in eval(CFG.conv_feature_layers):  # noqa: S307
        lengths = torch.div(lengths - kernel_size, stride, rounding_mode="floor") + 1
    return torch.arange(int(lengths.max())).expand(len(lengths), -1) >= lengths[:, None]


def get_mask_indices(starts, padding_mask):
    mask = torch.zeros_like(padding_mask)
    for row, row_starts in zip(mask, starts.tolist()):
        for start in row_starts:
            if start >= 0:
                row[start : start + CFG.mask_length] = True
    return mask


def postprocess(wav, length):
    """Normalise one utterance; zeros stay behind it."""
    feats = wav[:length]
    feats = F.layer_norm(feats, feats.shape, eps=1e-7)
    return F.pad(feats, (0, len(wav) - length))


def forward(net, batch):
    source = torch.stack(
        [postprocess(w, n) for w, n in zip(batch["wave"], batch["lengths"].tolist())]
    )
    padding_mask = get_padding_mask(batch["lengths"])
    mask_indices = get_mask_indices(batch["starts"], padding_mask)
    return net(source, padding_mask, mask_indices)


def loss(net_output, sample):
    logits, target = net_output["logits"], sample["units"]
    padding_mask = get_padding_mask(sample["lengths"])
    mask_indices = get_mask_indices(sample["starts"], padding_mask)
    masked_indices = torch.logical_and(~padding_mask, mask_indices)
    nomask_indices = torch.logical_and(~padding_mask, ~mask_indices)

    logp_m, targ_m = logits[masked_indices], target[masked_indices]
    logp_u, targ_u = logits[nomask_indices], target[nomask_indices]
    loss_m = F.cross_entropy(logp_m, targ_m, reduction="sum") / targ_m.numel()
    loss_u = F.cross_entropy(logp_u, targ_u, reduction="sum") / targ_u.numel()
    loss = CFG.pred_masked_weight * loss_m + CFG.pred_nomask_weight * loss_u
    return loss + CFG.features_pen_weight * net_output["penalty"]


class FairseqAdam(torch.optim.Optimizer):
    """Decay is apart from the moments; epsilon is for moments without their bias."""

    def __init__(self, param_groups, cfg):
        super().__init__(param_groups, {"lr": cfg.lr})
        self.cfg = cfg
        self.num_updates = 0

    def step_update(self):
        """Polynomial decay, with a power of one."""
        warmup, total = self.cfg.warmup_updates, self.cfg.total_num_update
        if self.num_updates <= warmup:
            lr = self.cfg.lr * self.num_updates / warmup
        else:
            pct_remaining = 1 - (self.num_updates - warmup) / (total - warmup)
            lr = self.cfg.lr * pct_remaining
        for group in self.param_groups:
            group["lr"] = lr

    @torch.no_grad()
    def step(self, closure=None):
        self.num_updates += 1
        self.step_update()
        beta1, beta2 = self.cfg.adam_betas
        bias_correction1 = 1 - beta1**self.num_updates
        bias_correction2 = 1 - beta2**self.num_updates
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
                exp_avg.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                exp_avg_sq.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                denom = (exp_avg_sq / bias_correction2).sqrt().add_(self.cfg.adam_eps)
                if group["weight_decay"] != 0:
                    p.add_(p, alpha=-group["weight_decay"] * group["lr"])
                p.addcdiv_(exp_avg, denom, value=-group["lr"] / bias_correction1)


NO_DECAY = re.compile(
    r"bias$|layer_norm|conv_layers\.0\.1|weight_g|grep_a|mask_emb"
    r"|relative_attention_bias|label_embs"
)


def optimizer(net):
    groups = {0.0: [], CFG.weight_decay: []}
    for name, p in net.named_parameters():
        groups[0.0 if NO_DECAY.search(name) else CFG.weight_decay].append(p)
    return FairseqAdam(
        [{"params": ps, "weight_decay": decay} for decay, ps in groups.items()], CFG
    )
