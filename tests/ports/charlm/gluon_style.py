"""After Gluon: blocks with parameters of their own, layout TNC, loss blocks and a trainer."""

from pathlib import Path

import torch
from torch import nn

VOCAB_SIZE, EMBED_SIZE, HIDDEN_SIZE, NUM_LAYERS = 90, 24, 32, 2
PAD_INDEX, UNK_INDEX = 0, 1
BATCH_SIZE = 4
ALPHA, BETA = 2.0, 1.0
OPTIMIZER_PARAMS = {"learning_rate": 1.2, "wd": 0.02}
LR_UPDATE_FACTOR, LR_UPDATE_AT = 0.5, (1, 2)
CLIP, AVG_TRIGGER = 0.25, 1


# --------------------------------------------------------------------- blocks


class Block(nn.Module):
    """A block that gets its parameters from a dictionary."""

    def __init__(self, params):
        super().__init__()
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value.clone()))


class Embedding(Block):
    def forward(self, data):
        one_hot = nn.functional.one_hot(data, self.weight.shape[0])
        return one_hot.to(self.weight.dtype) @ self.weight


def fully_connected(data, weight, bias):
    """FullyConnected with flatten=False."""
    return torch.einsum("...i,oi->...o", data, weight) + bias


class Dense(Block):
    def __init__(self, params, activation=None):
        super().__init__(params)
        self.activation = activation

    def forward(self, data, shared=None):
        weight = self.weight if shared is None else shared
        out = fully_connected(data, weight, self.bias)
        return out if self.activation is None else self.activation(out)


class LSTMCell(Block):
    """Gates are in, forget, transform and out."""

    def begin_state(self, batch_size):
        zeros = torch.zeros(batch_size, HIDDEN_SIZE)
        return [zeros, zeros]

    def forward(self, inputs, states):
        prev_h, prev_c = states
        i2h = fully_connected(inputs, self.i2h_weight, self.i2h_bias)
        h2h = fully_connected(prev_h, self.h2h_weight, self.h2h_bias)
        slices = torch.split(i2h + h2h, HIDDEN_SIZE, dim=1)
        in_gate = torch.sigmoid(slices[0])
        forget_gate = torch.sigmoid(slices[1])
        in_transform = torch.tanh(slices[2])
        out_gate = torch.sigmoid(slices[3])
        next_c = torch.addcmul(in_gate * in_transform, forget_gate, prev_c)
        next_h = out_gate * torch.tanh(next_c)
        return next_h, [next_h, next_c]

    def unroll(self, inputs, states):
        """TNC; returns all outputs, merged, and the last states."""
        outputs = []
        for step in inputs.unbind(0):
            output, states = self(step, states)
            outputs.append(output)
        return torch.stack(outputs, dim=0), states


