"""A small CaiT: talking heads among the patches, then layers in which a class token reads them."""

import torch
from torch import nn
from torch.nn import functional as F

CHANNELS, SIZE, PATCH = 3, (16, 30), (8, 6)
GRID = (SIZE[0] // PATCH[0], SIZE[1] // PATCH[1])
DIM, HEADS, HIDDEN = 28, 4, 80
DEPTH, CLASS_DEPTH = 3, 2
NUM_CLASSES = 9
MEAN, STD = (0.48, 0.45, 0.40), (0.23, 0.26, 0.29)
SMOOTHING = 0.1
# The auxiliary loss: its weight, and how much of its target is what the token says.
AUX, FROM_TOKEN = 0.4, 0.25


class PatchEmbed(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Conv2d(CHANNELS, DIM, PATCH, stride=PATCH)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class TalkingHeads(nn.Module):
    """Heads are mixed before and after the softmax.

    Keys have no bias, nor has the first mixing: the softmax would take it out again.
    """

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(dim))
        self.v_bias = nn.Parameter(torch.zeros(dim))
        self.proj_l = nn.Linear(heads, heads, bias=False)
        self.proj_w = nn.Linear(heads, heads)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        qkv = F.linear(x, self.qkv.weight, bias)
        qkv = qkv.view(b, n, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = self.proj_l(attn.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        attn = attn.softmax(dim=-1)
        attn = self.proj_w(attn.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x = (attn @ v).transpose(1, 2).reshape(b, n, c)
        return self.proj(x)


class ClassAttention(nn.Module):
    """Only the first token asks; all are read."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x):
        q = self.split(self.q(x[:, :1])) * self.scale
        k, v = self.split(self.k(x)), self.split(self.v(x))
        attn = (q @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm1 = nn.LayerNorm(DIM, eps=1e-6)
        self.attn = attention(DIM, HEADS)
        self.norm2 = nn.LayerNorm(DIM, eps=1e-6)
        self.mlp = Mlp(DIM, HIDDEN)
        self.gamma_1 = nn.Parameter(torch.ones(DIM))
        self.gamma_2 = nn.Parameter(torch.ones(DIM))


class PatchBlock(Block):
    def forward(self, x):
        x = x + self.gamma_1 * self.attn(self.norm1(x))
        return x + self.gamma_2 * self.mlp(self.norm2(x))


class ClassBlock(Block):
    """The token changes, the patches do not."""

    def forward(self, patches, token):
        both = torch.cat([token, patches], dim=1)
        token = token + self.gamma_1 * self.attn(self.norm1(both))
        return token + self.gamma_2 * self.mlp(self.norm2(token))


def soft_cross_entropy(logits, target):
    return -(target * logits.log_softmax(dim=-1)).sum(dim=-1).mean()


class CaiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.pos_embed = nn.Parameter(torch.zeros(1, GRID[0] * GRID[1], DIM))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, DIM))
        self.blocks = nn.ModuleList([PatchBlock(TalkingHeads) for _ in range(DEPTH)])
        self.blocks_token_only = nn.ModuleList(
            [ClassBlock(ClassAttention) for _ in range(CLASS_DEPTH)]
        )
        self.norm = nn.LayerNorm(DIM, eps=1e-6)
        self.head = nn.Linear(DIM, NUM_CLASSES)
        self.head_aux = nn.Linear(DIM, NUM_CLASSES)

    def logits(self, image):
        """What the token says, and what the mean of the patches says."""
        x = self.patch_embed(image) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        token = self.cls_token.expand(len(x), -1, -1)
        for block in self.blocks_token_only:
            token = block(x, token)
        x = self.norm(torch.cat([token, x], dim=1))
        return self.head(x[:, 0]), self.head_aux(x[:, 1:].mean(dim=1))

    def forward(self, batch):
        image, target = mixup(batch)
        logits, aux = self.logits(image)
        said = logits.detach().softmax(dim=-1)
        target_aux = (1 - FROM_TOKEN) * target + FROM_TOKEN * said
        loss = soft_cross_entropy(logits, target)
        return loss + AUX * soft_cross_entropy(aux, target_aux)


def smooth_one_hot(label):
    low = SMOOTHING / NUM_CLASSES
    return F.one_hot(label, NUM_CLASSES) * (1 - SMOOTHING) + low


def mixup(batch):
    """Each image with its partner; the batch says which and how much."""
    mean = torch.tensor(MEAN).view(-1, 1, 1)
    std = torch.tensor(STD).view(-1, 1, 1)
    image = (batch["image"].float() / 255 - mean) / std
    target = smooth_one_hot(batch["label"])
    lam, partner = batch["lam"], batch["partner"]
    keep = lam.view(-1, 1, 1, 1)
    image = keep * image + (1 - keep) * image[partner]
    target = lam[:, None] * target + (1 - lam[:, None]) * target[partner]
    return image, target


def model():
    torch.manual_seed(2107)
    net = CaiT()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                if module.bias is not None:
                    module.bias.normal_(0, 0.2)
            elif isinstance(module, Block):
                module.gamma_1.uniform_(0.3, 0.9)
                module.gamma_2.uniform_(0.2, 0.7)
        for block in net.blocks:
            block.attn.qkv.weight.mul_(1.3)
            block.attn.q_bias.normal_(0, 0.4)
            block.attn.v_bias.normal_(0, 0.3)
            for mixing in (block.attn.proj_l, block.attn.proj_w):
                mixing.weight.copy_(torch.eye(HEADS)).add_(
                    0.4 * torch.randn(HEADS, HEADS)
                )
        for block in net.blocks_token_only:
            block.attn.q.weight.mul_(1.4)
            block.attn.k.weight.mul_(1.4)
        net.pos_embed.normal_(0, 0.5)
        net.cls_token.normal_(0, 0.6)
    return net


def batches():
    """Stripes whose slope and colour tell the class, with noise; partners in a ring."""
    generator = torch.Generator().manual_seed(2108)
    y, x = torch.arange(16.0).view(16, 1), torch.arange(30.0)
    made = []
    for size in (6, 7):
        label = torch.randint(0, 9, (size,), generator=generator)
        angle = label.float().view(-1, 1, 1) * 0.35
        phase = 6.3 * torch.rand(size, 1, 1, generator=generator)
        wave = torch.sin(0.9 * (x * angle.cos() + y * angle.sin()) + phase)
        colour = torch.stack([label % 3, label // 3, 2 - label % 3], dim=1).float()
        image = 90 + 25 * colour[:, :, None, None] + 50 * wave[:, None]
        image = image + 30 * torch.randn(image.shape, generator=generator)
        lam = 0.2 + 0.75 * torch.rand(size, generator=generator)
        order = torch.randperm(size, generator=generator)
        partner = torch.empty_like(order)
        partner[order] = order.roll(1)
        made.append(
            {
                "image": image.clamp(0, 255).to(torch.uint8),
                "label": label,
                "partner": partner,
                "lam": lam,
            }
        )
    return made


def forward(net, batch):
    return {"loss": net(batch)}


def loss(output, batch):
    return output["loss"]
