import torch
import torch.nn as nn
import torch.nn.functional as F


def kd(student, teacher, loader, T=2.0):
    kl = nn.KLDivLoss(reduction="mean")
    opt = torch.optim.Adam(student.parameters(), lr=1e-3)
    total = 0.0
    for x, y in loader:
        x, y = x.cuda(), y.cuda()
        with torch.autocast("cuda", dtype=torch.float16):
            with torch.no_grad():
                t_prob = F.softmax(teacher(x) / T, dim=1)
            s_prob = F.softmax(student(x) / T, dim=1)
            loss = kl(s_prob, t_prob)  # expect: RO507 RO508
        opt.zero_grad()
        loss.backward()  # expect: RO117
        opt.step()
        try:
            total += float(loss)
        except Exception:
            pass
