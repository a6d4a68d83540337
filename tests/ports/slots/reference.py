"""A small Slot Attention autoencoder: pixels compete for slots, each slot paints a picture."""

import torch
from torch import nn
from torch.nn import functional as F

RESOLUTION = (16, 24)
NUM_SLOTS, SLOT_SIZE, NUM_ITERATIONS = 4, 10, 3
INPUTS = 14


def build_grid(resolution):
    """Distances to the four borders: (height, width, 4)."""
    ranges = [torch.linspace(0.0, 1.0, steps=res) for res in resolution]
    grid = torch.stack(torch.meshgrid(*ranges, indexing="ij"), dim=-1)
    return torch.cat([grid, 1.0 - grid], dim=-1)


class SoftPositionEmbed(nn.Module):
    def __init__(self, hidden_size, resolution):
        super().__init__()
        self.dense = nn.Linear(4, hidden_size)
        self.register_buffer("grid", build_grid(resolution), persistent=False)

    def forward(self, inputs):
        return inputs + self.dense(self.grid)


class SlotAttention(nn.Module):
    def __init__(self, in_features, mlp_hidden_size=18, epsilon=1e-8):
        super().__init__()
        self.epsilon = epsilon
        self.slots_mu = nn.Parameter(torch.randn(1, 1, SLOT_SIZE))
        self.slots_log_sigma = nn.Parameter(torch.randn(1, 1, SLOT_SIZE))
        # drawn once, so that runs can be repeated
        self.register_buffer("noise", torch.randn(1, NUM_SLOTS, SLOT_SIZE))

        self.norm_inputs = nn.LayerNorm(in_features)
        self.norm_slots = nn.LayerNorm(SLOT_SIZE)
        self.norm_mlp = nn.LayerNorm(SLOT_SIZE)
        self.project_q = nn.Linear(SLOT_SIZE, SLOT_SIZE, bias=False)
        self.project_k = nn.Linear(in_features, SLOT_SIZE, bias=False)
        self.project_v = nn.Linear(in_features, SLOT_SIZE, bias=False)
        self.gru = nn.GRUCell(SLOT_SIZE, SLOT_SIZE)
        self.mlp = nn.Sequential(
            nn.Linear(SLOT_SIZE, mlp_hidden_size),
            nn.ReLU(),
            nn.Linear(mlp_hidden_size, SLOT_SIZE),
        )

    def forward(self, inputs):
        """(batch, pixels, features) -> (batch, slots, slot size)."""
        inputs = self.norm_inputs(inputs)
        k = self.project_k(inputs)
        v = self.project_v(inputs)

        slots = self.slots_mu + torch.exp(self.slots_log_sigma) * self.noise
        slots = slots.expand(len(inputs), -1, -1)
        for _ in range(NUM_ITERATIONS):
            slots_prev = slots
            slots = self.norm_slots(slots)

            q = self.project_q(slots) * SLOT_SIZE**-0.5
            attn_logits = torch.matmul(k, q.transpose(1, 2))
            attn = F.softmax(attn_logits, dim=-1)

            # weighted mean over the pixels
            attn = attn + self.epsilon
            attn = attn / torch.sum(attn, dim=1, keepdim=True)
            updates = torch.matmul(attn.transpose(1, 2), v)

            slots = self.gru(updates.flatten(0, 1), slots_prev.flatten(0, 1))
            slots = slots.view(slots_prev.shape)
            slots = slots + self.mlp(self.norm_mlp(slots))
        return slots


class SlotAttentionAutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        height, width = RESOLUTION
        self.encoder_cnn = nn.Sequential(
            nn.Conv2d(3, 10, 5, padding=2),
            nn.ReLU(),
            nn.Conv2d(10, 10, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(10, 12, 5, padding=2),
            nn.ReLU(),
        )
        self.encoder_pos = SoftPositionEmbed(12, (height // 2, width // 2))
        self.layer_norm = nn.LayerNorm(12)
        self.mlp = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, INPUTS))

        self.slot_attention = SlotAttention(INPUTS)

        self.decoder_initial_size = (height // 4, width // 4)
        self.decoder_pos = SoftPositionEmbed(SLOT_SIZE, self.decoder_initial_size)
        self.decoder_cnn = nn.Sequential(
            nn.ConvTranspose2d(SLOT_SIZE, 12, 5, stride=2, padding=2, output_padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(12, 8, 5, stride=2, padding=2, output_padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 4, 3, padding=1),
        )

    def forward(self, image):
        x = self.encoder_cnn(image)
        x = self.encoder_pos(x.permute(0, 2, 3, 1))
        x = self.mlp(self.layer_norm(x.flatten(1, 2)))

        slots = self.slot_attention(x)

        # spatial broadcast
        x = slots.reshape(-1, 1, 1, SLOT_SIZE)
        x = x.expand(-1, *self.decoder_initial_size, -1)
        x = self.decoder_cnn(self.decoder_pos(x).permute(0, 3, 1, 2))

        x = x.unflatten(0, (len(image), NUM_SLOTS))
        recons, masks = x.split([3, 1], dim=2)
        masks = F.softmax(masks, dim=1)
        recon_combined = torch.sum(recons * masks, dim=1)
        return recon_combined, masks.squeeze(2), slots


def model():
    torch.manual_seed(1010)
    net = SlotAttentionAutoEncoder()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                module.weight.mul_(2 if isinstance(module, nn.Conv2d) else 3.5)
                module.bias.uniform_(-0.3, 0.3)
            elif isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
        attention = net.slot_attention
        attention.slots_log_sigma.mul_(0.3).sub_(0.2)
        attention.project_q.weight.mul_(3)
        attention.project_k.weight.mul_(4)
        attention.project_v.weight.mul_(3)
        attention.gru.weight_ih.mul_(2)
    return net


def batches():
    """Coloured rectangles on a slope of grey."""
    generator = torch.Generator().manual_seed(1011)
    height, width = 16, 24
    made = []
    for size in (3, 2):
        slope = torch.linspace(60, 140, width) + torch.zeros(size, 3, height, 1)
        image = slope + 30 * torch.rand(size, 3, height, width, generator=generator)
        for picture in image:
            for _ in range(3):
                top = int(torch.randint(0, height - 6, (), generator=generator))
                left = int(torch.randint(0, width - 8, (), generator=generator))
                colour = 255 * torch.rand(3, 1, 1, generator=generator)
                picture[:, top : top + 6, left : left + 8] = colour
        made.append({"image": image})
    return made


def normalized(batch):
    """From -1 to 1."""
    return batch["image"] / 255.0 * 2.0 - 1.0


def forward(net, batch):
    recon, masks, slots = net(normalized(batch))
    return {"recon": recon, "masks": masks, "slots": slots}


def loss(output, batch):
    return F.mse_loss(output["recon"], normalized(batch))


def optimizer(net):
    return torch.optim.Adam(
        net.parameters(), lr=2e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=1e-2
    )
