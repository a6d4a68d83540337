"""TabNet after Keras: layers with kernels [in, out], gamma and beta, moving statistics.

The embeddings stand before the numeric columns, as the inputs are concatenated here.
"""

from pathlib import Path

import torch
from torch import nn

VOCABULARY = {"occupation": (7, 3), "household": (5, 2), "county": (11, 4)}
FILL_VALUES = {
    "age": 38.0,
    "education": 10.0,
    "experience": 12.0,
    "gain": 0.0,
    "loss": 0.0,
    "hours": 40.0,
}
LOG_COLUMNS = ("gain", "loss")
FEATURE_DIM, OUTPUT_DIM = 14, 8
NUM_DECISION_STEPS = 3
RELAXATION_FACTOR = 1.3
VIRTUAL_BATCH_SIZE = 12
SPARSITY_LOSS_WEIGHT = 0.05
CLASS_WEIGHT = {0: 0.6, 1: 1.1, 2: 1.9}


# ------------------------------------------------------------------- layers


def weight(value):
    return nn.Parameter(value.clone().contiguous())


class Dense(nn.Module):
    def __init__(self, kernel, bias=None):
        super().__init__()
        self.kernel = weight(kernel)
        self.bias = weight(bias) if bias is not None else None

    def forward(self, inputs):
        outputs = torch.matmul(inputs, self.kernel)
        if self.bias is not None:
            outputs = outputs + self.bias
        return outputs


class Embedding(nn.Module):
    def __init__(self, embeddings):
        super().__init__()
        self.embeddings = weight(embeddings)

    def forward(self, inputs):
        return torch.index_select(self.embeddings, 0, inputs)


class BatchNormalization(nn.Module):
    def __init__(self, gamma, beta, moving_mean, moving_variance, momentum=0.99):
        super().__init__()
        self.gamma, self.beta = weight(gamma), weight(beta)
        self.register_buffer("moving_mean", moving_mean.clone().contiguous())
        self.register_buffer("moving_variance", moving_variance.clone().contiguous())
        self.momentum, self.epsilon = momentum, 1e-3

    @torch.no_grad()
    def assign_moving_average(self, variable, value):
        variable.sub_((variable - value) * (1.0 - self.momentum))

    def forward(self, inputs):
        mean = torch.mean(inputs, dim=0)
        variance = torch.mean(torch.square(inputs - mean), dim=0)
        count = inputs.shape[0]
        self.assign_moving_average(self.moving_mean, mean)
        self.assign_moving_average(self.moving_variance, variance * count / (count - 1))
        scale = self.gamma * torch.rsqrt(variance + self.epsilon)
        return (inputs - mean) * scale + self.beta


class VirtualBatchNormalization(BatchNormalization):
    def forward(self, inputs):
        virtual_batches = torch.split(inputs, VIRTUAL_BATCH_SIZE, dim=0)
        return torch.cat([super(type(self), self).forward(x) for x in virtual_batches])


def glu(act, n_units):
    """Generalized linear unit nonlinear activation."""
    return act[:, :n_units] * torch.sigmoid(act[:, n_units:])


class FeatureTransform(nn.Module):
    def __init__(self, dense_3, dense_4, norms):
        super().__init__()
        self.dense_3, self.dense_4 = dense_3, dense_4
        self.norm_1, self.norm_2, self.norm_3, self.norm_4 = norms

    def forward(self, features, shared_1, shared_2):
        root = 0.5**0.5
        f1 = glu(self.norm_1(shared_1(features)), FEATURE_DIM)
        f2 = glu(self.norm_2(shared_2(f1)), FEATURE_DIM)
        f2 = (f1 + f2) * root
        f3 = glu(self.norm_3(self.dense_3(f2)), FEATURE_DIM)
        f3 = (f2 + f3) * root
        f4 = glu(self.norm_4(self.dense_4(f3)), FEATURE_DIM)
        return (f3 + f4) * root


