"""Reads strips of digits aloud: a convolutional encoder, an LSTM that looks at its cells word by word."""

import argparse
import os
import tempfile

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.utils.rnn import pad_sequence
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, Dataset

NAMES = "zero one two three four five six seven eight nine".split()
VOCAB = ["<pad>", "<start>", "<end>", *NAMES, "even", "odd"]
WORD2ID = {word: i for i, word in enumerate(VOCAB)}


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--train-size", type=int, default=21)
    p.add_argument("--batch-size", type=int, default=7)
    p.add_argument("--channels", type=int, default=12)
    p.add_argument("--hidden", type=int, default=20)
    p.add_argument("--attention-dim", type=int, default=14)
    p.add_argument("--encoder-lr", type=float, default=4e-3)
    p.add_argument("--decoder-lr", type=float, default=8e-3)
    p.add_argument("--alpha-c", type=float, default=0.5)
    p.add_argument("--own-words", type=float, default=0.3)
    p.add_argument("--grad-clip", type=float, default=0.25)
    p.add_argument("--seed", type=int, default=120)
    return p.parse_args()


class DigitStrips(Dataset):
    """One to three digits beside each other; the caption names them and says whether their sum is even."""

    def __init__(self, size, seed):
        digits = load_digits()
        rng = np.random.default_rng(seed)
        self.strips = np.zeros((size, 1, 8, 24), dtype=np.float32)
        self.captions = []
        for n in range(size):
            picked = rng.integers(0, len(digits.target), size=rng.integers(1, 4))
            for slot, index in enumerate(picked):
                self.strips[n, 0, :, 8 * slot : 8 * slot + 8] = digits.images[index] / 16.0
            named = digits.target[picked]
            words = [NAMES[d] for d in named] + ["odd" if named.sum() % 2 else "even"]
            self.captions.append([WORD2ID[w] for w in ["<start>", *words, "<end>"]])

    def __len__(self):
        return len(self.captions)

    def __getitem__(self, i):
        strip = (torch.from_numpy(self.strips[i]) - 0.2) / 0.33
        return strip, torch.tensor(self.captions[i])

    def word_counts(self):
        return torch.bincount(torch.tensor([w for c in self.captions for w in c[1:]]), minlength=len(VOCAB))


def collate(samples):
    # longest captions first: the decoder drops finished ones from the end of the batch
    samples = sorted(samples, key=lambda s: len(s[1]), reverse=True)
    strips = torch.stack([s for s, _ in samples])
    captions = pad_sequence([c for _, c in samples], batch_first=True, padding_value=0)
    lengths = [len(c) - 1 for _, c in samples]
    return strips, captions, lengths


