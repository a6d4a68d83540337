import torch
import torch.nn.functional as F
from torch.amp import GradScaler, autocast


def train(model, loader, optimizer, epochs, max_norm=0.5):
    scaler = GradScaler("cuda")
    model.cuda().train()
    for epoch in range(epochs):
        for step, (tokens, targets) in enumerate(loader):
            tokens = tokens.cuda()
            targets = targets.cuda()
            optimizer.zero_grad(set_to_none=True)
            with autocast("cuda", dtype=torch.float16):
                logits = model(tokens)
                loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
            scaler.scale(loss).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)  # expect: RO104
            scaler.step(optimizer)  # expect: RO103
            if step % 50 == 0:
                print(f"{epoch}/{step}: loss {loss.item():.3f} grad {norm.item():.3f}")


def build_model(vocab, width, layers):
    layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, norm_first=True)
    return torch.nn.Sequential(
        torch.nn.Embedding(vocab, width),
        torch.nn.TransformerEncoder(layer, layers),
        torch.nn.Linear(width, vocab),
    )


def main():
    torch.manual_seed(0)
    model = build_model(32000, 512, 6)
    optimizer = torch.optim.AdamW(model.cuda().parameters(), lr=3e-4)
    blocks = torch.load("blocks.pt", weights_only=True)
    dataset = torch.utils.data.TensorDataset(blocks[:, :-1], blocks[:, 1:])
    loader = torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2, pin_memory=True)
    train(model, loader, optimizer, epochs=3)


if __name__ == "__main__":
    main()
