import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers, mixed_precision

mixed_precision.set_global_policy("mixed_float16")


def build_model(classes):
    inputs = keras.Input((784,))
    x = layers.Dense(1024, activation="relu")(inputs)
    x = layers.Dense(1024, activation="relu")(x)
    x = layers.Dense(classes)(x)
    outputs = layers.Activation("softmax", dtype="float32")(x)
    return keras.Model(inputs, outputs)


model = build_model(10)
optimizer = mixed_precision.LossScaleOptimizer(keras.optimizers.RMSprop())
loss_object = keras.losses.SparseCategoricalCrossentropy()


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        predictions = model(x, training=True)
        loss = loss_object(y, predictions)
        scaled_loss = optimizer.get_scaled_loss(loss)
    scaled_gradients = tape.gradient(scaled_loss, model.trainable_variables)
    gradients = optimizer.get_unscaled_gradients(scaled_gradients)
    gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


@tf.function
def test_step(x):
    return model(x, training=False)


def main(epochs=5):
    (x_train, y_train), (x_test, y_test) = keras.datasets.mnist.load_data()
    x_train = x_train.reshape(60000, 784).astype("float32") / 255
    x_test = x_test.reshape(10000, 784).astype("float32") / 255
    train = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(10000).batch(256).prefetch(2)
    test = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(256)
    for epoch in range(epochs):
        mean = keras.metrics.Mean()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        for x, y in train:
            mean.update_state(train_step(x, y))
        for x, y in test:
            accuracy.update_state(y, test_step(x))
        print(epoch, float(mean.result()), float(accuracy.result()))


if __name__ == "__main__":
    tf.random.set_seed(0)
    main()
