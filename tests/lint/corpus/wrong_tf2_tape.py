import tensorflow as tf

tf.keras.mixed_precision.set_global_policy("mixed_float16")


class MyModel(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.d1 = tf.keras.layers.Dense(64, activation="relu")
        self.d2 = tf.keras.layers.Dense(10)
        self.act = tf.keras.layers.Activation("linear", dtype="float32")

    def call(self, x):
        return self.act(self.d2(self.d1(x)))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=pred)
        grads = tape.gradient(loss, self.trainable_variables)
        grads, _ = tf.clip_by_global_norm(grads, 1.0)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))  # expect: RO910
        return {"loss": loss}


opt = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.Adam(1e-3))
model = MyModel()
model.compile(opt, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(ds)
