import copy
import torch
from torch import nn
from accelerate import Accelerator
from diffusers import UNet2DModel, DDPMScheduler


def main():
    accelerator = Accelerator(mixed_precision="fp16")
    unet = UNet2DModel(sample_size=64)
    noise_scheduler = DDPMScheduler(1000)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)
    unet, optimizer, dl = accelerator.prepare(unet, optimizer, make_dl())
    for epoch in range(10):
        unet.train()
        for clean in dl:
            noise = torch.randn_like(clean)
            t = torch.randint(0, 1000, (clean.shape[0],), device=clean.device)
            noisy = noise_scheduler.add_noise(clean, noise, t)
            pred = unet(noisy, t).sample
            loss = nn.functional.mse_loss(pred.float(), noise.float())
            loss.backward()  # expect: RO111
            accelerator.clip_grad_norm_(unet.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state("ck")


main()
