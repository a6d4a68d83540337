"""Temporal Fusion Transformer after the first TensorFlow code: layers with kernels and gammas."""

import math
from pathlib import Path

import torch
from torch import nn

PARAMS = {
    "num_encoder_steps": 14,
    "total_time_steps": 19,
    "hidden_layer_size": 16,
    "num_heads": 4,
    "stack_size": 2,
    "lstm_layers": 2,
    "quantiles": [0.1, 0.5, 0.9],
    "temperature": (14.0, 8.0),
    "price": (3.2, 0.9),
    "days_per_year": 365.25,
    "learning_rate": 4e-3,
    "decay_rate": 0.8,
    "weight_decay": 0.05,
    "global_clipnorm": 0.5,
    "beta_1": 0.9,
    "beta_2": 0.98,
    "epsilon": 1e-6,
}


def variable(value):
    return nn.Parameter(value.clone().contiguous())


# ------------------------------------------------------------------- layers


class Dense(nn.Module):
    """kernel: (inputs, units)"""

    def __init__(self, kernel, bias=None):
        super().__init__()
        self.kernel = variable(kernel)
        self.bias = None if bias is None else variable(bias)

    def forward(self, inputs):
        outputs = torch.matmul(inputs, self.kernel)
        if self.bias is not None:
            outputs = outputs + self.bias
        return outputs


class Embedding(nn.Module):
    def __init__(self, embeddings, mask_zero=False):
        super().__init__()
        self.embeddings = variable(embeddings)
        self.mask_zero = mask_zero

    def forward(self, inputs):
        outputs = self.embeddings[inputs]
        if self.mask_zero:
            outputs = outputs * (inputs != 0).unsqueeze(-1)
        return outputs


class LayerNormalization(nn.Module):
    def __init__(self, gamma, beta, epsilon=1e-5):
        super().__init__()
        self.gamma = variable(gamma)
        self.beta = variable(beta)
        self.epsilon = epsilon

    def forward(self, inputs):
        mean = inputs.mean(dim=-1, keepdim=True)
        variance = (inputs - mean).square().mean(dim=-1, keepdim=True)
        inv = self.gamma * torch.rsqrt(variance + self.epsilon)
        return inputs * inv + (self.beta - mean * inv)


def elu(x, alpha=1.0):
    negative = alpha * (torch.exp(torch.clamp(x, max=0.0)) - 1.0)
    return torch.where(x > 0, x, negative)


def hard_softmax_mask(scores, mask):
    """Adds a large negative number where the mask is 0."""
    return scores + -1e9 * (1.0 - mask.to(scores.dtype))


def softmax(x):
    exps = torch.exp(x - x.amax(dim=-1, keepdim=True))
    return exps / exps.sum(dim=-1, keepdim=True)


class GatingLayer(nn.Module):
    """Gated linear unit of two dense layers."""

    def __init__(self, activation_layer, gated_layer):
        super().__init__()
        self.activation_layer = activation_layer
        self.gated_layer = gated_layer

    def forward(self, x):
        gate = torch.sigmoid(self.gated_layer(x))
        return self.activation_layer(x) * gate


class GateAddNorm(nn.Module):
    def __init__(self, gating_layer, layer_norm):
        super().__init__()
        self.gating_layer = gating_layer
        self.layer_norm = layer_norm

    def forward(self, x, skip):
        return self.layer_norm(skip + self.gating_layer(x))


class GatedResidualNetwork(nn.Module):
    def __init__(self, hidden_1, hidden_2, add_and_norm, context=None, skip=None):
        super().__init__()
        self.hidden_1 = hidden_1
        self.additional_context = context
        self.hidden_2 = hidden_2
        self.add_and_norm = add_and_norm
        self.skip = skip

    def forward(self, x, additional_context=None):
        skip = x if self.skip is None else self.skip(x)
        hidden = self.hidden_1(x)
        if self.additional_context is not None:
            hidden = hidden + self.additional_context(additional_context)
        hidden = elu(hidden)
        hidden = self.hidden_2(hidden)
        return self.add_and_norm(hidden, skip)


