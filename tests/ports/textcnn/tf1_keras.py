"""After TF1 and Keras: a sentence is a picture [batch, length, dim, 1], kernels are HWIO.

Rows of the word table are those of a lookup table: padding, known words, and the bucket of
unknown words last. The highway layer has a carry gate.
"""

from pathlib import Path

import torch
from torch import nn

FLAGS = {
    "vocab_size": 64,
    "num_hash_buckets": 240,
    "min_ngram": 3,
    "max_ngram": 4,
    "label_smoothing": 0.1,
    "learning_rate": 2e-2,
    "warmup_steps": 2,
    "train_steps": 12,
    "clip_norm": 2.0,
    "weight_decay_rate": 0.2,
    "max_norm": 2.0,
}
FILTER_SIZES = (2, 3, 4, 5)
CLASS_WEIGHT = {0: 0.6, 1: 1.0, 2: 1.7, 3: 0.8, 4: 1.4}


# ----------------------------------------------------------------- ops of tf


def conv2d(inputs, filters, padding):
    """NHWC and HWIO, stride 1; SAME is for the height alone."""
    if padding == "SAME":
        total = filters.shape[0] - 1
        top = total // 2
        inputs = nn.functional.pad(inputs, (0, 0, 0, 0, top, total - top))
    nchw = torch.permute(inputs, (0, 3, 1, 2))
    y = nn.functional.conv2d(nchw, torch.permute(filters, (3, 2, 0, 1)))
    return torch.permute(y, (0, 2, 3, 1))


def sequence_mask(lengths, maxlen):
    return torch.arange(maxlen)[None, :] < lengths[:, None]


def embedding_lookup_sparse(params, segment_ids, ids, num_segments):
    """The mean of the rows of each segment, zeros where it has none."""
    embeddings = torch.index_select(params, 0, ids)
    total = embeddings.new_zeros(num_segments, params.shape[1])
    total = torch.index_add(total, 0, segment_ids, embeddings)
    count = torch.bincount(segment_ids, minlength=num_segments)
    return total / torch.clamp(count, min=1)[:, None]


def dense(scope, inputs):
    return torch.matmul(inputs, scope.kernel) + scope.bias


# ------------------------------------------------------------------ subwords


def to_tokens(chars):
    """<word> in lower case, as signed chars; chars [words, letters] end in zeros."""
    is_upper = torch.logical_and(chars >= 65, chars <= 90)
    chars = torch.where(is_upper, chars + 32, chars)
    length = torch.count_nonzero(chars, dim=1)
    chars = nn.functional.pad(chars, (1, 1))
    position = torch.arange(chars.shape[1])[None, :]
    chars = torch.where(position == 0, 60, chars)
    chars = torch.where(position == length[:, None] + 1, 62, chars)
    return chars.to(torch.int8).to(torch.int64)


def ngram_ids(tokens):
    """Buckets [words, positions, sizes]; -1 where the n-gram is not inside the word.

    The hash of a longer n-gram goes on from that of the shorter one.
    """
    state = torch.full_like(tokens, 0x811C9DC5)
    ids = []
    for n in range(1, FLAGS["max_ngram"] + 1):
        char = nn.functional.pad(tokens[:, n - 1 :], (0, n - 1))
        state = torch.bitwise_xor(state, char & 0xFFFFFFFF)
        state = (state * 0x01000193) & 0xFFFFFFFF
        if n >= FLAGS["min_ngram"]:
            bucket = torch.remainder(state, FLAGS["num_hash_buckets"])
            ids.append(torch.where(char != 0, bucket, -1))
    return torch.stack(ids, dim=2)


# --------------------------------------------------------------------- model


class Scope(nn.Module):
    """The variables of a layer."""

    def __init__(self, variables):
        super().__init__()
        for name, value in variables.items():
            self.register_parameter(name, nn.Parameter(value.clone().contiguous()))


