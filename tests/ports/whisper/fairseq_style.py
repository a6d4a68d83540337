"""After fairseq: [T, B, C], one in_proj of three stacked parts, padding masks of keys.

The dictionary begins with bos, pad, eos; positions begin behind pad. The gradient is that of
the sum over the words, and is divided by their number before the update.
"""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

ENCODER_EMBED_DIM, ATTENTION_HEADS, FFN_EMBED_DIM, LAYERS = 48, 4, 128, 2
VOCAB_SIZE, MAX_TARGET_POSITIONS, MAX_SOURCE_POSITIONS = 40, 12, 28
BOS, PAD, EOS = 0, 1, 2
VAD_GRAD_MULT = 0.3


# ---------------------------------------------------------------- modules


class GradMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.new(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, None


def lengths_to_padding_mask(lengths, longest):
    """[B, T], true where there is padding."""
    return torch.arange(longest).view(1, -1) >= lengths.view(-1, 1)


class Conv1dSubsampler(nn.Module):
    """[B, T, F] -> [T / 2, B, C]"""

    def __init__(self, in_channels, channels):
        super().__init__()
        self.conv_layers = nn.ModuleList(
            [
                nn.Conv1d(in_channels, channels, 3, stride=1, padding=1),
                nn.Conv1d(channels, channels, 3, stride=2, padding=1),
            ]
        )

    def get_out_seq_lens(self, lengths):
        out = lengths.clone()
        for conv in self.conv_layers:
            out = (out - 1) // conv.stride[0] + 1
        return out

    def forward(self, src_tokens, src_lengths):
        x = src_tokens.transpose(1, 2).contiguous()
        for conv in self.conv_layers:
            x = F.gelu(conv(x))
        x = x.permute(2, 0, 1).contiguous()
        return x, self.get_out_seq_lens(src_lengths)


class SinusoidalPositionalEmbedding(nn.Module):
    def __init__(self, num_embeddings, embedding_dim):
        super().__init__()
        table = self.get_embedding(num_embeddings, embedding_dim)
        self.register_buffer("weights", table)

    @staticmethod
    def get_embedding(num_embeddings, embedding_dim):
        half_dim = embedding_dim // 2
        emb = math.log(10000) / (half_dim - 1)
        emb = torch.exp(torch.arange(half_dim, dtype=torch.float) * -emb)
        emb = torch.arange(num_embeddings, dtype=torch.float).outer(emb)
        return torch.cat([emb.sin(), emb.cos()], dim=1)

    def forward(self, x):
        return self.weights[: x.size(0)].unsqueeze(1)


class LearnedPositionalEmbedding(nn.Embedding):
    """Rows up to padding_idx are never used."""

    def __init__(self, num_embeddings, embedding_dim, padding_idx):
        rows = num_embeddings + padding_idx + 1
        super().__init__(rows, embedding_dim, padding_idx)

    def forward(self, tokens):
        positions = torch.arange(tokens.size(1)) + self.padding_idx + 1
        return F.embedding(positions, self.weight, self.padding_idx)


class MultiheadAttention(nn.Module):
    """Queries and values have a bias; keys do not."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.empty(2 * embed_dim))
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def in_proj_q(self, query):
        d = self.embed_dim
        return F.linear(query, self.in_proj_weight[:d], self.in_proj_bias[:d])

    def in_proj_kv(self, key):
        d = self.embed_dim
        k, v = F.linear(key, self.in_proj_weight[d:]).chunk(2, dim=-1)
        return k, v + self.in_proj_bias[d:]

    def split_heads(self, x, bsz):
        x = x.contiguous().view(-1, bsz * self.num_heads, self.head_dim)
        return x.transpose(0, 1)

    def forward(
        self,
        query,
        key,
        key_padding_mask,
        attn_mask=None,
        incremental_state=None,
        static_kv=False,
    ):
        tgt_len, bsz, embed_dim = query.size()
        q = self.in_proj_q(query) * self.scaling
        q = self.split_heads(q, bsz)
        saved = None if incremental_state is None else incremental_state.get(id(self))
        if static_kv and saved is not None:
            k, v = saved["prev_key"], saved["prev_value"]
        else:
            k, v = self.in_proj_kv(key)
            k, v = self.split_heads(k, bsz), self.split_heads(v, bsz)
            if saved is not None:
                k = torch.cat([saved["prev_key"], k], dim=1)
                v = torch.cat([saved["prev_value"], v], dim=1)
        if incremental_state is not None:
            incremental_state[id(self)] = {"prev_key": k, "prev_value": v}

        src_len = k.size(1)
        attn_weights = torch.bmm(q, k.transpose(1, 2))
        if attn_mask is not None:
            attn_weights = attn_weights + attn_mask.unsqueeze(0)
        attn_weights = attn_weights.view(bsz, self.num_heads, tgt_len, src_len)
        attn_weights = attn_weights.masked_fill(
            key_padding_mask.unsqueeze(1).unsqueeze(2), float("-inf")
        )
        attn_weights = attn_weights.view(bsz * self.num_heads, tgt_len, src_len)
        attn_probs = F.softmax(attn_weights, dim=-1)
        attn = torch.bmm(attn_probs, v)
        attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        return self.out_proj(attn)


class PreNormLayer(nn.Module):
    def __init__(self, embed_dim, heads, ffn_dim):
        super().__init__()
        self.self_attn = MultiheadAttention(embed_dim, heads)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1 = nn.Linear(embed_dim, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)

    def feed_forward(self, x):
        residual = x
        x = self.final_layer_norm(x)
        x = F.gelu(self.fc1(x))
        x = self.fc2(x)
        return residual + x


class TransformerEncoderLayer(PreNormLayer):
    def forward(self, x, encoder_padding_mask):
        residual = x
        x = self.self_attn_layer_norm(x)
        x = self.self_attn(x, x, encoder_padding_mask)
        x = residual + x
        return self.feed_forward(x)


class TransformerDecoderLayer(PreNormLayer):
    def __init__(self, embed_dim, heads, ffn_dim):
        super().__init__(embed_dim, heads, ffn_dim)
        self.encoder_attn = MultiheadAttention(embed_dim, heads)
        self.encoder_attn_layer_norm = nn.LayerNorm(embed_dim)

    def forward(self, x, encoder_out, self_attn_mask, self_attn_padding_mask, state):
        residual = x
        x = self.self_attn_layer_norm(x)
        x = self.self_attn(x, x, self_attn_padding_mask, attn_mask=self_attn_mask)
        x = residual + x

        residual = x
        x = self.encoder_attn_layer_norm(x)
        x = self.encoder_attn(
            x,
            encoder_out["encoder_out"],
            encoder_out["encoder_padding_mask"],
            incremental_state=state,
            static_kv=True,
        )
        x = residual + x
        return self.feed_forward(x)


class S2TEncoder(nn.Module):
    def __init__(self, num_mel_bins=16):
        super().__init__()
        dims = ENCODER_EMBED_DIM, ATTENTION_HEADS, FFN_EMBED_DIM
        self.subsample = Conv1dSubsampler(num_mel_bins, ENCODER_EMBED_DIM)
        self.embed_positions = SinusoidalPositionalEmbedding(
            MAX_SOURCE_POSITIONS, ENCODER_EMBED_DIM
        )
        self.layers = nn.ModuleList(
            [TransformerEncoderLayer(*dims) for _ in range(LAYERS)]
        )
        self.layer_norm = nn.LayerNorm(ENCODER_EMBED_DIM)

    def forward(self, src_tokens, src_lengths):
        x, lengths = self.subsample(src_tokens, src_lengths)
        padding_mask = lengths_to_padding_mask(lengths, x.size(0))
        x = x + self.embed_positions(x)
        for layer in self.layers:
            x = layer(x, padding_mask)
        encoder_out = self.layer_norm(x)
        return {"encoder_out": encoder_out, "encoder_padding_mask": padding_mask}


class TransformerDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        dims = ENCODER_EMBED_DIM, ATTENTION_HEADS, FFN_EMBED_DIM
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, ENCODER_EMBED_DIM)
        self.embed_scale = math.sqrt(ENCODER_EMBED_DIM)
        self.embed_positions = LearnedPositionalEmbedding(
            MAX_TARGET_POSITIONS, ENCODER_EMBED_DIM, PAD
        )
        self.layers = nn.ModuleList(
            [TransformerDecoderLayer(*dims) for _ in range(LAYERS)]
        )
        self.layer_norm = nn.LayerNorm(ENCODER_EMBED_DIM)

    def buffered_future_mask(self, size):
        return torch.triu(torch.full((size, size), float("-inf")), 1)

    def output_layer(self, features):
        return F.linear(features, self.embed_tokens.weight)

    def forward(self, prev_output_tokens, encoder_out):
        positions = self.embed_positions(prev_output_tokens)
        x = self.embed_scale * self.embed_tokens(prev_output_tokens)
        x = x + positions
        x = x.transpose(0, 1)
        padding_mask = prev_output_tokens.eq(PAD)
        future_mask = self.buffered_future_mask(x.size(0))
        incremental_state = {}
        for layer in self.layers:
            x = layer(x, encoder_out, future_mask, padding_mask, incremental_state)
        x = self.layer_norm(x)
        return self.output_layer(x.transpose(0, 1))


class S2TTransformerModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = S2TEncoder()
        self.decoder = TransformerDecoder()
        self.vad_proj = nn.Linear(ENCODER_EMBED_DIM, 1)

    def forward(self, src_tokens, src_lengths, prev_output_tokens):
        encoder_out = self.encoder(src_tokens, src_lengths)
        logits = self.decoder(prev_output_tokens, encoder_out)
        x = GradMultiply.apply(encoder_out["encoder_out"], VAD_GRAD_MULT)
        vad = self.vad_proj(x).squeeze(-1).transpose(0, 1)
        return logits, vad


# ------------------------------------------------------------- dictionary


def dictionary_order():
    """Index there of each symbol here, and the other way round: the two first change."""
    return torch.tensor([1, 0, *range(2, VOCAB_SIZE)])


def collate(samples, pad_idx):
    size = max(len(v) for v in samples)
    res = samples[0].new_full((len(samples), size), pad_idx)
    for i, v in enumerate(samples):
        res[i, : len(v)] = v
    return res


def prepare_targets(words):
    """Tokens shifted by bos, and targets that end in eos."""
    words = dictionary_order()[words]
    sentences = [row[row.ne(PAD)] for row in words]
    bos, eos = words.new_tensor([BOS]), words.new_tensor([EOS])
    prev_output_tokens = collate([torch.cat([bos, s]) for s in sentences], PAD)
    target = collate([torch.cat([s, eos]) for s in sentences], PAD)
    return prev_output_tokens, target


def extract_fbank(power, n_frames):
    """[B, F, T] -> [B, T, F], each utterance under its own peak."""
    features = []
    for spectrum, n in zip(power, n_frames.tolist()):
        feature = spectrum[:, :n].t().clamp(min=1e-10).log10()
        feature = feature.maximum(feature.max() - 4.0)
        features.append(feature.add(4.0).div(4.0))
    padded = power.new_zeros(power.size(0), power.size(2), power.size(1))
    for i, feature in enumerate(features):
        padded[i, : feature.size(0)] = feature
    return padded


# ------------------------------------------------------------- checkpoint


def upgrade_state_dict(state):
    """Names and layouts of Whisper's checkpoint -> those of here."""
    new = {}

    def copy(target, source):
        for kind in ("weight", "bias"):
            new[f"{target}.{kind}"] = state[f"{source}.{kind}"]

    def attention(target, source):
        parts = [state[f"{source}.{part}.weight"] for part in ("query", "key", "value")]
        biases = [state[f"{source}.{part}.bias"] for part in ("query", "value")]
        new[target + ".in_proj_weight"] = torch.cat(parts)
        new[target + ".in_proj_bias"] = torch.cat(biases)
        copy(target + ".out_proj", source + ".out")

    for side in ("encoder", "decoder"):
        for i in range(LAYERS):
            target, source = f"{side}.layers.{i}", f"{side}.blocks.{i}"
            attention(target + ".self_attn", source + ".attn")
            copy(target + ".self_attn_layer_norm", source + ".attn_ln")
            if side == "decoder":
                attention(target + ".encoder_attn", source + ".cross_attn")
                copy(target + ".encoder_attn_layer_norm", source + ".cross_attn_ln")
            copy(target + ".fc1", source + ".mlp.0")
            copy(target + ".fc2", source + ".mlp.2")
            copy(target + ".final_layer_norm", source + ".mlp_ln")
    copy("encoder.subsample.conv_layers.0", "encoder.conv1")
    copy("encoder.subsample.conv_layers.1", "encoder.conv2")
    copy("encoder.layer_norm", "encoder.ln_post")
    copy("decoder.layer_norm", "decoder.ln")
    copy("vad_proj", "vad_head")
    embed = state["decoder.token_embedding.weight"]
    new["decoder.embed_tokens.weight"] = embed[dictionary_order()]
    positions = state["decoder.positional_embedding"]
    unused = positions.new_zeros(PAD + 1, positions.size(1))
    new["decoder.embed_positions.weight"] = torch.cat([unused, positions])
    return new


def model():
    state = torch.load(Path(__file__).with_name("weights.pt"))
    net = S2TTransformerModel()
    missing = net.load_state_dict(upgrade_state_dict(state), strict=False)
    if missing.unexpected_keys:
        raise KeyError(missing.unexpected_keys)
    net.ema = EMA(net)
    return net


# -------------------------------------------------------------- criterion


def forward(net, batch):
    prev_output_tokens, _ = prepare_targets(batch["words"])
    src_tokens = extract_fbank(batch["power"], batch["frames"])
    logits, vad = net(src_tokens, batch["frames"], prev_output_tokens)
    return {"logits": logits[..., dictionary_order()], "vad": vad}


def label_smoothed_nll_loss(lprobs, target, epsilon, ignore_index):
    target = target.unsqueeze(-1)
    nll_loss = -lprobs.gather(dim=-1, index=target)
    smooth_loss = -lprobs.sum(dim=-1, keepdim=True)
    pad_mask = target.eq(ignore_index)
    nll_loss = nll_loss.masked_fill(pad_mask, 0.0)
    smooth_loss = smooth_loss.masked_fill(pad_mask, 0.0)
    eps_i = epsilon / lprobs.size(-1)
    return (1.0 - epsilon) * nll_loss.sum() + eps_i * smooth_loss.sum()


def vad_loss(logits, speech, padding_mask, pos_weight):
    positive = -pos_weight * speech * F.logsigmoid(logits)
    negative = -(1.0 - speech) * F.logsigmoid(-logits)
    each = (positive + negative).masked_fill(padding_mask, 0.0)
    return each.sum()


class Trainer:
    """What the criterion tells the optimizer."""

    sample_size = 1


class Reported(torch.autograd.Function):
    """The mean is reported; the gradient is that of the sum."""

    @staticmethod
    def forward(ctx, total, sample_size):
        return total / sample_size

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def loss(output, batch, label_smoothing=0.1, vad_weight=0.5):
    _, target = prepare_targets(batch["words"])
    lprobs = F.log_softmax(output["logits"][..., dictionary_order()], dim=-1)
    lprobs = lprobs.view(-1, lprobs.size(-1))
    ntokens = int(target.ne(PAD).sum())
    total = label_smoothed_nll_loss(lprobs, target.view(-1), label_smoothing, PAD)

    vad = output["vad"]
    speech = batch["speech"][:, 0::2] | batch["speech"][:, 1::2]
    out_lengths = (batch["frames"] - 1) // 2 + 1
    padding_mask = lengths_to_padding_mask(out_lengths, vad.size(1))
    voice = vad_loss(vad, speech.to(vad), padding_mask, pos_weight=1.8)
    nframes = int(out_lengths.sum())
    total = total + vad_weight * voice * (ntokens / nframes)

    Trainer.sample_size = ntokens
    return Reported.apply(total, ntokens)


# -------------------------------------------------------------- optimizer


class EMA(nn.Module):
    """Exponential moving average of the model."""

    def __init__(self, model, ema_decay=0.99):
        super().__init__()
        self.decay = ema_decay
        self.names = {}
        for key, param in model.named_parameters():
            self.names[key] = key.replace(".", "/")
            self.register_buffer(self.names[key], param.detach().clone())

    def step(self, model, num_updates):
        decay = min(self.decay, (1 + num_updates) / (10 + num_updates))
        for key, param in model.named_parameters():
            ema_param = getattr(self, self.names[key])
            ema_param.mul_(decay)
            ema_param.add_(param, alpha=1 - decay)


class InverseSquareRootSchedule:
    def __init__(self, lr=4e-3, warmup_updates=2, warmup_init_lr=0.0):
        self.warmup_updates = warmup_updates
        self.warmup_init_lr = warmup_init_lr
        self.lr_step = (lr - warmup_init_lr) / warmup_updates
        self.decay_factor = lr * warmup_updates**0.5

    def step_update(self, num_updates):
        if num_updates < self.warmup_updates:
            return self.warmup_init_lr + num_updates * self.lr_step
        return self.decay_factor * num_updates**-0.5


class FairseqAdam(torch.optim.Optimizer):
    def __init__(self, model, betas=(0.9, 0.98), eps=1e-6, clip_norm=1.0):
        super().__init__(model.parameters(), dict(betas=betas, eps=eps))
        self.model = model
        self.clip_norm = clip_norm
        self.lr_scheduler = InverseSquareRootSchedule()
        self.num_updates = 0

    @property
    def grads(self):
        return [p.grad for p in self.param_groups[0]["params"]]

    def multiply_grads(self, c):
        for grad in self.grads:
            grad.mul_(c)

    def clip_grad_norm(self, max_norm):
        norms = torch.stack([torch.norm(g, p=2) for g in self.grads])
        total_norm = torch.norm(norms)
        clip_coef = (max_norm / (total_norm + 1e-6)).clamp_(max=1)
        self.multiply_grads(clip_coef)

    def adam(self, p, lr, betas, eps):
        beta1, beta2 = betas
        state = self.state[p]
        if len(state) == 0:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        state["step"] += 1
        exp_avg.mul_(beta1).add_(p.grad, alpha=1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        bias_correction1 = 1 - beta1 ** state["step"]
        bias_correction2 = 1 - beta2 ** state["step"]
        denom = exp_avg_sq.sqrt().add_(eps * math.sqrt(bias_correction2))
        step_size = lr * math.sqrt(bias_correction2) / bias_correction1
        p.addcdiv_(exp_avg, denom, value=-step_size)

    @torch.no_grad()
    def step(self, closure=None):
        self.multiply_grads(1 / Trainer.sample_size)
        self.clip_grad_norm(self.clip_norm)
        lr = self.lr_scheduler.step_update(self.num_updates + 1)
        for group in self.param_groups:
            for p in group["params"]:
                self.adam(p, lr, group["betas"], group["eps"])
        self.num_updates += 1
        self.model.ema.step(self.model, self.num_updates)


def optimizer(net):
    return FairseqAdam(net)