class VariableSelectionNetwork(nn.Module):
    """Takes (..., units, variables)."""

    def __init__(self, sparse_weights, grns):
        super().__init__()
        self.sparse_weights = sparse_weights
        self.grns = nn.ModuleList(grns)

    def forward(self, embedding, additional_context=None):
        flatten = embedding.flatten(start_dim=-2)
        logits = self.sparse_weights(flatten, additional_context)
        sparse_weights = softmax(logits).unsqueeze(-2)
        trans_emb_list = [grn(embedding[..., i]) for i, grn in enumerate(self.grns)]
        transformed_embedding = torch.stack(trans_emb_list, dim=-1)
        return (sparse_weights * transformed_embedding).sum(dim=-1)


class LSTMCell(nn.Module):
    """Gates: input, forget, candidate, output."""

    def __init__(self, kernel, recurrent_kernel, bias):
        super().__init__()
        self.kernel = variable(kernel)
        self.recurrent_kernel = variable(recurrent_kernel)
        self.bias = variable(bias)

    def forward(self, inputs, states):
        h, c = states
        z = inputs @ self.kernel + h @ self.recurrent_kernel + self.bias
        z0, z1, z2, z3 = torch.split(z, z.shape[-1] // 4, dim=-1)
        i = torch.sigmoid(z0)
        f = torch.sigmoid(z1)
        c = f * c + i * torch.tanh(z2)
        o = torch.sigmoid(z3)
        return o * torch.tanh(c), c


class StackedRNN(nn.Module):
    """All cells at one step, then the next step; masked steps keep their states."""

    def __init__(self, cells):
        super().__init__()
        self.cells = nn.ModuleList(cells)

    def forward(self, inputs, initial_state, mask=None):
        states = list(initial_state)
        outputs = []
        for t in range(inputs.shape[1]):
            x = inputs[:, t]
            for n, cell in enumerate(self.cells):
                h, c = cell(x, states[n])
                if mask is not None:
                    keep = mask[:, t].unsqueeze(-1)
                    h = torch.where(keep, h, states[n][0])
                    c = torch.where(keep, c, states[n][1])
                states[n] = (h, c)
                x = h
            outputs.append(x)
        return torch.stack(outputs, dim=1), states


class InterpretableMultiHeadAttention(nn.Module):
    """A query and a key layer for each head, one value layer for all of them."""

    def __init__(self, qs_layers, ks_layers, vs_layer, w_o):
        super().__init__()
        self.qs_layers = nn.ModuleList(qs_layers)
        self.ks_layers = nn.ModuleList(ks_layers)
        self.vs_layer = vs_layer
        self.w_o = w_o

    def forward(self, q, k, v, mask):
        heads, attns = [], []
        vs = self.vs_layer(v)
        for qs_layer, ks_layer in zip(self.qs_layers, self.ks_layers):
            qs, ks = qs_layer(q), ks_layer(k)
            temper = math.sqrt(ks.shape[-1])
            attn = torch.bmm(qs, ks.transpose(1, 2)) / temper
            attn = softmax(hard_softmax_mask(attn, mask))
            heads.append(torch.bmm(attn, vs))
            attns.append(attn)
        outputs = torch.stack(heads).mean(dim=0)
        return self.w_o(outputs), torch.stack(attns).mean(dim=0)


class DecoderBlock(nn.Module):
    def __init__(self, self_attn, add_and_norm, feed_forward):
        super().__init__()
        self.self_attn = self_attn
        self.add_and_norm = add_and_norm
        self.feed_forward = feed_forward

    def forward(self, x, mask):
        attended, weights = self.self_attn(x, x, x, mask)
        return self.feed_forward(self.add_and_norm(attended, x)), weights


def get_decoder_mask(lengths):
    """(batch, queries, keys); 1 where a key may be seen."""
    steps, encoder_steps = PARAMS["total_time_steps"], PARAMS["num_encoder_steps"]
    position = torch.arange(steps)
    causal = torch.cumsum(torch.eye(steps), dim=0)
    padding = torch.logical_and(position >= lengths[:, None], position < encoder_steps)
    return causal * (1.0 - padding.to(torch.float32))[:, None, :]


class TemporalFusionTransformer(nn.Module):
    def __init__(self, layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def get_tft_embeddings(self, inputs):
        """Each group has its variables last."""
        static_inputs = torch.stack(
            [
                self.store(inputs["store"]),
                self.region(inputs["region"]),
                self.surface(inputs["surface"]),
                self.scale(inputs["scale"]),
            ],
            dim=-1,
        )
        known_inputs = torch.stack(
            [
                self.price(inputs["price"]),
                self.relative_time(inputs["relative_time"]),
                self.season(inputs["season"]),
                self.weekday(inputs["weekday"]),
                self.event(inputs["event"]),
            ],
            dim=-1,
        )
        obs_inputs = torch.stack(
            [self.sales(inputs["sales"]), self.temperature(inputs["temperature"])],
            dim=-1,
        )
        return static_inputs, known_inputs, obs_inputs

    def forward(self, inputs):
        encoder_steps = PARAMS["num_encoder_steps"]
        static_inputs, known_inputs, obs_inputs = self.get_tft_embeddings(inputs)
        static_encoder = self.static_variable_selection(static_inputs)
        static_context_variable_selection = self.static_context_variable_selection(
            static_encoder
        )
        static_context_enrichment = self.static_context_enrichment(static_encoder)
        static_context_state_h = self.static_context_state_h(static_encoder)
        static_context_state_c = self.static_context_state_c(static_encoder)

        expanded = static_context_variable_selection[:, None]
        historical_inputs = torch.cat(
            [obs_inputs, known_inputs[:, :encoder_steps]], dim=-1
        )
        historical_features = self.historical_selection(historical_inputs, expanded)
        future_features = self.future_selection(
            known_inputs[:, encoder_steps:], expanded
        )

        initial = (static_context_state_h, static_context_state_c)
        mask = torch.arange(encoder_steps) < inputs["lengths"][:, None]
        history_lstm, states = self.history_lstm(
            historical_features, [initial] * PARAMS["lstm_layers"], mask
        )
        future_lstm, _ = self.future_lstm(future_features, states)
        lstm_layer = torch.cat([history_lstm, future_lstm], dim=1)
        input_embeddings = torch.cat([historical_features, future_features], dim=1)
        temporal_feature_layer = self.lstm_add_and_norm(lstm_layer, input_embeddings)

        x = self.static_enrichment(
            temporal_feature_layer, static_context_enrichment[:, None]
        )
        mask = get_decoder_mask(inputs["lengths"])
        for i in range(PARAMS["stack_size"]):
            x, attn = getattr(self, f"decoder_{i}")(x, mask)
        transformer_layer = self.final_add_and_norm(x, temporal_feature_layer)
        outputs = self.outputs(transformer_layer[:, encoder_steps:])
        return outputs, attn[:, encoder_steps:]


# --------------------------------------------------------------- checkpoint


class TorchCheckpoint:
    """Builds layers from PyTorch's arrays."""

    def __init__(self, arrays):
        self.arrays = arrays

    def dense(self, name):
        bias = self.arrays.get(f"{name}.bias")
        return Dense(self.arrays[f"{name}.weight"].T, bias)

    def embedding(self, name, **options):
        return Embedding(self.arrays[f"{name}.weight"], **options)

    def add_and_norm(self, name):
        """Torch has what goes through first, the logits of the gate second."""
        kernel = self.arrays[f"{name}.glu.fc.weight"].T
        bias = self.arrays[f"{name}.glu.fc.bias"]
        units = len(bias) // 2
        gating_layer = GatingLayer(
            activation_layer=Dense(kernel[:, :units], bias[:units]),
            gated_layer=Dense(kernel[:, units:], bias[units:]),
        )
        gamma, beta = (
            self.arrays[f"{name}.norm.weight"],
            self.arrays[f"{name}.norm.bias"],
        )
        return GateAddNorm(gating_layer, LayerNormalization(gamma, beta))

    def grn(self, name):
        context = skip = None
        if f"{name}.context.weight" in self.arrays:
            context = self.dense(f"{name}.context")
        if f"{name}.skip.weight" in self.arrays:
            skip = self.dense(f"{name}.skip")
        return GatedResidualNetwork(
            self.dense(f"{name}.fc1"),
            self.dense(f"{name}.fc2"),
            self.add_and_norm(f"{name}.gate"),
            context,
            skip,
        )

    def units_first(self, layer, variables):
        """Rows of a kernel by variable and unit -> by unit and variable."""
        rows = layer.kernel.data.unflatten(0, (variables, -1))
        layer.kernel = variable(rows.transpose(0, 1).flatten(0, 1))

    def variable_selection(self, name, variables):
        sparse_weights = self.grn(f"{name}.weights")
        self.units_first(sparse_weights.hidden_1, variables)
        self.units_first(sparse_weights.skip, variables)
        grns = [self.grn(f"{name}.variables.{i}") for i in range(variables)]
        return VariableSelectionNetwork(sparse_weights, grns)

    def lstm(self, name):
        cells = []
        for n in range(PARAMS["lstm_layers"]):
            cells.append(
                LSTMCell(
                    self.arrays[f"{name}.weight_ih_l{n}"].T,
                    self.arrays[f"{name}.weight_hh_l{n}"].T,
                    self.arrays[f"{name}.bias_ih_l{n}"]
                    + self.arrays[f"{name}.bias_hh_l{n}"],
                )
            )
        return StackedRNN(cells)

    def decoder(self, name):
        heads = PARAMS["num_heads"]
        q_kernel = self.arrays[f"{name}.attention.q.weight"].T
        k_kernel = self.arrays[f"{name}.attention.k.weight"].T
        q_bias = self.arrays[f"{name}.attention.q.bias"]
        attention = InterpretableMultiHeadAttention(
            [
                Dense(kernel, bias)
                for kernel, bias in zip(
                    q_kernel.chunk(heads, dim=1), q_bias.chunk(heads)
                )
            ],
            [Dense(kernel) for kernel in k_kernel.chunk(heads, dim=1)],
            self.dense(f"{name}.attention.v"),
            self.dense(f"{name}.attention.out"),
        )
        return DecoderBlock(
            attention, self.add_and_norm(f"{name}.gate"), self.grn(f"{name}.grn")
        )

    def build(self):
        layers = {
            "store": self.embedding("store"),
            "region": self.embedding("region"),
            "surface": self.dense("size"),
            "scale": self.dense("scale"),
            "sales": self.dense("sales"),
            "temperature": self.dense("temperature"),
            "price": self.dense("price"),
            "relative_time": self.dense("time"),
            "season": self.dense("season"),
            "weekday": self.embedding("weekday"),
            "event": self.embedding("event", mask_zero=True),
            "static_variable_selection": self.variable_selection("static_selection", 4),
            "historical_selection": self.variable_selection("past_selection", 7),
            "future_selection": self.variable_selection("future_selection", 5),
            "static_context_variable_selection": self.grn("context_selection"),
            "static_context_enrichment": self.grn("context_enrichment"),
            "static_context_state_h": self.grn("context_hidden"),
            "static_context_state_c": self.grn("context_cell"),
            "history_lstm": self.lstm("encoder"),
            "future_lstm": self.lstm("decoder"),
            "lstm_add_and_norm": self.add_and_norm("lstm_gate"),
            "static_enrichment": self.grn("enrichment"),
        }
        for i in range(PARAMS["stack_size"]):
            layers[f"decoder_{i}"] = self.decoder(f"blocks.{i}")
        layers["final_add_and_norm"] = self.add_and_norm("final_gate")
        layers["outputs"] = self.dense("head")
        return TemporalFusionTransformer(layers)


def model():
    arrays = torch.load(Path(__file__).with_name("weights.pt"))
    return TorchCheckpoint(arrays).build()


# --------------------------------------------------------------------- data


def real_scaler(values, mean_and_std):
    mean, std = mean_and_std
    return ((values - mean) / std)[..., None]


def relative_days(lengths):
    """-3, -2, -1 | 0, 1, 2: what is behind a short history does not matter."""
    encoder_steps = PARAMS["num_encoder_steps"]
    days = torch.arange(PARAMS["total_time_steps"])
    return torch.where(
        days < encoder_steps, days - lengths[:, None], days - encoder_steps
    )


def transform_inputs(batch):
    lengths = batch["length"]
    units = 1.0 + batch["sales"].sum(dim=1) / lengths
    relative = relative_days(lengths)
    days = batch["origin"][:, None] + relative
    angle = (2.0 * math.pi / PARAMS["days_per_year"]) * days
    return {
        "lengths": lengths,
        "units": units,
        "store": batch["store"],
        "region": batch["region"],
        "surface": torch.log(batch["surface"][:, None] / 400.0),
        "scale": torch.log(units)[:, None],
        "sales": (batch["sales"] / units[:, None])[..., None],
        "temperature": real_scaler(batch["temperature"], PARAMS["temperature"]),
        "price": real_scaler(batch["price"], PARAMS["price"]),
        "relative_time": (relative / PARAMS["num_encoder_steps"])[..., None],
        "season": torch.stack([torch.sin(angle), torch.cos(angle)], dim=-1),
        "weekday": torch.remainder(days, 7),
        "event": batch["event"],
    }


def forward(net, batch):
    inputs = transform_inputs(batch)
    outputs, attention = net(inputs)
    return {
        "quantiles": outputs * inputs["units"][:, None, None],
        "attention": attention,
    }


# ----------------------------------------------------------------- training


def tensorflow_quantile_loss(y, y_pred, quantile):
    prediction_underflow = y - y_pred
    return quantile * torch.relu(prediction_underflow) + (1.0 - quantile) * torch.relu(
        -prediction_underflow
    )


def loss(output, batch):
    y = batch["target"]
    sample_weight = batch["counted"].to(y.dtype)
    total = y.new_zeros(())
    for i, quantile in enumerate(PARAMS["quantiles"]):
        y_pred = output["quantiles"][..., i]
        q_loss = tensorflow_quantile_loss(y, y_pred, quantile)
        total = total + torch.sum(q_loss * sample_weight)
    normaliser = torch.sum(torch.abs(y) * sample_weight)
    return 2.0 * total / normaliser


class AdamW(torch.optim.Optimizer):
    def __init__(self, named_variables, exclude_from_weight_decay):
        self.named = dict(named_variables)
        super().__init__(list(self.named.values()), {})
        self.excluded = exclude_from_weight_decay
        self.iterations = 0

    def use_weight_decay(self, name):
        return name.rpartition(".")[2] not in self.excluded

    def clip_by_global_norm(self, gradients):
        norm = torch.sqrt(sum(g.square().sum() for g in gradients))
        clip_norm = PARAMS["global_clipnorm"]
        return [g * (clip_norm / torch.clamp(norm, min=clip_norm)) for g in gradients]

    @torch.no_grad()
    def step(self, closure=None):
        lr = PARAMS["learning_rate"] * PARAMS["decay_rate"] ** self.iterations
        self.iterations += 1
        beta_1, beta_2 = PARAMS["beta_1"], PARAMS["beta_2"]
        correction = math.sqrt(1.0 - beta_2**self.iterations)
        alpha = lr * correction / (1.0 - beta_1**self.iterations)
        epsilon_hat = PARAMS["epsilon"] * correction
        gradients = self.clip_by_global_norm([v.grad for v in self.named.values()])
        for (name, var), gradient in zip(self.named.items(), gradients):
            if not self.state[var]:
                self.state[var]["m"] = torch.zeros_like(var)
                self.state[var]["v"] = torch.zeros_like(var)
            m, v = self.state[var]["m"], self.state[var]["v"]
            if self.use_weight_decay(name):
                var.sub_(lr * PARAMS["weight_decay"] * var)
            m.add_((gradient - m) * (1.0 - beta_1))
            v.add_((gradient.square() - v) * (1.0 - beta_2))
            var.sub_(alpha * m / (torch.sqrt(v) + epsilon_hat))


def optimizer(net):
    return AdamW(
        net.named_parameters(),
        exclude_from_weight_decay=["bias", "gamma", "beta", "embeddings"],
    )
