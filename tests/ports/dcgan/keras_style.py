"""From a TF2 code base: Keras layers, NHWC, a train step with tapes, layers named by type.

The wrapped layers keep one vector, that of the inputs of their kernel. Where a layer is not
trainable, gradients go through it but not to it.
"""

from pathlib import Path

import torch
from torch import nn

LATENT_DIM = 24
BATCH_GROUPS = 4
GP_WEIGHT = 0.25
DECAY_STEPS = 20


def l2_normalize(x, epsilon=1e-24):
    return x * torch.rsqrt(torch.clamp(torch.sum(torch.square(x)), min=epsilon))


class GradientTape:
    """Records also where gradients are switched off."""

    def __init__(self):
        self.grad_mode = torch.enable_grad()

    def __enter__(self):
        self.grad_mode.__enter__()
        return self

    def __exit__(self, *error):
        self.grad_mode.__exit__(*error)

    def watch(self, x):
        x.requires_grad_(True)

    def gradient(self, target, source):
        with torch.enable_grad():
            total = torch.sum(target)
            return torch.autograd.grad(total, source, create_graph=True)[0]


# --------------------------------------------------------------------- layers


class Layer(nn.Module):
    """Has the variables of its checkpoint; those that are moved by hand are buffers."""

    trainable = True

    def __init__(self, variables):
        super().__init__()
        for name, value in variables.items():
            value = value.clone().contiguous()
            if name.startswith(("moving", "vector")):
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value))

    def read(self, name):
        variable = getattr(self, name)
        return variable if self.trainable else variable.detach()


class Dense(Layer):
    def forward(self, inputs):
        y = torch.matmul(inputs, self.read("kernel"))
        return y + self.read("bias") if hasattr(self, "bias") else y


def same_padding(size, kernel, stride):
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


class Conv2D(Layer):
    """kernel [height, width, in, out], padding "same"."""

    def __init__(self, variables, strides):
        super().__init__(variables)
        self.strides = strides

    def convolve(self, inputs, kernel):
        top, bottom = same_padding(inputs.shape[1], kernel.shape[0], self.strides)
        left, right = same_padding(inputs.shape[2], kernel.shape[1], self.strides)
        x = nn.functional.pad(inputs, (0, 0, left, right, top, bottom))
        x = torch.permute(x, (0, 3, 1, 2))
        weight = torch.permute(kernel, (3, 2, 0, 1))
        y = nn.functional.conv2d(x, weight, stride=self.strides)
        return torch.permute(y, (0, 2, 3, 1))


class SpectralConv2D(Conv2D):
    def normalized_kernel(self, training):
        kernel = self.read("kernel")
        w = torch.reshape(kernel, (-1, kernel.shape[-1]))
        v = self.vector_v
        with torch.no_grad():
            u = l2_normalize(torch.matmul(v, w))
            if training:
                v = l2_normalize(torch.matmul(u, w.T))
                self.vector_v.copy_(v)
        sigma = torch.matmul(torch.matmul(v, w), u.T)
        return kernel / sigma

    def forward(self, inputs, training):
        kernel = self.normalized_kernel(training)
        return self.convolve(inputs, kernel) + self.read("bias")


class Conv2DTranspose(Layer):
    """kernel [height, width, out, in], strides of 2 and padding "same"."""

    def forward(self, inputs):
        x = torch.permute(inputs, (0, 3, 1, 2))
        weight = torch.permute(self.read("kernel"), (3, 2, 0, 1))
        y = nn.functional.conv_transpose2d(x, weight, stride=2, padding=1)
        y = torch.permute(y, (0, 2, 3, 1))
        return y + self.read("bias") if hasattr(self, "bias") else y


class BatchNormalization(Layer):
    momentum = 0.9
    epsilon = 1e-5

    def forward(self, inputs, training):
        mean, variance = self.moving_mean, self.moving_variance
        if training:
            mean = torch.mean(inputs, dim=(0, 1, 2))
            variance = torch.mean(torch.square(inputs - mean), dim=(0, 1, 2))
            self.assign_moving_averages(mean, variance, inputs[..., 0].numel())
        inv = torch.rsqrt(variance + self.epsilon) * self.read("gamma")
        return inputs * inv + (self.read("beta") - mean * inv)

    @torch.no_grad()
    def assign_moving_averages(self, mean, variance, size):
        variance = variance * (size / (size - 1))
        decay = 1.0 - self.momentum
        self.moving_mean.sub_((self.moving_mean - mean) * decay)
        self.moving_variance.sub_((self.moving_variance - variance) * decay)


def leaky_relu(x, alpha=0.2):
    return torch.maximum(x, alpha * x)


