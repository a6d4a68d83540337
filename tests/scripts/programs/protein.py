"""Pre-training of a toy protein language model on masked residues and contacts.

After ESM: rotary pre-norm transformer, output embedding tied to the input, contacts by a
logistic regression on the symmetrised and APC-corrected attention maps. The proteins are
random walks that I fold towards their centre of mass. The cluster preempts jobs, so main()
runs a short job, then a second one that goes on from its checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

# --- what I change between experiments
SEED = 7
N_TRAIN, N_HELD_OUT = 40, 5
SHORTEST, LONGEST = 10, 24
BUCKET_EDGES = (14, 19)
TOKENS_PER_BATCH = 110
MASK_FRACTION, MASK_TOKEN_SHARE, RANDOM_SHARE = 0.15, 0.8, 0.1
CONTACT_ANGSTROM, MIN_SEPARATION = 8.0, 6
WIDTH, N_HEADS, N_LAYERS, FFN_WIDTH = 24, 2, 2, 48
DROPOUT, SMOOTHING, CONTACT_WEIGHT = 0.1, 0.05, 2.0
PEAK_LR, WARMUP, BETAS, WEIGHT_DECAY = 4e-3, 3, (0.9, 0.98), 0.1
ACCUMULATE, MAX_NORM, EMA_DECAY = 2, 0.5, 0.9
EVALUATE_EVERY, FIRST_JOB, ALL_UPDATES = 2, 1, 4

IGNORE = -100  # residue that is not to be guessed
UNKNOWN = -1  # pair of which nothing is known, or nothing asked


# ------------------------------------------------------------------------------------
# alphabet


class Alphabet:
    SPECIALS = ("<cls>", "<pad>", "<eos>", "<unk>")
    RESIDUES = "LAGVSERTIDPKQNFYMHWC"  # the twenty, by frequency
    AMBIGUOUS = "XBUZO"

    def __init__(self):
        self.tokens = [*self.SPECIALS, *self.RESIDUES, *self.AMBIGUOUS, "<mask>"]
        self.index = {token: number for number, token in enumerate(self.tokens)}
        self.cls, self.pad, self.eos, self.unk = range(4)
        self.mask = self.index["<mask>"]
        self.first = self.index[self.RESIDUES[0]]
        self.after_last = self.first + len(self.RESIDUES)

    def __len__(self):
        return len(self.tokens)

    def encode(self, sequence: str) -> torch.Tensor:
        """Lower case is soft-masked repeats, as in UniRef's FASTA; they are residues too."""
        body = [self.index.get(letter, self.unk) for letter in sequence.upper()]
        return torch.tensor([self.cls, *body, self.eos])

    def in_chain(self, tokens: torch.Tensor) -> torch.Tensor:
        """Everything but the first three specials."""
        return tokens > self.eos


ABC = Alphabet()


# ------------------------------------------------------------------------------------
# proteins


class Protein(NamedTuple):
    sequence: str
    xyz: torch.Tensor  # [length, 3] of the C-alphas in angstrom, nan where unresolved


def fold_walk(length: int, dice: torch.Generator) -> torch.Tensor:
    places = [torch.zeros(3)]
    for _ in range(length - 1):
        home = torch.stack(places).mean(0) - places[-1]
        way = torch.randn(3, generator=dice) + 0.12 * home
        places.append(places[-1] + 3.8 * F.normalize(way, dim=0))
    return torch.stack(places)


def make_proteins(count: int, seed: int) -> list[Protein]:
    dice = torch.Generator().manual_seed(seed)
    inside = torch.tensor([float(letter in "LAVIFMWC") for letter in ABC.RESIDUES])
    proteins = []
    for _ in range(count):
        length = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=dice))
        xyz = fold_walk(length, dice)
        depth = (xyz - xyz.mean(0)).norm(dim=-1)
        buried = (depth < depth.median()).float()
        odds = 0.2 + torch.outer(buried, inside) + torch.outer(1 - buried, 1 - inside)
        picks = torch.multinomial(odds, 1, generator=dice).squeeze(1).tolist()
        letters = [ABC.RESIDUES[pick] for pick in picks]
        luck = torch.rand(3, length, generator=dice)
        for place in range(length):
            if luck[0, place] < 0.04:
                letters[place] = "X"
            if luck[1, place] < 0.12:
                letters[place] = letters[place].lower()
        xyz[luck[2] < 0.06] = math.nan
        proteins.append(Protein("".join(letters), xyz))
    return proteins


