import torch
from torch import nn
import torch.nn.functional as F


class MLP(nn.Module):
    def __init__(self, n_in, n_out, final=None):
        super().__init__()
        mods = [nn.Linear(n_in, 64), nn.ReLU()]
        mods += [nn.Linear(64, n_out), nn.LogSoftmax(dim=-1)]
        self.body = nn.Sequential(*mods)

    def forward(self, x):
        return self.body(x.flatten(1))


def loop(model, loader, crit, opt, gs=None):
    for x, t in loader:
        with torch.autocast("cuda", torch.float16, enabled=gs is not None):
            y = model(x)
            loss = crit(y, t)  # expect: RO502
        opt.zero_grad()
        if gs:
            gs.scale(loss).backward()
            gs.unscale_(opt)
            F.dropout  # noqa
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            gs.step(opt)
            gs.update()
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            opt.step()


net = MLP(784, 10).cuda()
sgd = torch.optim.SGD(net.parameters(), 0.05)
gs = torch.amp.GradScaler("cuda")
for _ in range(5):
    loop(net, train_dl, nn.CrossEntropyLoss(), sgd, gs)
