import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers


def make_model():
    model = keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(10, activation="softmax", dtype="float32"),
        ]
    )
    model.compile(
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),  # expect: RO912
        metrics=["accuracy"],
    )
    return model


def prepare(images, labels):
    images = tf.cast(images, tf.float32)[..., None] / 255.0
    return tf.data.Dataset.from_tensor_slices((images, labels)).batch(128)


def main():
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_global_policy("mixed_float16")
    (x, y), (tx, ty) = keras.datasets.mnist.load_data()
    train = prepare(x, y).shuffle(100).prefetch(2)
    test = prepare(tx, ty)
    model = make_model()
    model.fit(train, epochs=5, validation_data=test)
    print(model.evaluate(test))
    model.save("mnist.keras")


if __name__ == "__main__":
    main()
