"""After Keras: layers with masks, one kernel for the gates i, f, c, o, one bias.

The two frames of a step lie side by side in each bin. The cost is found along diagonals
of the lattice, which are rows where it is skewed.
"""

import math
from pathlib import Path

import torch
from torch import nn

NUM_MEL_BINS = 16
FRAMES_PER_STEP = 2
VOCABULARY_SIZE = 13
BLANK_ID = 0
LOG_ZERO = -1e30
CONFIG = {
    "log_guard": 1e-3,
    "std_guard": 1e-5,
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "weight_decay": 0.2,
    "beta_1": 0.9,
    "beta_2": 0.98,
    "epsilon": 1e-6,
    "global_clipnorm": 5.0,
}


def sequence_mask(lengths, maxlen):
    return torch.arange(maxlen)[None, :] < lengths[:, None]


# ------------------------------------------------------------------------- layers


class Layer(nn.Module):
    def __init__(self, weights=None):
        super().__init__()
        for name, value in (weights or {}).items():
            self.register_parameter(name, nn.Parameter(value.clone().contiguous()))

    def forward(self, *args, **kwargs):
        return self.call(*args, **kwargs)


class Dense(Layer):
    def __init__(self, weights):
        super().__init__(weights)
        self.use_bias = "bias" in weights

    def call(self, inputs):
        outputs = torch.matmul(inputs, self.kernel)
        return outputs + self.bias if self.use_bias else outputs


class Embedding(Layer):
    def call(self, inputs):
        return self.embeddings[inputs]


class LayerNormalization(Layer):
    epsilon = 1e-5

    def call(self, inputs):
        mean = torch.mean(inputs, dim=-1, keepdim=True)
        variance = torch.mean(torch.square(inputs - mean), dim=-1, keepdim=True)
        inv = torch.rsqrt(variance + self.epsilon) * self.gamma
        return inputs * inv + (self.beta - mean * inv)


class LSTMCell(Layer):
    def recurrent_activation(self, x):
        return torch.sigmoid(x)

    def call(self, inputs, states):
        h_tm1, c_tm1 = states
        z = torch.matmul(inputs, self.kernel)
        z = z + torch.matmul(h_tm1, self.recurrent_kernel)
        z = z + self.bias
        z0, z1, z2, z3 = torch.chunk(z, 4, dim=1)
        i = self.recurrent_activation(z0)
        f = self.recurrent_activation(z1)
        c = f * c_tm1 + i * torch.tanh(z2)
        o = self.recurrent_activation(z3)
        h = o * torch.tanh(c)
        return h, c


class LSTM(Layer):
    """Returns sequences; where the mask is False the states wait and zeros come out."""

    def __init__(self, weights, stateful=False):
        super().__init__()
        self.cell = LSTMCell(weights)
        self.stateful = stateful
        self.states = None

    def get_initial_state(self, inputs):
        if self.stateful and self.states is not None:
            return self.states
        zeros = inputs.new_zeros(inputs.shape[0], self.cell.recurrent_kernel.shape[0])
        return zeros, zeros

    def call(self, inputs, mask=None):
        if mask is None:
            mask = torch.ones(inputs.shape[:2], dtype=torch.bool)
        h, c = self.get_initial_state(inputs)
        outputs = []
        for t in range(inputs.shape[1]):
            keep = mask[:, t, None]
            new_h, new_c = self.cell(inputs[:, t], (h, c))
            outputs.append(torch.where(keep, new_h, torch.zeros_like(new_h)))
            h = torch.where(keep, new_h, h)
            c = torch.where(keep, new_c, c)
        self.states = h.detach(), c.detach()
        return torch.stack(outputs, dim=1)


# -------------------------------------------------------------------------- model


class AcousticEncoder(Layer):
    def __init__(self, weights):
        super().__init__()
        self.lstm_1 = LSTM(weights["lstm_1"])
        self.ln_1 = LayerNormalization(weights["ln_1"])
        self.lstm_2 = LSTM(weights["lstm_2"])
        self.ln_2 = LayerNormalization(weights["ln_2"])

    def call(self, inputs, mask):
        x = self.ln_1(self.lstm_1(inputs, mask=mask))
        x = self.ln_2(self.lstm_2(x, mask=mask))
        return x * mask[:, :, None].to(x.dtype)


class PredictionNetwork(Layer):
    def __init__(self, weights):
        super().__init__()
        self.embedding = Embedding(weights["embedding"])
        self.lstm = LSTM(weights["lstm"])

    def call(self, labels):
        start = torch.full_like(labels[:, :1], BLANK_ID)
        tokens = torch.cat([start, labels], dim=1)
        return self.lstm(self.embedding(tokens))


