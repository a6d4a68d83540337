"""A small Tacotron 2: mel frames of a text, two a step, by location-sensitive attention."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

SYMBOLS, CHANNELS = 26, 16
MELS, FRAMES = 10, 2
PRENET, RNN = 12, 20
ATTENTION, FILTERS = 16, 4


def conv_norm(inputs, outputs, kernel=5):
    return nn.Sequential(
        nn.Conv1d(inputs, outputs, kernel, padding=kernel // 2),
        nn.BatchNorm1d(outputs),
    )


def padding_mask(lengths, size):
    return torch.arange(size) >= lengths[:, None]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, CHANNELS)
        self.convolutions = nn.ModuleList(
            conv_norm(CHANNELS, CHANNELS) for _ in range(3)
        )
        self.lstm = nn.LSTM(
            CHANNELS, CHANNELS // 2, batch_first=True, bidirectional=True
        )

    def forward(self, text, lengths):
        x = self.embedding(text).transpose(1, 2)
        for conv in self.convolutions:
            x = F.relu(conv(x))
        x = pack_padded_sequence(x.transpose(1, 2), lengths, batch_first=True)
        x, _ = self.lstm(x)
        x, _ = pad_packed_sequence(x, batch_first=True)
        return x


class Prenet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Linear(MELS * FRAMES, PRENET, bias=False),
                nn.Linear(PRENET, PRENET, bias=False),
            ]
        )

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


class LocationLayer(nn.Module):
    def __init__(self, kernel=5):
        super().__init__()
        self.conv = nn.Conv1d(2, FILTERS, kernel, padding=kernel // 2, bias=False)
        self.dense = nn.Linear(FILTERS, ATTENTION, bias=False)

    def forward(self, weights):
        return self.dense(self.conv(weights).transpose(1, 2))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query_layer = nn.Linear(RNN, ATTENTION, bias=False)
        self.memory_layer = nn.Linear(CHANNELS, ATTENTION, bias=False)
        self.v = nn.Linear(ATTENTION, 1, bias=False)
        self.location_layer = LocationLayer()

    def forward(self, hidden, memory, processed_memory, weights, mask):
        query = self.query_layer(hidden.unsqueeze(1))
        location = self.location_layer(weights)
        energies = self.v(torch.tanh(query + location + processed_memory)).squeeze(-1)
        energies = energies.masked_fill(mask, float("-inf"))
        weights = F.softmax(energies, dim=1)
        context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
        return context, weights


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.prenet = Prenet()
        self.attention_rnn = nn.LSTMCell(PRENET + CHANNELS, RNN)
        self.attention = Attention()
        self.decoder_rnn = nn.LSTMCell(RNN + CHANNELS, RNN)
        self.linear_projection = nn.Linear(RNN + CHANNELS, MELS * FRAMES)
        self.gate_layer = nn.Linear(RNN + CHANNELS, 1)

    def forward(self, memory, lengths, mels):
        batch, size, _ = memory.shape
        mask = padding_mask(lengths, size)
        processed_memory = self.attention.memory_layer(memory)

        frames = mels.transpose(1, 2).reshape(batch, -1, FRAMES * MELS)
        go = torch.zeros(batch, 1, FRAMES * MELS)
        inputs = self.prenet(torch.cat([go, frames], dim=1))

        attention_hidden = torch.zeros(batch, RNN)
        attention_cell = torch.zeros(batch, RNN)
        decoder_hidden = torch.zeros(batch, RNN)
        decoder_cell = torch.zeros(batch, RNN)
        context = torch.zeros(batch, CHANNELS)
        weights = torch.zeros(batch, size)
        cumulative = torch.zeros(batch, size)

        outputs, gates, alignments = [], [], []
        for step in range(frames.shape[1]):
            cell_input = torch.cat([inputs[:, step], context], dim=-1)
            attention_hidden, attention_cell = self.attention_rnn(
                cell_input, (attention_hidden, attention_cell)
            )
            context, weights = self.attention(
                attention_hidden,
                memory,
                processed_memory,
                torch.stack([weights, cumulative], dim=1),
                mask,
            )
            cumulative = cumulative + weights
            decoder_hidden, decoder_cell = self.decoder_rnn(
                torch.cat([attention_hidden, context], dim=-1),
                (decoder_hidden, decoder_cell),
            )
            both = torch.cat([decoder_hidden, context], dim=-1)
            outputs.append(self.linear_projection(both))
            gates.append(self.gate_layer(both).squeeze(-1))
            alignments.append(weights)

        mel = torch.stack(outputs, dim=1).reshape(batch, -1, MELS).transpose(1, 2)
        return mel, torch.stack(gates, dim=1), torch.stack(alignments, dim=1)


class Postnet(nn.Module):
    def __init__(self, channels=14):
        super().__init__()
        self.convolutions = nn.ModuleList(
            [
                conv_norm(MELS, channels),
                conv_norm(channels, channels),
                conv_norm(channels, channels),
                conv_norm(channels, MELS),
            ]
        )

    def forward(self, x):
        for conv in self.convolutions[:-1]:
            x = torch.tanh(conv(x))
        return self.convolutions[-1](x)


class Tacotron2(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.decoder = Decoder()
        self.postnet = Postnet()

    def forward(self, text, text_lengths, mels, mel_lengths):
        memory = self.encoder(text, text_lengths)
        mel, gate, alignments = self.decoder(memory, text_lengths, mels)
        mel_postnet = mel + self.postnet(mel)

        mask = padding_mask(mel_lengths, mel.shape[2])
        mel = mel.masked_fill(mask[:, None], 0.0)
        mel_postnet = mel_postnet.masked_fill(mask[:, None], 0.0)
        gate = gate.masked_fill(mask[:, ::FRAMES], 1e3)
        return {
            "mel": mel,
            "mel_postnet": mel_postnet,
            "gate": gate,
            "alignments": alignments,
        }


def model():
    torch.manual_seed(810)
    net = Tacotron2()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.weight.uniform_(0.6, 1.5)
                module.bias.normal_(0, 0.3)
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.1, 0.9)
            elif isinstance(module, nn.Conv1d | nn.Linear):
                nn.init.xavier_uniform_(module.weight, gain=1.6)
            elif isinstance(module, nn.LSTM | nn.LSTMCell):
                for value in module.parameters():
                    value.mul_(1.6)
    return net.eval()


def batches():
    generator = torch.Generator().manual_seed(811)
    text_lengths = torch.tensor([8, 7, 5])
    mel_lengths = torch.tensor([12, 8, 10])
    text = torch.randint(1, 26, (3, 8), generator=generator)
    mels = torch.randn(3, 10, 12, generator=generator)
    mels = mels + torch.roll(mels, 1, 2)
    last = (mel_lengths // 2 - 1)[:, None]
    return [
        {
            "text": text * (torch.arange(8) < text_lengths[:, None]),
            "text_lengths": text_lengths,
            "mels": mels * (torch.arange(12) < mel_lengths[:, None])[:, None],
            "mel_lengths": mel_lengths,
            "gate": (torch.arange(6) >= last).float(),
        }
    ]


def forward(net, batch):
    return net(
        batch["text"], batch["text_lengths"], batch["mels"], batch["mel_lengths"]
    )


def loss(output, batch):
    mel = F.mse_loss(output["mel"], batch["mels"])
    mel_postnet = F.mse_loss(output["mel_postnet"], batch["mels"])
    gate = F.binary_cross_entropy_with_logits(output["gate"], batch["gate"])
    return mel + mel_postnet + gate


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=1e-3, eps=1e-6)
