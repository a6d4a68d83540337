import paddle
import paddle.nn.functional as F
from paddle.amp import auto_cast


class Trainer:
    def __init__(self, model, loader):
        self.model = model
        self.loader = loader
        self.lr = paddle.optimizer.lr.CosineAnnealingDecay(0.1, 100)
        self.opt = paddle.optimizer.Momentum(self.lr, parameters=model.parameters())

    def train(self):
        scaler = paddle.amp.GradScaler(init_loss_scaling=1024)
        for epoch in range(100):
            for x, y in self.loader():
                with auto_cast(level="O2"):  # expect: RO808
                    out = self.model(x)
                    loss = F.cross_entropy(out, y)
                loss.backward()  # expect: RO804
                scaler.step(self.opt)
                scaler.update()
                self.opt.clear_grad()
            self.lr.step()