def minibatch_stddev(x, group_size=BATCH_GROUPS):
    """[N, H, W, C] -> [N, H, W, C + 1]; every M-th image is of the same group."""
    n, height, width, channels = x.shape
    group_size = min(group_size, n)
    y = torch.reshape(x, (group_size, -1, height, width, channels))
    y = y - torch.mean(y, dim=0, keepdim=True)
    y = torch.mean(torch.square(y), dim=0)
    y = torch.sqrt(y + 1e-8)
    y = torch.mean(y, dim=(1, 2, 3), keepdim=True)
    y = torch.tile(y, (group_size, height, width, 1))
    return torch.cat([x, y], dim=-1)


# --------------------------------------------------------------------- models


class Generator(nn.Module):
    def __init__(self, checkpoint):
        super().__init__()
        self.dense = Dense(checkpoint["dense"])
        self.batch_normalization = BatchNormalization(checkpoint["batch_normalization"])
        self.conv2d_transpose = Conv2DTranspose(checkpoint["conv2d_transpose"])
        self.batch_normalization_1 = BatchNormalization(
            checkpoint["batch_normalization_1"]
        )
        self.conv2d_transpose_1 = Conv2DTranspose(checkpoint["conv2d_transpose_1"])

    def forward(self, latent, training):
        x = self.dense(latent)
        x = torch.reshape(x, (-1, 4, 4, x.shape[-1] // 16))
        x = torch.relu(self.batch_normalization(x, training))
        x = self.conv2d_transpose(x)
        x = torch.relu(self.batch_normalization_1(x, training))
        return torch.tanh(self.conv2d_transpose_1(x))


class Discriminator(nn.Module):
    def __init__(self, checkpoint):
        super().__init__()
        self.conv2d = SpectralConv2D(checkpoint["conv2d"], strides=2)
        self.conv2d_1 = SpectralConv2D(checkpoint["conv2d_1"], strides=2)
        self.conv2d_2 = SpectralConv2D(checkpoint["conv2d_2"], strides=1)
        self.dense = Dense(checkpoint["dense"])

    def set_trainable(self, value):
        for layer in self.children():
            layer.trainable = value

    def forward(self, images, training):
        x = leaky_relu(self.conv2d(images, training))
        x = leaky_relu(self.conv2d_1(x, training))
        x = minibatch_stddev(x)
        x = leaky_relu(self.conv2d_2(x, training))
        return self.dense(torch.flatten(x, 1))


class GAN(nn.Module):
    def __init__(self, checkpoint):
        super().__init__()
        self.generator = Generator(checkpoint["generator"])
        self.discriminator = Discriminator(checkpoint["discriminator"])
        self.shadow = Generator(checkpoint["ema"])
        for variable in self.shadow.parameters():
            variable.requires_grad_(False)

    def gradient_penalty(self, real_images):
        with GradientTape() as tape:
            tape.watch(real_images)
            logits = self.discriminator(real_images, training=True)
        gradients = tape.gradient(logits, real_images)
        return logits, torch.sum(torch.square(gradients), dim=(1, 2, 3))

    def train_step(self, real_images, latent):
        """What the losses need of one step."""
        samples = self.shadow(latent, training=False)
        real_logits, penalty = self.gradient_penalty(real_images)
        fake_images = self.generator(latent, training=True)
        fake_logits = self.discriminator(fake_images.detach(), training=True)

        self.discriminator.set_trainable(False)
        generator_logits = self.discriminator(fake_images, training=True)
        self.discriminator.set_trainable(True)
        return {
            "real": real_logits[:, 0],
            "fake": fake_logits[:, 0],
            "fooled": generator_logits[:, 0],
            "penalty": penalty,
            "sample": torch.permute(samples, (0, 3, 1, 2)),
        }


# ----------------------------------------------------------------- checkpoint


def from_torch(state):
    """Weights of the torch model -> variables of each layer."""

    def bias(name):
        return {"bias": state[name + ".bias"]} if name + ".bias" in state else {}

    def transposed(name):
        kernel = torch.permute(state[name + ".weight"], (2, 3, 1, 0))
        return {"kernel": kernel, **bias(name)}

    def norm(name):
        return {
            "gamma": state[name + ".weight"],
            "beta": state[name + ".bias"],
            "moving_mean": state[name + ".running_mean"],
            "moving_variance": state[name + ".running_var"],
        }

    def spectral(name):
        weight = state[name + ".parametrizations.weight.original"]
        kernel = torch.permute(weight, (2, 3, 1, 0))
        vector = torch.reshape(
            state[name + ".parametrizations.weight.0._v"], weight.shape[1:]
        )
        vector = torch.permute(vector, (1, 2, 0))
        return {
            "kernel": kernel,
            "vector_v": torch.reshape(vector, (1, -1)),
            **bias(name),
        }

    def generator(name):
        first = torch.permute(state[name + ".main.0.weight"], (0, 2, 3, 1))
        return {
            "dense": {"kernel": torch.reshape(first, (LATENT_DIM, -1))},
            "batch_normalization": norm(name + ".main.1"),
            "conv2d_transpose": transposed(name + ".main.3"),
            "batch_normalization_1": norm(name + ".main.4"),
            "conv2d_transpose_1": transposed(name + ".main.6"),
        }

    last = torch.permute(state["discriminator.head.weight"], (2, 3, 1, 0))
    return {
        "generator": generator("generator"),
        "discriminator": {
            "conv2d": spectral("discriminator.conv1"),
            "conv2d_1": spectral("discriminator.conv2"),
            "conv2d_2": spectral("discriminator.conv3"),
            "dense": {
                "kernel": torch.reshape(last, (-1, 1)),
                **bias("discriminator.head"),
            },
        },
        "ema": generator("ema"),
    }


# ------------------------------------------------------------------- training


def model():
    return GAN(from_torch(torch.load(Path(__file__).with_name("weights.pt"))))


def prepare(batch):
    """uint8 NCHW -> float NHWC in [-1, 1], some mirrored."""
    images = torch.permute(batch["image"], (0, 2, 3, 1)).float()
    images = (images - 127.5) / 127.5
    flipped = torch.flip(images, (2,))
    return torch.where(batch["flip"][:, None, None, None], flipped, images)


def forward(net, batch):
    return net.train_step(prepare(batch), batch["z"])


def loss(output, batch):
    real_loss = -torch.mean(torch.clamp(output["real"] - 1.0, max=0.0))
    fake_loss = -torch.mean(torch.clamp(-output["fake"] - 1.0, max=0.0))
    d_loss = real_loss + fake_loss + GP_WEIGHT * torch.mean(output["penalty"])
    g_loss = torch.mean(-output["fooled"])
    return d_loss + g_loss


class LinearDecay:
    def __init__(self, initial_learning_rate, decay_steps):
        self.initial_learning_rate = initial_learning_rate
        self.decay_steps = decay_steps

    def __call__(self, step):
        return self.initial_learning_rate * (1.0 - step / self.decay_steps)


class Adam:
    """The correction of both moments is in the rate; epsilon is scaled for it."""

    def __init__(self, learning_rate, beta_1, beta_2, epsilon=1e-8):
        self.learning_rate = learning_rate
        self.beta_1, self.beta_2 = beta_1, beta_2
        self.epsilon = epsilon
        self.iterations = 0
        self.slots = {}

    def apply_gradients(self, variables):
        rate = self.learning_rate(self.iterations)
        self.iterations += 1
        root = (1.0 - self.beta_2**self.iterations) ** 0.5
        alpha = rate * root / (1.0 - self.beta_1**self.iterations)
        epsilon = self.epsilon * root
        for variable in variables:
            gradient = variable.grad
            if variable not in self.slots:
                zeros = torch.zeros_like(variable)
                self.slots[variable] = (zeros, zeros.clone())
            m, v = self.slots[variable]
            m.add_((gradient - m) * (1.0 - self.beta_1))
            v.add_((torch.square(gradient) - v) * (1.0 - self.beta_2))
            variable.sub_(m * alpha / (torch.sqrt(v) + epsilon))


class ExponentialMovingAverage:
    """After few updates the decay is smaller."""

    def __init__(self, decay):
        self.decay = decay
        self.num_updates = 0

    def apply(self, shadow, model):
        self.num_updates += 1
        decay = min(self.decay, (1.0 + self.num_updates) / (10.0 + self.num_updates))
        for average, variable in zip(shadow.parameters(), model.parameters()):
            average.sub_((1.0 - decay) * (average - variable))
        for moving, statistic in zip(shadow.buffers(), model.buffers()):
            moving.copy_(statistic)


class Trainer(torch.optim.Optimizer):
    def __init__(self, net):
        self.net = net
        self.generator_variables = list(net.generator.parameters())
        self.discriminator_variables = list(net.discriminator.parameters())
        super().__init__(self.generator_variables + self.discriminator_variables, {})
        self.g_optimizer = Adam(LinearDecay(4e-4, DECAY_STEPS), 0.5, 0.999)
        self.d_optimizer = Adam(LinearDecay(8e-4, DECAY_STEPS), 0.3, 0.99)
        self.ema = ExponentialMovingAverage(0.95)

    @torch.no_grad()
    def step(self, closure=None):
        self.d_optimizer.apply_gradients(self.discriminator_variables)
        self.g_optimizer.apply_gradients(self.generator_variables)
        self.ema.apply(self.net.shadow, self.net.generator)


def optimizer(net):
    return Trainer(net)
