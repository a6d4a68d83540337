"""A small Whisper: speech to words, with voice activity of each frame beside it."""

import math

import torch
from torch import nn
from torch.nn import functional as F

N_MELS, N_STATE, N_HEAD, N_FF, N_LAYER = 16, 48, 4, 128, 2
AUDIO_CTX, TEXT_CTX = 28, 12
VOCAB, PAD, SOT, EOT = 40, 0, 1, 2
DYNAMIC_RANGE = 4.0  # in powers of ten
LABEL_SMOOTHING = 0.1
VAD_WEIGHT, VAD_POS_WEIGHT, VAD_GRAD = 0.5, 1.8, 0.3
LR, WARMUP, BETAS, EPS = 4e-3, 2, (0.9, 0.98), 1e-6
MAX_NORM, EMA_DECAY = 1.0, 0.99


def sinusoids(length, channels, max_timescale=10000):
    """Sines, then cosines."""
    increment = math.log(max_timescale) / (channels // 2 - 1)
    inv_timescales = torch.exp(-increment * torch.arange(channels // 2))
    scaled_time = torch.arange(length)[:, None] * inv_timescales[None, :]
    return torch.cat([torch.sin(scaled_time), torch.cos(scaled_time)], dim=1)


def additive(keep):
    """0 where a key may be seen, -inf where not."""
    return torch.zeros(keep.shape).masked_fill(~keep, -math.inf)


class MultiHeadAttention(nn.Module):
    def __init__(self, n_state, n_head):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_state, n_state)
        self.key = nn.Linear(n_state, n_state, bias=False)
        self.value = nn.Linear(n_state, n_state)
        self.out = nn.Linear(n_state, n_state)

    def forward(self, x, xa=None, mask=None):
        source = x if xa is None else xa
        q, k, v = self.query(x), self.key(source), self.value(source)
        scale = (q.shape[-1] // self.n_head) ** -0.25
        q = q.unflatten(2, (self.n_head, -1)).permute(0, 2, 1, 3) * scale
        k = k.unflatten(2, (self.n_head, -1)).permute(0, 2, 3, 1) * scale
        v = v.unflatten(2, (self.n_head, -1)).permute(0, 2, 1, 3)
        w = F.softmax(q @ k + mask, dim=-1)
        return self.out((w @ v).permute(0, 2, 1, 3).flatten(2))


class ResidualAttentionBlock(nn.Module):
    def __init__(self, n_state, n_head, cross_attention=False):
        super().__init__()
        self.attn = MultiHeadAttention(n_state, n_head)
        self.attn_ln = nn.LayerNorm(n_state)
        self.cross_attn = None
        if cross_attention:
            self.cross_attn = MultiHeadAttention(n_state, n_head)
            self.cross_attn_ln = nn.LayerNorm(n_state)
        self.mlp = nn.Sequential(
            nn.Linear(n_state, N_FF), nn.GELU(), nn.Linear(N_FF, n_state)
        )
        self.mlp_ln = nn.LayerNorm(n_state)

    def forward(self, x, mask, xa=None, xa_mask=None):
        x = x + self.attn(self.attn_ln(x), mask=mask)
        if self.cross_attn is not None:
            x = x + self.cross_attn(self.cross_attn_ln(x), xa, mask=xa_mask)
        return x + self.mlp(self.mlp_ln(x))


class AudioEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(N_MELS, N_STATE, 3, padding=1)
        self.conv2 = nn.Conv1d(N_STATE, N_STATE, 3, stride=2, padding=1)
        self.register_buffer("positional_embedding", sinusoids(AUDIO_CTX, N_STATE))
        self.blocks = nn.ModuleList(
            [ResidualAttentionBlock(N_STATE, N_HEAD) for _ in range(N_LAYER)]
        )
        self.ln_post = nn.LayerNorm(N_STATE)

    def forward(self, mel, mask):
        """(batch, mels, frames) -> (batch, frames / 2, state)"""
        x = F.gelu(self.conv1(mel))
        x = F.gelu(self.conv2(x))
        x = x.permute(0, 2, 1)
        x = x + self.positional_embedding[: x.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        return self.ln_post(x)


class TextDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_embedding = nn.Embedding(VOCAB, N_STATE)
        self.positional_embedding = nn.Parameter(torch.empty(TEXT_CTX, N_STATE))
        self.blocks = nn.ModuleList(
            [ResidualAttentionBlock(N_STATE, N_HEAD, True) for _ in range(N_LAYER)]
        )
        self.ln = nn.LayerNorm(N_STATE)

    def forward(self, tokens, xa, xa_mask):
        """(batch, t), (batch, frames, state) -> logits (batch, t, words)"""
        length = tokens.shape[1]
        x = self.token_embedding(tokens) * math.sqrt(N_STATE)
        x = x + self.positional_embedding[:length]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask = additive(causal & (tokens != PAD)[:, None, None, :])
        for block in self.blocks:
            x = block(x, mask, xa, xa_mask)
        return self.ln(x) @ self.token_embedding.weight.T


class WeightAverage(nn.Module):
    """Shadows of the parameters; the average is fast at the start."""

    def __init__(self, net):
        super().__init__()
        self.updates = 0
        for name, p in net.named_parameters():
            self.register_buffer(name.replace(".", "_"), p.detach().clone())

    @torch.no_grad()
    def update(self, net):
        self.updates += 1
        decay = min(EMA_DECAY, (1 + self.updates) / (10 + self.updates))
        for name, p in net.named_parameters():
            getattr(self, name.replace(".", "_")).lerp_(p, 1 - decay)


class Whisper(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = AudioEncoder()
        self.decoder = TextDecoder()
        self.vad_head = nn.Linear(N_STATE, 1)

    def forward(self, mel, frames, tokens):
        """Logits of words, and of voice at each frame of the encoder."""
        steps = torch.arange(mel.shape[2] // 2)
        keep = steps < encoder_frames(frames)[:, None]
        mask = additive(keep)[:, None, None, :]
        xa = self.encoder(mel, mask)
        logits = self.decoder(tokens, xa, mask)
        # The head of voices moves the encoder less than itself.
        gentle = xa.detach() + VAD_GRAD * (xa - xa.detach())
        return {"logits": logits, "vad": self.vad_head(gentle).squeeze(2)}


def encoder_frames(frames):
    return (frames + 1) // 2


def log_mel(power, frames):
    log_spec = power.clamp(min=1e-10).log10()
    peak = log_spec.amax(dim=(1, 2), keepdim=True)
    log_spec = torch.maximum(log_spec, peak - DYNAMIC_RANGE)
    log_spec = (log_spec + 4) / 4
    keep = torch.arange(power.shape[2]) < frames[:, None]
    return log_spec * keep[:, None]


def decoder_inputs(words):
    return F.pad(words, (1, 0), value=SOT)


def decoder_targets(words):
    lengths = (words != PAD).sum(dim=1, keepdim=True)
    return F.pad(words, (0, 1), value=PAD).scatter(1, lengths, EOT)


def model():
    torch.manual_seed(2212)
    net = Whisper()
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "ln" in name and name.endswith("weight"):
                p.uniform_(0.6, 1.4)
            elif p.ndim == 1:
                p.normal_(0, 0.15)
            elif name.endswith("token_embedding.weight"):
                p.normal_(0, N_STATE**-0.5)
            elif name.endswith("positional_embedding"):
                p.normal_(0, 0.5)
            else:
                nn.init.xavier_uniform_(p)
                p.mul_(1.3)
    net.ema = WeightAverage(net)
    return net


def batches():
    """Words are chords that slide, between pauses; power of each mel band and frame.

    Behind an utterance there is no power, and there are no words.
    """
    generator = torch.Generator().manual_seed(1922)

    def draw(low, high, *size):
        return torch.randint(low, high, size, generator=generator)

    band = torch.arange(16.0)[:, None]
    made = []
    for counts in ((4, 7, 2, 5), (3, 6, 5), (6, 2, 8, 3)):
        spoken = []
        for count in counts:
            chords, speech, words = [], [], []
            pause = int(draw(1, 5))
            for word in draw(3, 40, count).tolist():
                length = int(draw(3, 6))
                time = torch.arange(float(length)) / length
                low, high, slide = word % 7, 7 + word % 9, word % 5 - 2
                chord = torch.exp(-0.5 * (band - low - slide * time) ** 2)
                chord = chord + 0.4 * torch.exp(-0.5 * (band - high) ** 2)
                chords += [torch.zeros(16, pause), chord]
                speech += [0] * pause + [1] * length
                words.append(word)
                pause = int(draw(0, 3))
            power = torch.cat(chords, dim=1)
            noise = torch.randn(power.shape, generator=generator)
            loud = 10 ** (1.5 * torch.rand((), generator=generator) - 1)
            power = loud * (power**2 + 1e-4) * torch.exp(0.8 * noise)
            spoken.append((power, speech, words))
        longest = max(len(speech) for _, speech, _ in spoken)
        longest += longest % 2
        size, most = len(counts), max(counts)
        batch = {
            "power": torch.zeros(size, 16, longest),
            "frames": torch.tensor([len(speech) for _, speech, _ in spoken]),
            "speech": torch.zeros(size, longest, dtype=torch.bool),
            "words": torch.zeros(size, most, dtype=torch.long),
        }
        for row, (power, speech, words) in enumerate(spoken):
            batch["power"][row, :, : len(speech)] = power
            batch["speech"][row, : len(speech)] = torch.tensor(speech) > 0
            batch["words"][row, : len(words)] = torch.tensor(words)
        made.append(batch)
    return made


def forward(net, batch):
    frames = batch["frames"]
    mel = log_mel(batch["power"], frames)
    return net(mel, frames, decoder_inputs(batch["words"]))


def loss(output, batch):
    target = decoder_targets(batch["words"])
    words = F.cross_entropy(
        output["logits"].flatten(0, 1),
        target.flatten(),
        ignore_index=PAD,
        label_smoothing=LABEL_SMOOTHING,
    )

    vad = output["vad"]
    speech = batch["speech"].unflatten(1, (-1, 2)).any(dim=2).float()
    mask = torch.arange(vad.shape[1]) < encoder_frames(batch["frames"])[:, None]
    each = F.binary_cross_entropy_with_logits(
        vad, speech, pos_weight=torch.tensor(VAD_POS_WEIGHT), reduction="none"
    )
    voice = (each * mask).sum() / mask.sum()
    return words + VAD_WEIGHT * voice


class WhisperAdam(torch.optim.Adam):
    """Warm-up, then the inverse square root; clips by norm and keeps the average."""

    def __init__(self, net):
        super().__init__(net.parameters(), lr=LR, betas=BETAS, eps=EPS)
        self.net = net
        self.done = 0

    def step(self, closure=None):
        self.done += 1
        nn.utils.clip_grad_norm_(self.net.parameters(), MAX_NORM)
        rate = LR * min(self.done / WARMUP, math.sqrt(WARMUP / self.done))
        self.param_groups[0]["lr"] = rate
        result = super().step(closure)
        self.net.ema.update(self.net)
        return result


def optimizer(net):
    return WhisperAdam(net)
