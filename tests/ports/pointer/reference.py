"""A small summarizer: attention with coverage, words from a vocabulary or from the article."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

PAD, UNK = 0, 1
VOCAB = 150
EMBED, ENCODER, DECODER, ATTENTION, PROJECTED = 40, 34, 52, 46, 58
COVERAGE_WEIGHT = 1.5
EPS = 1e-5


class Encoder(nn.Module):
    """States of both directions, and the start of the decoder made of the last ones."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(EMBED, ENCODER, batch_first=True, bidirectional=True)
        self.reduce_h = nn.Linear(2 * ENCODER, DECODER)
        self.reduce_c = nn.Linear(2 * ENCODER, DECODER)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        packed, (h, c) = self.lstm(packed)
        states, _ = pad_packed_sequence(
            packed, batch_first=True, total_length=x.shape[1]
        )
        h, c = (s.transpose(0, 1).flatten(1) for s in (h, c))
        return states, (F.relu(self.reduce_h(h)), F.relu(self.reduce_c(c)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.W_h = nn.Linear(2 * ENCODER, ATTENTION, bias=False)
        self.W_s = nn.Linear(2 * DECODER, ATTENTION)
        self.W_c = nn.Linear(1, ATTENTION, bias=False)
        self.v = nn.Linear(ATTENTION, 1, bias=False)

    def forward(self, state, states, features, mask, coverage):
        query = self.W_s(torch.cat(state, dim=1)).unsqueeze(1)
        seen = self.W_c(coverage.unsqueeze(2))
        scores = self.v(torch.tanh(features + query + seen)).squeeze(2)
        attention = scores.masked_fill(~mask, -torch.inf).softmax(dim=1)
        context = torch.bmm(attention.unsqueeze(1), states).squeeze(1)
        return context, attention


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.merge = nn.Linear(EMBED + 2 * ENCODER, EMBED)
        self.cell = nn.LSTMCell(EMBED, DECODER)
        self.attention = Attention()
        self.switch = nn.Linear(2 * ENCODER + 2 * DECODER + EMBED, 1)
        self.project = nn.Linear(DECODER + 2 * ENCODER, PROJECTED)
        self.out = nn.Linear(PROJECTED, VOCAB)

    def step(self, word, state, context, coverage, memory):
        x = self.merge(torch.cat([word, context], dim=1))
        state = self.cell(x, state)
        context, attention = self.attention(state, *memory, coverage)
        p_gen = torch.sigmoid(self.switch(torch.cat([context, *state, x], dim=1)))
        hidden = self.project(torch.cat([state[0], context], dim=1))
        vocab = self.out(hidden).softmax(dim=1)
        return state, context, attention, p_gen, vocab

    def forward(self, words, states, state, mask, article, extra):
        """Distributions over the extended vocabulary, and what was attended to again."""
        memory = (states, self.attention.W_h(states), mask)
        context = torch.zeros_like(states[:, 0])
        coverage = torch.zeros_like(states[:, :, 0])
        finals, repeats = [], []
        for word in words.unbind(1):
            state, context, attention, p_gen, vocab = self.step(
                word, state, context, coverage, memory
            )
            final = F.pad(p_gen * vocab, (0, extra))
            finals.append(final.scatter_add(1, article, (1 - p_gen) * attention))
            repeats.append(torch.minimum(attention, coverage).sum(dim=1))
            coverage = coverage + attention
        return torch.stack(finals, dim=1), torch.stack(repeats, dim=1)


def known(ids):
    """Words out of the vocabulary have no vectors of their own."""
    return ids.masked_fill(ids >= VOCAB, UNK)


def mean_per_sentence(values, mask):
    return ((values * mask).sum(dim=1) / mask.sum(dim=1)).mean()


class Summarizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, EMBED, padding_idx=PAD)
        self.encoder = Encoder()
        self.decoder = Decoder()

    def forward(self, batch):
        article, summary = batch["article"], batch["summary"]
        mask = article.ne(PAD)
        states, start = self.encoder(self.embed(known(article)), mask.sum(dim=1))
        inputs, targets = summary[:, :-1], summary[:, 1:]
        extra = int(batch["oovs"].max())
        finals, repeats = self.decoder(
            self.embed(known(inputs)), states, start, mask, article, extra
        )
        gold = finals.gather(2, targets.unsqueeze(2)).squeeze(2)
        counted = targets.ne(PAD).float()
        nll = mean_per_sentence(-torch.log(gold + EPS), counted)
        return nll + COVERAGE_WEIGHT * mean_per_sentence(repeats, counted)


def model():
    torch.manual_seed(1704)
    net = Summarizer()
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name == "embed.weight":
                p[1:].normal_(0, 0.8)
            elif "bias" in name:
                p.normal_(0, 0.3)
            elif ".W_c." in name or ".v." in name:
                p.normal_(0, 0.6)
            else:
                p.normal_(0, 1.3 * p.shape[1] ** -0.5)
    return net


def batches():
    """Articles that come back to their words; a summary takes most of its words from there.

    The words that the vocabulary lacks are numbered behind it, for each article anew. A
    summary stands between a start and a stop.
    """
    generator = torch.Generator().manual_seed(1705)
    made = []
    for articles, summaries in (
        ((13, 17, 9), (8, 6, 10)),
        ((15, 8, 14, 11), (5, 7, 9, 8)),
    ):
        size = len(articles)
        article = torch.zeros(size, max(articles), dtype=torch.long)
        summary = torch.zeros(size, max(summaries) + 1, dtype=torch.long)
        oovs = torch.zeros(size, dtype=torch.long)
        for n, (length, count) in enumerate(zip(articles, summaries)):
            for i in range(length):
                kind = torch.rand((), generator=generator)
                if kind < 0.35 and i > 0:
                    back = torch.randint(0, i, (), generator=generator)
                    article[n, i] = article[n, back]
                elif kind < 0.65:
                    article[n, i] = 150 + oovs[n]
                    oovs[n] += 1
                else:
                    article[n, i] = torch.randint(4, 150, (), generator=generator)
            words = torch.randint(4, 150, (count - 1,), generator=generator)
            taken = torch.randint(0, length, (count - 1,), generator=generator)
            copied = torch.rand(count - 1, generator=generator) < 0.7
            summary[n, 0] = 2
            summary[n, 1:count] = torch.where(copied, article[n, taken], words)
            summary[n, count] = 3
        made.append({"article": article, "summary": summary, "oovs": oovs})
    return made


def forward(net, batch):
    return {"loss": net(batch)}


def loss(output, batch):
    return output["loss"]
