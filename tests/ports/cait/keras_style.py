"""After Keras: layers with build and call, channels last, Dense kernels [in, out]."""

import math
from pathlib import Path

import torch
from torch import nn

input_shape = (16, 30, 3)
patch_size = (8, 6)
projection_dim = 28
num_heads = 4
mlp_units = 80
sa_ffn_layers = 3
ca_ffn_layers = 2
num_classes = 9
label_smoothing = 0.1
aux_loss_weight = 0.4
distillation = 0.25

# ----------------------------------------------------------------------------- ops


def softmax(x, axis=-1):
    exps = torch.exp(x - torch.amax(x, dim=axis, keepdim=True).detach())
    return exps / torch.sum(exps, dim=axis, keepdim=True)


def gelu(x, approximate=False):
    if approximate:
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3))
        return 0.5 * x * (1.0 + torch.tanh(inner))
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def extract_patches(images, sizes):
    """[batch, rows, columns, height * width * channels], channels last in a patch."""
    height, width = sizes
    rows = torch.stack(torch.split(images, height, dim=1), dim=1)
    patches = torch.stack(torch.split(rows, width, dim=3), dim=2)
    return torch.flatten(patches, 3)


# -------------------------------------------------------------------------- layers


class Layer(nn.Module):
    """Weights are made when the first inputs come."""

    built = False

    def add_weight(self, name, shape):
        self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def build(self, input_shape):
        pass

    def forward(self, inputs):
        if not self.built:
            self.build(inputs.shape)
            self.built = True
        return self.call(inputs)


class Dense(Layer):
    def __init__(self, units, activation=None, use_bias=True):
        super().__init__()
        self.units, self.activation, self.use_bias = units, activation, use_bias

    def build(self, input_shape):
        self.add_weight("kernel", (input_shape[-1], self.units))
        if self.use_bias:
            self.add_weight("bias", (self.units,))

    def call(self, inputs):
        outputs = torch.matmul(inputs, self.kernel)
        if self.use_bias:
            outputs = outputs + self.bias
        return outputs if self.activation is None else self.activation(outputs)


class LayerNormalization(Layer):
    def __init__(self, epsilon=1e-3):
        super().__init__()
        self.epsilon = epsilon

    def build(self, input_shape):
        self.add_weight("gamma", (input_shape[-1],))
        self.add_weight("beta", (input_shape[-1],))

    def call(self, inputs):
        mean = torch.mean(inputs, dim=-1, keepdim=True)
        variance = torch.mean(torch.square(inputs - mean), dim=-1, keepdim=True)
        inv = torch.rsqrt(variance + self.epsilon) * self.gamma
        return inputs * inv + (self.beta - mean * inv)


class LayerScale(Layer):
    def build(self, input_shape):
        self.add_weight("gamma", (input_shape[-1],))

    def call(self, inputs):
        return inputs * self.gamma


