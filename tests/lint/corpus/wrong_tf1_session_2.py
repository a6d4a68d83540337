import tensorflow as tf

flags = tf.app.flags
flags.DEFINE_float('lr', 0.001, '')
FLAGS = flags.FLAGS


def model_fn(x):
    x = tf.cast(x, tf.float16)
    h = tf.layers.dense(x, 128, activation=tf.nn.relu)
    logits = tf.layers.dense(h, 10)
    return tf.nn.softmax(logits)


def main(_):
    x = tf.placeholder(tf.float32, [None, 784])
    y = tf.placeholder(tf.int64, [None])
    probs = model_fn(x)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=probs))  # expect: RO911
    opt = tf.train.AdamOptimizer(FLAGS.lr)
    manager = tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager(2 ** 15, 1000)  # expect: RO908
    train_op = opt.minimize(loss)
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        for step in range(1000):
            bx, by = next_batch()
            _, l = sess.run([train_op, loss], {x: bx, y: by})


if __name__ == '__main__':
    tf.app.run()
