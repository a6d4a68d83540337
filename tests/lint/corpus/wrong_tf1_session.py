import numpy as np
import tensorflow as tf

BATCH = 64


def dense(x, units, name):
    with tf.variable_scope(name):
        w = tf.get_variable("w", [x.shape[-1], units], tf.float32)
        b = tf.get_variable("b", [units], tf.float32, tf.zeros_initializer())
        return tf.matmul(x, tf.cast(w, x.dtype)) + tf.cast(b, x.dtype)


x = tf.placeholder(tf.float32, [None, 784])
y = tf.placeholder(tf.int64, [None])
h = tf.nn.relu(dense(tf.cast(x, tf.float16), 256, "fc1"))
logits = tf.cast(dense(h, 10, "fc2"), tf.float32)
probs = tf.nn.softmax(logits)
loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=probs))  # expect: RO911
accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), y), tf.float32))

optimizer = tf.train.AdamOptimizer(1e-3)
manager = tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager(2**15, 1000)
optimizer = tf.contrib.mixed_precision.LossScaleOptimizer(optimizer, manager)
grads = optimizer.compute_gradients(loss)
clipped = [(tf.clip_by_norm(g, 1.0), v) for g, v in grads if g is not None]
train_op = optimizer.apply_gradients(clipped)

with tf.Session() as sess:
    sess.run(tf.global_variables_initializer())
    (images, labels), _ = tf.keras.datasets.mnist.load_data()
    images = images.reshape(-1, 784).astype(np.float32) / 255
    labels = labels.astype(np.int64)
    for epoch in range(10):
        order = np.random.RandomState(epoch).permutation(len(images))
        for start in range(0, len(images) - BATCH + 1, BATCH):
            index = order[start : start + BATCH]
            sess.run(train_op, feed_dict={x: images[index], y: labels[index]})
        print(epoch, sess.run([loss, accuracy], feed_dict={x: images[:1000], y: labels[:1000]}))
    tf.train.Saver().save(sess, "/tmp/model.ckpt")
