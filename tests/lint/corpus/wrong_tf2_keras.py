import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers, mixed_precision

inputs = keras.Input((28, 28, 1))
x = layers.Conv2D(32, 3, activation="relu")(inputs)
x = layers.Flatten()(x)
mixed_precision.set_global_policy("mixed_float16")  # expect: RO907
outputs = layers.Dense(10, activation="softmax")(x)  # expect: RO906
model = keras.Model(inputs, outputs)
model.compile("adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])  # expect: RO912
model.fit(ds, epochs=3)
