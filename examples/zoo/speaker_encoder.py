"""Who speaks? Three LSTM layers, the last hidden state, a ReLU layer, a unit vector."""

import torch
from torch import nn

SPEAKERS = torch.randn(12, 20, generator=torch.Generator().manual_seed(7))


class SpeakerEncoder(nn.Module):
    def __init__(self, mel_n_channels=20, hidden_size=32, embedding_size=24):
        super().__init__()
        self.lstm = nn.LSTM(mel_n_channels, hidden_size, 3, batch_first=True)
        self.linear = nn.Linear(hidden_size, embedding_size)
        self.relu = nn.ReLU()

    def forward(self, mels):
        """Unit vectors (utterances, embedding_size) of mels (utterances, frames, channels)."""
        _, (hidden, _) = self.lstm(mels)
        embeds_raw = self.relu(self.linear(hidden[-1]))
        return embeds_raw / torch.norm(embeds_raw, dim=1, keepdim=True)


def utterances(count, seed):
    g = torch.Generator().manual_seed(seed)
    speaker = torch.randint(0, len(SPEAKERS), (count,), generator=g)
    sound = torch.randn(count, 24, 20, generator=g)
    smooth = (sound + sound.roll(1, 1) + sound.roll(2, 1)) / 3
    return SPEAKERS[speaker][:, None] * 0.7 + smooth, speaker


def model():
    torch.manual_seed(0)
    encoder = SpeakerEncoder()
    head = nn.Linear(24, len(SPEAKERS), bias=False)
    parameters = [*encoder.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    for step in range(60):
        mels, speaker = utterances(32, 100 + step)
        optimizer.zero_grad()
        logits = 8 * head(encoder(mels))
        nn.functional.cross_entropy(logits, speaker).backward()
        nn.utils.clip_grad_norm_(parameters, 3)
        optimizer.step()
    return encoder.eval()


def batches():
    return [utterances(16, seed) for seed in range(6)]


def held_out():
    return [utterances(16, seed) for seed in range(50, 54)]


def forward(model, batch):
    return model(batch[0])


def metric(outputs, batches):
    """Mean over pairs: cosine of the same speaker minus cosine of others."""
    vectors = torch.cat(outputs)
    speaker = torch.cat([b[1] for b in batches])
    same = speaker[:, None] == speaker
    cosine = vectors @ vectors.T
    return (cosine[same].mean() - cosine[~same].mean()).item()