def contact_map(xyz: torch.Tensor) -> torch.Tensor:
    """1 where two residues touch, 0 where not, UNKNOWN near the diagonal or unresolved."""
    distance = (xyz[:, None] - xyz[None]).norm(dim=-1)
    touching = (distance < CONTACT_ANGSTROM).long()
    place = torch.arange(len(xyz))
    near = (place[:, None] - place[None]).abs() < MIN_SEPARATION
    return touching.masked_fill(near | distance.isnan(), UNKNOWN)


class Batch(NamedTuple):
    tokens: torch.Tensor  # [proteins, length], as the model sees them
    targets: torch.Tensor  # [proteins, length], IGNORE where nothing is hidden
    contacts: torch.Tensor  # [proteins, length - 2, length - 2]


class Masker:
    """BERT's corruption, drawn anew each time a protein is seen."""

    def __init__(self, seed: int):
        self.dice = torch.Generator().manual_seed(seed)

    def __call__(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chance = torch.rand(tokens.shape, generator=self.dice)
        chosen = (chance < MASK_FRACTION) & ABC.in_chain(tokens)
        fate = torch.rand(tokens.shape, generator=self.dice)
        other = torch.randint(
            ABC.first, ABC.after_last, tokens.shape, generator=self.dice
        )
        seen = tokens.masked_fill(chosen & (fate < MASK_TOKEN_SHARE), ABC.mask)
        swapped = chosen & (fate >= 1 - RANDOM_SHARE)
        seen = torch.where(swapped, other, seen)
        return seen, tokens.masked_fill(~chosen, IGNORE)


def collate(proteins: list[Protein], masker: Masker) -> Batch:
    proteins = sorted(proteins, key=lambda protein: -len(protein.sequence))
    rows = [ABC.encode(protein.sequence) for protein in proteins]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=ABC.pad)
    side = tokens.shape[1] - 2
    contacts = torch.full((len(proteins), side, side), UNKNOWN)
    for row, protein in enumerate(proteins):
        length = len(protein.sequence)
        contacts[row, :length, :length] = contact_map(protein.xyz)
    return Batch(*masker(tokens), contacts)


class BucketSampler:
    """Endless lists of proteins of like length, each holding about as many tokens."""

    def __init__(self, lengths: list[int], seed: int):
        self.seed, self.epoch, self.position = seed, 0, 0
        shelf = torch.bucketize(torch.tensor(lengths), torch.tensor(BUCKET_EDGES))
        self.buckets = [
            torch.nonzero(shelf == number).flatten()
            for number in range(len(BUCKET_EDGES) + 1)
        ]
        self.longest = [*BUCKET_EDGES, LONGEST]
        self.deal()

    def deal(self):
        dice = torch.Generator().manual_seed(self.seed + self.epoch)
        hands = []
        for members, longest in zip(self.buckets, self.longest, strict=True):
            members = members[torch.randperm(len(members), generator=dice)]
            hands += members.split(TOKENS_PER_BATCH // (longest + 2))
        order = torch.randperm(len(hands), generator=dice)
        self.hands = [hands[number].tolist() for number in order]

    def __next__(self) -> list[int]:
        if self.position == len(self.hands):
            self.epoch, self.position = self.epoch + 1, 0
            self.deal()
        self.position += 1
        return self.hands[self.position - 1]

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]
        self.deal()


# ------------------------------------------------------------------------------------
# hand-written derivatives


