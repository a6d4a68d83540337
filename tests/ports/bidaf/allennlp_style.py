"""After AllenNLP: modules by registered names, sorted and packed sequences, a trainer.

A highway layer is one projection, and its gate says how much of the input is carried.
Cells are augmented LSTMs that run over the rows of a packed sequence.
"""

import re
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

CONFIG = {
    "model": {
        "type": "bidaf",
        "text_field_embedder": {
            "tokens": {"type": "embedding", "num_embeddings": 48, "dim": 16},
            "token_characters": {
                "type": "character_encoding",
                "embedding": {"type": "embedding", "num_embeddings": 28, "dim": 6},
                "encoder": {"type": "cnn", "dim": 6, "num_filters": 12, "ngram": 3},
            },
        },
        "highway": {"type": "highway", "dim": 28, "num_layers": 2},
        "phrase_layer": {"type": "lstm", "input_size": 28, "num_layers": 1},
        "similarity_function": {
            "type": "linear",
            "dims": (20, 20),
            "combination": "x,y,x*y",
        },
        "modeling_layer": {"type": "lstm", "input_size": 80, "num_layers": 2},
        "span_end_encoder": {"type": "lstm", "input_size": 140, "num_layers": 1},
    },
    "trainer": {
        "optimizer": {
            "lr": 1.0,
            "rho": 0.95,
            "eps": 1e-6,
            "parameter_groups": [(r"(tokens|_embedding)\.weight$", 0.4)],
        },
        "grad_norm": 2.0,
        "learning_rate_scheduler": {"warmup_steps": 2, "gamma": 0.8},
        "moving_average": {"decay": 0.99},
    },
}
HIDDEN = 10


class Registrable(nn.Module):
    registry: dict = {}

    @classmethod
    def register(cls, name):
        def add(subclass):
            Registrable.registry[name] = subclass
            return subclass

        return add

    @classmethod
    def from_params(cls, params):
        params = dict(params)
        subclass = Registrable.registry[params.pop("type")]
        for key, value in params.items():
            if isinstance(value, dict) and "type" in value:
                params[key] = cls.from_params(value)
        return subclass(**params)


# ------------------------------------------------------------------------- util


def masked_softmax(vector, mask):
    """The last axis; what is masked gets nothing."""
    result = torch.softmax(vector * mask, dim=-1)
    result = result * mask
    return result / (result.sum(dim=-1, keepdim=True) + 1e-13)


def masked_log_softmax(vector, mask):
    return torch.log_softmax(vector + (mask + 1e-45).log(), dim=-1)


def masked_max(vector, mask):
    return vector.masked_fill(mask == 0, -1e7).max(dim=-1)[0]


def weighted_sum(matrix, attention):
    """matrix (batch, n, dim), attention (batch, n) or (batch, rows, n)."""
    if attention.dim() == 2:
        return (attention.unsqueeze(-1) * matrix).sum(dim=1)
    return attention.bmm(matrix)


def sort_batch_by_length(tensor, lengths):
    """Return the sorted batch and lengths, and the indices that bring the order back."""
    sorted_lengths, permutation = lengths.sort(0, descending=True)
    sorted_tensor = tensor.index_select(0, permutation)
    restoration_indices = permutation.argsort()
    return sorted_tensor, sorted_lengths, restoration_indices


# ----------------------------------------------------------------------- modules


@Registrable.register("embedding")
class Embedding(Registrable):
    """Ids that the vocabulary hasn't got are unknown, which is 1."""

    def __init__(self, num_embeddings, dim, padding_index=0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, dim))
        self.padding_index = padding_index

    def forward(self, tokens):
        tokens = tokens.masked_fill(tokens > self.weight.shape[0] - 1, 1)
        return nn.functional.embedding(
            tokens, self.weight, padding_idx=self.padding_index
        )


@Registrable.register("cnn")
class CnnEncoder(Registrable):
    def __init__(self, dim, num_filters, ngram):
        super().__init__()
        self.conv_layer_0 = nn.Conv1d(dim, num_filters, ngram)

    def forward(self, tokens):
        filtered = self.conv_layer_0(tokens.transpose(1, 2))
        return filtered.relu().max(dim=2)[0]


@Registrable.register("character_encoding")
class TokenCharactersEncoder(Registrable):
    def __init__(self, embedding, encoder):
        super().__init__()
        self._embedding = embedding
        self._encoder = encoder

    def forward(self, token_characters):
        flat = token_characters.flatten(0, 1)
        encoded = self._encoder(self._embedding(flat))
        return encoded.unflatten(0, token_characters.shape[:2])


