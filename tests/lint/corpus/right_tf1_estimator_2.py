import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()


def model_fn(features, labels, mode, params):
    net = features["x"]
    for units in params["hidden"]:
        net = tf.layers.dense(net, units, activation=tf.nn.relu)
        net = tf.layers.dropout(net, 0.5, training=mode == tf.estimator.ModeKeys.TRAIN)
    logits = tf.layers.dense(net, params["classes"])
    predictions = {"probabilities": tf.nn.softmax(logits), "classes": tf.argmax(logits, 1)}
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions=predictions)
    loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
    if mode == tf.estimator.ModeKeys.EVAL:
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops={"acc": tf.metrics.accuracy(labels, predictions["classes"])})
    optimizer = tf.train.AdamOptimizer(1e-3)
    optimizer = tf.train.experimental.enable_mixed_precision_graph_rewrite(optimizer)
    train_op = optimizer.minimize(loss, global_step=tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


est = tf.estimator.Estimator(model_fn, "/tmp/m", params={"hidden": [64], "classes": 3})
est.train(input_fn, steps=1000)
