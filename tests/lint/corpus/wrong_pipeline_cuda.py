import os

import numpy as np
import torch
import torch.nn as nn
from PIL import Image
from torch.utils.data import DataLoader, Dataset


class Leaves(Dataset):
    def __init__(self, root):
        self.paths = sorted(os.path.join(root, name) for name in os.listdir(root))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        image = Image.open(self.paths[index]).convert("RGB")
        image = image.resize((224, 224))  # expect: RO708
        array = np.asarray(image, dtype=np.float32) / 255
        label = int(os.path.basename(self.paths[index])[0])
        return torch.from_numpy(array).permute(2, 0, 1), label


def main(model):
    torch.manual_seed(0)
    loader = DataLoader(Leaves("leaves"), batch_size=32, shuffle=True)  # expect: RO701 RO702
    model = model.cuda().train()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(10):
        for images, labels in loader:
            images = images.cuda(non_blocking=True)  # expect: RO703
            labels = labels.cuda()
            noise = torch.randn(images.shape).cuda()  # expect: RO705
            out = model(images + 0.01 * noise)
            loss = criterion(out, labels)
            optimizer.zero_grad(set_to_none=False)  # expect: RO706
            loss.backward()
            optimizer.step()
            print("loss", loss.item())  # expect: RO704
        torch.save(model.state_dict(), f"leaves{epoch}.pt")
