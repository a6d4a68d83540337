import paddle
from paddle import nn
from paddle.amp import GradScaler, auto_cast


class TextCNN(nn.Layer):
    def __init__(self, vocab, classes):
        super().__init__()
        self.emb = nn.Embedding(vocab, 64)
        self.conv = nn.Conv1D(64, 64, 3)
        self.out = nn.Linear(64, classes)

    def forward(self, ids):
        h = self.conv(self.emb(ids).transpose([0, 2, 1]))
        return self.out(h.max(axis=-1))


def train(model, loader, epochs):
    opt = paddle.optimizer.Adam(1e-3, parameters=model.parameters())
    scaler = GradScaler(init_loss_scaling=65536)
    for _ in range(epochs):
        for ids, y in loader:
            with auto_cast(level="O1"):
                loss = nn.functional.cross_entropy(model(ids), y)
                scaler.scale(loss).backward()  # expect: RO807
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # expect: RO806
            scaler.step(opt)  # expect: RO805
            scaler.update()
