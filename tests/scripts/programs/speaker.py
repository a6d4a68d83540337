"""Speaker verification on made-up voices: a small ECAPA-TDNN under angular margins."""

import math
import sys

import torch
import torch.nn.functional as F
from torch import nn

SEED, EPOCHS, BATCHES, ACCUMULATE, MAX_NORM = 1986, 2, 4, 2, 3.0
RATE, WINDOW, HOP, MELS, FLOOR = 8000, 200, 80, 21, 1e-2
TAKES, HELD, WHO, EACH, CROP, SNR = 6, 2, 5, 3, (2000, 2800), (3.0, 15.0)
CHANNELS, SCALE, DILATIONS, POOLED, ATTENTION, EMBEDDING = 24, 3, (2, 3), 36, 10, 17
SQUEEZED, CENTRES, MARGIN, SHARP, PAIRS, COHORT = 9, 2, 0.25, 12.0, 0.5, 4
BASE_LR, MAX_LR, HEAD_LR, HALF, BETAS, DECAY = 0.02, 0.08, 2.5, 3, (0.9, 0.6), 1e-2
SPEAKERS = "mira jon ada theo lena omar ruth ivan cleo finn bea".split()


def record(gen):
    """PCM of a speaker's takes: harmonics through three formants, and hiss."""
    harmonic = torch.arange(1, 15)[:, None]
    pitch = 90 + 130 * torch.rand(1, generator=gen)
    formants = torch.tensor([550.0, 1450.0, 2600.0])[:, None, None]
    formants = formants * (1 + 0.2 * torch.randn(3, 1, 1, generator=gen))
    takes = []
    for size in torch.randint(3000, 3600, (TAKES,), generator=gen).tolist():
        time = torch.arange(size) / RATE
        a, b, c = torch.rand(3, generator=gen)
        f0 = pitch * (1 + 0.08 * torch.sin(2 * math.pi * (3 * a + 2) * time + 6 * b))
        off = (harmonic * f0 - formants * (0.95 + 0.1 * c)) / 160
        power = (torch.exp(-0.5 * off**2).sum(0) + 0.05) / harmonic**0.5
        wave = power * torch.sin(2 * math.pi * harmonic * f0.cumsum(0) / RATE)
        wave = wave.sum(0) * (0.6 + 0.4 * torch.sin(30 * (0.7 + c) * time + 6 * a))
        wave = wave / wave.abs().max() + 0.02 * torch.randn(size, generator=gen)
        takes.append((wave * 20000).round().clamp(-32768, 32767).to(torch.int16))
    return takes


def collate(crops):
    """PCM to waves, padded with silence, the longest first."""
    waves = [pcm / 32768 for pcm, _ in crops]
    labels = torch.tensor([label for _, label in crops])
    lens = torch.tensor([len(wave) for wave in waves])
    order = lens.argsort(descending=True, stable=True)
    padded = nn.utils.rnn.pad_sequence(waves, batch_first=True)
    return padded[order], lens[order], labels[order]


def batches(voices, gen):
    """A few speakers with a few takes of each, cut where it is drawn."""
    for _ in range(BATCHES):
        crops = []
        for label in torch.randperm(len(voices), generator=gen)[:WHO].tolist():
            takes = voices[label]
            for take in torch.randperm(len(takes), generator=gen)[:EACH]:
                size = int(torch.randint(*CROP, (1,), generator=gen))
                start = int(torch.rand(1, generator=gen) * (len(takes[take]) - size))
                crops.append((takes[take][start : start + size], label))
        yield collate(crops)


def add_noise(wavs, lens, gen):
    """Noise with a drawn ratio to the signal, in decibels."""
    noise = torch.randn(wavs.shape, generator=gen)
    snr = SNR[0] + (SNR[1] - SNR[0]) * torch.rand(len(wavs), 1, generator=gen)
    loud = (wavs.square().sum(1) / lens).sqrt()[:, None]
    inside = torch.arange(wavs.shape[1]) < lens[:, None]
    return wavs + inside * noise * loud * 10 ** (-snr / 20)