class Encoder(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, kernel_size=3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, channels, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.columns = nn.Parameter(0.1 * torch.randn(channels, 1, 12))
        for conv in (self.conv1, self.conv2):
            nn.init.kaiming_uniform_(conv.weight, nonlinearity="relu")

    def forward(self, strips):
        out = F.max_pool2d(F.relu(self.bn1(self.conv1(strips))), 2)
        out = F.relu(self.bn2(self.conv2(out))) + self.columns
        return out.flatten(2).permute(0, 2, 1)  # (batch, cells, channels)


class Attention(nn.Module):
    def __init__(self, channels, hidden, dim):
        super().__init__()
        self.of_cells = nn.Linear(channels, dim)
        self.of_state = nn.Linear(hidden, dim)
        self.energy = nn.Linear(dim, 1, bias=False)

    def forward(self, cells, state):
        e = self.energy(torch.tanh(self.of_cells(cells) + self.of_state(state).unsqueeze(1))).squeeze(2)
        alpha = F.softmax(e, dim=1)
        return (cells * alpha.unsqueeze(2)).sum(dim=1), alpha


class Decoder(nn.Module):
    def __init__(self, args, word_counts):
        super().__init__()
        self.embedding = nn.Embedding(len(VOCAB), args.hidden)
        self.attention = Attention(args.channels, args.hidden, args.attention_dim)
        self.lstm = nn.LSTMCell(args.hidden + args.channels, args.hidden)
        self.init_h = nn.Linear(args.channels, args.hidden)
        self.init_c = nn.Linear(args.channels, args.hidden)
        self.gate = nn.Linear(args.hidden, args.channels)
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(args.hidden, len(VOCAB))
        self.init_weights(word_counts)

    @torch.no_grad()
    def init_weights(self, word_counts):
        self.embedding.weight.uniform_(-1, 1)
        self.fc.weight.uniform_(-0.9, 0.9)
        self.fc.bias.copy_(torch.log((word_counts + 1) / (word_counts + 1).sum()))
        hidden = self.lstm.hidden_size
        self.lstm.bias_ih[hidden : 2 * hidden].fill_(1.0)  # remember at first

    def begin(self, cells):
        mean = cells.mean(dim=1)
        return torch.tanh(self.init_h(mean)), self.init_c(mean)

    def one_word(self, words, cells, h, c):
        context, alpha = self.attention(cells, h)
        context = torch.sigmoid(self.gate(h)) * context
        h, c = self.lstm(torch.cat([self.embedding(words), context], dim=1), (h, c))
        return self.fc(self.dropout(h)), alpha, h, c

    def forward(self, cells, captions, lengths, own=None):
        h, c = self.begin(cells)
        predictions = cells.new_zeros(len(lengths), max(lengths), len(VOCAB))
        alphas = cells.new_zeros(len(lengths), max(lengths), cells.size(1))
        words = captions[:, 0]
        for t in range(max(lengths)):
            n = sum(length > t for length in lengths)
            words = words[:n]
            if t > 0:
                words = captions[:n, t]
                if own is not None:
                    said = predictions[:n, t - 1].detach().argmax(dim=1)
                    words = torch.where(own[:n, t], said, words)
            scores, alpha, h, c = self.one_word(words, cells[:n], h[:n], c[:n])
            predictions[:n, t] = scores
            alphas[:n, t] = alpha
        return predictions, alphas


class Captioner(nn.Module):
    def __init__(self, args, word_counts):
        super().__init__()
        self.encoder = Encoder(args.channels)
        self.decoder = Decoder(args, word_counts)

    def forward(self, strips, captions, lengths, own=None):
        return self.decoder(self.encoder(strips), captions, lengths, own)


class CaptionLoss(nn.Module):
    """Cross entropy of the words that are there; over all words, each cell is to be looked at once."""

    def __init__(self, alpha_c):
        super().__init__()
        self.alpha_c = alpha_c

    def forward(self, predictions, alphas, captions):
        targets = captions[:, 1:]
        mask = (targets != WORD2ID["<pad>"]).float()
        nll = F.cross_entropy(predictions.transpose(1, 2), targets, reduction="none")
        words = (nll * mask).sum() / mask.sum()
        looked = ((1.0 - alphas.sum(dim=1)) ** 2).mean()
        return words + self.alpha_c * looked, words


class Training:
    """All that a checkpoint has to hold."""

    def __init__(self, args, word_counts):
        self.model = Captioner(args, word_counts)
        self.average = AveragedModel(self.model)
        self.encoder_optimizer = torch.optim.Adam(self.model.encoder.parameters(), lr=args.encoder_lr)
        self.decoder_optimizer = torch.optim.RMSprop(
            self.model.decoder.parameters(), lr=args.decoder_lr, alpha=0.9, eps=1e-4, momentum=0.5
        )
        self.schedule = torch.optim.lr_scheduler.StepLR(self.decoder_optimizer, step_size=1, gamma=0.7)

    def parts(self):
        return {name: part for name, part in vars(self).items() if hasattr(part, "state_dict")}

    def save(self, path):
        state = {name: part.state_dict() for name, part in self.parts().items()}
        torch.save({**state, "rng": torch.get_rng_state()}, path)

    def load(self, path):
        state = torch.load(path, weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["rng"])


def train_step(args, run, criterion, batch, step):
    strips, captions, lengths = batch
    run.model.train()
    coin = torch.Generator().manual_seed(args.seed + 1 + step)
    own = torch.rand(captions.shape, generator=coin) < args.own_words
    predictions, alphas = run.model(strips, captions, lengths, own)
    loss, words = criterion(predictions, alphas, captions)
    run.encoder_optimizer.zero_grad()
    run.decoder_optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(run.model.decoder.parameters(), args.grad_clip)
    run.encoder_optimizer.step()
    run.decoder_optimizer.step()
    run.schedule.step()
    run.average.update_parameters(run.model)
    return words.item()


@torch.no_grad()
def validate(model, batch, criterion):
    model.eval()
    strips, captions, lengths = batch
    _, words = criterion(*model(strips, captions, lengths), captions)
    cells = model.module.encoder(strips)
    h, c = model.module.decoder.begin(cells)
    said = captions[:, 0]
    right = 0
    for t in range(2):
        scores, _, h, c = model.module.decoder.one_word(said, cells, h, c)
        said = scores.argmax(dim=1)
        right += (said == captions[:, t + 1]).sum().item()
    return words.item(), right / (2 * len(said))


def main():
    args = get_args()
    torch.manual_seed(args.seed)
    train, valid = DigitStrips(args.train_size, seed=1), DigitStrips(6, seed=2)
    shuffle = torch.Generator().manual_seed(args.seed)
    loader = DataLoader(train, args.batch_size, shuffle=True, collate_fn=collate, generator=shuffle)
    held_out = collate([valid[i] for i in range(len(valid))])
    criterion = CaptionLoss(args.alpha_c)
    run = Training(args, train.word_counts())
    run.average.update_parameters(run.model)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint.pt")
        for step, batch in enumerate(loader):
            words = train_step(args, run, criterion, batch, step)
            update_bn([batch[0]], run.average.module.encoder)
            held, right = validate(run.average, held_out, criterion)
            print(f"[{step}] words {words:.5f} held out {held:.5f} right {right:.3f}")
            if step == 0:  # the machine is needed for something else: go on from the file
                run.save(path)
                run = Training(args, train.word_counts())
                run.load(path)


if __name__ == "__main__":
    main()