class TextCNN(nn.Module):
    def __init__(self, checkpoint):
        super().__init__()
        for name, variables in checkpoint.items():
            self.add_module(name, Scope(variables))

    def char_features(self, chars):
        """[words, letters] -> [words, filters]"""
        oov = torch.ones_like(chars)
        ids = torch.where(chars > 126, oov, torch.relu(chars - 30))
        x = torch.index_select(self.char_embedding.embeddings, 0, ids.flatten())
        mask = (chars != 0).to(x.dtype)[:, :, None, None]
        x = torch.reshape(x, (*chars.shape, -1, 1)) * mask
        x = conv2d(x, self.char_conv.kernel, padding="SAME") + self.char_conv.bias
        x = torch.tanh(x) - 2.0 * (1.0 - mask)
        return torch.amax(x, dim=(1, 2))

    def subword_features(self, chars):
        ids = ngram_ids(to_tokens(chars))
        indices = torch.nonzero(ids >= 0)
        values = ids[ids >= 0]
        table = self.subword_embedding.embeddings
        return embedding_lookup_sparse(table, indices[:, 0], values, chars.shape[0])

    def conv_and_pool(self, inputs, length, filter_size):
        """[batch, length, dim, 1] -> [batch, 1, 1, filters]"""
        scope = getattr(self, f"conv_{filter_size}")
        conv = conv2d(inputs, scope.kernel, padding="VALID")
        h = torch.relu(conv + scope.bias)
        num_windows = torch.clamp(length - filter_size + 1, min=1)
        mask = sequence_mask(num_windows, h.shape[1])
        h = h * mask[:, :, None, None]
        pooled = nn.functional.max_pool2d(
            torch.permute(h, (0, 3, 1, 2)), (h.shape[1], 1)
        )
        return torch.permute(pooled, (0, 2, 3, 1))

    def highway(self, inputs):
        h = torch.relu(dense(self.highway_transform, inputs))
        carry = torch.sigmoid(dense(self.highway_carry, inputs))
        return inputs * carry + h * (1.0 - carry)

    def forward(self, words, letters):
        ids = torch.clamp(words - 1, 0, FLAGS["vocab_size"] - 1)
        mask = ids != 0
        length = torch.count_nonzero(mask, dim=1)
        batch, maxlen = ids.shape
        word = torch.index_select(self.word_embedding.embeddings, 0, ids.flatten())
        chars = torch.reshape(letters.to(torch.int64), (batch * maxlen, -1))
        features = [word, self.subword_features(chars), self.char_features(chars)]
        x = torch.cat(features, dim=1) * mask.flatten()[:, None]
        x = torch.reshape(x, (batch, maxlen, -1, 1))

        pooled = torch.cat(
            [self.conv_and_pool(x, length, n) for n in FILTER_SIZES], dim=3
        )
        return dense(self.logits, self.highway(torch.flatten(pooled, 1)))


# ---------------------------------------------------------------- checkpoint


def from_torch(state):
    def conv(name):
        """[filters, dim, width] -> [width, dim, 1, filters]"""
        kernel = torch.permute(state[name + ".weight"], (2, 1, 0))
        return {"kernel": kernel[:, :, None, :], "bias": state[name + ".bias"]}

    def fully_connected(name, sign=1.0):
        return {
            "kernel": sign * torch.transpose(state[name + ".weight"], 0, 1),
            "bias": sign * state[name + ".bias"],
        }

    words = state["word_embed.weight"]
    words = torch.cat([words[:1], words[2:], words[1:2]])
    checkpoint = {
        "word_embedding": {"embeddings": words},
        "subword_embedding": {"embeddings": state["subword_embed.weight"]},
        "char_embedding": {"embeddings": state["char_cnn.embed.weight"]},
        "char_conv": conv("char_cnn.conv"),
    }
    for i, size in enumerate(FILTER_SIZES):
        checkpoint[f"conv_{size}"] = conv(f"convs.{i}")
    checkpoint["highway_transform"] = fully_connected("highway.transform")
    # Carry is one minus transform, and so is the sigmoid of what is negated.
    checkpoint["highway_carry"] = fully_connected("highway.gate", sign=-1.0)
    checkpoint["logits"] = fully_connected("fc")
    return checkpoint


