import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader


def build(vocab, width):
    return paddle.nn.Sequential(
        paddle.nn.Embedding(vocab, width), paddle.nn.Flatten(), paddle.nn.Linear(width * 32, 2)
    )


def train(dataset, epochs=3, accumulate=2):
    paddle.seed(33)
    model = build(10000, 64)
    opt = paddle.optimizer.AdamW(learning_rate=1e-3, parameters=model.parameters())
    loader = DataLoader(dataset, batch_size=64, shuffle=True)
    for epoch in range(epochs):
        scaler = paddle.amp.GradScaler(init_loss_scaling=2**16)  # expect: RO801
        model.train()
        for step, (tokens, label) in enumerate(loader):
            with paddle.amp.auto_cast(level="O1", dtype="float16"):
                logits = model(tokens)
                loss = F.cross_entropy(logits, label)
            scaled = scaler.scale(loss)
            scaled.backward()
            opt.step()  # expect: RO802
            opt.clear_grad()
            if step % 50 == 0:
                print(epoch, step, float(loss))


def evaluate(model, dataset):
    model.eval()
    right = 0
    with paddle.no_grad():
        for tokens, label in DataLoader(dataset, batch_size=128):
            with paddle.amp.auto_cast(level="O1", dtype="float16"):
                logits = model(tokens)
            right += int((logits.argmax(-1) == label.flatten()).sum())
    return right / len(dataset)


def export(model, path):
    spec = [paddle.static.InputSpec([None, 32], "int64")]
    paddle.jit.save(model, path, input_spec=spec)


if __name__ == "__main__":
    from data import Reviews

    train(Reviews("train"))
