import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm


class DistillLoss(nn.Module):
    def __init__(self, T=4.0, alpha=0.7):
        super().__init__()
        self.T, self.alpha = T, alpha
        self.kl = nn.KLDivLoss(reduction="batchmean")
        self.ce = nn.CrossEntropyLoss()

    def forward(self, student_logits, teacher_logits, y):
        soft = self.kl(F.log_softmax(student_logits / self.T, dim=1), F.softmax(teacher_logits / self.T, dim=1))
        return self.alpha * self.T ** 2 * soft + (1 - self.alpha) * self.ce(student_logits, y)


def distill(student, teacher, loader, device="cuda", epochs=5):
    teacher.eval()
    crit = DistillLoss()
    optim = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler(device)
    for epoch in range(epochs):
        student.train()
        pbar = tqdm(loader, desc=f"epoch {epoch}")
        for x, y in pbar:
            x, y = x.to(device), y.to(device)
            with torch.no_grad(), torch.autocast(device, dtype=torch.float16):
                t = teacher(x)
            with torch.autocast(device, dtype=torch.float16):
                loss = crit(student(x), t, y)
            optim.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(optim)
            gn = torch.nn.utils.clip_grad_norm_(student.parameters(), 5.0)
            scaler.step(optim)
            scaler.update()
            pbar.set_postfix(loss=f"{loss.item():.3f}", gn=f"{gn:.2f}")
    return student