def model():
    return TextCNN(from_torch(torch.load(Path(__file__).with_name("weights.pt"))))


# ------------------------------------------------------------------ training


def forward(net, batch):
    return net(batch["words"], batch["letters"])


def loss(output, batch):
    num_classes = output.shape[1]
    class_weight = output.new_tensor([CLASS_WEIGHT[i] for i in range(num_classes)])
    smoothing = FLAGS["label_smoothing"]
    one_hot = nn.functional.one_hot(batch["label"], num_classes).to(output.dtype)
    labels = one_hot * (1.0 - smoothing) + smoothing / num_classes
    log_probs = output - torch.logsumexp(output, dim=1, keepdim=True)
    losses = -torch.sum(labels * class_weight * log_probs, dim=1)
    weights = torch.sum(one_hot * class_weight, dim=1)
    return torch.sum(losses) / torch.sum(weights)


def clip_by_global_norm(t_list, clip_norm):
    squares = [torch.sum(torch.square(t)) for t in t_list]
    global_norm = torch.sqrt(torch.sum(torch.stack(squares)))
    scale = clip_norm * torch.minimum(
        1.0 / global_norm, torch.ones_like(global_norm) / clip_norm
    )
    return [t * scale for t in t_list]


def learning_rate(global_step):
    """Warm-up, then polynomial decay of power 1 to zero."""
    init_lr, warmup = FLAGS["learning_rate"], FLAGS["warmup_steps"]
    if global_step < warmup:
        return init_lr * (global_step + 1) / warmup
    decay_steps = FLAGS["train_steps"] - warmup
    return init_lr * (1.0 - (global_step - warmup) / decay_steps)


class AdamWeightDecayOptimizer(torch.optim.Optimizer):
    exclude_from_weight_decay = ("embeddings", "bias")

    def __init__(self, named, beta_1=0.9, beta_2=0.98, epsilon=1e-8):
        self.names, variables = zip(*named)
        super().__init__(variables, {})
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.global_step = 0

    def use_weight_decay(self, name):
        return not any(part in name for part in self.exclude_from_weight_decay)

    @torch.no_grad()
    def step(self, closure=None):
        lr = learning_rate(self.global_step)
        self.global_step += 1
        beta1_power = self.beta_1**self.global_step
        beta2_power = self.beta_2**self.global_step
        lr_t = lr * (1.0 - beta2_power) ** 0.5 / (1.0 - beta1_power)
        epsilon_hat = self.epsilon * (1.0 - beta2_power) ** 0.5
        variables = self.param_groups[0]["params"]
        grads = clip_by_global_norm([v.grad for v in variables], FLAGS["clip_norm"])
        for name, var, grad in zip(self.names, variables, grads):
            slots = self.state[var]
            if not slots:
                slots["m"], slots["v"] = torch.zeros_like(var), torch.zeros_like(var)
            m, v = slots["m"], slots["v"]
            m.copy_(self.beta_1 * m + (1.0 - self.beta_1) * grad)
            v.copy_(self.beta_2 * v + (1.0 - self.beta_2) * torch.square(grad))
            update = lr_t * m / (torch.sqrt(v) + epsilon_hat)
            if self.use_weight_decay(name):
                update += lr * FLAGS["weight_decay_rate"] * var
            var.sub_(update)
            if name == "logits.kernel":
                self.max_norm(var)

    def max_norm(self, w):
        """The constraint of Keras: each unit's weights stay inside a ball."""
        norms = torch.sqrt(torch.sum(torch.square(w), dim=0, keepdim=True))
        w.mul_(torch.clamp(norms, 0, FLAGS["max_norm"]) / norms)


def optimizer(net):
    return AdamWeightDecayOptimizer(net.named_parameters())