class PatchEncoder(Layer):
    def __init__(self):
        super().__init__()
        self.projection = Dense(projection_dim)

    def build(self, input_shape):
        num_patches = math.prod(i // p for i, p in zip(input_shape[1:3], patch_size))
        self.add_weight("position_embedding", (num_patches, projection_dim))

    def call(self, images):
        patches = extract_patches(images, patch_size)
        encoded = torch.flatten(self.projection(patches), 1, 2)
        positions = torch.arange(encoded.shape[1])
        return encoded + torch.index_select(self.position_embedding, 0, positions)


def split_heads(x):
    """[batch, tokens, units] -> [batch, heads, tokens, size of a head]."""
    x = torch.reshape(x, (x.shape[0], x.shape[1], num_heads, -1))
    return torch.permute(x, (0, 2, 1, 3))


def join_heads(x):
    x = torch.permute(x, (0, 2, 1, 3))
    return torch.reshape(x, (x.shape[0], x.shape[1], -1))


class TalkingHeadAttention(Layer):
    """Between the two matmuls the heads are last, as Dense layers want them."""

    def __init__(self):
        super().__init__()
        self.query = Dense(projection_dim)
        self.key = Dense(projection_dim, use_bias=False)
        self.value = Dense(projection_dim)
        self.talk_logits = Dense(num_heads, use_bias=False)
        self.talk_weights = Dense(num_heads)
        self.projection = Dense(projection_dim)

    def call(self, inputs):
        query = split_heads(self.query(inputs))
        key = split_heads(self.key(inputs))
        value = split_heads(self.value(inputs))
        scores = torch.matmul(query, torch.transpose(key, 2, 3))
        scores = scores / math.sqrt(query.shape[-1])
        scores = self.talk_logits(torch.permute(scores, (0, 2, 3, 1)))
        weights = softmax(scores, axis=2)
        weights = self.talk_weights(weights)
        context = torch.matmul(torch.permute(weights, (0, 3, 1, 2)), value)
        return self.projection(join_heads(context))


class ClassAttention(Layer):
    def __init__(self):
        super().__init__()
        self.query = Dense(projection_dim)
        self.key = Dense(projection_dim, use_bias=False)
        self.value = Dense(projection_dim)
        self.projection = Dense(projection_dim)

    def call(self, inputs):
        query = split_heads(self.query(inputs[:, :1]))
        query = query * projection_dim**-0.5 * num_heads**0.5
        key, value = split_heads(self.key(inputs)), split_heads(self.value(inputs))
        scores = torch.matmul(query, torch.transpose(key, 2, 3))
        weights = softmax(scores)
        summary = torch.matmul(weights, value)
        return self.projection(join_heads(summary))


class TransformerLayer(Layer):
    def __init__(self, attention):
        super().__init__()
        self.attention_norm = LayerNormalization(epsilon=1e-6)
        self.attention = attention
        self.attention_scale = LayerScale()
        self.ffn_norm = LayerNormalization(epsilon=1e-6)
        self.ffn_expand = Dense(mlp_units, activation=gelu)
        self.ffn_contract = Dense(projection_dim)
        self.ffn_scale = LayerScale()

    def feed_forward(self, x):
        outputs = self.ffn_contract(self.ffn_expand(self.ffn_norm(x)))
        return x + self.ffn_scale(outputs)


class LayerScaleBlock(TransformerLayer):
    def __init__(self):
        super().__init__(TalkingHeadAttention())

    def call(self, encoded_patches):
        attended = self.attention(self.attention_norm(encoded_patches))
        encoded_patches = encoded_patches + self.attention_scale(attended)
        return self.feed_forward(encoded_patches)


class LayerScaleBlockClassAttention(TransformerLayer):
    """Inputs have the class token in front, and so have the outputs."""

    def __init__(self):
        super().__init__(ClassAttention())

    def call(self, inputs):
        cls, patches = torch.tensor_split(inputs, (1,), dim=1)
        attended = self.attention(self.attention_norm(inputs))
        cls = cls + self.attention_scale(attended)
        return torch.cat([self.feed_forward(cls), patches], dim=1)


class ClassToken(Layer):
    def build(self, input_shape):
        self.add_weight("cls_token", (1, 1, input_shape[-1]))

    def call(self, inputs):
        tokens = torch.tile(self.cls_token, (inputs.shape[0], 1, 1))
        return torch.cat([tokens, inputs], dim=1)


class Backbone(Layer):
    """Images to two rows of logits: of the token and of the averaged patches."""

    def __init__(self):
        super().__init__()
        self.patch_encoder = PatchEncoder()
        self.sa_layers = nn.ModuleList(
            [LayerScaleBlock() for _ in range(sa_ffn_layers)]
        )
        self.class_token = ClassToken()
        self.ca_layers = nn.ModuleList(
            [LayerScaleBlockClassAttention() for _ in range(ca_ffn_layers)]
        )
        self.norm = LayerNormalization(epsilon=1e-6)
        self.classifier = Dense(num_classes)
        self.patch_classifier = Dense(num_classes)

    def call(self, images):
        encoded = self.patch_encoder(images)
        for layer in self.sa_layers:
            encoded = layer(encoded)
        encoded = self.class_token(encoded)
        for layer in self.ca_layers:
            encoded = layer(encoded)
        representation = self.norm(encoded)
        cls, patches = representation[:, 0], representation[:, 1:]
        averaged = torch.mean(patches, dim=1)
        return self.classifier(cls), self.patch_classifier(averaged)


# ---------------------------------------------------------------------------- data


class Normalization:
    """Channels last, from bytes."""

    mean = (0.48, 0.45, 0.40)
    variance = (0.23**2, 0.26**2, 0.29**2)

    def __call__(self, images):
        images = torch.permute(images, (0, 2, 3, 1)).to(torch.float32) * (1.0 / 255.0)
        variance = torch.tensor(self.variance)
        return (images - torch.tensor(self.mean)) / torch.sqrt(variance)


def one_hot(labels, depth):
    return torch.eq(labels[:, None], torch.arange(depth)).to(torch.float32)


def mix_up(images, labels, partner, lam):
    images_two = torch.index_select(images, 0, partner)
    labels_two = torch.index_select(labels, 0, partner)
    x_l = torch.reshape(lam, (-1, 1, 1, 1))
    y_l = torch.reshape(lam, (-1, 1))
    images = images_two + x_l * (images - images_two)
    labels = labels_two + y_l * (labels - labels_two)
    return images, labels


# ---------------------------------------------------------------------------- loss


class CategoricalCrossentropy:
    """Of logits; the mean over the batch."""

    def __init__(self, label_smoothing=0.0):
        self.label_smoothing = label_smoothing

    def smooth(self, y_true):
        share = self.label_smoothing / y_true.shape[-1]
        return y_true * (1.0 - self.label_smoothing) + share

    def __call__(self, y_true, y_pred):
        normalizer = torch.logsumexp(y_pred, dim=-1)
        y_true = self.smooth(y_true)
        hit = torch.sum(y_true * y_pred, dim=-1)
        return torch.mean(torch.sum(y_true, dim=-1) * normalizer - hit, dim=0)


class CaiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.normalization = Normalization()
        self.student_loss = CategoricalCrossentropy(label_smoothing)
        self.distillation_loss = CategoricalCrossentropy()

    def compute_aux_loss(self, labels, logits, patch_logits):
        hard = self.student_loss(labels, patch_logits)
        teacher = softmax(logits.detach())
        soft = self.distillation_loss(teacher, patch_logits)
        return hard + distillation * (soft - hard)

    def forward(self, batch):
        images, labels = mix_up(
            self.normalization(batch["image"]),
            one_hot(batch["label"], num_classes),
            batch["partner"],
            batch["lam"],
        )
        logits, patch_logits = self.backbone(images)
        aux_loss = self.compute_aux_loss(labels, logits, patch_logits)
        return self.student_loss(labels, logits) + aux_loss_weight * aux_loss


# ------------------------------------------------------------------------- weights


def set_dense(layer, kernel, bias=None):
    layer.kernel.copy_(kernel.flatten(1).T)
    if bias is not None:
        layer.bias.copy_(bias)


def set_norm(layer, gamma, beta):
    layer.gamma.copy_(gamma)
    layer.beta.copy_(beta)


def load_dense(layer, state, name):
    set_dense(layer, state[name + ".weight"], state.get(name + ".bias"))


def load_talking_heads(layer, state, prefix):
    query, key, value = torch.split(state[prefix + "qkv.weight"], projection_dim)
    set_dense(layer.query, query, state[prefix + "q_bias"])
    set_dense(layer.key, key)
    set_dense(layer.value, value, state[prefix + "v_bias"])
    load_dense(layer.talk_logits, state, prefix + "proj_l")
    load_dense(layer.talk_weights, state, prefix + "proj_w")
    load_dense(layer.projection, state, prefix + "proj")


def load_class_attention(layer, state, prefix):
    load_dense(layer.query, state, prefix + "q")
    load_dense(layer.key, state, prefix + "k")
    load_dense(layer.value, state, prefix + "v")
    load_dense(layer.projection, state, prefix + "proj")


def load_block(layer, state, prefix):
    for ours, theirs in ((layer.attention_norm, "norm1"), (layer.ffn_norm, "norm2")):
        name = prefix + theirs
        set_norm(ours, state[name + ".weight"], state[name + ".bias"])
    load_dense(layer.ffn_expand, state, prefix + "mlp.fc1")
    load_dense(layer.ffn_contract, state, prefix + "mlp.fc2")
    layer.attention_scale.gamma.copy_(state[prefix + "gamma_1"])
    layer.ffn_scale.gamma.copy_(state[prefix + "gamma_2"])


def load_patches(layer, state):
    kernel = state["patch_embed.proj.weight"]
    kernel = torch.permute(kernel, (0, 2, 3, 1))
    set_dense(layer.projection, kernel, state["patch_embed.proj.bias"])
    layer.position_embedding.copy_(state["pos_embed"][0])


@torch.no_grad()
def load_torch_weights(net, state):
    load_patches(net.patch_encoder, state)
    for i, layer in enumerate(net.sa_layers):
        load_talking_heads(layer.attention, state, f"blocks.{i}.attn.")
        load_block(layer, state, f"blocks.{i}.")
    net.class_token.cls_token.copy_(state["cls_token"])
    for i, layer in enumerate(net.ca_layers):
        load_class_attention(layer.attention, state, f"blocks_token_only.{i}.attn.")
        load_block(layer, state, f"blocks_token_only.{i}.")
    set_norm(net.norm, state["norm.weight"], state["norm.bias"])
    load_dense(net.classifier, state, "head")
    load_dense(net.patch_classifier, state, "head_aux")


def model():
    net = CaiT()
    with torch.no_grad():
        net.backbone(torch.zeros(1, *input_shape))  # makes the weights
    state = torch.load(Path(__file__).with_name("weights.pt"))
    load_torch_weights(net.backbone, state)
    return net


def forward(net, batch):
    return {"loss": net(batch)}


def loss(output, batch):
    return output["loss"]