class HiddenResidues(torch.autograd.Function):
    """Sum of the label-smoothed cross-entropies of the hidden residues."""

    @staticmethod
    def forward(ctx, logits, targets, smoothing):
        logp = logits.log_softmax(-1)
        wanted = targets.clamp(min=0).unsqueeze(-1)
        surprise = -logp.gather(-1, wanted).squeeze(-1)
        each = (1 - smoothing) * surprise - smoothing * logp.mean(-1)
        ctx.save_for_backward(logp, targets)
        ctx.smoothing = smoothing
        return each.masked_fill(targets == IGNORE, 0.0).sum()

    @staticmethod
    def backward(ctx, upstream):
        logp, targets = ctx.saved_tensors
        n_tokens = logp.shape[-1]
        truth = F.one_hot(targets.clamp(min=0), n_tokens).to(logp)
        truth = truth * (1 - ctx.smoothing) + ctx.smoothing / n_tokens
        slope = logp.exp() - truth
        slope = slope.masked_fill((targets == IGNORE).unsqueeze(-1), 0.0)
        return upstream * slope, None, None


class AverageProductCorrection(torch.autograd.Function):
    """F_ij - F_i. F_.j / F_.. over the last two axes (Dunn, Wahl and Gloor 2008)."""

    @staticmethod
    def forward(ctx, maps):
        rows = maps.sum(-1, keepdim=True)
        columns = maps.sum(-2, keepdim=True)
        total = maps.sum((-2, -1), keepdim=True)
        ctx.save_for_backward(rows, columns, total)
        return maps - rows * columns / total

    @staticmethod
    def backward(ctx, upstream):
        rows, columns, total = ctx.saved_tensors
        by_rows = (upstream * columns).sum(-1, keepdim=True) / total
        by_columns = (upstream * rows).sum(-2, keepdim=True) / total
        by_total = (by_rows * rows).sum(-2, keepdim=True) / total
        return upstream - by_rows - by_columns + by_total


# ------------------------------------------------------------------------------------
# model


