"""A small ConvLSTM encoder-forecaster: radar maps of the next minutes from the last ones."""

import math

import torch
from torch import nn
from torch.nn import functional as F

HEIGHT, WIDTH = 28, 24
IN_FRAMES, OUT_FRAMES = 5, 4
HIDDEN = (16, 24)
# A byte is reflectivity from -10 to 60 dBZ, or says that the radar saw nothing.
FULL, NO_DATA = 250.0, 255
# Z = a * R**b, R in mm/h.
ZR_A, ZR_B = 58.53, 1.56
RAIN_THRESHOLDS = (2.0, 5.0, 10.0, 30.0)
RAIN_WEIGHTS = (2.0, 5.0, 10.0, 30.0)
MAE_WEIGHT = 0.5
MAX_LR, MIN_LR, TOTAL_STEPS = 1e-2, 5e-4, 10
CLIP_VALUE = 0.02


class ConvLSTMCell(nn.Module):
    """Gates also look at the cell: the peephole weights are maps of its size."""

    def __init__(self, in_channels, hidden, size, kernel=3):
        super().__init__()
        self.conv = nn.Conv2d(
            in_channels + hidden, 4 * hidden, kernel, padding=kernel // 2
        )
        self.w_ci = nn.Parameter(torch.zeros(hidden, *size))
        self.w_cf = nn.Parameter(torch.zeros(hidden, *size))
        self.w_co = nn.Parameter(torch.zeros(hidden, *size))

    def forward(self, x, state):
        h, c = state
        stacked = h if x is None else torch.cat([x, h], dim=1)
        i, f, o, g = self.conv(stacked).chunk(4, dim=1)
        i = torch.sigmoid(i + self.w_ci * c)
        f = torch.sigmoid(f + self.w_cf * c)
        c = f * c + i * torch.tanh(g)
        o = torch.sigmoid(o + self.w_co * c)
        return o * torch.tanh(c), c


def down(in_channels, channels, groups):
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, 3, stride=2, padding=1),
        nn.GroupNorm(groups, channels),
        nn.LeakyReLU(0.2),
    )


def up(in_channels, channels, groups):
    return nn.Sequential(
        nn.ConvTranspose2d(in_channels, channels, 4, stride=2, padding=1),
        nn.GroupNorm(groups, channels),
        nn.LeakyReLU(0.2),
    )


