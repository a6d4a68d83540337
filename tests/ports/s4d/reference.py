"""A small S4D: diagonal state spaces as long convolutions, for sequences of some lengths."""

import math

import torch
from torch import nn
from torch.nn import functional as F

CHANNELS, NUM_CLASSES = 3, 5
D_MODEL, D_STATE, N_LAYERS = 16, 16, 3
DT_MIN, DT_MAX = 0.04, 0.25
MEAN, STD = (2.0, -1.5, 0.5), (1.5, 0.8, 2.5)
SMOOTHING = 0.1
LR, SSM_LR, WEIGHT_DECAY = 4e-3, 1e-3, 0.1


class S4DKernel(nn.Module):
    """Only one of each pair of conjugates is kept."""

    def __init__(self, d_model, n):
        super().__init__()
        log_dt = torch.rand(d_model) * math.log(DT_MAX / DT_MIN) + math.log(DT_MIN)
        self.log_dt = nn.Parameter(log_dt)
        self.C = nn.Parameter(torch.randn(d_model, n, 2))
        self.log_A_real = nn.Parameter(math.log(0.5) + 0.3 * torch.randn(d_model, n))
        frequency = math.pi * torch.arange(n).expand(d_model, n)
        self.A_imag = nn.Parameter(frequency + 0.2 * torch.randn(d_model, n))

    def forward(self, length):
        dt = torch.exp(self.log_dt)
        C = torch.view_as_complex(self.C)
        A = torch.complex(-torch.exp(self.log_A_real), self.A_imag)
        dtA = A * dt.unsqueeze(-1)
        C = C * (torch.exp(dtA) - 1.0) / A
        vandermonde = torch.exp(dtA.unsqueeze(-1) * torch.arange(length))
        return 2 * torch.einsum("hn,hnl->hl", C, vandermonde).real


class S4D(nn.Module):
    def __init__(self, d_model, d_state):
        super().__init__()
        self.D = nn.Parameter(torch.randn(d_model))
        self.kernel = S4DKernel(d_model, d_state // 2)
        self.output_linear = nn.Conv1d(d_model, 2 * d_model, 1)

    def forward(self, u):
        """[batch, channel, time]"""
        length = u.shape[-1]
        k = self.kernel(length)
        k_f = torch.fft.rfft(k, n=2 * length)
        u_f = torch.fft.rfft(u, n=2 * length)
        y = torch.fft.irfft(u_f * k_f, n=2 * length)[..., :length]
        y = y + u * self.D.unsqueeze(-1)
        return F.glu(self.output_linear(F.gelu(y)), dim=1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D_MODEL)
        self.s4d = S4D(D_MODEL, D_STATE)

    def forward(self, x):
        z = self.norm(x).transpose(1, 2)
        return x + self.s4d(z).transpose(1, 2)


class S4Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(CHANNELS, D_MODEL)
        self.layers = nn.ModuleList([Block() for _ in range(N_LAYERS)])
        self.norm = nn.LayerNorm(D_MODEL)
        self.decoder = nn.Linear(D_MODEL, NUM_CLASSES)

    def forward(self, x, lengths):
        x = self.encoder(x)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        mask = torch.arange(x.shape[1]) < lengths.unsqueeze(1)
        x = (x * mask.unsqueeze(-1)).sum(dim=1) / lengths.unsqueeze(-1)
        return self.decoder(x)


def model():
    torch.manual_seed(2206)
    net = S4Model()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.Linear | nn.Conv1d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                module.bias.normal_(0, 0.2)
        net.encoder.weight.mul_(0.5)
    return net


def batches():
    """Waves of three sensors; the class gives their pitch; zeros behind the end."""
    generator = torch.Generator().manual_seed(2207)
    centre, spread = torch.tensor([[2.0, -1.5, 0.5], [1.5, 0.8, 2.5]])
    made = []
    for size, longest in ((5, 40), (6, 36)):
        label = torch.randint(0, 5, (size,), generator=generator)
        phase = 6.28 * torch.rand(size, 1, 3, generator=generator)
        time = torch.arange(longest).view(1, -1, 1)
        pitch = (0.15 + 0.12 * label).view(-1, 1, 1) * torch.tensor([1.0, 0.5, 2.0])
        series = torch.sin(pitch * time + phase) + 0.02 * time
        series = series + 0.4 * torch.randn(series.shape, generator=generator)
        series = centre + spread * series
        lengths = torch.randint(longest // 3, longest, (size,), generator=generator)
        lengths[0] = longest
        series = series * (time < lengths.view(-1, 1, 1))
        made.append({"series": series, "lengths": lengths, "label": label})
    return made


def forward(net, batch):
    x = (batch["series"] - torch.tensor(MEAN)) / torch.tensor(STD)
    return net(x, batch["lengths"])


def loss(output, batch):
    return F.cross_entropy(output, batch["label"], label_smoothing=SMOOTHING)


def optimizer(net):
    """State spaces learn slowly and do not decay."""
    named = list(net.named_parameters())
    ssm = [p for name, p in named if ".kernel." in name]
    rest = [p for name, p in named if ".kernel." not in name]
    groups = [
        {"params": rest},
        {"params": ssm, "lr": SSM_LR, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, weight_decay=WEIGHT_DECAY)
