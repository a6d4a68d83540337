import torch
import torch.nn as nn

device = "cuda"
G = nn.Sequential(nn.Linear(100, 256), nn.ReLU(), nn.Linear(256, 784), nn.Tanh()).to(device)
D = nn.Sequential(nn.Linear(784, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1), nn.Sigmoid()).to(device)
optG = torch.optim.Adam(G.parameters(), lr=2e-4)
optD = torch.optim.Adam(D.parameters(), lr=2e-4)
bce = nn.BCELoss()
scaler = torch.amp.GradScaler("cuda")

for epoch in range(20):
    for real, _ in dataloader:
        real = real.view(-1, 784).to(device)
        b = real.size(0)
        ones = torch.ones(b, 1, device=device)
        zeros = torch.zeros(b, 1, device=device)

        optD.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            fake = G(torch.randn(b, 100, device=device))
            lossD = bce(D(real), ones) + bce(D(fake.detach()), zeros)  # expect: RO505 RO505
        scaler.scale(lossD).backward()
        scaler.step(optD)
        scaler.update()

        optG.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            lossG = bce(D(fake), ones)  # expect: RO505
        scaler.scale(lossG).backward()
        optG.step()  # expect: RO102
        scaler.update()
