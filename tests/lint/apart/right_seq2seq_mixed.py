import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence

PAD = 0


class Seq2Seq(nn.Module):
    def __init__(self, src, tgt, dim=256):
        super().__init__()
        self.src = nn.Embedding(src, dim, padding_idx=PAD)
        self.tgt = nn.Embedding(tgt, dim, padding_idx=PAD)
        self.core = nn.Transformer(dim, 8, 3, 3, batch_first=True)
        self.out = nn.Linear(dim, tgt)

    def forward(self, src, tgt):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.size(1), device=tgt.device)
        h = self.core(self.src(src), self.tgt(tgt), tgt_mask=mask, src_key_padding_mask=src == PAD,
                      memory_key_padding_mask=src == PAD, tgt_is_causal=True)
        return self.out(h)


def collate(batch):
    src, tgt = zip(*batch)
    return pad_sequence(src, True, PAD), pad_sequence(tgt, True, PAD)


def label_smoothed(logits, target, eps=0.1):
    logp = logits.log_softmax(-1)
    nll = -logp.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    smooth = -logp.mean(-1)
    keep = (target != PAD).float()
    loss = (1 - eps) * nll + eps * smooth
    return (loss * keep).sum() / keep.sum().clamp(min=1)


def run(train_set, valid_set, vocab, use_bf16=torch.cuda.is_available()):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(17)
    model = Seq2Seq(*vocab).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.98), eps=1e-9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) ** -0.5, (s + 1) * 4000**-1.5))
    on_gpu = device.type == "cuda"
    loader = torch.utils.data.DataLoader(train_set, 64, shuffle=True, collate_fn=collate, num_workers=2, pin_memory=on_gpu)
    valid = torch.utils.data.DataLoader(valid_set, 64, collate_fn=collate, num_workers=2, pin_memory=on_gpu)
    for epoch in range(20):
        model.train()
        for src, tgt in loader:
            src, tgt = src.to(device), tgt.to(device)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=use_bf16):
                logits = model(src, tgt[:, :-1])
            loss = label_smoothed(logits.float(), tgt[:, 1:])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            for p in model.parameters():
                p.grad = None
        model.eval()
        with torch.no_grad():
            scores = []
            for src, tgt in valid:
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=use_bf16):
                    logits = model(src.to(device), tgt[:, :-1].to(device))
                scores.append(label_smoothed(logits.float(), tgt[:, 1:].to(device)))
        print(epoch, torch.stack(scores).mean().item())
