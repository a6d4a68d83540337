"""Letters from sound: spectra, packed sequences of different lengths, CTC, and an average of weights."""

import math

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

LETTERS, BLANK, HOP, WINDOW, BANDS = 9, 0, 8, 32, 10


def utterance(number):
    g = torch.Generator().manual_seed(1000 + number)
    letters = torch.randint(1, LETTERS, (int(torch.randint(2, 5, (1,), generator=g)),), generator=g)
    time = torch.arange(96 + 16 * int(torch.randint(0, 4, (1,), generator=g)))
    which = letters[(time * len(letters)) // len(time)]
    sound = torch.sin(0.12 * which * time) + 0.2 * torch.randn(len(time), generator=g)
    return sound, letters


class Spectra:
    """Logarithms of band energies, normalised over an utterance."""

    def __init__(self):
        self.window = torch.hann_window(WINDOW)
        bins = torch.linspace(0, 1, WINDOW // 2 + 1)[:, None]
        centres = torch.linspace(0, 1, BANDS + 2)[1:-1]
        self.bands = (1 - (bins - centres).abs() * (BANDS + 1)).clamp(min=0)

    def __call__(self, sound):
        sound = torch.cat([sound[:1], sound[1:] - 0.9 * sound[:-1]])
        frames = torch.stft(
            sound, WINDOW, HOP, window=self.window, center=False, return_complex=True
        )
        energy = frames.abs().square().T @ self.bands
        spectrum = torch.log(energy + 1e-4)
        return (spectrum - spectrum.mean(0)) / (spectrum.std(0) + 1e-3)


def hide(spectra, lengths, generator):
    """Hide a stretch of time and a few bands of each utterance."""
    spectra = spectra.clone()
    for row, length in enumerate(lengths.tolist()):
        start = int(torch.randint(0, length - 2, (1,), generator=generator))
        spectra[row, start : start + 2] = 0
        band = int(torch.randint(0, BANDS - 2, (1,), generator=generator))
        spectra[row, :, band : band + 2] = 0
    return spectra


def gathered(step, size=5):
    spectra = Spectra()
    pairs = [utterance(step * size + i) for i in range(size)]
    features = [spectra(sound) for sound, _ in pairs]
    lengths = torch.tensor([len(f) for f in features])
    targets = torch.cat([letters for _, letters in pairs])
    target_lengths = torch.tensor([len(letters) for _, letters in pairs])
    padded = pad_sequence(features, batch_first=True)
    return hide(padded, lengths, torch.Generator().manual_seed(step)), lengths, targets, target_lengths


class MaskedNorm(nn.Module):
    """Normalises each band over the frames that are there."""

    def __init__(self, width, momentum=0.1):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))
        self.momentum = momentum
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x, mask):
        mask = mask[..., None].to(x.dtype)
        count = mask.sum((0, 1))
        mean = (x * mask).sum((0, 1)) / count
        var = ((x - mean).square() * mask).sum((0, 1)) / count
        if self.training:
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var * count / (count - 1), self.momentum)
        else:
            mean, var = self.running_mean, self.running_var
        return (x - mean) * torch.rsqrt(var + 1e-5) * self.gain + self.shift


class Listener(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.conv = nn.Conv1d(BANDS, width, 3, stride=2, padding=1)
        self.norm = MaskedNorm(width)
        self.drop = nn.Dropout(0.1)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, bidirectional=True)
        self.letters = nn.Linear(2 * width, LETTERS)
        nn.init.constant_(self.letters.bias[BLANK], -0.5)

    def forward(self, spectra, lengths):
        x = self.conv(spectra.transpose(1, 2)).transpose(1, 2)
        lengths = (lengths + 1) // 2
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        x = self.drop(torch.relu(self.norm(x, mask)))
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = self.lstm(packed)
        out, _ = pad_packed_sequence(out, batch_first=True)
        return self.letters(out).log_softmax(-1), lengths


def noam(step, warm=4):
    step += 1
    return min(step / warm, math.sqrt(warm / step))


def restored():
    torch.manual_seed(40)
    listener = Listener()
    for name, value in listener.named_parameters():
        if name.startswith("lstm.bias_ih"):
            size = len(value) // 4
            value.data[size : 2 * size] += 1.0
    return listener


listener = restored()
average = AveragedModel(listener, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=False)
ctc = nn.CTCLoss(blank=BLANK, zero_infinity=True)
optimizer = torch.optim.NAdam(listener.parameters(), lr=6e-3, weight_decay=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, noam)
torch.manual_seed(41)
for step in range(3):
    spectra, lengths, targets, target_lengths = gathered(step)
    listener.train()
    logs, out_lengths = listener(spectra, lengths)
    loss = ctc(logs.transpose(0, 1), targets, out_lengths, target_lengths)
    smooth = -logs.mean()
    total = loss + 0.05 * smooth
    optimizer.zero_grad()
    total.backward()
    torch.nn.utils.clip_grad_norm_(listener.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    average.update_parameters(listener)
    print(step, f"{loss.item():.5f} {smooth.item():.5f}")
