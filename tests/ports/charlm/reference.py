"""A word-level language model: two LSTMs, tied words, state carried from batch to batch."""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HIDDEN = 90, 24, (32, 32)
LANES = 4
PAD, UNKNOWN = 0, 1
AR, TAR = 2.0, 1.0
LR, FALL, WEIGHT_DECAY, MAX_NORM = 1.2, 0.5, 0.02, 0.25
#: After this many steps the validation was no better, and the rate falls.
NO_BETTER = (1, 2)
AVERAGE_AFTER = 1


class WeightAverage(nn.Module):
    """The average of the weights since some step."""

    def __init__(self, net):
        super().__init__()
        self.updates = 0
        for name, p in net.named_parameters():
            self.register_buffer(name.replace(".", "_"), p.detach().clone())

    def update(self, net):
        self.updates += 1
        share = 1 / max(1, self.updates - AVERAGE_AFTER)
        for name, p in net.named_parameters():
            mean = getattr(self, name.replace(".", "_"))
            mean.add_(p - mean, alpha=share)


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(VOCABULARY, WIDTH)
        sizes = (WIDTH, *HIDDEN)
        self.rnns = nn.ModuleList(
            [nn.LSTM(i, h, batch_first=True) for i, h in zip(sizes, HIDDEN)]
        )
        self.projection = nn.Linear(HIDDEN[-1], WIDTH)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.decoder.weight = self.encoder.weight
        for layer, size in enumerate(HIDDEN):
            self.register_buffer(f"h{layer}", torch.zeros(1, LANES, size))
            self.register_buffer(f"c{layer}", torch.zeros(1, LANES, size))

    def forward(self, words, fresh):
        """(lanes, time) -> logits and states of the last layer; fresh lanes start from zero."""
        keep = (~fresh).float().view(1, -1, 1)
        x = self.encoder(words)
        for layer, rnn in enumerate(self.rnns):
            h, c = getattr(self, f"h{layer}"), getattr(self, f"c{layer}")
            x, (h, c) = rnn(x, (h * keep, c * keep))
            setattr(self, f"h{layer}", h.detach())
            setattr(self, f"c{layer}", c.detach())
        return {"logits": self.decoder(self.projection(x)), "hidden": x}


def model():
    torch.manual_seed(1708)
    net = LanguageModel()
    with torch.no_grad():
        net.encoder.weight.uniform_(-1, 1)
        net.decoder.bias.normal_(0, 0.3)
        net.projection.weight.mul_(2)
        net.projection.bias.normal_(0, 0.3)
        for rnn in net.rnns:
            for name, p in rnn.named_parameters():
                if "weight" in name:
                    p.mul_(3)
                else:
                    p.normal_(0, 0.4)
            rnn.bias_ih_l0[rnn.hidden_size : 2 * rnn.hidden_size].add_(0.8)
    net.average = WeightAverage(net)
    return net


def batches():
    """Lanes of documents; one that ends is padded, and a new one begins with the next batch.

    The last word of a batch is the first of the next. Word 2 ends a document.
    """
    generator = torch.Generator().manual_seed(1709)
    lanes = 4
    # The words of each lane that are left of its document, and the word it goes on with.
    left = [16, 6, 40, 11]
    last = torch.randint(3, 100, (lanes,), generator=generator).tolist()
    fresh = [True] * lanes
    made = []
    for time in (10, 7, 10):
        text = torch.zeros(lanes, time + 1, dtype=torch.int64)
        begins = torch.tensor(fresh)
        for lane in range(lanes):
            word = last[lane]
            text[lane, 0] = word
            for t in range(1, min(time, left[lane]) + 1):
                noise = torch.randint(0, 23, (), generator=generator).item()
                word = 3 + (word * 7 + noise) % 101
                text[lane, t] = word
            left[lane] -= time
            fresh[lane] = left[lane] <= 0
            last[lane] = int(text[lane, time])
            if fresh[lane]:
                text[lane, time + left[lane]] = 2
                left[lane] = int(torch.randint(5, 19, (), generator=generator))
                last[lane] = int(torch.randint(3, 100, (), generator=generator))
        made.append({"text": text, "fresh": begins})
    return made


def known(text):
    return text.masked_fill(text >= VOCABULARY, UNKNOWN)


def forward(net, batch):
    return net(known(batch["text"][:, :-1]), batch["fresh"])


def loss(output, batch):
    """Entropy of the words, and penalties of large and of quickly changing states."""
    target = known(batch["text"][:, 1:])
    hidden = output["hidden"]
    valid = target != PAD
    entropy = F.cross_entropy(
        output["logits"].flatten(0, 1), target.flatten(), ignore_index=PAD
    )
    large = hidden[valid].square().mean()
    change = (hidden[:, 1:] - hidden[:, :-1])[valid[:, 1:]].square().mean()
    return entropy + AR * large + TAR * change


class AveragedSGD(torch.optim.SGD):
    """Clips by norm, steps, and keeps the average of the weights."""

    done = 0

    def __init__(self, net):
        super().__init__(net.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
        self.net = net

    @torch.no_grad()
    def step(self, closure=None):
        if self.done in NO_BETTER:
            for group in self.param_groups:
                group["lr"] *= FALL
        self.done += 1
        nn.utils.clip_grad_norm_(self.net.parameters(), MAX_NORM)
        super().step(closure)
        self.net.average.update(self.net)


def optimizer(net):
    return AveragedSGD(net)
