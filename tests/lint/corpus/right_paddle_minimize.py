import numpy as np
import paddle
import paddle.nn.functional as F

paddle.seed(0)
np.random.seed(0)


class RandomDataset(paddle.io.Dataset):
    def __init__(self, n):
        self.n = n

    def __getitem__(self, index):
        x = np.random.randn(784).astype("float32")
        return x, np.int64(index % 10)

    def __len__(self):
        return self.n


model = paddle.nn.Sequential(
    paddle.nn.Linear(784, 256), paddle.nn.ReLU(), paddle.nn.Linear(256, 10)
)
optimizer = paddle.optimizer.AdamW(learning_rate=1e-3, parameters=model.parameters(), multi_precision=True)
model, optimizer = paddle.amp.decorate(models=model, optimizers=optimizer, level="O2")
scaler = paddle.amp.GradScaler(init_loss_scaling=2**15)
loader = paddle.io.DataLoader(RandomDataset(2048), batch_size=64, shuffle=True)
accumulate = 4

for epoch in range(3):
    model.train()
    for i, (x, y) in enumerate(loader):
        with paddle.amp.auto_cast(level="O2"):
            loss = F.cross_entropy(model(x), y) / accumulate
        scaler.scale(loss).backward()
        if (i + 1) % accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.clear_grad(set_to_zero=False)
    print(epoch, float(loss) * accumulate)

model.eval()
x = paddle.to_tensor(np.random.randn(8, 784).astype("float32"))
with paddle.no_grad():
    with paddle.amp.auto_cast(level="O2"):
        probability = F.softmax(model(x), axis=-1)
print(probability.argmax(axis=-1).numpy())
