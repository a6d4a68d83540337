"""Faulty ports of the click-through model with attention."""

from ..bank import Change

FAULTS = [
    Change(
        "tf_style",
        "rows of the attention's first kernel keep the item before the category",
        'dense(net.attention.f1_att, "attention.mlp.0", swapped)',
        'dense(net.attention.f1_att, "attention.mlp.0")',
        parameter="attention.f1_att.kernel",
        at="hidden = self.dice(self.f1_att(",
    ),
    Change(
        "tf_style",
        "tables begin with the row of padding",
        'table = reader[name + ".weight"][1:]',
        'table = reader[name + ".weight"][:-1]',
        parameter="embedding_matrix",
        at="vectors = torch.index_select(self.embedding_matrix, 0, rows",
    ),
    Change(
        "tf_style",
        "what is too long loses its end, not its front",
        "    ends = torch.cumsum(lengths, dim=0)[:, None]\n",
        "    ends = torch.cumsum(lengths, dim=0)[:, None]\n"
        "    ends = ends - torch.relu(lengths - maxlen)[:, None]\n",
        at="index = torch.clamp(ends|return torch.where(is_real, torch.take("
        "|his = pad_sequences(|noclick = pad_sequences(",
    ),
    Change(
        "tf_style",
        "epsilon of Keras in the norm of the input",
        "def __init__(self, units, momentum=0.9, epsilon=1e-5, affine=True)",
        "def __init__(self, units, momentum=0.9, epsilon=1e-3, affine=True)",
        at="inv = torch.rsqrt(variance + self.epsilon)",
    ),
    Change(
        "tf_style",
        "padding enters the moments of the attention's Dice",
        "hidden = self.dice(self.f1_att(din_all), weights)",
        "hidden = self.dice(self.f1_att(din_all))",
        at="weights = torch.ones_like(x[..., :1])|x_p = torch.sigmoid(self.bn("
        "|mean = torch.sum(weights * x|count = torch.sum(weights)",
    ),
    Change(
        "tf_style",
        "scores of padding are nought before the softmax",
        "paddings = torch.ones_like(scores) * (-(2**32) + 1)",
        "paddings = torch.zeros_like(scores)",
        at="scores = torch.where(mask[",
        reference="logits = keys.new_full(",
    ),
    Change(
        "tf_style",
        "half is left out of the negative side of PReLU",
        "neg = self.alphas * (x - torch.abs(x)) * 0.5",
        "neg = self.alphas * (x - torch.abs(x))",
    ),
    Change(
        "tf_style",
        "auxiliary loss counts the step into the first visit",
        "        weights = weights[:, :-1]\n",
        "        weights = weights[:, 1:]\n",
        at="loss = loss * torch.tile(weights|return torch.sum(loss) / torch.clamp(",
    ),
    Change(
        "tf_style",
        "items drawn at random get no gradient",
        "noclick_input = torch.cat([h_states, noclick[:, 1:]], dim=-1)",
        "noclick_input = torch.cat([h_states, noclick[:, 1:].detach()], dim=-1)",
        reference="drawn = self.next_item(",
    ),
    Change(
        "tf_style",
        "default row is trained",
        "return vectors * (rows > 0)[..., None]",
        "return vectors",
        at="vectors = torch.index_select(self.embedding_matrix, 0, rows"
        "|vectors = torch.reshape(vectors",
    ),
    Change(
        "tf_style",
        "rows are regularized as often as they occur",
        "unique = torch.unique(torch.cat(rows))",
        "unique = torch.cat(rows)",
        at="vectors = torch.index_select(self.embedding_matrix, 0, unique)"
        "|return torch.sum(torch.square(vectors)) / 2.0",
        reference="getattr(self, name)(ids.unique())",
    ),
    Change(
        "tf_style",
        "mean over the samples whose weight is not nought, as is the default there",
        'ctr_loss = torch.mean(losses * batch["weight"])',
        'present = torch.count_nonzero(batch["weight"])\n'
        '    ctr_loss = torch.sum(losses * batch["weight"]) / present',
    ),
    Change(
        "tf_style",
        "rate falls in stairs",
        "decay_rate ** (global_step / decay_steps)",
        "decay_rate ** (global_step // decay_steps)",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "jagged_style",
        "shown and visited are taken for each other in the first layer's parts",
        'names = ("shown", "visited", "difference", "product")',
        'names = ("visited", "shown", "difference", "product")',
        parameter="relevance.shown|relevance.visited",
        at="h = (shown @ (self.shown|h = h + visited @ (self.visited",
    ),
    Change(
        "jagged_style",
        "square halves of the follower's first layer are not transposed",
        'w["next_item.0.weight"].t().split(2 * DIM)',
        'w["next_item.0.weight"].split(2 * DIM, 1)',
        parameter="follower.past|follower.coming",
        at="past = past @ self.past|past + x @ self.coming",
    ),
    Change(
        "jagged_style",
        "each item has the category of the item before it",
        'self.register_buffer("category", w["category_of"][1:])',
        'self.register_buffer("category", w["category_of"][:-1])',
        parameter="category",
        at='category = self.tables["category"][self.category[items - 1] - 1]'
        '|ids |= {"item": items, "category"',
    ),
    Change(
        "jagged_style",
        "value on an edge belongs to the lower group",
        "group = torch.searchsorted(EDGES, age, right=True) + 1",
        "group = torch.searchsorted(EDGES, age) + 1",
        at='"age": Jagged.of_single(group|rows = self[name][feature.values - 1]',
    ),
    Change(
        "jagged_style",
        "scores are scaled by the size of one table, not of both",
        "score = (h @ self.last) / shown.shape[1] ** 0.5",
        "score = (h @ self.last) / DIM**0.5",
    ),
    Change(
        "jagged_style",
        "softmax over the visits of all samples",
        "return e / segment_sum(e, segment, count)[segment]",
        "return e / e.sum()",
    ),
    Change(
        "jagged_style",
        "leak of Dice is not taken from the open share",
        "return x * (self.leak + (1 - self.leak) * share)",
        "return x * (self.leak + share)",
    ),
    Change(
        "jagged_style",
        "variance taken for constant in the gradient of the norm",
        "return rstd * (grad - grad.mean(0) - along), None",
        "return rstd * (grad - grad.mean(0)), None",
        at="unit, mean, var = Standard.apply(",
    ),
    Change(
        "jagged_style",
        "mean over the longest history, not over one's own",
        "mean = mean / visits.lengths.clamp(min=1)[:, None]",
        "mean = mean / visits.lengths.max()",
        reference="mean = keys.sum(dim=1) / length",
    ),
    Change(
        "jagged_style",
        "state has already seen the visit that it tells",
        "self.follower(mean[at - 1], [visited[at], drawn[at]])",
        "self.follower(mean[at], [visited[at], drawn[at]])",
    ),
    Change(
        "jagged_style",
        "weights of the samples divide the sum",
        'click = (batch["weight"] @ each) / len(z)',
        'click = (batch["weight"] @ each) / batch["weight"].sum()',
    ),
    Change(
        "jagged_style",
        "squares of the gradients are added to a copy only",
        "            moment[rows] = total\n",
        "",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "jagged_style",
        "second moment has no correction of its bias",
        "root = (self.second / (1 - self.left_2)).sqrt()",
        "root = self.second.sqrt()",
        phase="optimizer",
    ),
]
