import paddle
import paddle.nn as nn
import paddle.nn.functional as F
from paddle.io import DataLoader


class LeNet(nn.Layer):
    def __init__(self, classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2D(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2D(2, 2),
            nn.Conv2D(6, 16, 5), nn.ReLU(), nn.MaxPool2D(2, 2),
        )
        self.fc = nn.Sequential(nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, classes))

    def forward(self, x):
        x = self.features(x)
        return self.fc(paddle.flatten(x, 1))


def evaluate(model, loader):
    model.eval()
    metric = paddle.metric.Accuracy()
    with paddle.no_grad():
        for x, y in loader:
            with paddle.amp.auto_cast(level="O1"):
                logits = model(x)
            metric.update(metric.compute(logits, y))
    model.train()
    return metric.accumulate()


def train(train_set, val_set, epochs=5):
    paddle.seed(2024)
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True, num_workers=2)
    val_loader = DataLoader(val_set, batch_size=64, num_workers=2)
    model = LeNet()
    scheduler = paddle.optimizer.lr.CosineAnnealingDecay(0.001, epochs)
    clip = nn.ClipGradByGlobalNorm(1.0)
    optimizer = paddle.optimizer.AdamW(scheduler, parameters=model.parameters(), grad_clip=clip)
    scaler = paddle.amp.GradScaler(init_loss_scaling=1024)
    model.train()
    for epoch in range(epochs):
        for step, (x, y) in enumerate(train_loader):
            with paddle.amp.auto_cast(level="O1"):
                loss = F.cross_entropy(model(x), y)
            scaled = scaler.scale(loss)
            scaled.backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.clear_grad()
            if step % 100 == 0:
                print(epoch, step, float(loss))
        scheduler.step()
        print(epoch, evaluate(model, val_loader))
        paddle.save(model.state_dict(), "lenet.pdparams")
        paddle.save({"opt": optimizer.state_dict(), "scaler": scaler.state_dict()}, "lenet.pdopt")