def sparsemax(logits):
    """After TensorFlow Addons."""
    dims = logits.shape[1]
    z = logits - torch.mean(logits, dim=1, keepdim=True)
    z_sorted, _ = torch.topk(z, k=dims, dim=1)
    z_cumsum = torch.cumsum(z_sorted, dim=1)
    k = torch.arange(1, dims + 1).to(logits.dtype)
    z_check = 1.0 + k * z_sorted > z_cumsum
    k_z = torch.sum(z_check.to(torch.int64), dim=1, keepdim=True)
    tau_sum = torch.gather(z_cumsum, 1, k_z - 1)
    tau_z = (tau_sum - 1.0) / k_z.to(logits.dtype)
    return torch.maximum(torch.zeros_like(z), z - tau_z)


class AttentiveTransform(nn.Module):
    def __init__(self, dense, norm):
        super().__init__()
        self.dense, self.norm = dense, norm

    def forward(self, features, prior_scales):
        mask_values = self.dense(features)
        mask_values = self.norm(mask_values)
        mask_values = mask_values * prior_scales
        return sparsemax(mask_values)


# -------------------------------------------------------------------- model


def spread_matrix():
    """[columns, features]: each embedding's column is spread over its dimensions."""
    dims = [dim for _, dim in VOCABULARY.values()] + [1] * len(FILL_VALUES)
    return torch.block_diag(*[torch.full((1, dim), 1.0 / dim) for dim in dims])