class Fbank(nn.Module):
    def __init__(self):
        super().__init__()
        turn = torch.arange(WINDOW // 2 + 1)[:, None] * torch.arange(WINDOW)
        angle = 2 * math.pi * (turn % WINDOW).double() / WINDOW
        taper = torch.hann_window(WINDOW, dtype=torch.double)
        basis = torch.stack([angle.cos() * taper, -angle.sin() * taper])
        self.register_buffer("basis", basis.float())
        top = 2595 * math.log10(1 + RATE / 2 / 700)
        edges = 700 * (10 ** (torch.linspace(30, top, MELS + 2) / 2595) - 1)
        hertz = torch.linspace(0, RATE / 2, len(turn))
        left, mid, right = (edges[i : i + MELS, None] for i in range(3))
        rise, fall = (hertz - left) / (mid - left), (right - hertz) / (right - mid)
        self.register_buffer("mel", torch.minimum(rise, fall).clamp(min=0))
        self.register_buffer("deviation", torch.ones(MELS, 1))

    def log_mel(self, wavs):
        frames = wavs.unfold(1, WINDOW, HOP)
        real, imag = torch.einsum("cfw,ntw->cnft", self.basis, frames)
        return (self.mel @ (real**2 + imag**2) + FLOOR).log()

    def forward(self, wavs, lens):
        x = self.log_mel(wavs)
        frames = 1 + (lens - WINDOW) // HOP
        mask = (torch.arange(x.shape[2]) < frames[:, None])[:, None].float()
        x = x - (x * mask).sum(2, keepdim=True) / frames[:, None, None]
        return x / self.deviation * mask, mask


class Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):  # the weights add up to one
        mean = (weight * x).sum(2, keepdim=True)
        off = x - mean
        std = ((weight * off.square()).sum(2, keepdim=True) + eps).sqrt()
        ctx.save_for_backward(x, weight, off, std)
        return mean, std

    @staticmethod
    def backward(ctx, grad_mean, grad_std):
        x, weight, off, std = ctx.saved_tensors
        ratio = grad_std / std
        grad_x = weight * (grad_mean + ratio * off)
        grad_weight = grad_mean * x + 0.5 * ratio * off.square()
        return grad_x, grad_weight, None


def tdnn(inputs, outputs, kernel=1, dilation=1):
    conv = nn.Conv1d(inputs, outputs, kernel, padding="same", dilation=dilation)
    norm = nn.BatchNorm1d(outputs)
    nn.init.normal_(norm.weight, 1.0, 0.2)
    nn.init.normal_(norm.bias, 0.0, 0.2)
    return nn.Sequential(conv, nn.ReLU(), norm)


class SERes2(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        n, width = CHANNELS, CHANNELS // SCALE
        parts = nn.ModuleList(tdnn(width, width, 3, dilation) for _ in range(SCALE - 1))
        self.before, self.parts, self.after = tdnn(n, n), parts, tdnn(n, n)
        self.squeeze, self.excite = nn.Linear(n, SQUEEZED), nn.Linear(SQUEEZED, n)

    def forward(self, x, mask):
        said = list(self.before(x).chunk(SCALE, 1))
        for i, part in enumerate(self.parts, 1):
            said[i] = part(said[i] + said[i - 1] if i > 1 else said[i])
        y = self.after(torch.cat(said, 1))
        heard = (y * mask).sum(2) / mask.sum(2)
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(heard))))
        return x + y * gate[:, :, None]


class Ecapa(nn.Module):
    def __init__(self):
        super().__init__()
        self.inlet = tdnn(MELS, CHANNELS, 5)
        self.blocks = nn.ModuleList(SERes2(dilation) for dilation in DILATIONS)
        self.gather = tdnn(CHANNELS * len(DILATIONS), POOLED)
        self.look = tdnn(3 * POOLED, ATTENTION)
        self.weigh = nn.Conv1d(ATTENTION, POOLED, 1, bias=False)
        self.outlet = nn.Linear(2 * POOLED, EMBEDDING)

    def forward(self, x, mask):
        levels = [self.inlet(x)]
        for block in self.blocks:
            levels.append(block(levels[-1], mask))
        x = self.gather(torch.cat(levels[1:], 1))
        even = (mask / mask.sum(2, keepdim=True)).expand_as(x)
        context = [x, *(part.expand_as(x) for part in Moments.apply(x, even, 1e-3))]
        score = self.weigh(torch.tanh(self.look(torch.cat(context, 1))))
        weight = score.masked_fill(mask == 0, -1e4).softmax(2)
        return self.outlet(torch.cat(Moments.apply(x, weight, 1e-3), 1).squeeze(2))


class Head(nn.Module):
    def __init__(self, centres):
        super().__init__()
        self.centres = nn.Parameter(centres)
        self.warmth = nn.Parameter(torch.tensor(6.0))

    def forward(self, embedding, labels):
        """Angles to the nearest of a speaker's centres, the right ones made wider."""
        near, centres = F.normalize(embedding, dim=1), F.normalize(self.centres, dim=2)
        cosine = torch.einsum("nd,ksd->nks", near, centres).amax(2)
        sine = (1 - cosine.square()).clamp(min=1e-4).sqrt()
        wider = cosine * math.cos(MARGIN) - sine * math.sin(MARGIN)
        right = F.one_hot(labels, len(centres)).bool()
        return F.cross_entropy(SHARP * torch.where(right, wider, cosine), labels)

    def pairs(self, clean, noisy, labels):
        """Clean crops look for the noisy ones of their speaker."""
        same = (labels[:, None] == labels).float()
        alike = F.normalize(clean, dim=1) @ F.normalize(noisy, dim=1).T
        return F.cross_entropy(self.warmth * alike, same / same.sum(1, keepdim=True))


