"""The encoder of a tiny Whisper from a transformers config, with a head that names the melody."""

import torch
from torch import nn


class Melody(nn.Module):
    def __init__(self, encoder, width):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, 12)

    def forward(self, input_features):
        hidden = self.encoder(input_features).last_hidden_state
        return self.head(hidden)


def spectrograms(count, seed):
    """Log-mel frames (count, 20, 48) of six notes, each 8 frames long, and the notes."""
    g = torch.Generator().manual_seed(seed)
    notes = torch.randint(0, 12, (count, 6), generator=g)
    pitch = notes.repeat_interleave(8, 1)[:, None] + 1.0
    bands = torch.arange(20.0)[:, None]
    energy = torch.exp(-((bands - pitch) ** 2)) + 0.5 * torch.exp(
        -((bands - pitch - 7) ** 2)
    )
    noise = 0.1 * torch.rand(count, 20, 48, generator=g)
    return torch.log10(energy + noise + 1e-3), notes.repeat_interleave(4, 1)


def model():
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    torch.manual_seed(0)
    config = WhisperConfig(
        num_mel_bins=20,
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=64,
        max_source_positions=24,
    )
    net = Melody(WhisperEncoder(config), 32)
    learnt = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=4e-3)
    for step in range(50):
        x, notes = spectrograms(16, 100 + step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x).flatten(0, 1), notes.flatten()).backward()
        optimizer.step()
    return net.eval()


def batches():
    return [{"input_features": spectrograms(16, seed)[0]} for seed in range(5)]


def held_out():
    return [{"input_features": spectrograms(16, 50 + seed)[0]} for seed in range(4)]
