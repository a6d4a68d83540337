import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast

from networks import Critic, Generator

latent = 128
gen = Generator(latent).cuda()
critic = Critic().cuda()
opt_gen = torch.optim.Adam(gen.parameters(), lr=1e-4, betas=(0.0, 0.9))
opt_critic = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
scaler = GradScaler()  # expect: RO115
bce = nn.BCELoss()


def train_step(real):
    noise = torch.randn(real.size(0), latent, device=real.device)
    opt_critic.zero_grad()
    with autocast():  # expect: RO209
        fake = gen(noise)
        d_real = critic(real)
        d_fake = critic(fake.detach())
        real_loss = bce(torch.sigmoid(d_real), torch.ones_like(d_real))  # expect: RO505
        fake_loss = bce(torch.sigmoid(d_fake), torch.zeros_like(d_fake))  # expect: RO505
        loss_d = real_loss + fake_loss
    scaler.scale(loss_d).backward()
    scaler.step(opt_critic)
    scaler.update()  # expect: RO106

    opt_gen.zero_grad()
    with autocast():  # expect: RO209
        d_fake = critic(fake)
        loss_g = nn.functional.binary_cross_entropy_with_logits(d_fake, torch.ones_like(d_fake))
    scaler.scale(loss_g).backward()
    scaler.step(opt_gen)
    scaler.update()
    return loss_d.detach(), loss_g.detach()


def main(loader, epochs):
    for epoch in range(epochs):
        sums = torch.zeros(2, device="cuda")
        for real, _ in loader:
            d, g = train_step(real.cuda(non_blocking=True))
            sums += torch.stack([d, g])
        mean_d, mean_g = (sums / len(loader)).tolist()
        print(f"[{epoch}] D {mean_d:.4f}  G {mean_g:.4f}")
        torch.save(gen.state_dict(), f"gen_{epoch}.pt")
