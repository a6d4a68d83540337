import torch
from lightning.fabric import Fabric
from torch import nn

fabric = Fabric(accelerator="cuda", devices=2, precision="16-mixed")
fabric.launch()
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LazyLinear(10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(get_loader())
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
    fabric.print(epoch, loss.item())
    fabric.save("ck.ckpt", {"model": model, "optimizer": optimizer})