class JointNetwork(Layer):
    def __init__(self, weights):
        super().__init__()
        self.encoder_dense = Dense(weights["encoder_dense"])
        self.prediction_dense = Dense(weights["prediction_dense"])
        self.vocab_dense = Dense(weights["vocab_dense"])

    def call(self, encoded, predicted):
        encoded = torch.unsqueeze(self.encoder_dense(encoded), 2)
        predicted = torch.unsqueeze(self.prediction_dense(predicted), 1)
        joint = torch.tanh(encoded + predicted)
        return self.vocab_dense(joint)


class RNNT(Layer):
    def __init__(self, weights):
        super().__init__()
        self.encoder = AcousticEncoder(weights["encoder"])
        self.prediction = PredictionNetwork(weights["prediction"])
        self.joint = JointNetwork(weights["joint"])

    def call(self, inputs, mask, labels):
        return self.joint(self.encoder(inputs, mask), self.prediction(labels))


# ------------------------------------------------------------------------ weights


def from_torch(state):
    def dense(name):
        weights = {"kernel": torch.transpose(state[f"{name}.weight"], 0, 1)}
        if f"{name}.bias" in state:
            weights["bias"] = state[f"{name}.bias"]
        return weights

    def layer_norm(name):
        return {"gamma": state[f"{name}.weight"], "beta": state[f"{name}.bias"]}

    def lstm(name):
        """Both have the gates i, f, c, o; two biases become one."""
        return {
            "kernel": torch.transpose(state[f"{name}.weight_ih_l0"], 0, 1),
            "recurrent_kernel": torch.transpose(state[f"{name}.weight_hh_l0"], 0, 1),
            "bias": state[f"{name}.bias_ih_l0"] + state[f"{name}.bias_hh_l0"],
        }

    def frames_inside(kernel):
        """Rows of frames, bins -> rows of bins, frames."""
        kernel = torch.reshape(kernel, (FRAMES_PER_STEP, NUM_MEL_BINS, -1))
        return torch.transpose(kernel, 0, 1).flatten(0, 1)

    first = lstm("encoder.lstms.0")
    first["kernel"] = frames_inside(first["kernel"])
    return {
        "encoder": {
            "lstm_1": first,
            "ln_1": layer_norm("encoder.norms.0"),
            "lstm_2": lstm("encoder.lstms.1"),
            "ln_2": layer_norm("encoder.norms.1"),
        },
        "prediction": {
            "embedding": {"embeddings": state["predictor.embed.weight"]},
            "lstm": lstm("predictor.lstm"),
        },
        "joint": {
            "encoder_dense": dense("joiner.enc_proj"),
            "prediction_dense": dense("joiner.pred_proj"),
            "vocab_dense": dense("joiner.out"),
        },
    }


def model():
    state = torch.load(Path(__file__).with_name("weights.pt"))
    return RNNT(from_torch(state))


# --------------------------------------------------------------------------- data


def normalize(batch):
    """Each bin over the frames of its utterance."""
    x = torch.log(batch["mel"] + CONFIG["log_guard"])
    weight = sequence_mask(batch["frames"], x.shape[1])[:, :, None].to(x.dtype)
    count = torch.sum(weight, dim=1, keepdim=True)
    mean = torch.sum(x * weight, dim=1, keepdim=True) / count
    centred = (x - mean) * weight
    variance = torch.sum(torch.square(centred), dim=1, keepdim=True) / (count - 1.0)
    return centred / (torch.sqrt(variance) + CONFIG["std_guard"])


def stack_frames(x):
    """[batch, frames, bins] -> [batch, steps, bins * 2]"""
    if x.shape[1] % FRAMES_PER_STEP:
        x = torch.cat([x, torch.zeros_like(x[:, :1])], dim=1)
    pairs = torch.stack([x[:, 0::2], x[:, 1::2]], dim=3)
    return torch.flatten(pairs, 2)


def input_length(batch):
    ceiling = batch["frames"] + FRAMES_PER_STEP - 1
    return torch.div(ceiling, FRAMES_PER_STEP, rounding_mode="floor")


def forward(net, batch):
    inputs = stack_frames(normalize(batch))
    mask = sequence_mask(input_length(batch), inputs.shape[1])
    return net(inputs, mask, batch["labels"])


# --------------------------------------------------------------------------- loss


