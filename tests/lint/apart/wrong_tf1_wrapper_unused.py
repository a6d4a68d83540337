import tensorflow as tf

x = tf.compat.v1.placeholder(tf.float32, [None, 32])
y = tf.compat.v1.placeholder(tf.float32, [None, 1])
h = tf.compat.v1.layers.dense(x, 64, tf.nn.relu)
out = tf.compat.v1.layers.dense(h, 1)
prob = tf.sigmoid(out)
loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=prob))  # expect: RO911
base = tf.compat.v1.train.GradientDescentOptimizer(0.1)
opt = tf.compat.v1.train.experimental.enable_mixed_precision_graph_rewrite(base, "dynamic")
train = base.minimize(loss)  # expect: RO908
with tf.compat.v1.Session() as s:
    s.run(tf.compat.v1.global_variables_initializer())
    for bx, by in batches:
        s.run(train, {x: bx, y: by})