class NovoGrad(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta, keep = group["betas"]
            for p in group["params"]:
                state, size = self.state[p], p.grad.square().sum()
                if not state:
                    state["size"], state["speed"] = size.clone(), torch.zeros_like(p)
                state["size"].lerp_(size, 1 - keep)
                slope = p.grad / (state["size"].sqrt() + 1e-6) + group["decay"] * p
                state["speed"].mul_(beta).add_(slope)
                p.sub_(group["lr"] * state["speed"])


class SpeakerBrain:
    def __init__(self, modules, optimizer, schedule):
        self.modules, self.optimizer = nn.ModuleDict(modules), optimizer
        self.schedule, self.step, self.checkpoints = schedule, 0, []
        self.noise = torch.Generator().manual_seed(SEED + 2)

    def compute_forward(self, batch, stage):
        wavs, lens, labels = batch
        if stage == "train":
            wavs = torch.cat([wavs, add_noise(wavs, lens, self.noise)])
            lens, labels = lens.repeat(2), labels.repeat(2)
        return self.modules["ecapa"](*self.modules["fbank"](wavs, lens)), labels, stage

    def compute_objectives(self, embedding, labels, stage):
        head = self.modules["head"]
        loss = head(embedding, labels)
        if stage == "train":
            clean, noisy = embedding.chunk(2)
            loss = loss + PAIRS * head.pairs(clean, noisy, labels[: len(clean)])
        return loss

    def fit(self, epochs, held):
        self.evaluate(held)  # a dry run
        for epoch in epochs:
            self.modules.train()
            told = [self.fit_batch(batch) for batch in epoch]
            self.on_epoch_end(sum(told) / len(told), self.evaluate(held))

    def fit_batch(self, batch):
        should_step = (self.step + 1) % ACCUMULATE == 0
        loss = self.compute_objectives(*self.compute_forward(batch, "train"))
        (loss / ACCUMULATE).backward()
        if should_step:
            nn.utils.clip_grad_norm_(self.modules.parameters(), MAX_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.step += 1
        self.on_fit_batch_end(should_step)
        return loss.item()

    def on_fit_batch_end(self, should_step):
        if should_step:
            self.schedule.step()

    def on_epoch_end(self, train, valid):
        weights = self.modules["ecapa"].parameters()
        self.checkpoints.append(nn.utils.parameters_to_vector(weights).detach())
        sys.stdout.write(f"train {train:.4f} valid {valid:.4f}\n")

    @torch.no_grad()
    def evaluate(self, batch):
        self.modules.eval()
        return self.compute_objectives(*self.compute_forward(batch, "valid")).item()

    @torch.no_grad()
    def verify(self, known, trials):
        """How often right trials score higher, checkpoints averaged, by a cohort."""
        mean = torch.stack(self.checkpoints).mean(0)
        nn.utils.vector_to_parameters(mean, self.modules["ecapa"].parameters())
        said = [self.compute_forward(batch, "test")[0] for batch in (known, trials)]
        cohort, ours = (F.normalize(embedding, dim=1) for embedding in said)
        best = (ours @ cohort.T).topk(COHORT).values
        z = (ours @ ours.T - best.mean(1)) / best.std(1)
        score, same = z + z.T, trials[2][:, None] == trials[2]
        return (score[same.triu(1)][:, None] > score[~same]).float().mean()


def main():
    torch.manual_seed(SEED)
    gen = torch.Generator().manual_seed(SEED + 1)
    voices = [record(gen) for _ in SPEAKERS]
    held = collate([(pcm, i) for i, v in enumerate(voices) for pcm in v[-HELD:]])
    voices = [takes[:-HELD] for takes in voices]
    known = collate([(pcm, i) for i, takes in enumerate(voices) for pcm in takes])
    # an older model: true convolutions, speakers by the alphabet
    kernel = torch.randn(5, MELS, CHANNELS) / (5 * MELS) ** 0.5
    centres = torch.randn(len(SPEAKERS), CENTRES, EMBEDDING)
    head = Head(centres[[sorted(SPEAKERS).index(name) for name in SPEAKERS]])
    fbank, ecapa = Fbank(), Ecapa()
    mels = torch.cat([fbank.log_mel(p[None] / 32768)[0] for v in voices for p in v], 1)
    fbank.deviation.copy_(mels.std(1, keepdim=True))
    ecapa.inlet[0].weight.data.copy_(kernel.flip(0).permute(2, 1, 0))
    groups = [{"params": list(module.parameters())} for module in (ecapa, head)]
    optimizer = NovoGrad(groups, {"lr": BASE_LR, "betas": BETAS, "decay": DECAY})
    rates = [[rate, HEAD_LR * rate] for rate in (BASE_LR, MAX_LR)]
    schedule = torch.optim.lr_scheduler.CyclicLR(
        optimizer, *rates, HALF, mode="triangular2", cycle_momentum=False
    )
    modules = {"fbank": fbank, "ecapa": ecapa, "head": head}
    brain = SpeakerBrain(modules, optimizer, schedule)
    brain.fit((batches(voices, gen) for _ in range(EPOCHS)), held)
    sys.stdout.write(f"right trials higher: {brain.verify(known, held):.3f}\n")


if __name__ == "__main__":
    main()
