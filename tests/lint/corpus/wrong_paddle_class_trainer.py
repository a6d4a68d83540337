import paddle
from paddle import nn
from paddle.amp import GradScaler, auto_cast


class PaddleTrainer:
    def __init__(self, model, train_loader, val_loader, lr=3e-4):
        self.model = model
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = paddle.optimizer.Momentum(learning_rate=lr, parameters=model.parameters(), weight_decay=1e-4)
        self.scaler = GradScaler(init_loss_scaling=2.0**15)

    def train_epoch(self, epoch):
        self.model.train()
        for i, (img, label) in enumerate(self.train_loader):
            with auto_cast(custom_black_list={"reduce_mean"}):
                out = self.model(img)
                loss = self.criterion(out, label)
                scaled = self.scaler.scale(loss)
                scaled.backward()  # expect: RO807
            self.scaler.step(self.optimizer)  # expect: RO803
            self.optimizer.clear_grad()
            if i % 20 == 0:
                print(epoch, i, loss.item())

    @paddle.no_grad()
    def validate(self):
        self.model.eval()
        right, total = 0, 0
        for img, label in self.val_loader:
            with auto_cast(custom_black_list={"reduce_mean"}):
                out = self.model(img)
            right += (out.argmax(axis=1) == label.flatten()).sum().item()
            total += label.shape[0]
        return right / total

    def fit(self, epochs):
        for epoch in range(epochs):
            self.train_epoch(epoch)
            print(epoch, self.validate())
        paddle.save(self.model.state_dict(), "model.pdparams")


if __name__ == "__main__":
    from paddle.vision.models import resnet18

    from data import loaders

    paddle.seed(1)
    PaddleTrainer(resnet18(num_classes=10), *loaders()).fit(3)
