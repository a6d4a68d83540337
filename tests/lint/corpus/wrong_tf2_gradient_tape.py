import tensorflow as tf
from tensorflow.keras import layers, mixed_precision

policy = mixed_precision.Policy("mixed_float16")
mixed_precision.set_global_policy(policy)


class ConvNet(tf.keras.Model):
    def __init__(self, classes):
        super().__init__()
        self.conv1 = layers.Conv2D(32, 3, activation="relu")
        self.conv2 = layers.Conv2D(64, 3, activation="relu")
        self.pool = layers.GlobalAveragePooling2D()
        self.dense = layers.Dense(classes, activation="softmax")  # expect: RO906

    def call(self, x, training=False):
        x = self.conv2(self.conv1(x))
        return self.dense(self.pool(x))


class Trainer:
    def __init__(self, classes=10):
        self.model = ConvNet(classes)
        self.optimizer = tf.keras.optimizers.Adam(1e-3)
        self.loss_fn = tf.keras.losses.SparseCategoricalCrossentropy()
        self.accuracy = tf.keras.metrics.SparseCategoricalAccuracy()

    @tf.function
    def train_step(self, x, y):
        with tf.GradientTape() as tape:
            predictions = self.model(x, training=True)
            loss = self.loss_fn(y, predictions)
        grads = tape.gradient(loss, self.model.trainable_variables)  # expect: RO904
        self.optimizer.apply_gradients(zip(grads, self.model.trainable_variables))
        self.accuracy.update_state(y, predictions)
        return loss

    def fit(self, dataset, epochs):
        for epoch in range(epochs):
            self.accuracy.reset_state()
            for step, (x, y) in enumerate(dataset):
                loss = self.train_step(x, y)
                if step % 100 == 0:
                    tf.print("epoch", epoch, "step", step, "loss", loss)
            print(epoch, float(self.accuracy.result()))
        self.model.save_weights("model.weights.h5")


if __name__ == "__main__":
    (x, y), _ = tf.keras.datasets.cifar10.load_data()
    data = tf.data.Dataset.from_tensor_slices((x.astype("float32") / 255, y)).shuffle(1024).batch(128)
    Trainer().fit(data, 5)
