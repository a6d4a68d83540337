"""After diffusers: split projections, a scheduler of its own, scale before shift at the end."""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

CONFIG = {
    "num_attention_heads": 3,
    "attention_head_dim": 8,
    "in_channels": 2,
    "out_channels": 4,
    "num_layers": 3,
    "sample_size": 8,
    "patch_size": 2,
    "num_embeds_ada_norm": 5,
    "time_proj_dim": 16,
    "ff_inner_dim": 48,
    "norm_eps": 1e-6,
}
SCHEDULER_CONFIG = {
    "num_train_timesteps": 60,
    "beta_start": 0.0001 * 1000 / 60,
    "beta_end": 0.02 * 1000 / 60,
    "beta_schedule": "linear",
}


# ----------------------------------------------------------------- embeddings


def get_timestep_embedding(
    timesteps,
    embedding_dim,
    flip_sin_to_cos=False,
    downscale_freq_shift=1.0,
    max_period=10000,
):
    half_dim = embedding_dim // 2
    exponent = -math.log(max_period) * torch.arange(half_dim, dtype=torch.float32)
    exponent = exponent / (half_dim - downscale_freq_shift)
    emb = timesteps[:, None].float() * torch.exp(exponent)[None, :]
    emb = torch.cat([torch.sin(emb), torch.cos(emb)], dim=-1)
    if flip_sin_to_cos:
        emb = torch.cat([emb[:, half_dim:], emb[:, :half_dim]], dim=-1)
    return emb