class TabNetEncoder(nn.Module):
    def __init__(self, layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.register_buffer("spread", spread_matrix(), persistent=False)

    def transform(self, step, features):
        layer = getattr(self, f"transform_{step}")
        return layer(features, self.shared_1, self.shared_2)

    def forward(self, inputs):
        embedded = [
            getattr(self, f"{name}_embedding")(inputs[name]) for name in VOCABULARY
        ]
        numeric = [inputs[name][:, None] for name in FILL_VALUES]
        features = self.feature_norm(torch.cat([*embedded, *numeric], dim=1))

        batch_size = features.shape[0]
        output_aggregated = torch.zeros((batch_size, OUTPUT_DIM))
        prior_scales = torch.ones((batch_size, self.spread.shape[0]))
        masked_features = features
        total_entropy: torch.Tensor | float = 0.0

        for ni in range(NUM_DECISION_STEPS + 1):
            transformed = self.transform(ni, masked_features)
            if ni > 0:
                decision_out = torch.relu(transformed[:, :OUTPUT_DIM])
                output_aggregated = output_aggregated + decision_out
            if ni < NUM_DECISION_STEPS:
                features_for_coef = transformed[:, OUTPUT_DIM:]
                coef = getattr(self, f"coef_{ni}")
                mask_values = coef(features_for_coef, prior_scales)
                prior_scales = prior_scales * (RELAXATION_FACTOR - mask_values)
                entropy = torch.sum(-mask_values * torch.log(mask_values + 1e-5), dim=1)
                total_entropy = total_entropy + torch.mean(entropy) / NUM_DECISION_STEPS
                masked_features = torch.matmul(mask_values, self.spread) * features

        return self.logits(output_aggregated), total_entropy


# --------------------------------------------------------------- checkpoint


class TorchWeights:
    def __init__(self, state):
        self.state = state
        n = len(FILL_VALUES)
        n_features = n + sum(dim for _, dim in VOCABULARY.values())
        n_columns = n + len(VOCABULARY)
        self.feature_order = [*range(n, n_features), *range(n)]
        self.column_order = [*range(n, n_columns), *range(n)]

    def kernel(self, name):
        return torch.transpose(self.state[name + ".weight"], 0, 1)

    def norm(self, name):
        keys = ("weight", "bias", "running_mean", "running_var")
        return [self.state[f"{name}.{key}"] for key in keys]

    def virtual_norm(self, name):
        return VirtualBatchNormalization(*self.norm(name + ".bn"), momentum=0.98)

    def transform(self, name):
        norms = [self.virtual_norm(f"{name}.norms.{i}") for i in range(4)]
        dense_3 = Dense(self.kernel(f"{name}.fcs.0"))
        dense_4 = Dense(self.kernel(f"{name}.fcs.1"))
        return FeatureTransform(dense_3, dense_4, norms)

    def coef(self, name):
        order = self.column_order
        dense = Dense(self.kernel(name + ".fc")[:, order])
        variables = [v[order] for v in self.norm(name + ".norm.bn")]
        norm = VirtualBatchNormalization(*variables, momentum=0.98)
        return AttentiveTransform(dense, norm)

    def layers(self):
        layers: dict[str, nn.Module] = {}
        for i, name in enumerate(VOCABULARY):
            table = self.state[f"embedder.tables.{i}.weight"]
            layers[f"{name}_embedding"] = Embedding(table)
        order = self.feature_order
        variables = [v[order] for v in self.norm("initial_bn")]
        layers["feature_norm"] = BatchNormalization(*variables)
        layers["shared_1"] = Dense(self.kernel("shared.0")[order])
        layers["shared_2"] = Dense(self.kernel("shared.1"))
        layers["transform_0"] = self.transform("splitter")
        for i in range(NUM_DECISION_STEPS):
            layers[f"transform_{i + 1}"] = self.transform(f"features.{i}")
            layers[f"coef_{i}"] = self.coef(f"attentive.{i}")
        layers["logits"] = Dense(self.kernel("head"), self.state["head.bias"])
        return layers


def model():
    state = torch.load(Path(__file__).with_name("weights.pt"))
    return TabNetEncoder(TorchWeights(state).layers())


# ----------------------------------------------------------------- training


def preprocess(batch):
    """A dictionary of columns."""
    inputs = {}
    for i, (name, fill) in enumerate(FILL_VALUES.items()):
        column = torch.nan_to_num(batch["numeric"][:, i], nan=fill)
        inputs[name] = torch.log(1.0 + column) if name in LOG_COLUMNS else column
    for i, (name, (rows, _)) in enumerate(VOCABULARY.items()):
        codes = batch["category"][:, i]
        inputs[name] = codes * (codes < rows)
    return inputs


def forward(net, batch):
    logits, total_entropy = net(preprocess(batch))
    return {"logits": logits, "entropy": total_entropy}


def sparse_categorical_crossentropy(y_true, logits):
    picked = torch.gather(logits, 1, y_true[:, None])
    return torch.logsumexp(logits, dim=1) - picked[:, 0]


def loss(output, batch):
    y_true = batch["label"]
    losses = sparse_categorical_crossentropy(y_true, output["logits"])
    sample_weight = torch.tensor(list(CLASS_WEIGHT.values()))[y_true]
    softmax_loss = torch.sum(losses * sample_weight) / torch.sum(sample_weight)
    return softmax_loss + SPARSITY_LOSS_WEIGHT * output["entropy"]


class ExponentialDecay:
    def __init__(self, initial_learning_rate, decay_steps, decay_rate):
        self.initial_learning_rate = initial_learning_rate
        self.decay_steps, self.decay_rate = decay_steps, decay_rate

    def __call__(self, step):
        exponent = step / self.decay_steps
        return self.initial_learning_rate * self.decay_rate**exponent


class Adam(torch.optim.Optimizer):
    """Epsilon is that of torch, so it is scaled as the root of the second moment is."""

    def __init__(self, variables, schedule, beta_1=0.9, beta_2=0.999, epsilon=1e-3):
        super().__init__(variables, {})
        self.schedule = schedule
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.iterations = 0

    @torch.no_grad()
    def step(self, closure=None):
        local_step = self.iterations + 1
        root = (1.0 - self.beta_2**local_step) ** 0.5
        alpha = self.schedule(self.iterations) * root / (1.0 - self.beta_1**local_step)
        epsilon = self.epsilon * root
        for variable in self.param_groups[0]["params"]:
            gradient = variable.grad
            slots = self.state[variable]
            if not slots:
                slots["m"] = torch.zeros_like(variable)
                slots["v"] = torch.zeros_like(variable)
            m, v = slots["m"], slots["v"]
            m.add_((gradient - m) * (1.0 - self.beta_1))
            v.add_((torch.square(gradient) - v) * (1.0 - self.beta_2))
            variable.sub_(alpha * m / (torch.sqrt(v) + epsilon))
        self.iterations += 1


def optimizer(net):
    schedule = ExponentialDecay(5e-3, decay_steps=4, decay_rate=0.8)
    return Adam(list(net.parameters()), schedule)
