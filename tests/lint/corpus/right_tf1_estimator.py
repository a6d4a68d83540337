import tensorflow as tf

flags = tf.app.flags
flags.DEFINE_float("lr", 1e-3, "learning rate")
flags.DEFINE_bool("amp", True, "mixed precision")
FLAGS = flags.FLAGS


def network(x, is_training):
    x = tf.layers.conv2d(x, 32, 3, activation=tf.nn.relu)
    x = tf.layers.max_pooling2d(x, 2, 2)
    x = tf.layers.conv2d(x, 64, 3, activation=tf.nn.relu)
    x = tf.layers.flatten(x)
    x = tf.layers.dropout(x, 0.25, training=is_training)
    return tf.layers.dense(x, 10)


def model_fn(features, labels, mode):
    logits = network(features, mode == tf.estimator.ModeKeys.TRAIN)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions={"p": tf.nn.softmax(logits)})
    loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
    if mode == tf.estimator.ModeKeys.EVAL:
        metrics = {"acc": tf.metrics.accuracy(labels, tf.argmax(logits, 1))}
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
    optimizer = tf.train.AdamOptimizer(FLAGS.lr)
    if FLAGS.amp:
        optimizer = tf.train.experimental.enable_mixed_precision_graph_rewrite(optimizer)
    update_ops = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    with tf.control_dependencies(update_ops):
        train_op = optimizer.minimize(loss, tf.train.get_or_create_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def input_fn(images, labels, batch, repeat):
    ds = tf.data.Dataset.from_tensor_slices((images, labels))
    return ds.shuffle(10000).repeat(repeat).batch(batch).prefetch(1)


def main(_):
    tf.set_random_seed(0)
    (x, y), (tx, ty) = tf.keras.datasets.mnist.load_data()
    x, tx = x[..., None] / 255.0, tx[..., None] / 255.0
    estimator = tf.estimator.Estimator(model_fn, model_dir="/tmp/mnist")
    for _ in range(5):
        estimator.train(lambda: input_fn(x.astype("float32"), y.astype("int32"), 128, 1))
        print(estimator.evaluate(lambda: input_fn(tx.astype("float32"), ty.astype("int32"), 128, 1)))


if __name__ == "__main__":
    tf.app.run()