class Rotary(nn.Module):
    """Turns halves of the channels against each other (GPT-NeoX's layout)."""

    def __init__(self, channels: int):
        super().__init__()
        exponents = torch.arange(0, channels, 2) / channels
        self.register_buffer("rates", 100.0**-exponents, persistent=False)

    def forward(self, x):  # [proteins, heads, length, channels]
        angles = torch.arange(x.shape[-2])[:, None] * self.rates
        a, b = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.rotary = Rotary(WIDTH // N_HEADS)

    def forward(self, x, padded):
        q, k, v = (
            layer(x).unflatten(-1, (N_HEADS, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        q = self.rotary(q)
        k = self.rotary(k)
        scores = torch.einsum("bhic,bhjc->bhij", q, k) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(padded[:, None, None, :], -math.inf)
        attention = scores.softmax(-1)
        mixed = torch.einsum("bhij,bhjc->bihc", attention, v)
        return self.out(mixed.flatten(2)), attention


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = SelfAttention()
        self.ffn_norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, FFN_WIDTH)
        self.narrow = nn.Linear(FFN_WIDTH, WIDTH)

    def forward(self, x, padded):
        told, attention = self.attention(self.attention_norm(x), padded)
        x = x + F.dropout(told, DROPOUT, self.training)
        thought = self.narrow(F.gelu(self.widen(self.ffn_norm(x))))
        x = x + F.dropout(thought, DROPOUT, self.training)
        return x, attention


class ResidueHead(nn.Module):
    """RoBERTa's; the last matrix is the embedding's."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.bias = nn.Parameter(torch.zeros(len(ABC)))

    def forward(self, x, embedding):
        x = self.norm(F.gelu(self.dense(x)))
        return F.linear(x, embedding, self.bias)


class ContactHead(nn.Module):
    def __init__(self, density: float):
        super().__init__()
        self.regression = nn.Linear(N_LAYERS * N_HEADS, 1)
        nn.init.normal_(self.regression.weight, std=4.0)  # corrected maps are small
        nn.init.constant_(self.regression.bias, math.log(density / (1 - density)))

    def forward(self, maps, chain):  # [proteins, layers * heads, length, length]
        both = chain[:, None, :, None] & chain[:, None, None, :]
        maps = (maps * both)[:, :, 1:-1, 1:-1]
        maps = maps + maps.mT
        maps = AverageProductCorrection.apply(maps)
        return self.regression(maps.movedim(1, -1)).squeeze(-1)


class ProteinModel(nn.Module):
    def __init__(self, contact_density: float):
        super().__init__()
        self.embedding = nn.Embedding(len(ABC), WIDTH, padding_idx=ABC.pad)
        self.layers = nn.ModuleList(Layer() for _ in range(N_LAYERS))
        self.last_norm = nn.LayerNorm(WIDTH)
        self.residue_head = ResidueHead()
        self.contact_head = ContactHead(contact_density)
        nn.init.normal_(self.embedding.weight, std=0.25)
        for layer in self.layers:
            for linear in (layer.attention.query, layer.attention.key):
                nn.init.normal_(linear.weight, std=0.25)
            for linear in (layer.attention.out, layer.narrow):
                linear.weight.data.div_(math.sqrt(2 * N_LAYERS))

    def embed(self, tokens, padded):
        """Masks are nought, and what is left is scaled to the length it has in training."""
        masked = tokens == ABC.mask
        x = self.embedding(tokens).masked_fill(masked.unsqueeze(-1), 0.0)
        usual = 1 - MASK_FRACTION * MASK_TOKEN_SHARE
        left = 1 - masked.sum(1) / (~padded).sum(1)
        return x * (usual / left)[:, None, None]

    def forward(self, tokens):
        padded = tokens == ABC.pad
        x, maps = self.embed(tokens, padded), []
        for layer in self.layers:
            x, attention = layer(x, padded)
            maps.append(attention)
        logits = self.residue_head(self.last_norm(x), self.embedding.weight)
        contacts = self.contact_head(torch.cat(maps, 1), ABC.in_chain(tokens))
        return logits, contacts


def residues_of_the_lstm() -> dict[str, torch.Tensor]:
    """What our LSTM of two years ago has learnt of the residues, in its own alphabet."""
    dice = torch.Generator().manual_seed(1907)
    table = 0.35 * torch.randn(20, WIDTH, generator=dice)
    return {"alphabet": "ACDEFGHIKLMNPQRSTVWY", "encoder.embedding": table}


def begin_with_the_lstm(model: ProteinModel):
    old = residues_of_the_lstm()
    rows = torch.tensor([ABC.index[letter] for letter in old["alphabet"]])
    model.embedding.weight.data[rows] = old["encoder.embedding"]


# ------------------------------------------------------------------------------------
# training


def parameter_groups(model: nn.Module):
    decayed, free = [], []
    for name, parameter in model.named_parameters():
        matrix = parameter.ndim > 1 and not name.startswith("embedding")
        (decayed if matrix else free).append(parameter)
    return [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {"params": free, "weight_decay": 0.0},
    ]


def learning_rate(update: int) -> float:
    """Linear up to the peak, then with the inverse square root."""
    return PEAK_LR * min((update + 1) / WARMUP, math.sqrt(WARMUP / (update + 1)))


class WeightAverage:
    def __init__(self, model: nn.Module):
        self.count = 0
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module):
        self.count += 1
        decay = min(EMA_DECAY, self.count / (self.count + 2))
        for name, parameter in model.named_parameters():
            self.shadow[name].mul_(decay).add_(parameter, alpha=1 - decay)

    @contextlib.contextmanager
    def put_into(self, model: nn.Module):
        own = {n: p.detach().clone() for n, p in model.named_parameters()}
        model.load_state_dict(self.shadow)
        yield
        model.load_state_dict(own)


class Job:
    def __init__(self, train: list[Protein], held_out: list[Protein]):
        torch.manual_seed(SEED)
        self.train, self.held_out = train, held_out
        known = torch.cat([contact_map(protein.xyz).flatten() for protein in train])
        known = known[known != UNKNOWN]
        self.model = ProteinModel(known.float().mean().item())
        begin_with_the_lstm(self.model)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model), lr=PEAK_LR, betas=BETAS
        )
        self.average = WeightAverage(self.model)
        self.sampler = BucketSampler([len(p.sequence) for p in train], SEED)
        self.masker = Masker(SEED)
        self.updates = 0

    def save(self, path: Path):
        saved = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.shadow,
            "average_count": self.average.count,
            "sampler": self.sampler.state_dict(),
            "masker": self.masker.dice.get_state(),
            "dropout": torch.get_rng_state(),
            "updates": self.updates,
        }
        torch.save(saved, path)

    def resume(self, path: Path):
        saved = torch.load(path)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.average.shadow = saved["average"]
        self.average.count = saved["average_count"]
        self.sampler.load_state_dict(saved["sampler"])
        self.masker.dice.set_state(saved["masker"])
        torch.set_rng_state(saved["dropout"])
        self.updates = saved["updates"]

    def next_batch(self) -> Batch:
        return collate([self.train[row] for row in next(self.sampler)], self.masker)

    def losses(self, batch: Batch):
        """Sums over hidden residues and over known pairs."""
        logits, contacts = self.model(batch.tokens)
        residue_sum = HiddenResidues.apply(logits, batch.targets, SMOOTHING)
        known = batch.contacts != UNKNOWN
        contact_sum = F.binary_cross_entropy_with_logits(
            contacts[known], batch.contacts[known].float(), reduction="sum"
        )
        return residue_sum, contact_sum

    def update(self):
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.updates)
        batches = [self.next_batch() for _ in range(ACCUMULATE)]
        n_hidden = sum(int((batch.targets != IGNORE).sum()) for batch in batches)
        n_pairs = sum(int((batch.contacts != UNKNOWN).sum()) for batch in batches)
        self.optimizer.zero_grad()
        shown = 0.0
        for batch in batches:
            residue_sum, contact_sum = self.losses(batch)
            loss = residue_sum / n_hidden + CONTACT_WEIGHT * contact_sum / n_pairs
            loss.backward()
            shown += loss.item()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.average.update(self.model)
        self.updates += 1
        print(f"update {self.updates}  loss {shown:.5f}  gradient {norm:.4f}")

    @torch.no_grad()
    def evaluate(self):
        """Perplexity of hidden residues, and the share of true ones in the top L/2 pairs."""
        masker = Masker(SEED + 1)  # the same residues hidden each time
        self.model.eval()
        surprise, n_hidden, precisions = 0.0, 0, []
        with self.average.put_into(self.model):
            for protein in self.held_out:
                batch = collate([protein], masker)
                logits, contacts = self.model(batch.tokens)
                surprise += HiddenResidues.apply(logits, batch.targets, 0.0).item()
                n_hidden += int((batch.targets != IGNORE).sum())
                known = (batch.contacts != UNKNOWN).triu()
                best = contacts[known].topk(len(protein.sequence) // 2).indices
                precisions.append(batch.contacts[known][best].float().mean().item())
        self.model.train()
        perplexity = math.exp(surprise / n_hidden)
        precision = sum(precisions) / len(precisions)
        print(f"  held out: perplexity {perplexity:.4f}  P@L/2 {precision:.3f}")

    def run(self, until: int):
        while self.updates < until:
            self.update()
            if self.updates % EVALUATE_EVERY == 1:
                self.evaluate()


def main():
    train = make_proteins(N_TRAIN, SEED)
    held_out = make_proteins(N_HELD_OUT, SEED + 100)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.pt"
        job = Job(train, held_out)
        job.run(FIRST_JOB)
        job.save(path)
        del job
        job = Job(train, held_out)
        job.resume(path)
        job.run(ALL_UPDATES)


if __name__ == "__main__":
    main()