class TextFieldEmbedder(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.keys = list(params)
        for key in self.keys:
            embedder = Registrable.from_params(params[key])
            self.add_module(f"token_embedder_{key}", embedder)

    def forward(self, text_field):
        embedded = [
            getattr(self, f"token_embedder_{key}")(text_field[key]) for key in self.keys
        ]
        return torch.cat(embedded, dim=-1)


@Registrable.register("highway")
class Highway(Registrable):
    def __init__(self, dim, num_layers):
        super().__init__()
        layers = [nn.Linear(dim, 2 * dim) for _ in range(num_layers)]
        self._layers = nn.ModuleList(layers)

    def forward(self, inputs):
        for layer in self._layers:
            nonlinear_part, gate = layer(inputs).chunk(2, dim=-1)
            gate = gate.sigmoid()
            inputs = gate * inputs + (1 - gate) * nonlinear_part.relu()
        return inputs


class AugmentedLstm(nn.Module):
    """One direction; the bias of the states opens the forget gate and stays as it is."""

    def __init__(self, input_size, go_forward):
        super().__init__()
        self.go_forward = go_forward
        self.input_linearity = nn.Linear(input_size, 4 * HIDDEN)
        self.state_linearity = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.state_linearity.bias.requires_grad_(False)

    def rows(self, state, count):
        """Short sequences leave the batch forwards; they join it backwards."""
        if count > len(state):
            zeros = state.new_zeros(count - len(state), HIDDEN)
            return torch.cat([state, zeros])
        return state[:count]

    def forward(self, inputs):
        projected = self.input_linearity(inputs.data)
        steps = projected.split(inputs.batch_sizes.tolist())
        hidden = memory = projected[:0, :HIDDEN]
        outputs = []
        for step in steps if self.go_forward else reversed(steps):
            hidden = self.rows(hidden, len(step))
            memory = self.rows(memory, len(step))
            gates = step + self.state_linearity(hidden)
            input_gate, forget_gate, memory_init, output_gate = gates.chunk(4, dim=1)
            memory = forget_gate.sigmoid() * memory
            memory = memory + input_gate.sigmoid() * memory_init.tanh()
            hidden = output_gate.sigmoid() * memory.tanh()
            outputs.append(hidden)
        return torch.cat(outputs if self.go_forward else outputs[::-1])


@Registrable.register("lstm")
class StackedBidirectionalLstm(Registrable):
    def __init__(self, input_size, num_layers):
        super().__init__()
        self.num_layers = num_layers
        for i in range(num_layers):
            for name, go_forward in (("forward", True), ("backward", False)):
                layer = AugmentedLstm(input_size, go_forward)
                self.add_module(f"{name}_layer_{i}", layer)
            input_size = 2 * HIDDEN

    def forward(self, inputs, mask):
        lengths = mask.long().sum(-1)
        sorted_inputs, sorted_lengths, restoration_indices = sort_batch_by_length(
            inputs, lengths
        )
        packed = pack_padded_sequence(sorted_inputs, sorted_lengths, batch_first=True)
        for i in range(self.num_layers):
            directions = [
                getattr(self, f"{name}_layer_{i}")(packed)
                for name in ("forward", "backward")
            ]
            packed = PackedSequence(torch.cat(directions, -1), packed.batch_sizes)
        output, _ = pad_packed_sequence(
            packed, batch_first=True, total_length=inputs.shape[1]
        )
        return output.index_select(0, restoration_indices)


@Registrable.register("linear")
class LinearMatrixAttention(Registrable):
    def __init__(self, dims, combination):
        super().__init__()
        self._combinations = combination.split(",")
        sizes = {"x": dims[0], "y": dims[1], "x*y": dims[0]}
        self._sizes = [sizes[part] for part in self._combinations]
        self._weight_vector = nn.Parameter(torch.empty(sum(self._sizes)))

    def forward(self, matrix_1, matrix_2):
        tensors = {"x": matrix_1.unsqueeze(2), "y": matrix_2.unsqueeze(1)}
        weights = self._weight_vector.split(self._sizes)
        similarity = 0
        for combination, weight in zip(self._combinations, weights):
            combined = weight
            for name in combination.split("*"):
                combined = combined * tensors[name]
            similarity = similarity + combined.sum(dim=-1)
        return similarity


@Registrable.register("bidaf")
class BidirectionalAttentionFlow(Registrable):
    def __init__(
        self,
        text_field_embedder,
        highway,
        phrase_layer,
        similarity_function,
        modeling_layer,
        span_end_encoder,
    ):
        super().__init__()
        self._text_field_embedder = TextFieldEmbedder(text_field_embedder)
        self._highway_layer = highway
        self._phrase_layer = phrase_layer
        self._matrix_attention = similarity_function
        self._modeling_layer = modeling_layer
        self._span_end_encoder = span_end_encoder
        self._span_start_predictor = nn.Linear(10 * HIDDEN, 1, bias=False)
        self._span_end_predictor = nn.Linear(10 * HIDDEN, 1, bias=False)

    def forward(self, question, passage):
        embedded_question = self._highway_layer(self._text_field_embedder(question))
        embedded_passage = self._highway_layer(self._text_field_embedder(passage))
        question_mask = (question["tokens"] != 0).to(embedded_question.dtype)
        passage_mask = (passage["tokens"] != 0).to(embedded_passage.dtype)
        encoded_question = self._phrase_layer(embedded_question, question_mask)
        encoded_passage = self._phrase_layer(embedded_passage, passage_mask)

        similarity = self._matrix_attention(encoded_passage, encoded_question)
        question_mask = question_mask.unsqueeze(1)
        passage_question_attention = masked_softmax(similarity, question_mask)
        passage_question_vectors = weighted_sum(
            encoded_question, passage_question_attention
        )
        question_passage_similarity = masked_max(similarity, question_mask)
        question_passage_attention = masked_softmax(
            question_passage_similarity, passage_mask
        )
        question_passage_vector = weighted_sum(
            encoded_passage, question_passage_attention
        )
        question_passage_vectors = question_passage_vector.unsqueeze(1)

        merged_passage = torch.cat(
            [
                encoded_passage,
                passage_question_vectors,
                encoded_passage * passage_question_vectors,
                encoded_passage * question_passage_vectors,
            ],
            dim=-1,
        )
        modeled_passage = self._modeling_layer(merged_passage, passage_mask)
        span_start_input = torch.cat([merged_passage, modeled_passage], dim=-1)
        span_start_logits = self._span_start_predictor(span_start_input).squeeze(-1)

        span_start_probs = masked_softmax(span_start_logits, passage_mask)
        start_representation = weighted_sum(modeled_passage, span_start_probs)
        start_representation = start_representation.unsqueeze(1)
        span_end_representation = torch.cat(
            [
                merged_passage,
                modeled_passage,
                start_representation.expand_as(modeled_passage),
                modeled_passage * start_representation,
            ],
            dim=-1,
        )
        encoded_span_end = self._span_end_encoder(span_end_representation, passage_mask)
        span_end_input = torch.cat([merged_passage, encoded_span_end], dim=-1)
        span_end_logits = self._span_end_predictor(span_end_input).squeeze(-1)
        return span_start_logits * passage_mask, span_end_logits * passage_mask


# ----------------------------------------------------------------------- archive


def load_archive(state):
    """Weights of the reference by the names of these modules."""
    embedder = "_text_field_embedder.token_embedder_"
    characters = embedder + "token_characters."
    weights = {
        embedder + "tokens.weight": state["word_embed.weight"],
        characters + "_embedding.weight": state["char_cnn.embed.weight"],
        "_span_start_predictor.weight": state["start.weight"],
        "_span_end_predictor.weight": state["end.weight"],
    }
    for kind in ("weight", "bias"):
        conv = state[f"char_cnn.conv.{kind}"]
        weights[f"{characters}_encoder.conv_layer_0.{kind}"] = conv
        for i in range(2):
            transform = state[f"highway.transforms.{i}.{kind}"]
            carry = -state[f"highway.gates.{i}.{kind}"]
            key = f"_highway_layer._layers.{i}.{kind}"
            weights[key] = torch.cat([transform, carry])

    parts = [state[f"attention.{name}_weight"] for name in ("c", "q", "cq")]
    weights["_matrix_attention._weight_vector"] = torch.cat(parts)

    linearities = {"ih": "input_linearity", "hh": "state_linearity"}
    encoders = {
        "_phrase_layer": ("encoder", 1),
        "_modeling_layer": ("modelling", 2),
        "_span_end_encoder": ("end_encoder", 1),
    }
    for module, (name, num_layers) in encoders.items():
        for i in range(num_layers):
            for direction, suffix in (("forward", ""), ("backward", "_reverse")):
                for short, linearity in linearities.items():
                    key = f"{module}.{direction}_layer_{i}.{linearity}"
                    for kind in ("weight", "bias"):
                        value = state[f"{name}.rnn.{kind}_{short}_l{i}{suffix}"]
                        weights[f"{key}.{kind}"] = value
    return weights


# ---------------------------------------------------------------------- training


def model():
    net = Registrable.from_params(CONFIG["model"])
    state = torch.load(Path(__file__).with_name("weights.pt"))
    net.load_state_dict(load_archive(state))
    net.moving_average = ExponentialMovingAverage(net, **trainer("moving_average"))
    return net


def trainer(key):
    return CONFIG["trainer"][key]


def forward(net, batch):
    fields = [
        {"tokens": batch[name], "token_characters": batch[name + "_chars"]}
        for name in ("question", "passage")
    ]
    span_start_logits, span_end_logits = net(*fields)
    return {"start": span_start_logits, "end": span_end_logits}


def char_span_to_token_span(offsets, character_span):
    start_index = 0
    while offsets[start_index][0] < character_span[0]:
        start_index += 1
    end_index = start_index
    while offsets[end_index][1] < character_span[1]:
        end_index += 1
    return start_index, end_index


def nll_loss(log_probs, targets):
    answered = targets >= 0
    picked = log_probs[answered].gather(1, targets[answered].unsqueeze(1))
    return -picked.mean()


def loss(output, batch):
    passage_mask = (batch["passage"] != 0).to(output["start"].dtype)
    spans = [
        char_span_to_token_span(offsets, span) if span[0] >= 0 else (-1, -1)
        for offsets, span in zip(batch["offsets"].tolist(), batch["answer"].tolist())
    ]
    span_start, span_end = torch.tensor(spans).unbind(1)
    start_log_probs = masked_log_softmax(output["start"], passage_mask)
    end_log_probs = masked_log_softmax(output["end"], passage_mask)
    total = nll_loss(start_log_probs, span_start)
    total += nll_loss(end_log_probs, span_end)
    return total


class ExponentialMovingAverage(nn.Module):
    def __init__(self, net, decay):
        super().__init__()
        self._decay = decay
        for i, p in enumerate(trained(net).values()):
            self.register_buffer(f"shadow_{i}", p.detach().clone())

    def apply_to(self, parameters, num_updates):
        decay = min(self._decay, (1 + num_updates) / (10 + num_updates))
        for shadow, p in zip(self.buffers(), parameters):
            shadow.lerp_(p, 1.0 - decay)


def trained(net):
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


def make_parameter_groups(net, groups):
    """The first group whose pattern is found in the name; the last is for all others."""
    made = [{"params": [], "factor": factor} for _, factor in groups]
    made.append({"params": [], "factor": 1.0})
    for name, p in trained(net).items():
        found = [i for i, (regex, _) in enumerate(groups) if re.search(regex, name)]
        made[min(found, default=-1)]["params"].append(p)
    return made


class WarmupExponential:
    def __init__(self, base_lr, warmup_steps, gamma):
        self.base_lr, self.warmup_steps, self.gamma = base_lr, warmup_steps, gamma

    def get_value(self, batch_num):
        if batch_num <= self.warmup_steps:
            return self.base_lr * batch_num / self.warmup_steps
        return self.base_lr * self.gamma ** (batch_num - self.warmup_steps)


class GradientDescentTrainer(torch.optim.Optimizer):
    """What comes after the backward pass: clipping, schedule, Adadelta, average."""

    def __init__(self, net, lr, rho, eps, parameter_groups):
        super().__init__(make_parameter_groups(net, parameter_groups), {})
        self.parameters = list(trained(net).values())
        self.scheduler = WarmupExponential(lr, **trainer("learning_rate_scheduler"))
        self.moving_average = net.moving_average
        self.rho, self.eps = rho, eps
        self.batch_num_total = 0

    def rescale_gradients(self, grad_norm):
        norms = torch.stack([p.grad.norm() for p in self.parameters])
        coefficient = grad_norm / (norms.norm() + 1e-6)
        if coefficient < 1:
            for p in self.parameters:
                p.grad.mul_(coefficient)

    def update(self, p, lr):
        state = self.state[p]
        if not state:
            state["square_avg"] = torch.zeros_like(p)
            state["acc_delta"] = torch.zeros_like(p)
        square_avg, acc_delta = state["square_avg"], state["acc_delta"]
        square_avg.lerp_(p.grad.square(), 1 - self.rho)
        ratio = (acc_delta + self.eps) / (square_avg + self.eps)
        delta = ratio.sqrt() * p.grad
        acc_delta.lerp_(delta.square(), 1 - self.rho)
        p.add_(delta, alpha=-lr)

    @torch.no_grad()
    def step(self, closure=None):
        self.batch_num_total += 1
        self.rescale_gradients(trainer("grad_norm"))
        lr = self.scheduler.get_value(self.batch_num_total)
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, lr * group["factor"])
        self.moving_average.apply_to(self.parameters, self.batch_num_total)


def optimizer(net):
    return GradientDescentTrainer(net, **trainer("optimizer"))
