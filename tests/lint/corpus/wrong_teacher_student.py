"""Knowledge distillation."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def mean_teacher_step(model, x_weak, x_strong, optimizer, scaler):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        with torch.no_grad():
            target = model(x_weak).softmax(-1)  # expect: RO205
        logits = model(x_strong)
        loss = F.kl_div(F.log_softmax(logits, -1), target, reduction="batchmean")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


class Distiller(nn.Module):
    def __init__(self, teacher, student, temperature=4.0, alpha=0.7):
        super().__init__()
        self.teacher = teacher.eval().requires_grad_(False)
        self.student = student
        self.t = temperature
        self.alpha = alpha

    def loss(self, x, labels):
        with torch.no_grad():
            teacher_logits = self.teacher(x)
        student_logits = self.student(x)
        soft = F.kl_div(  # expect: RO507
            F.softmax(student_logits / self.t, dim=1),
            F.softmax(teacher_logits / self.t, dim=1),
            reduction="batchmean",
        )
        hard = F.cross_entropy(student_logits, labels)
        return self.alpha * self.t**2 * soft + (1 - self.alpha) * hard


def train(distiller, loader, epochs):
    distiller.cuda()
    optimizer = torch.optim.SGD(distiller.student.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        distiller.student.train()
        for x, labels in loader:
            loss = distiller.loss(x.cuda(), labels.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())
