import tensorflow as tf

tf.random.set_seed(11)
tf.keras.mixed_precision.set_global_policy("mixed_float16")

ACCUM = 4
net = tf.keras.Sequential(
    [
        tf.keras.layers.Input((128,)),
        tf.keras.layers.Dense(512, activation="gelu"),
        tf.keras.layers.Dense(512, activation="gelu"),
        tf.keras.layers.Dense(20, dtype="float32"),
    ]
)
optimizer = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.05, momentum=0.9))
loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
buffers = [tf.Variable(tf.zeros_like(v), trainable=False) for v in net.trainable_variables]


@tf.function
def micro_step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_fn(y, net(x, training=True)) / ACCUM
        scaled = optimizer.get_scaled_loss(loss)
    grads = optimizer.get_unscaled_gradients(tape.gradient(scaled, net.trainable_variables))
    for buffer, grad in zip(buffers, grads):
        buffer.assign_add(grad)
    return loss * ACCUM


@tf.function
def apply():
    optimizer.apply_gradients(zip(buffers, net.trainable_variables))
    for buffer in buffers:
        buffer.assign(tf.zeros_like(buffer))


def evaluate(dataset):
    metric = tf.keras.metrics.SparseCategoricalAccuracy()
    for x, y in dataset:
        metric.update_state(y, net(x, training=False))
    return float(metric.result())


def main(train, valid, epochs=3):
    for epoch in range(epochs):
        mean = tf.keras.metrics.Mean()
        for i, (x, y) in enumerate(train):
            mean.update_state(micro_step(x, y))
            if (i + 1) % ACCUM == 0:
                apply()
        print(epoch, float(mean.result()), evaluate(valid))


if __name__ == "__main__":
    x = tf.random.normal((1024, 128))
    y = tf.random.uniform((1024,), maxval=20, dtype=tf.int32)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
    main(data, data)
