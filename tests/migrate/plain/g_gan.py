import torch
import torch.nn as nn
import torch.optim as optim

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
netG = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)).to(device)
netD = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).to(device)
criterion = nn.BCEWithLogitsLoss()
optimizerD = optim.Adam(netD.parameters(), lr=2e-2)
optimizerG = optim.Adam(netG.parameters(), lr=1e-4)
real_label, fake_label = 1.0, 0.0

losses = []
for iteration in range(40):
    # the discriminator
    netD.zero_grad()
    real = (torch.randn(32, 2) * 0.1 + 3).to(device)
    label = torch.full((32, 1), real_label, device=device)
    output = netD(real)
    errD_real = criterion(output, label)
    errD_real.backward()

    noise = torch.randn(32, 2, device=device)
    fake = netG(noise)
    output = netD(fake.detach())
    errD_fake = criterion(output, torch.full_like(label, fake_label))
    errD_fake.backward()
    optimizerD.step()

    # the generator
    netG.zero_grad()
    output = netD(fake)
    errG = criterion(output, label)
    errG.backward()
    optimizerG.step()
    losses.append(errD_real.item() + errD_fake.item())
