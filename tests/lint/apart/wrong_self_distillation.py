import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class EMATeacher:
    def __init__(self, student, decay=0.996):
        self.model = copy.deepcopy(student).half().eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, student):
        for t, s in zip(self.model.parameters(), student.parameters()):
            t.data = t.data * self.decay + s.data.half() * (1 - self.decay)  # expect: RO305


class Loss(nn.Module):
    def __init__(self, t_student=0.1, t_teacher=0.04):
        super().__init__()
        self.ts = t_student
        self.tt = t_teacher

    def forward(self, student, teacher):
        p = F.softmax(teacher / self.tt, dim=-1)
        q = F.softmax(student / self.ts, dim=-1)
        return -(p * torch.log(q)).sum(-1).mean()  # expect: RO404


def jensen_shannon(a, b):
    p, q = F.softmax(a, -1), F.softmax(b, -1)
    m = 0.5 * (p + q)
    left = F.kl_div(m, p, reduction="batchmean")  # expect: RO507
    right = F.kl_div(m.clamp_min(1e-8).log(), q, reduction="batchmean")
    return 0.5 * (left + right)


def train(student, loader, epochs, device="cuda"):
    student.to(device)
    teacher = EMATeacher(student)
    criterion = Loss()
    opt = torch.optim.AdamW(student.parameters(), lr=5e-4)
    scaler = torch.amp.GradScaler(device)
    for epoch in range(epochs):
        student.train()
        for (a, b), _ in loader:
            a, b = a.to(device), b.to(device)
            with torch.no_grad(), torch.autocast(device, dtype=torch.float16):
                target = teacher.model(a)
            with torch.autocast(device, dtype=torch.float16):
                out = student(b)
            loss = criterion(out.float(), target.float())
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            teacher.update(student)
        print(epoch, loss.item())
