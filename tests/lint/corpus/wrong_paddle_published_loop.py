"""Image classification with Paddle, mixed precision as in a published tutorial."""
import paddle
from paddle.vision.models import mobilenet_v2
from paddle.vision.transforms import Compose, Normalize, Resize, ToTensor

EPOCHS = 10
BATCH = 32


def get_loader(mode):
    tf = Compose([Resize(224), ToTensor(), Normalize([0.5] * 3, [0.5] * 3)])
    data = paddle.vision.datasets.Flowers(mode=mode, transform=tf)
    return paddle.io.DataLoader(data, batch_size=BATCH, shuffle=mode == "train", num_workers=2)


def main():
    model = mobilenet_v2(num_classes=102)
    loss_fn = paddle.nn.CrossEntropyLoss()
    optim = paddle.optimizer.Adam(learning_rate=1e-3, parameters=model.parameters())
    train_loader = get_loader("train")
    model.train()
    for epoch in range(EPOCHS):
        for batch_id, data in enumerate(train_loader()):
            x_data = data[0]
            y_data = data[1]
            scaler = paddle.amp.GradScaler(init_loss_scaling=1024)  # expect: RO801
            with paddle.amp.auto_cast():
                predicts = model(x_data)
                loss = loss_fn(predicts, y_data)
            scaled = scaler.scale(loss)
            scaled.backward()
            optim.step()  # expect: RO802
            optim.clear_grad()
            if batch_id % 50 == 0:
                print(f"epoch {epoch} batch {batch_id} loss {float(loss)}")
    paddle.save(model.state_dict(), "flowers.pdparams")


if __name__ == "__main__":
    main()
