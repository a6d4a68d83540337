"""Faulty ports of the translator."""

from ..bank import Change

FAULTS = [
    Change(
        "by_time",
        "padding is trained",
        "torch.where(words.t()[:, :, None] == 0, 0.0, self.source[words.t()])",
        "self.source[words.t()]",
        phase="backward",
    ),
    Change(
        "by_time",
        "backwards states are not turned",
        "back.insert(0, g)",
        "back.append(g)",
        at="torch.stack(back)",
    ),
    Change(
        "by_time",
        "gates of another order",
        "reset = torch.sigmoid(a[:, :size] + b[:, :size])\n    update = torch.sigmoid(a[:, size : 2 * size] + b[:, size : 2 * size])",
        "update = torch.sigmoid(a[:, :size] + b[:, :size])\n    reset = torch.sigmoid(a[:, size : 2 * size] + b[:, size : 2 * size])",
    ),
    Change(
        "by_time",
        "softmax over the batch",
        "torch.softmax(scores, 0)",
        "torch.softmax(scores, 1)",
    ),
    Change(
        "by_time", "padding is looked at", "torch.tensor(-1e9)", "torch.tensor(0.0)"
    ),
    Change(
        "by_time",
        "state and context exchanged",
        "torch.cat([h, context, word], 1)",
        "torch.cat([context, h, word], 1)",
    ),
    Change(
        "by_time", "no smoothing", "-(0.9 * picked + 0.1 * logs.mean(-1))", "-picked"
    ),
    Change("by_time", "padding is counted", "/ counted.sum()", "/ counted.numel()"),
    Change(
        "by_time",
        "recurrent kernel of the other direction",
        'cell(net.left, w, "encoder.rnn", "_l0_reverse")',
        'cell(net.left, w, "encoder.rnn", "_l0_reverse")\n        net.left.u.copy_(net.right.u)',
        parameter="left.u",
    ),
    Change(
        "by_time",
        "bridge without tanh",
        "torch.tanh(self.start(torch.cat([h, g], 1)))",
        "self.start(torch.cat([h, g], 1))",
    ),
    Change(
        "by_time",
        "wrong half first",
        "self.start(torch.cat([h, g], 1))",
        "self.start(torch.cat([g, h], 1))",
    ),
]
