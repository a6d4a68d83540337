import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import mixed_precision

mixed_precision.set_global_policy("mixed_float16")


def make_encoder(vocab, dim, classes):
    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(vocab, dim)(tokens)
    x = keras.layers.Bidirectional(keras.layers.LSTM(dim))(x)
    x = keras.layers.Dense(dim, activation="relu")(x)
    out = keras.layers.Dense(classes, activation="softmax")(x)  # expect: RO906
    return keras.Model(tokens, out)


model = make_encoder(20000, 128, 4)
inner = keras.optimizers.Adam(1e-3)
optimizer = mixed_precision.LossScaleOptimizer(inner)
loss_fn = keras.losses.SparseCategoricalCrossentropy()
train_metric = keras.metrics.Mean()


@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        p = model(x, training=True)
        loss = loss_fn(y, p)
        scaled = optimizer.get_scaled_loss(loss)
    grads = tape.gradient(scaled, model.trainable_variables)
    grads, norm = tf.clip_by_global_norm(grads, 1.0)  # expect: RO901
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    train_metric.update_state(loss)
    return norm


def fit(dataset, epochs):
    for epoch in range(epochs):
        train_metric.reset_state()
        for x, y in dataset:
            step(x, y)
        print(epoch, float(train_metric.result()))


def predict(texts, vectorizer):
    return tf.argmax(model(vectorizer(texts), training=False), axis=-1)


if __name__ == "__main__":
    keras.utils.set_random_seed(5)
    x = tf.random.uniform((512, 40), maxval=20000, dtype=tf.int32)
    y = tf.random.uniform((512,), maxval=4, dtype=tf.int32)
    fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(32), 2)
