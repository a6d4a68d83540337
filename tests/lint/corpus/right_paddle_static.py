import numpy as np
import paddle

paddle.enable_static()
main = paddle.static.Program()
startup = paddle.static.Program()
with paddle.static.program_guard(main, startup):
    image = paddle.static.data("image", [None, 784], "float32")
    label = paddle.static.data("label", [None, 1], "int64")
    hidden = paddle.static.nn.fc(image, 200, activation="relu")
    logits = paddle.static.nn.fc(hidden, 10)
    loss = paddle.mean(paddle.nn.functional.cross_entropy(logits, label))
    opt = paddle.optimizer.Adam(1e-3)
    lists = paddle.static.amp.CustomOpLists(custom_black_list={"reduce_mean"})
    opt = paddle.static.amp.decorate(opt, lists, init_loss_scaling=128.0, use_dynamic_loss_scaling=True)
    opt.minimize(loss)
place = paddle.CUDAPlace(0)
exe = paddle.static.Executor(place)
exe.run(startup)
opt.amp_init(place, scope=paddle.static.global_scope())
for step in range(100):
    x, y = next(batches)
    out, = exe.run(main, feed={"image": x, "label": y}, fetch_list=[loss])
