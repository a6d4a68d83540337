"""A small FastPitch: characters to mels, with predictors of durations and of pitch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

N_SYMBOLS, PADDING_IDX, N_MEL = 20, 0, 12
D_MODEL, N_HEAD, D_HEAD, D_INNER = 24, 2, 10, 40
N_LAYERS, KERNEL, FILTER = 2, 3, 20
PITCH_MEAN, PITCH_STD = 214.72, 65.72
DUR_SCALE, PITCH_SCALE = 0.3, 0.2
LR, BETAS, EPS, WEIGHT_DECAY = 2e-3, (0.9, 0.98), 1e-8, 0.1


class PositionalEmbedding(nn.Module):
    def __init__(self, demb):
        super().__init__()
        inv_freq = 1 / (10000 ** (torch.arange(0.0, demb, 2.0) / demb))
        self.register_buffer("inv_freq", inv_freq)

    def forward(self, pos_seq):
        sinusoid = torch.outer(pos_seq, self.inv_freq)
        return torch.cat([sinusoid.sin(), sinusoid.cos()], dim=1)


class MultiHeadAttn(nn.Module):
    """Without biases, as softmax forgets that of the keys."""

    def __init__(self):
        super().__init__()
        self.scale = 1 / D_HEAD**0.5
        self.qkv_net = nn.Linear(D_MODEL, 3 * N_HEAD * D_HEAD, bias=False)
        self.o_net = nn.Linear(N_HEAD * D_HEAD, D_MODEL, bias=False)
        self.layer_norm = nn.LayerNorm(D_MODEL)

    def forward(self, inp, mask):
        b, t, _ = inp.shape
        heads = self.qkv_net(inp).view(b, t, 3, N_HEAD, D_HEAD)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        score = (q @ k.transpose(2, 3)) * self.scale
        score = score.masked_fill(~mask[:, None, None, :], -float("inf"))
        prob = F.softmax(score, dim=3)
        vec = (prob @ v).transpose(1, 2).reshape(b, t, -1)
        return self.layer_norm(inp + self.o_net(vec))


class PositionwiseConvFF(nn.Module):
    def __init__(self):
        super().__init__()
        self.core_net = nn.Sequential(
            nn.Conv1d(D_MODEL, D_INNER, KERNEL, padding=KERNEL // 2),
            nn.ReLU(),
            nn.Conv1d(D_INNER, D_MODEL, KERNEL, padding=KERNEL // 2),
        )
        self.layer_norm = nn.LayerNorm(D_MODEL)

    def forward(self, inp):
        core = self.core_net(inp.transpose(1, 2)).transpose(1, 2)
        return self.layer_norm(inp + core)


class TransformerLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.dec_attn = MultiHeadAttn()
        self.pos_ff = PositionwiseConvFF()

    def forward(self, inp, mask):
        out = self.dec_attn(inp, mask) * mask.unsqueeze(2)
        return self.pos_ff(out) * mask.unsqueeze(2)


class FFTransformer(nn.Module):
    def __init__(self, embed):
        super().__init__()
        self.word_emb = None
        if embed:
            self.word_emb = nn.Embedding(N_SYMBOLS, D_MODEL, PADDING_IDX)
        self.pos_emb = PositionalEmbedding(D_MODEL)
        self.layers = nn.ModuleList([TransformerLayer() for _ in range(N_LAYERS)])

    def forward(self, inp, lens):
        mask = mask_from_lens(lens, inp.shape[1])
        if self.word_emb is not None:
            inp = self.word_emb(inp)
        pos_seq = torch.arange(float(inp.shape[1]))
        out = inp + self.pos_emb(pos_seq) * mask.unsqueeze(2)
        for layer in self.layers:
            out = layer(out, mask)
        return out, mask


class ConvReLUNorm(nn.Module):
    def __init__(self, inp, out):
        super().__init__()
        self.conv = nn.Conv1d(inp, out, KERNEL, padding=KERNEL // 2)
        self.norm = nn.LayerNorm(out)

    def forward(self, x):
        out = F.relu(self.conv(x.transpose(1, 2)))
        return self.norm(out.transpose(1, 2))


class TemporalPredictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            ConvReLUNorm(D_MODEL, FILTER), ConvReLUNorm(FILTER, FILTER)
        )
        self.fc = nn.Linear(FILTER, 1)

    def forward(self, enc_out, mask):
        out = self.fc(self.layers(enc_out)).squeeze(2)
        return out * mask


class FastPitch(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = FFTransformer(embed=True)
        self.duration_predictor = TemporalPredictor()
        self.pitch_predictor = TemporalPredictor()
        self.pitch_emb = nn.Conv1d(1, D_MODEL, KERNEL, padding=KERNEL // 2)
        self.decoder = FFTransformer(embed=False)
        self.proj = nn.Linear(D_MODEL, N_MEL)

    def forward(self, text, text_lens, durs, pitch_tgt):
        enc_out, mask = self.encoder(text, text_lens)
        log_dur = self.duration_predictor(enc_out, mask)
        pitch = self.pitch_predictor(enc_out, mask)
        pitch_emb = self.pitch_emb(pitch_tgt.unsqueeze(1)).transpose(1, 2)
        enc_out = enc_out + pitch_emb
        frames, mel_lens = regulate_len(enc_out, durs)
        dec_out, _ = self.decoder(frames, mel_lens)
        return {"mel": self.proj(dec_out), "log_dur": log_dur, "pitch": pitch}


def mask_from_lens(lens, max_len):
    return torch.arange(max_len) < lens.unsqueeze(1)


def regulate_len(enc_out, durs):
    """Each character stands for as many frames as it lasts."""
    reps = [x.repeat_interleave(d, dim=0) for x, d in zip(enc_out, durs)]
    return pad_sequence(reps, batch_first=True), durs.sum(dim=1)


def average_pitch(pitch, durs):
    """Mean over the voiced frames of each character; 0 where there is none."""
    averages = torch.zeros(durs.shape)
    for row, (values, dur) in enumerate(zip(pitch, durs)):
        parts = values[: int(dur.sum())].split(dur.tolist())
        for column, part in enumerate(parts):
            voiced = part[part > 0]
            if len(voiced):
                scaled = (voiced - PITCH_MEAN) / PITCH_STD
                averages[row, column] = scaled.mean()
    return averages


def model():
    torch.manual_seed(2006)
    net = FastPitch()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, MultiHeadAttn):
                module.qkv_net.weight.mul_(2.5)
                module.o_net.weight.mul_(2)
            elif isinstance(module, nn.Conv1d):
                nn.init.kaiming_normal_(module.weight)
                module.bias.normal_(0, 0.2)
    return net


def batches():
    """Every symbol has a colour of its own; some last no frame, some have no voice."""
    generator = torch.Generator().manual_seed(2007)
    colours = torch.randn(20, 12, generator=generator)
    made = []
    for lens in ((11, 7, 9, 5), (6, 10, 8, 10)):
        text, durs, pitch, mel = [], [], [], []
        for n in lens:
            symbols = torch.randint(1, 20, (n,), generator=generator)
            dur = torch.randint(0, 6, (n,), generator=generator)
            dur[-1] += 1
            spoken = symbols.repeat_interleave(dur)
            time = torch.arange(float(len(spoken)))
            phase, level = torch.rand(2, generator=generator)
            wave = torch.sin(0.4 * time + 6.28 * phase)
            hertz = 170 + 80 * level + 50 * wave
            hertz = hertz + 10 * torch.randn(len(spoken), generator=generator)
            noise = 0.2 * torch.randn(len(spoken), 12, generator=generator)
            text.append(symbols)
            durs.append(dur)
            pitch.append(hertz * (spoken % 4 != 0))
            mel.append(colours[spoken] + 0.4 * wave.unsqueeze(1) + noise - 0.5)
        columns = {"text": text, "durs": durs, "pitch": pitch, "mel": mel}
        batch = {"text_lens": torch.tensor(lens)}
        for name, rows in columns.items():
            batch[name] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        made.append(batch)
    return made


def forward(net, batch):
    pitch_tgt = average_pitch(batch["pitch"], batch["durs"])
    return net(batch["text"], batch["text_lens"], batch["durs"], pitch_tgt)


def masked_mse(pred, target, mask):
    error = F.mse_loss(pred, target, reduction="none")
    return (error * mask).sum() / mask.expand_as(error).sum()


def loss(output, batch):
    durs = batch["durs"]
    text_mask = mask_from_lens(batch["text_lens"], durs.shape[1])
    mel_mask = mask_from_lens(durs.sum(dim=1), batch["mel"].shape[1])
    mel_loss = masked_mse(output["mel"], batch["mel"], mel_mask.unsqueeze(2))
    log_dur_tgt = torch.log(durs.float() + 1)
    dur_loss = masked_mse(output["log_dur"], log_dur_tgt, text_mask)
    pitch_tgt = average_pitch(batch["pitch"], durs)
    pitch_loss = masked_mse(output["pitch"], pitch_tgt, text_mask)
    return mel_loss + DUR_SCALE * dur_loss + PITCH_SCALE * pitch_loss


def optimizer(net):
    """Neither biases and norms nor the embedding decay."""
    decay, rest = [], []
    for name, p in net.named_parameters():
        (decay if p.ndim > 1 and "word_emb" not in name else rest).append(p)
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