class EncoderForecaster(nn.Module):
    """The forecaster starts from the encoder's states and sees its own last map."""

    def __init__(self):
        super().__init__()
        near, far = (HEIGHT // 2, WIDTH // 2), (HEIGHT // 4, WIDTH // 4)
        self.down1 = down(2, 8, 2)
        self.enc1 = ConvLSTMCell(8, HIDDEN[0], near)
        self.down2 = down(HIDDEN[0], 16, 4)
        self.enc2 = ConvLSTMCell(16, HIDDEN[1], far)
        self.dec2 = ConvLSTMCell(0, HIDDEN[1], far)
        self.up2 = up(HIDDEN[1], 12, 3)
        self.dec1 = ConvLSTMCell(12 + 8, HIDDEN[0], near)
        self.up1 = up(HIDDEN[0], 8, 2)
        self.head = nn.Conv2d(8, 1, 1)

    def zeros(self, batch, cell):
        zero = torch.zeros(batch, *cell.w_ci.shape)
        return zero, zero

    def forward(self, maps):
        """(batch, time, value and validity, height, width) -> (batch, time, height, width)."""
        state1 = self.zeros(len(maps), self.enc1)
        state2 = self.zeros(len(maps), self.enc2)
        for t in range(maps.shape[1]):
            state1 = self.enc1(self.down1(maps[:, t]), state1)
            state2 = self.enc2(self.down2(state1[0]), state2)

        last = maps[:, -1]
        forecast = []
        for _ in range(OUT_FRAMES):
            state2 = self.dec2(None, state2)
            x = torch.cat([self.up2(state2[0]), self.down1(last)], dim=1)
            state1 = self.dec1(x, state1)
            y = torch.sigmoid(self.head(self.up1(state1[0])))
            forecast.append(y)
            last = torch.cat([y, torch.ones_like(y)], dim=1)
        return torch.cat(forecast, dim=1)


def model():
    torch.manual_seed(1506)
    net = EncoderForecaster()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                module.weight.mul_(1.8)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.GroupNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
        for cell in (net.enc1, net.enc2, net.dec2, net.dec1):
            cell.conv.bias[len(cell.w_ci) : 2 * len(cell.w_ci)].add_(1.0)
            for weight in (cell.w_ci, cell.w_cf, cell.w_co):
                weight.normal_(0, 0.4)
        net.head.bias.sub_(1.0)
    return net


def batches():
    """Showers that move, grow and fade, as a radar sees them: round, with blocked rays."""
    generator = torch.Generator().manual_seed(1704)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(*shape, generator=generator)

    rows = torch.arange(28.0)[:, None]
    columns = torch.arange(24.0)[None, :]
    time = torch.arange(9.0)[:, None, None]
    outside = (rows - 13.5) ** 2 + (columns - 11.5) ** 2 > 14.5**2
    angle = torch.atan2(rows - 13.3, columns - 11.3)
    made = []
    for _ in range(3):
        frames = torch.zeros(3, 9, 28, 24, dtype=torch.uint8)
        for sequence in frames:
            wind = uniform(-1.2, 1.2, 2)
            field = torch.zeros(9, 28, 24)
            for _ in range(6):
                y, x = uniform(2, 26, 1), uniform(2, 22, 1)
                drift = wind + uniform(-0.3, 0.3, 2)
                size, trend = uniform(1.5, 4.5, 1), uniform(-0.08, 0.08, 1)
                square = (rows - y - drift[0] * time) ** 2
                square = square + (columns - x - drift[1] * time) ** 2
                peak = uniform(0.35, 0.85, 1) * (1 + trend * time)
                field = torch.maximum(field, peak * torch.exp(-square / size**2 / 2))
            field = field + uniform(-0.03, 0.03, 9, 28, 24)
            field = torch.where(field < 0.1, 0.0, field)
            sequence.copy_((250 * field.clamp(0, 1)).round().to(torch.uint8))
            ray = uniform(-3, 2, 1)
            sequence[:, outside | (angle > ray) & (angle < ray + 0.4)] = 255
            lost = int(uniform(0, 9, 1))
            top = int(uniform(0, 16, 1))
            sequence[lost, top : top + 12] = 255
        made.append({"frames": frames})
    return made


def prepared(frames):
    """Bytes -> values in [0, 1], and where they are valid."""
    valid = frames != NO_DATA
    values = frames.float() / FULL
    return values.masked_fill(~valid, 0.0), valid.float()


def forward(net, batch):
    return net(torch.stack(prepared(batch["frames"][:, :IN_FRAMES]), dim=2))


def rain_to_value(rain):
    dbz = 10 * math.log10(ZR_A) + 10 * ZR_B * math.log10(rain)
    return (dbz + 10) / 70


def loss(output, batch):
    """Squared and absolute errors of valid pixels, more where it rains more."""
    target, valid = prepared(batch["frames"][:, IN_FRAMES:])
    weight = torch.ones_like(target)
    for rain, value in zip(RAIN_THRESHOLDS, RAIN_WEIGHTS):
        weight = weight.masked_fill(target >= rain_to_value(rain), value)
    weight = weight * valid
    mse = F.mse_loss(output, target, reduction="none")
    mae = F.l1_loss(output, target, reduction="none")
    return (weight * (mse + MAE_WEIGHT * mae)).sum() / valid.sum()


class CosineAdam(torch.optim.Adam):
    """Clips each element of the gradient; the rate falls as half a cosine."""

    done = 0

    def step(self, closure=None):
        half = (1 + math.cos(math.pi * self.done / TOTAL_STEPS)) / 2
        for group in self.param_groups:
            group["lr"] = MIN_LR + (MAX_LR - MIN_LR) * half
            nn.utils.clip_grad_value_(group["params"], CLIP_VALUE)
        self.done += 1
        return super().step(closure)


def optimizer(net):
    return CosineAdam(net.parameters(), lr=MAX_LR, betas=(0.9, 0.995), eps=1e-5)