def get_1d_sincos_pos_embed(embed_dim, pos):
    omega = torch.arange(embed_dim // 2, dtype=torch.float64) * 2.0 / embed_dim
    out = torch.outer(pos.flatten(), 10000.0**-omega)
    return torch.cat([torch.sin(out), torch.cos(out)], dim=1)


def get_2d_sincos_pos_embed(embed_dim, grid_size):
    axis = torch.arange(grid_size, dtype=torch.float64)
    grid_h, grid_w = torch.meshgrid(axis, axis, indexing="ij")
    emb_w = get_1d_sincos_pos_embed(embed_dim // 2, grid_w)
    emb_h = get_1d_sincos_pos_embed(embed_dim // 2, grid_h)
    return torch.cat([emb_w, emb_h], dim=1).to(torch.float32)


class PatchEmbed(nn.Module):
    """A linear layer over patches of [row, column, channel]."""

    def __init__(self, dim):
        super().__init__()
        self.patch_size = CONFIG["patch_size"]
        grid_size = CONFIG["sample_size"] // self.patch_size
        self.proj = nn.Linear(self.patch_size**2 * CONFIG["in_channels"], dim)
        pos_embed = get_2d_sincos_pos_embed(dim, grid_size)
        self.register_buffer("pos_embed", pos_embed[None], persistent=False)

    def forward(self, latent):
        batch, channels, height, width = latent.shape
        p = self.patch_size
        latent = latent.reshape(batch, channels, height // p, p, width // p, p)
        latent = latent.permute(0, 2, 4, 3, 5, 1)
        latent = latent.reshape(batch, -1, p * p * channels)
        return self.proj(latent) + self.pos_embed


class TimestepEmbedding(nn.Module):
    def __init__(self, in_channels, time_embed_dim):
        super().__init__()
        self.linear_1 = nn.Linear(in_channels, time_embed_dim)
        self.linear_2 = nn.Linear(time_embed_dim, time_embed_dim)

    def forward(self, sample):
        sample = self.linear_1(sample)
        sample = F.silu(sample)
        return self.linear_2(sample)


class CombinedTimestepLabelEmbeddings(nn.Module):
    def __init__(self, num_classes, embedding_dim):
        super().__init__()
        self.num_classes = num_classes
        self.timestep_embedder = TimestepEmbedding(
            CONFIG["time_proj_dim"], embedding_dim
        )
        self.class_embedder = nn.Embedding(num_classes + 1, embedding_dim)

    def forward(self, timestep, class_labels, force_drop_ids):
        timesteps_proj = get_timestep_embedding(
            timestep,
            CONFIG["time_proj_dim"],
            flip_sin_to_cos=True,
            downscale_freq_shift=0,
        )
        timesteps_emb = self.timestep_embedder(timesteps_proj)
        class_labels = class_labels.masked_fill(force_drop_ids, self.num_classes)
        return timesteps_emb + self.class_embedder(class_labels)


# --------------------------------------------------------------------- layers


class AdaLayerNormZero(nn.Module):
    def __init__(self, embedding_dim):
        super().__init__()
        self.linear = nn.Linear(embedding_dim, 6 * embedding_dim)
        self.norm = nn.LayerNorm(
            embedding_dim, elementwise_affine=False, eps=CONFIG["norm_eps"]
        )

    def forward(self, x, emb):
        emb = self.linear(F.silu(emb))[:, None]
        shift_msa, scale_msa, gate_msa, *mlp = emb.chunk(6, dim=-1)
        x = self.norm(x) * (1 + scale_msa) + shift_msa
        return x, gate_msa, *mlp


class AdaLayerNormContinuous(nn.Module):
    """The scale is the first half here."""

    def __init__(self, embedding_dim):
        super().__init__()
        self.linear = nn.Linear(embedding_dim, 2 * embedding_dim)
        self.norm = nn.LayerNorm(
            embedding_dim, elementwise_affine=False, eps=CONFIG["norm_eps"]
        )

    def forward(self, x, conditioning_embedding):
        emb = self.linear(F.silu(conditioning_embedding))
        scale, shift = torch.chunk(emb, 2, dim=1)
        return torch.addcmul(shift[:, None], self.norm(x), 1 + scale[:, None])


class Attention(nn.Module):
    def __init__(self, query_dim, heads, dim_head):
        super().__init__()
        self.heads = heads
        self.scale = dim_head**-0.5
        self.to_q = nn.Linear(query_dim, heads * dim_head)
        self.to_k = nn.Linear(query_dim, heads * dim_head, bias=False)
        self.to_v = nn.Linear(query_dim, heads * dim_head)
        self.to_out = nn.ModuleList([nn.Linear(heads * dim_head, query_dim)])

    def head_to_batch_dim(self, tensor):
        batch, seq_len, dim = tensor.shape
        tensor = tensor.reshape(batch, seq_len, self.heads, dim // self.heads)
        return tensor.permute(0, 2, 1, 3).reshape(batch * self.heads, seq_len, -1)

    def batch_to_head_dim(self, tensor):
        batch, seq_len, dim = tensor.shape
        tensor = tensor.reshape(batch // self.heads, self.heads, seq_len, dim)
        return tensor.permute(0, 2, 1, 3).reshape(-1, seq_len, dim * self.heads)

    def get_attention_scores(self, query, key):
        empty = query.new_zeros(query.shape[0], query.shape[1], key.shape[1])
        scores = torch.baddbmm(
            empty, query, key.transpose(-1, -2), beta=0, alpha=self.scale
        )
        return scores.softmax(dim=-1)

    def forward(self, hidden_states):
        query = self.head_to_batch_dim(self.to_q(hidden_states))
        key = self.head_to_batch_dim(self.to_k(hidden_states))
        value = self.head_to_batch_dim(self.to_v(hidden_states))
        attention_probs = self.get_attention_scores(query, key)
        hidden_states = torch.bmm(attention_probs, value)
        return self.to_out[0](self.batch_to_head_dim(hidden_states))


class GELU(nn.Module):
    def __init__(self, dim_in, dim_out, approximate="none"):
        super().__init__()
        self.proj = nn.Linear(dim_in, dim_out)
        self.approximate = approximate

    def forward(self, hidden_states):
        return F.gelu(self.proj(hidden_states), approximate=self.approximate)


class FeedForward(nn.Module):
    def __init__(self, dim, inner_dim):
        super().__init__()
        act_fn = GELU(dim, inner_dim, approximate="tanh")
        self.net = nn.ModuleList([act_fn, nn.Identity(), nn.Linear(inner_dim, dim)])

    def forward(self, hidden_states):
        for module in self.net:
            hidden_states = module(hidden_states)
        return hidden_states


class BasicTransformerBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1 = AdaLayerNormZero(dim)
        self.attn1 = Attention(
            dim, CONFIG["num_attention_heads"], CONFIG["attention_head_dim"]
        )
        self.norm3 = nn.LayerNorm(dim, elementwise_affine=False, eps=CONFIG["norm_eps"])
        self.ff = FeedForward(dim, CONFIG["ff_inner_dim"])

    def forward(self, hidden_states, emb):
        norm_hidden_states, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.norm1(
            hidden_states, emb
        )
        attn_output = self.attn1(norm_hidden_states)
        hidden_states = gate_msa * attn_output + hidden_states
        norm_hidden_states = self.norm3(hidden_states)
        norm_hidden_states = norm_hidden_states * (1 + scale_mlp) + shift_mlp
        ff_output = self.ff(norm_hidden_states)
        return gate_mlp * ff_output + hidden_states


class DiTTransformer2DModel(nn.Module):
    def __init__(self):
        super().__init__()
        dim = CONFIG["num_attention_heads"] * CONFIG["attention_head_dim"]
        self.pos_embed = PatchEmbed(dim)
        self.emb = CombinedTimestepLabelEmbeddings(CONFIG["num_embeds_ada_norm"], dim)
        self.transformer_blocks = nn.ModuleList(
            [BasicTransformerBlock(dim) for _ in range(CONFIG["num_layers"])]
        )
        self.norm_out = AdaLayerNormContinuous(dim)
        self.proj_out = nn.Linear(dim, CONFIG["patch_size"] ** 2 * 4)

    def unpatchify(self, hidden_states):
        p, channels = CONFIG["patch_size"], CONFIG["out_channels"]
        side = CONFIG["sample_size"] // p
        hidden_states = hidden_states.reshape(-1, side, side, p, p, channels)
        hidden_states = hidden_states.permute(0, 5, 1, 3, 2, 4)
        return hidden_states.reshape(-1, channels, side * p, side * p)

    def forward(self, hidden_states, timestep, class_labels, force_drop_ids):
        hidden_states = self.pos_embed(hidden_states)
        emb = self.emb(timestep, class_labels, force_drop_ids)
        for block in self.transformer_blocks:
            hidden_states = block(hidden_states, emb)
        hidden_states = self.norm_out(hidden_states, emb)
        return self.unpatchify(self.proj_out(hidden_states))


# ------------------------------------------------------------------ scheduler


class DDPMScheduler:
    """Variances are of the type learned_range; at the first step that of the second."""

    def __init__(self, num_train_timesteps, beta_start, beta_end, beta_schedule):
        if beta_schedule == "linear":
            self.betas = torch.linspace(
                beta_start, beta_end, num_train_timesteps, dtype=torch.float64
            )
        elif beta_schedule == "scaled_linear":
            root = torch.linspace(
                beta_start**0.5,
                beta_end**0.5,
                num_train_timesteps,
                dtype=torch.float64,
            )
            self.betas = root**2
        self.num_train_timesteps = num_train_timesteps
        self.alphas_cumprod = torch.cumprod(1.0 - self.betas, dim=0)

    def alpha_prods(self, timesteps):
        """Products up to this step, and up to the one before it."""
        alpha_prod_t = self.alphas_cumprod[timesteps]
        before = self.alphas_cumprod[(timesteps - 1).clamp(min=0)]
        return alpha_prod_t, torch.where(timesteps > 0, before, 1.0)

    def add_noise(self, original_samples, noise, timesteps):
        alpha_prod_t = self.alphas_cumprod[timesteps].view(-1, 1, 1, 1)
        sqrt_alpha_prod = (alpha_prod_t**0.5).to(noise.dtype)
        sqrt_one_minus_alpha_prod = ((1 - alpha_prod_t) ** 0.5).to(noise.dtype)
        return sqrt_alpha_prod * original_samples + sqrt_one_minus_alpha_prod * noise

    def log_variance_range(self, timesteps):
        alpha_prod_t, alpha_prod_t_prev = self.alpha_prods(timesteps.clamp(min=1))
        current_beta_t = self.betas[timesteps.clamp(min=1)]
        variance = (1 - alpha_prod_t_prev) / (1 - alpha_prod_t) * current_beta_t
        min_log = torch.log(variance).view(-1, 1, 1, 1)
        max_log = torch.log(self.betas[timesteps]).view(-1, 1, 1, 1)
        return min_log.float(), max_log.float()

    def get_log_variance(self, predicted_variance, timesteps):
        min_log, max_log = self.log_variance_range(timesteps)
        frac = (predicted_variance + 1) / 2
        return frac * max_log + (1 - frac) * min_log

    def pred_original_sample(self, model_output, sample, timesteps):
        alpha_prod_t = self.alphas_cumprod[timesteps].view(-1, 1, 1, 1)
        beta_prod_t = 1 - alpha_prod_t
        scaled = sample - beta_prod_t.sqrt().float() * model_output
        return scaled / alpha_prod_t.sqrt().float()

    def pred_prev_sample(self, original_sample, sample, timesteps):
        alpha_prod_t, alpha_prod_t_prev = self.alpha_prods(timesteps)
        beta_prod_t, beta_prod_t_prev = 1 - alpha_prod_t, 1 - alpha_prod_t_prev
        current_beta_t = self.betas[timesteps]
        original_coeff = alpha_prod_t_prev.sqrt() * current_beta_t / beta_prod_t
        sample_coeff = (1 - current_beta_t).sqrt() * beta_prod_t_prev / beta_prod_t
        original_coeff = original_coeff.view(-1, 1, 1, 1).float()
        sample_coeff = sample_coeff.view(-1, 1, 1, 1).float()
        return original_coeff * original_sample + sample_coeff * sample


noise_scheduler = DDPMScheduler(**SCHEDULER_CONFIG)


# ----------------------------------------------------------------- conversion


def swap_scale_shift(weight):
    shift, scale = weight.chunk(2, dim=0)
    return torch.cat([scale, shift], dim=0)


def convert_patch_kernel(weight):
    """[out, channel, row, column] -> [out, row * column * channel]."""
    return weight.permute(0, 2, 3, 1).flatten(1)


def convert_dit_checkpoint(checkpoint):
    converted = {
        "pos_embed.proj.weight": convert_patch_kernel(
            checkpoint["x_embedder.proj.weight"]
        ),
        "pos_embed.proj.bias": checkpoint["x_embedder.proj.bias"],
        "emb.class_embedder.weight": checkpoint["y_embedder.embedding_table.weight"],
    }
    for suffix in ("weight", "bias"):
        for i, j in ((1, 0), (2, 2)):
            key = f"t_embedder.mlp.{j}.{suffix}"
            converted[f"emb.timestep_embedder.linear_{i}.{suffix}"] = checkpoint[key]
        converted[f"norm_out.linear.{suffix}"] = swap_scale_shift(
            checkpoint[f"final_layer.adaLN_modulation.1.{suffix}"]
        )
        converted[f"proj_out.{suffix}"] = checkpoint[f"final_layer.linear.{suffix}"]

    for depth in range(CONFIG["num_layers"]):
        new, old = f"transformer_blocks.{depth}", f"blocks.{depth}"
        q, k, v = torch.chunk(checkpoint[f"{old}.attn.qkv.weight"], 3, dim=0)
        converted[f"{new}.attn1.to_q.weight"] = q
        converted[f"{new}.attn1.to_q.bias"] = checkpoint[f"{old}.attn.q_bias"]
        converted[f"{new}.attn1.to_k.weight"] = k
        converted[f"{new}.attn1.to_v.weight"] = v
        converted[f"{new}.attn1.to_v.bias"] = checkpoint[f"{old}.attn.v_bias"]
        for suffix in ("weight", "bias"):
            converted[f"{new}.norm1.linear.{suffix}"] = checkpoint[
                f"{old}.adaLN_modulation.1.{suffix}"
            ]
            converted[f"{new}.attn1.to_out.0.{suffix}"] = checkpoint[
                f"{old}.attn.proj.{suffix}"
            ]
            converted[f"{new}.ff.net.0.proj.{suffix}"] = checkpoint[
                f"{old}.mlp.fc1.{suffix}"
            ]
            converted[f"{new}.ff.net.2.{suffix}"] = checkpoint[
                f"{old}.mlp.fc2.{suffix}"
            ]
    return converted


def model():
    transformer = DiTTransformer2DModel()
    checkpoint = torch.load(Path(__file__).with_name("weights.pt"))
    transformer.load_state_dict(convert_dit_checkpoint(checkpoint), strict=True)
    return transformer


# ------------------------------------------------------------------- training


def forward(net, batch):
    noisy_latents = noise_scheduler.add_noise(
        batch["latent"], batch["noise"], batch["t"]
    )
    model_pred = net(noisy_latents, batch["t"], batch["label"], batch["drop"])
    return {"x_t": noisy_latents, "pred": model_pred}


def variational_bound(model_pred, variance_values, noisy_latents, latents, timesteps):
    """In bits, for each example."""
    pred_original = noise_scheduler.pred_original_sample(
        model_pred, noisy_latents, timesteps
    )
    pred_mean = noise_scheduler.pred_prev_sample(
        pred_original, noisy_latents, timesteps
    )
    target_mean = noise_scheduler.pred_prev_sample(latents, noisy_latents, timesteps)
    target_log_var, _ = noise_scheduler.log_variance_range(timesteps)
    pred_log_var = noise_scheduler.get_log_variance(variance_values, timesteps)

    log_ratio = pred_log_var - target_log_var
    distance = (target_mean - pred_mean).square() / pred_log_var.exp()
    kl = 0.5 * (log_ratio + torch.exp(-log_ratio) - 1.0 + distance)

    posterior = torch.distributions.Normal(pred_mean, torch.exp(0.5 * pred_log_var))
    decoder_nll = -posterior.log_prob(latents)

    is_first = (timesteps == 0)[:, None, None, None]
    bound = torch.where(is_first, decoder_nll, kl)
    return bound.flatten(1).mean(dim=1) / math.log(2)


def loss(output, batch):
    model_pred, variance_values = torch.split(
        output["pred"], CONFIG["in_channels"], dim=1
    )
    mse_loss = F.mse_loss(model_pred, batch["noise"], reduction="mean")
    bound = variational_bound(
        model_pred.detach(), variance_values, output["x_t"], batch["latent"], batch["t"]
    )
    vlb_loss = noise_scheduler.num_train_timesteps * bound.mean()
    return mse_loss + 0.001 * vlb_loss


class TrainingAdamW(torch.optim.AdamW):
    max_grad_norm = 1.0

    def step(self, closure=None):
        parameters = (p for g in self.param_groups for p in g["params"])
        torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        return super().step(closure)


def optimizer(net):
    no_decay = ("bias", "class_embedder.weight")
    named = list(net.named_parameters())
    grouped_parameters = [
        {
            "params": [p for n, p in named if not n.endswith(no_decay)],
            "weight_decay": 0.2,
        },
        {
            "params": [p for n, p in named if n.endswith(no_decay)],
            "weight_decay": 0.0,
        },
    ]
    return TrainingAdamW(grouped_parameters, lr=2e-3, betas=(0.9, 0.99), eps=1e-8)
