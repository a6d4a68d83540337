import paddle
import paddle.nn as nn

net = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
opt = paddle.optimizer.Adam(parameters=net.parameters(), learning_rate=1e-3)
scaler = paddle.amp.GradScaler(init_loss_scaling=2 ** 14)
ce = nn.CrossEntropyLoss()
acc_steps = 4
for epoch in range(5):
    for i, (x, y) in enumerate(loader()):
        with paddle.amp.auto_cast(custom_black_list={"elementwise_add"}, level="O1"):
            loss = ce(net(x), y) / acc_steps
        scaler.scale(loss).backward()
        if (i + 1) % acc_steps == 0:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            opt.clear_grad()
