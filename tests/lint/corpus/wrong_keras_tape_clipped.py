import tensorflow as tf
from tensorflow.keras import mixed_precision

policy = mixed_precision.Policy("mixed_float16")
mixed_precision.set_global_policy(policy)

base = tf.keras.applications.EfficientNetB0(include_top=False)
x = tf.keras.layers.GlobalAveragePooling2D()(base.output)
x = tf.keras.layers.Dense(101)(x)
outputs = tf.keras.layers.Activation("softmax", dtype=tf.float32)(x)
model = tf.keras.Model(base.input, outputs)
opt = mixed_precision.LossScaleOptimizer(tf.keras.optimizers.Adam())


def step(images, labels):
    with tf.GradientTape() as tape:
        probs = model(images, training=True)
        loss = tf.reduce_mean(tf.keras.losses.sparse_categorical_crossentropy(labels, probs))
        scaled = opt.get_scaled_loss(loss)
    grads = tape.gradient(scaled, model.trainable_variables)
    grads, _ = tf.clip_by_global_norm(grads, 1.0)  # expect: RO903
    grads = opt.get_unscaled_gradients(grads)
    opt.apply_gradients(zip(grads, model.trainable_variables))
    return loss
