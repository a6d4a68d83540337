import torch
import torch.nn.functional as F


def gan_epoch(gen, disc, loader, opt_g, opt_d, scaler, z_dim, device):
    for real in loader:
        real = real.to(device)
        noise = torch.randn(real.shape[0], z_dim, device=device)
        opt_d.zero_grad(set_to_none=True)
        with torch.autocast(device_type=device.type, dtype=torch.float16):
            fake = gen(noise)
            d_real = disc(real)
            d_fake = disc(fake.detach())
            loss_d = F.softplus(-d_real).mean() + F.softplus(d_fake).mean()
        scaler.scale(loss_d).backward()
        scaler.step(opt_d)

        opt_g.zero_grad(set_to_none=True)
        with torch.autocast(device_type=device.type, dtype=torch.float16):
            loss_g = F.softplus(-disc(fake)).mean()
        scaler.scale(loss_g).backward()
        scaler.step(opt_g)

        scaler.update()


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gen, disc = build_nets()
    gen.to(device)
    disc.to(device)
    opt_g = torch.optim.Adam(gen.parameters(), 1e-4, betas=(0.0, 0.99))
    opt_d = torch.optim.Adam(disc.parameters(), 1e-4, betas=(0.0, 0.99))
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    for _ in range(100):
        gan_epoch(gen, disc, make_loader(), opt_g, opt_d, scaler, 128, device)


main()
