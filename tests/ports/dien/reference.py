"""A small DIEN: interests by a GRU, an auxiliary loss on them, and their evolution by AUGRU."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

NUM_USERS, NUM_ITEMS, NUM_CATEGORIES = 24, 60, 12
HOURS_PER_SLOT, NUM_SLOTS, NUM_DEVICES = 3, 8, 4
USER_DIM, ITEM_DIM, CATEGORY_DIM, CONTEXT_DIM = 8, 12, 6, 4
BEHAVIOUR_DIM = ITEM_DIM + CATEGORY_DIM
HIDDEN, ATTENTION_HIDDEN, AUX_HIDDEN = 20, 16, 16
MLP = (32, 16)
MAX_LENGTH = 9
MASKED = -(2.0**32) + 1
NORM_EPS, DICE_EPS = 1e-3, 1e-8
AUX_WEIGHT = 0.5
LR, BETAS, ADAM_EPS = 4e-3, (0.9, 0.999), 1e-6


class Dice(nn.Module):
    """Between x and alpha x, by how far x is from the mean of the batch."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width, eps=DICE_EPS, affine=False)
        self.alpha = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        p = torch.sigmoid(self.norm(x))
        return p * x + (1 - p) * self.alpha * x


class InterestExtractor(nn.Module):
    """States behind the end of a history are zero."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(BEHAVIOUR_DIM, HIDDEN, batch_first=True)

    def forward(self, history, length):
        packed = pack_padded_sequence(
            history, length.cpu(), batch_first=True, enforce_sorted=False
        )
        states, _ = self.gru(packed)
        return pad_packed_sequence(
            states, batch_first=True, total_length=history.shape[1]
        )[0]


class AuxiliaryNet(nn.Module):
    """Would this behaviour follow the state before it?"""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(HIDDEN + BEHAVIOUR_DIM, AUX_HIDDEN)
        self.fc2 = nn.Linear(AUX_HIDDEN, 1)

    def forward(self, state, behaviour):
        h = torch.sigmoid(self.fc1(torch.cat([state, behaviour], dim=-1)))
        return self.fc2(h).squeeze(-1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(BEHAVIOUR_DIM, HIDDEN)
        self.act = nn.PReLU(HIDDEN)
        self.fc1 = nn.Linear(4 * HIDDEN, ATTENTION_HIDDEN)
        self.fc2 = nn.Linear(ATTENTION_HIDDEN, 1, bias=False)

    def forward(self, target, states, mask):
        query = self.act(self.query(target)).unsqueeze(1).expand_as(states)
        pairs = torch.cat([query, states, query - states, query * states], dim=-1)
        scores = self.fc2(torch.sigmoid(self.fc1(pairs))).squeeze(-1)
        scores = scores.masked_fill(~mask, MASKED)
        return scores.softmax(dim=1)


class AUGRU(nn.Module):
    """A GRU whose update gate is scaled by the attention."""

    def __init__(self, inputs, hidden):
        super().__init__()
        self.hidden = hidden
        self.gates = nn.Linear(inputs + hidden, 2 * hidden)
        self.candidate = nn.Linear(inputs + hidden, hidden)

    def cell(self, x, h, attention):
        gates = torch.sigmoid(self.gates(torch.cat([x, h], dim=1)))
        reset, update = gates.chunk(2, dim=1)
        candidate = torch.tanh(self.candidate(torch.cat([x, reset * h], dim=1)))
        update = attention * update
        return (1 - update) * h + update * candidate

    def forward(self, x, attention, mask):
        h = x.new_zeros(len(x), self.hidden)
        for t in range(x.shape[1]):
            new = self.cell(x[:, t], h, attention[:, t, None])
            h = torch.where(mask[:, t, None], new, h)
        return h


class DIEN(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(NUM_USERS, USER_DIM)
        self.item = nn.Embedding(NUM_ITEMS, ITEM_DIM, padding_idx=0)
        self.category = nn.Embedding(NUM_CATEGORIES, CATEGORY_DIM, padding_idx=0)
        self.slot = nn.Embedding(NUM_SLOTS, CONTEXT_DIM)
        self.device = nn.Embedding(NUM_DEVICES, CONTEXT_DIM)
        self.extractor = InterestExtractor()
        self.auxiliary = AuxiliaryNet()
        self.attention = Attention()
        self.evolution = AUGRU(HIDDEN, HIDDEN)
        width = USER_DIM + 2 * CONTEXT_DIM + 2 * BEHAVIOUR_DIM + HIDDEN
        self.norm = nn.BatchNorm1d(width, eps=NORM_EPS)
        self.fc1 = nn.Linear(width, MLP[0])
        self.dice1 = Dice(MLP[0])
        self.fc2 = nn.Linear(MLP[0], MLP[1])
        self.dice2 = Dice(MLP[1])
        self.fc3 = nn.Linear(MLP[1], 1)

    def behaviour(self, item, category):
        return torch.cat([self.item(item), self.category(category)], dim=-1)

    def auxiliary_loss(self, states, history, negative, mask):
        """The next behaviour against a negative sample."""
        clicked = self.auxiliary(states[:, :-1], history[:, 1:])
        other = self.auxiliary(states[:, :-1], negative[:, 1:])
        losses = F.softplus(-clicked) + F.softplus(other)
        mask = mask[:, 1:].float()
        return (losses * mask).sum() / mask.sum()

    def forward(self, batch):
        length = batch["length"]
        history = self.behaviour(batch["history_item"], batch["history_category"])
        negative = self.behaviour(batch["negative_item"], batch["negative_category"])
        target = self.behaviour(batch["item"], batch["category"])
        mask = torch.arange(history.shape[1]) < length[:, None]

        states = self.extractor(history, length)
        aux_loss = self.auxiliary_loss(states, history, negative, mask)
        attention = self.attention(target, states, mask)
        interest = self.evolution(states, attention, mask)

        mean = (history * mask.unsqueeze(-1)).sum(dim=1) / length[:, None]
        user = self.user(batch["user"])
        slot = self.slot(batch["hour"] // HOURS_PER_SLOT)
        device = self.device(batch["device"])
        x = torch.cat([user, slot, device, target, target * mean, interest], dim=1)
        x = self.dice1(self.fc1(self.norm(x)))
        x = self.dice2(self.fc2(x))
        return {"logit": self.fc3(x).squeeze(1), "aux_loss": aux_loss}


def model():
    torch.manual_seed(1809)
    net = DIEN()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Embedding):
                module.weight.normal_(0, 0.5)
                if module.padding_idx is not None:
                    module.weight[module.padding_idx] = 0
            elif isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight, gain=1.4)
                if module.bias is not None:
                    module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.GRU):
                for parameter in module.parameters():
                    parameter.normal_(0, 0.35)
            elif isinstance(module, Dice):
                module.alpha.uniform_(-0.1, 0.5)
            elif isinstance(module, nn.PReLU):
                module.weight.uniform_(0.05, 0.5)
        net.attention.fc2.weight.mul_(3)
        net.norm.weight.uniform_(0.6, 1.4)
        net.norm.bias.normal_(0, 0.2)
    return net.train()


def batches():
    """People keep to few categories; some items have none (0)."""
    generator = torch.Generator().manual_seed(1810)

    def draw(low, high, *size):
        return torch.randint(low, high, size, generator=generator)

    category_of = draw(0, 12, 60)
    category_of[0] = 0
    made = []
    for size in (14, 12):
        length = draw(2, 10, size)
        length[0], length[1] = 9, 2
        padding = torch.arange(9) >= length[:, None]
        liked = draw(0, 3, size, 1)
        guesses = draw(1, 60, 4, size, 9)
        history = guesses[0]
        for guess in guesses[1:]:
            fits = category_of[history] % 3 == liked
            history = torch.where(fits, history, guess)
        history = history.masked_fill(padding, 0)
        negative = draw(1, 60, size, 9).masked_fill(padding, 0)
        item = draw(1, 60, size)
        fits = (category_of[item] % 3 == liked[:, 0]).float()
        chance = torch.rand(size, generator=generator)
        made.append(
            {
                "user": draw(0, 24, size),
                "hour": draw(0, 24, size),
                "device": draw(0, 4, size),
                "item": item,
                "category": category_of[item],
                "history_item": history,
                "history_category": category_of[history],
                "negative_item": negative,
                "negative_category": category_of[negative],
                "length": length,
                "click": (chance < 0.25 + 0.5 * fits).float(),
            }
        )
    return made


def forward(net, batch):
    return net(batch)


def loss(output, batch):
    click_loss = F.binary_cross_entropy_with_logits(output["logit"], batch["click"])
    return click_loss + AUX_WEIGHT * output["aux_loss"]


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=LR, betas=BETAS, eps=ADAM_EPS)
