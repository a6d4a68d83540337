import tensorflow as tf
from tensorflow import keras

keras.mixed_precision.set_global_policy("mixed_bfloat16")


def block(x, filters, stride=1):
    shortcut = x
    x = keras.layers.Conv2D(filters, 3, strides=stride, padding="same", use_bias=False)(x)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.ReLU()(x)
    x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
    x = keras.layers.BatchNormalization()(x)
    if stride != 1 or shortcut.shape[-1] != filters:
        shortcut = keras.layers.Conv2D(filters, 1, strides=stride, use_bias=False)(shortcut)
    return keras.layers.ReLU()(x + shortcut)


def resnet(classes):
    inputs = keras.Input((32, 32, 3))
    x = keras.layers.Rescaling(1.0 / 255)(inputs)
    x = keras.layers.Conv2D(32, 3, padding="same")(x)
    for filters, stride in ((32, 1), (64, 2), (128, 2)):
        x = block(x, filters, stride)
    x = keras.layers.GlobalAveragePooling2D()(x)
    outputs = keras.layers.Dense(classes, dtype="float32")(x)
    return keras.Model(inputs, outputs)


def main():
    keras.utils.set_random_seed(3)
    (x, y), (tx, ty) = keras.datasets.cifar100.load_data()
    model = resnet(100)
    model.compile(
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(50000).batch(256).prefetch(tf.data.AUTOTUNE)
    callbacks = [keras.callbacks.ReduceLROnPlateau(), keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True)]
    model.fit(data, epochs=20, validation_data=(tx, ty), callbacks=callbacks)


if __name__ == "__main__":
    main()
