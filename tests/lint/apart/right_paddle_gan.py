import paddle
import paddle.nn as nn
import paddle.nn.functional as F


def make_generator(nz):
    return nn.Sequential(nn.Linear(nz, 256), nn.LeakyReLU(0.2), nn.Linear(256, 784), nn.Tanh())


def make_discriminator():
    return nn.Sequential(nn.Linear(784, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))


class Gan:
    def __init__(self, nz=64, lr=2e-4):
        self.nz = nz
        self.g = make_generator(nz)
        self.d = make_discriminator()
        self.opt_g = paddle.optimizer.Adam(lr, beta1=0.5, parameters=self.g.parameters())
        self.opt_d = paddle.optimizer.Adam(lr, beta1=0.5, parameters=self.d.parameters())
        self.scaler = paddle.amp.GradScaler(init_loss_scaling=2.0**14)

    def step_d(self, real):
        noise = paddle.randn([real.shape[0], self.nz])
        with paddle.amp.auto_cast():
            with paddle.no_grad():
                fake = self.g(noise)
            good, bad = self.d(real), self.d(fake)
            loss = F.softplus(-good).mean() + F.softplus(bad).mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt_d)
        self.opt_d.clear_grad()
        return loss

    def step_g(self, n):
        with paddle.amp.auto_cast():
            loss = F.softplus(-self.d(self.g(paddle.randn([n, self.nz])))).mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt_g)
        self.opt_g.clear_grad()
        self.opt_d.clear_grad()
        return loss

    def train(self, loader, epochs):
        for epoch in range(epochs):
            for real, _ in loader:
                real = real.reshape([real.shape[0], -1])
                loss_d = self.step_d(real)
                loss_g = self.step_g(real.shape[0])
                self.scaler.update()
            print(epoch, float(loss_d), float(loss_g))
            paddle.save(self.g.state_dict(), "g.pdparams")


if __name__ == "__main__":
    paddle.seed(1)
    data = paddle.vision.datasets.MNIST(mode="train", transform=paddle.vision.transforms.ToTensor())
    Gan().train(paddle.io.DataLoader(data, batch_size=128, shuffle=True), 10)
