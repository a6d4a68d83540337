import tensorflow as tf
from tensorflow.keras import mixed_precision as mp

mp.set_global_policy(mp.Policy("mixed_float16"))
model = tf.keras.Sequential([
    tf.keras.layers.Dense(256, activation="relu", input_shape=(784,)),
    tf.keras.layers.Dense(10),
    tf.keras.layers.Activation("softmax", dtype="float32"),
])
loss_object = tf.keras.losses.SparseCategoricalCrossentropy()
optimizer = mp.LossScaleOptimizer(tf.keras.optimizers.SGD(0.01))


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


for epoch in range(3):
    for x, y in ds:
        train_step(x, y)
