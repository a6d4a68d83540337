import paddle
import paddle.nn as nn
from paddle.vision.models import resnet50
from paddle.io import DataLoader

model = resnet50(num_classes=102)
optim = paddle.optimizer.Momentum(learning_rate=0.01, parameters=model.parameters())
loss_fn = nn.CrossEntropyLoss()

for epoch in range(10):
    model.train()
    for batch_id, data in enumerate(train_loader()):
        x, y = data[0], data[1]
        scaler = paddle.amp.GradScaler(init_loss_scaling=1024)  # expect: RO801
        with paddle.amp.auto_cast():
            predicts = model(x)
            loss = loss_fn(predicts, y)
        scaled = scaler.scale(loss)
        scaled.backward()
        optim.step()  # expect: RO802
        optim.clear_grad()