class RNNModel(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.embedding = Embedding(params["embedding"])
        self.lstm0 = LSTMCell(params["lstm0"])
        self.lstm1 = LSTMCell(params["lstm1"])
        self.proj = Dense(params["proj"])
        self.decoder = Dense(params["decoder"])
        for i, cell in enumerate((self.lstm0, self.lstm1)):
            for name, state in zip("hc", cell.begin_state(BATCH_SIZE)):
                self.register_buffer(f"state{i}_{name}", state)
        for name, param in list(self.named_parameters()):
            self.register_buffer(avg_name(name), param.detach().clone())

    def begin_state(self):
        return [
            [self.state0_h, self.state0_c],
            [self.state1_h, self.state1_c],
        ]

    def keep_state(self, states):
        for i, layer in enumerate(states):
            for name, state in zip("hc", layer):
                setattr(self, f"state{i}_{name}", state.detach())

    def forward(self, inputs, begin_state):
        """inputs (T, N) -> logits and outputs of the last cell, (T, N, C)."""
        encoded = self.embedding(inputs)
        out_states = []
        for cell, states in zip((self.lstm0, self.lstm1), begin_state):
            encoded, states = cell.unroll(encoded, states)
            out_states.append(states)
        projected = self.proj(encoded)
        logits = self.decoder(projected, shared=self.embedding.weight)
        return logits, encoded, out_states


def avg_name(name):
    return "avg_" + name.replace(".", "_")


# ----------------------------------------------------------------- parameters


def convert(state):
    params = {"embedding": {"weight": state["encoder.weight"]}}
    for i in range(NUM_LAYERS):
        old = f"rnns.{i}"
        params[f"lstm{i}"] = {
            "i2h_weight": state[f"{old}.weight_ih_l0"],
            "h2h_weight": state[f"{old}.weight_hh_l0"],
            "i2h_bias": state[f"{old}.bias_ih_l0"],
            "h2h_bias": state[f"{old}.bias_hh_l0"],
        }
    params["proj"] = {
        "weight": state["projection.weight"],
        "bias": state["projection.bias"],
    }
    params["decoder"] = {"bias": state["decoder.bias"]}
    return params


def model():
    return RNNModel(convert(torch.load(Path(__file__).with_name("weights.pt"))))


# ----------------------------------------------------------------------- data


def get_batch(batch):
    """Data and target in TN, and how many words each sample has to guess."""
    text = batch["text"].swapaxes(0, 1)
    text = torch.where(text < VOCAB_SIZE, text, UNK_INDEX)
    data, target = text[:-1], text[1:]
    valid_length = torch.count_nonzero(target != PAD_INDEX, dim=0)
    return data, target, valid_length


def sequence_mask(steps, valid_length):
    """(T, N): ones up to the length of each sample."""
    return (torch.arange(steps)[:, None] < valid_length[None, :]).float()


def forward(net, batch):
    data, _, _ = get_batch(batch)
    goes_on = torch.logical_not(batch["fresh"]).float()[:, None]
    begin_state = [[s * goes_on for s in layer] for layer in net.begin_state()]
    logits, encoded, states = net(data, begin_state)
    net.keep_state(states)
    return {"logits": logits.swapaxes(0, 1), "hidden": encoded.swapaxes(0, 1)}


# ----------------------------------------------------------------------- loss


class SoftmaxCELoss:
    """One value a sample, the mean of its weighted losses; batch axis 1."""

    def __call__(self, pred, label, sample_weight):
        log_prob = torch.log_softmax(pred, dim=-1)
        picked = torch.gather(log_prob, 2, label[:, :, None])
        weighted = -picked * sample_weight[:, :, None]
        return torch.mean(weighted, dim=(0, 2))


class ActivationRegularizationLoss:
    def __init__(self, alpha):
        self.alpha = alpha

    def __call__(self, state, sample_weight):
        means = torch.mean(torch.square(state), dim=2)
        return self.alpha * torch.mean(means * sample_weight)


class TemporalActivationRegularizationLoss:
    def __init__(self, beta):
        self.beta = beta

    def __call__(self, state, sample_weight):
        means = torch.mean(torch.square(state[1:] - state[:-1]), dim=2)
        return self.beta * torch.mean(means * sample_weight)


def normalized(mask):
    """Weights of the mean 1."""
    return mask / torch.mean(mask)


def loss(output, batch):
    _, target, valid_length = get_batch(batch)
    logits = output["logits"].swapaxes(0, 1)
    encoded = output["hidden"].swapaxes(0, 1)
    mask = sequence_mask(target.shape[0], valid_length)
    ce = SoftmaxCELoss()(logits, target, normalized(mask))
    ar = ActivationRegularizationLoss(ALPHA)(encoded, normalized(mask))
    tar = TemporalActivationRegularizationLoss(BETA)(encoded, normalized(mask[1:]))
    return torch.mean(ce) + ar + tar


# -------------------------------------------------------------------- trainer


def sgd_update(weight, grad, lr, wd, rescale_grad):
    weight.copy_((1 - lr * wd) * weight - lr * (rescale_grad * grad))


class Trainer(torch.optim.Optimizer):
    """Clips by the scale of the gradients; averages from the trigger on."""

    def __init__(self, net, learning_rate, wd):
        super().__init__(net.parameters(), {})
        self.net = net
        self.learning_rate, self.wd = learning_rate, wd
        self.num_update = 0

    def set_learning_rate(self, lr):
        self.learning_rate = lr

    def global_norm(self):
        grads = [param.grad.flatten() for param in self.net.parameters()]
        return torch.linalg.vector_norm(torch.cat(grads))

    def update_average(self):
        gamma = 1.0 / max(1, self.num_update - AVG_TRIGGER)
        for name, param in self.net.named_parameters():
            average = getattr(self.net, avg_name(name))
            average.copy_((1.0 - gamma) * average + gamma * param)

    @torch.no_grad()
    def step(self, closure=None):
        if self.num_update in LR_UPDATE_AT:
            self.set_learning_rate(self.learning_rate * LR_UPDATE_FACTOR)
        self.num_update += 1
        rescale_grad = torch.clamp(CLIP / (self.global_norm() + 1e-8), max=1.0)
        for param in self.net.parameters():
            sgd_update(param, param.grad, self.learning_rate, self.wd, rescale_grad)
        self.update_average()


def optimizer(net):
    return Trainer(net, **OPTIMIZER_PARAMS)