def skew(x):
    """[batch, steps, rows] -> [batch, diagonals, rows], each row one later than the last."""
    batch, steps, rows = x.shape
    x = nn.functional.pad(x, (0, 0, 0, rows), value=LOG_ZERO)
    x = torch.transpose(x, 1, 2).reshape(batch, -1)[:, :-rows]
    return torch.transpose(x.reshape(batch, rows, steps + rows - 1), 1, 2)


def transitions(logits, labels):
    """Skewed logarithms of staying at a label and of going on to the next."""
    log_probs = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
    one_hot = nn.functional.one_hot(labels, VOCABULARY_SIZE).to(logits.dtype)
    truth = torch.einsum("btuv,buv->btu", log_probs[:, :, :-1], one_hot)
    truth = nn.functional.pad(truth, (0, 1), value=LOG_ZERO)
    return skew(log_probs[..., BLANK_ID]), skew(truth)


def rnnt_batch_cost(labels, logits, logit_length, label_length):
    """[batch]"""
    blank, truth = transitions(logits, labels)
    first = torch.arange(blank.shape[2]) == 0
    alpha = torch.where(first, 0.0, LOG_ZERO).expand(len(labels), -1)
    alphas = [alpha]
    for d in range(1, blank.shape[1]):
        stay = alpha + blank[:, d - 1]
        move = alpha + truth[:, d - 1]
        move = nn.functional.pad(move[:, :-1], (1, 0), value=LOG_ZERO)
        alpha = torch.logaddexp(stay, move)
        alphas.append(alpha)
    forward_variables = torch.stack(alphas, dim=1)

    which = torch.arange(len(labels))
    diagonal = logit_length - 1 + label_length
    log_likelihood = forward_variables[which, diagonal, label_length]
    log_likelihood = log_likelihood + blank[which, diagonal, label_length]
    return -log_likelihood


def loss(output, batch):
    costs = rnnt_batch_cost(
        batch["labels"], output, input_length(batch), batch["sizes"]
    )
    return torch.sum(costs) / torch.sum(batch["sizes"])


# ---------------------------------------------------------------------- optimizer


class WarmUpInverseSqrt:
    def __init__(self, learning_rate, warmup_steps):
        self.peak, self.warmup_steps = learning_rate, warmup_steps

    def __call__(self, step):
        step = step + 1
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        return self.peak * math.sqrt(self.warmup_steps) / math.sqrt(step)


class AdamW(torch.optim.Optimizer):
    """A cell's bias stands for two equal ones: it counts twice and moves twice."""

    def __init__(self, named, learning_rate, config):
        self.names, variables = zip(*named)
        super().__init__(variables, {})
        self.learning_rate = learning_rate
        self.config = config
        self.iterations = 0

    @staticmethod
    def copies(name):
        return 2.0 if name.endswith("cell.bias") else 1.0

    @staticmethod
    def use_weight_decay(name):
        return name.endswith(("kernel", "embeddings"))

    def clip(self, gradients):
        squares = [
            self.copies(name) * torch.sum(torch.square(g))
            for name, g in zip(self.names, gradients)
        ]
        limit = self.config["global_clipnorm"]
        norm = torch.sqrt(torch.sum(torch.stack(squares)))
        return [g * limit / torch.clamp(norm, min=limit) for g in gradients]

    def update_step(self, name, gradient, variable, lr):
        slots = self.state[variable]
        if not slots:
            slots["momentum"] = torch.zeros_like(variable)
            slots["velocity"] = torch.zeros_like(variable)
        m, v = slots["momentum"], slots["velocity"]
        beta_1, beta_2 = self.config["beta_1"], self.config["beta_2"]
        root = math.sqrt(1.0 - beta_2**self.iterations)
        alpha = lr * root / (1.0 - beta_1**self.iterations)
        m.add_((gradient - m) * (1.0 - beta_1))
        v.add_((torch.square(gradient) - v) * (1.0 - beta_2))
        # epsilon is added before the root is corrected
        delta = m * alpha / (torch.sqrt(v) + self.config["epsilon"] * root)
        variable.sub_(self.copies(name) * delta)

    @torch.no_grad()
    def step(self, closure=None):
        lr = self.learning_rate(self.iterations)
        self.iterations += 1
        variables = self.param_groups[0]["params"]
        gradients = self.clip([v.grad for v in variables])
        for name, gradient, variable in zip(self.names, gradients, variables):
            if self.use_weight_decay(name):
                variable.sub_(variable * self.config["weight_decay"] * lr)
            self.update_step(name, gradient, variable, lr)


def optimizer(net):
    schedule = WarmUpInverseSqrt(CONFIG["learning_rate"], CONFIG["warmup_steps"])
    return AdamW(net.named_parameters(), schedule, CONFIG)
