"""Is there a voice? An STFT by convolution, log magnitude, and an LSTM cell from chunk to chunk."""

import math

import torch
from torch import nn

CHUNK, CHUNKS, WINDOW, HOP = 256, 6, 64, 32


class STFT(nn.Module):
    """Magnitudes of a Hann-windowed Fourier transform, as a strided convolution."""

    def __init__(self):
        super().__init__()
        n = torch.arange(WINDOW)
        k = torch.arange(WINDOW // 2 + 1)[:, None]
        angle = 2 * math.pi * k * n / WINDOW
        window = torch.hann_window(WINDOW)
        basis = torch.cat([torch.cos(angle) * window, -torch.sin(angle) * window])
        self.register_buffer("basis", basis.unsqueeze(1))

    def forward(self, audio):
        spectrum = nn.functional.conv1d(audio.unsqueeze(1), self.basis, stride=HOP)
        cutoff = WINDOW // 2 + 1
        re, im = spectrum[:, :cutoff], spectrum[:, cutoff:]
        return torch.sqrt(re**2 + im**2)


class VoiceDetector(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.stft = STFT()
        self.encoder = nn.Sequential(
            nn.Conv1d(WINDOW // 2 + 1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv1d(32, 32, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.rnn = nn.LSTMCell(32, hidden)
        self.decoder = nn.Sequential(nn.ReLU(), nn.Linear(hidden, 1), nn.Sigmoid())

    def forward(self, audio):
        state = None
        probabilities = []
        for chunk in audio.split(CHUNK, dim=1):
            features = self.encoder(torch.log(self.stft(chunk) + 1e-4))
            state = self.rnn(features.mean(-1), state)
            probabilities.append(self.decoder(state[0]))
        return torch.cat(probabilities, dim=1)


def recordings(count, seed):
    """Noise, with harmonics of a voice in some of the chunks; 1 where there is one."""
    g = torch.Generator().manual_seed(seed)
    voiced = torch.rand(count, CHUNKS, generator=g) < 0.5
    t = torch.arange(CHUNK * CHUNKS) / 8000
    pitch = 100 + 150 * torch.rand(count, 1, generator=g)
    tone = sum(torch.sin(2 * math.pi * h * pitch * t) / h for h in range(1, 6))
    loud = voiced.float().repeat_interleave(CHUNK, 1)
    noise = 0.05 * torch.randn(count, CHUNK * CHUNKS, generator=g)
    return 0.2 * tone * loud + noise, voiced.float()


def model():
    torch.manual_seed(0)
    net = VoiceDetector()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for step in range(50):
        audio, voiced = recordings(16, 100 + step)
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy(net(audio), voiced).backward()
        optimizer.step()
    return net.eval()


def batches():
    return [recordings(8, seed)[0] for seed in range(8)]


def held_out():
    return [recordings(8, seed)[0] for seed in range(50, 54)]
