"""A small wav2vec: convolutions of sound, masked times, a contrast with negatives."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

WIDTH, HEADS, TARGET = 12, 2, 8
CONVS = ((8, 10, 5), (8, 3, 2), (10, 2, 2))


class GradMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, None


class FeatureExtractor(nn.Module):
    def __init__(self):
        super().__init__()
        inputs = 1
        layers = []
        for i, (width, kernel, stride) in enumerate(CONVS):
            conv = nn.Conv1d(inputs, width, kernel, stride, bias=False)
            norm = nn.GroupNorm(width, width) if i == 0 else nn.Identity()
            layers.append(nn.Sequential(conv, norm, nn.GELU()))
            inputs = width
        self.conv_layers = nn.ModuleList(layers)

    def forward(self, wave):
        x = wave.unsqueeze(1)
        for layer in self.conv_layers:
            x = layer(x)
        return x


class PositionalConv(nn.Module):
    def __init__(self):
        super().__init__()
        conv = nn.Conv1d(WIDTH, WIDTH, 4, padding=2, groups=3)
        self.conv = weight_norm(conv, dim=2)

    def forward(self, x):
        y = self.conv(x.transpose(1, 2))[:, :, :-1]
        return F.gelu(y).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm1 = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 20)
        self.fc2 = nn.Linear(20, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = self.norm1(x + self.self_attn(x, x, x, need_weights=False)[0])
        return self.norm2(x + self.fc2(F.gelu(self.fc1(x))))


class Wav2Vec(nn.Module):
    def __init__(self):
        super().__init__()
        self.feature_extractor = FeatureExtractor()
        self.layer_norm = nn.LayerNorm(CONVS[-1][0])
        self.post_extract_proj = nn.Linear(CONVS[-1][0], WIDTH)
        self.mask_emb = nn.Parameter(torch.rand(WIDTH))
        self.pos_conv = PositionalConv()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.project_q = nn.Linear(CONVS[-1][0], TARGET)
        self.final_proj = nn.Linear(WIDTH, TARGET)

    def forward(self, wave, mask, negatives):
        features = GradMultiply.apply(self.feature_extractor(wave), 0.1)
        penalty = features.float().pow(2).mean()
        features = self.layer_norm(features.transpose(1, 2))
        unmasked = features.clone()
        x = self.post_extract_proj(features)
        x[mask] = self.mask_emb
        x = self.norm(x + self.pos_conv(x))
        for layer in self.layers:
            x = layer(x)
        n = len(wave)
        y = self.project_q(unmasked[mask].view(n, -1, unmasked.shape[-1]))
        x = self.final_proj(x[mask].view(n, -1, x.shape[-1]))
        size = y.shape[1]
        flat = negatives + torch.arange(n).view(-1, 1, 1) * size
        drawn = y.reshape(-1, TARGET)[flat.flatten()].view(*negatives.shape, TARGET)
        drawn = drawn.permute(2, 0, 1, 3)
        same = (y == drawn).all(-1)
        targets = torch.cat([y.unsqueeze(0), drawn], dim=0)
        logits = torch.cosine_similarity(x, targets, dim=-1) / 0.2
        logits[1:] = logits[1:].masked_fill(same, float("-inf"))
        logits = logits.permute(1, 2, 0).flatten(0, 1)
        target = logits.new_zeros(len(logits), dtype=torch.long)
        contrast = F.cross_entropy(logits, target, reduction="sum")
        return contrast / len(logits), penalty


def model():
    torch.manual_seed(530)
    net = Wav2Vec()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, (nn.LayerNorm, nn.GroupNorm)):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            if isinstance(module, nn.MultiheadAttention):
                module.in_proj_bias.normal_(0, 0.2)
                module.out_proj.bias.normal_(0, 0.2)
        net.pos_conv.conv.parametrizations.weight.original0.mul_(1.7)
    return net


def batches():
    generator = torch.Generator().manual_seed(531)
    time = torch.arange(260) / 9
    pitch = torch.rand(2, 1, generator=generator) + 0.5
    wave = torch.sin(pitch * time) + 0.4 * torch.randn(2, 260, generator=generator)
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[0, 2:5] = mask[0, 8:10] = True
    mask[1, 0:2] = mask[1, 6:9] = True
    negatives = torch.randint(0, 5, (2, 5, 4), generator=generator)
    negatives[0, 1, 2] = 1
    negatives[1, 3, 0] = 3
    return [{"wave": wave, "mask": mask, "negatives": negatives}]


def forward(net, batch):
    return net(batch["wave"], batch["mask"], batch["negatives"])


def loss(output, batch):
    contrast, penalty = output
    return contrast + 10 * penalty


def optimizer(net):
    return torch.optim.AdamW(
        net.parameters(), lr=2e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01
    )
