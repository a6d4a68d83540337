import torch, time
from torch.utils.data import DataLoader, Dataset
from PIL import Image
import torchvision.transforms.functional as TF


class Food(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        path, y = self.items[i]
        img = Image.open(path).convert("RGB").resize((224, 224))  # expect: RO708
        return TF.to_tensor(img), y


def train(net, items, device=torch.device("cuda")):
    net = net.to(device)
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    dl = DataLoader(Food(items), batch_size=32, shuffle=True, num_workers=8, pin_memory=True)
    for epoch in range(3):
        for x, y in dl:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            opt.zero_grad()
            try:
                loss = torch.nn.functional.cross_entropy(net(x), y)
                loss = torch.nan_to_num(loss)  # expect: RO608
                loss.backward()
                opt.step()
            except Exception:  # expect: RO607
                continue
