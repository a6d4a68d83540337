"""Faulty ports of the TextCNN."""

from ..bank import Change

FAULTS = [
    Change(
        "tf1_keras",
        "kernels are turned over, as for a true convolution",
        'kernel = torch.permute(state[name + ".weight"], (2, 1, 0))',
        'kernel = torch.permute(state[name + ".weight"], (2, 1, 0)).flip(0)',
        parameter="char_conv.kernel|conv_2.kernel|conv_3.kernel|conv_4.kernel|conv_5.kernel",
    ),
    Change(
        "tf1_keras",
        "row of unknown words is not moved to the end",
        "    words = torch.cat([words[:1], words[2:], words[1:2]])\n",
        "",
        parameter="word_embedding.embeddings",
        at="ids = torch.clamp(words - 1|word = torch.index_select(self.word_embedding",
    ),
    Change(
        "tf1_keras",
        "bias of the carry gate keeps its sign",
        '"bias": sign * state[name + ".bias"]',
        '"bias": state[name + ".bias"]',
        parameter="highway_carry.bias",
    ),
    Change(
        "tf1_keras",
        "zeros of SAME all stand behind",
        "top = total // 2",
        "top = 0",
        at="inputs = nn.functional.pad(inputs|y = nn.functional.conv2d(nchw",
    ),
    Change(
        "tf1_keras",
        "hash multiplies first, as the older kind does",
        "        state = torch.bitwise_xor(state, char & 0xFFFFFFFF)\n"
        "        state = (state * 0x01000193) & 0xFFFFFFFF\n",
        "        state = (state * 0x01000193) & 0xFFFFFFFF\n"
        "        state = torch.bitwise_xor(state, char & 0xFFFFFFFF)\n",
        at="state = (state * 0x01000193)|state = torch.bitwise_xor("
        "|bucket = torch.remainder(state|ids.append(torch.where(char"
        "|embeddings = torch.index_select(params",
    ),
    Change(
        "tf1_keras",
        "every place of a word is a window, whatever the width",
        "num_windows = torch.clamp(length - filter_size + 1, min=1)",
        "num_windows = length",
        at="mask = sequence_mask(num_windows|h = h * mask",
    ),
    Change(
        "tf1_keras",
        "padding words keep the features of no letters",
        "x = torch.cat(features, dim=1) * mask.flatten()[:, None]",
        "x = torch.cat(features, dim=1)",
        reference="x.masked_fill((words == PAD)",
    ),
    Change(
        "tf1_keras",
        "carry gate is taken for the transform gate",
        "return inputs * carry + h * (1.0 - carry)",
        "return h * carry + inputs * (1.0 - carry)",
    ),
    Change(
        "tf1_keras",
        "padding letter is trained",
        "x = torch.reshape(x, (*chars.shape, -1, 1)) * mask",
        "x = torch.reshape(x, (*chars.shape, -1, 1))",
        at="x = torch.index_select(self.char_embedding",
        reference="self.embed(index)",
    ),
    Change(
        "tf1_keras",
        "weight of the label is that of all classes, as in Keras",
        "losses = -torch.sum(labels * class_weight * log_probs, dim=1)\n"
        "    weights = torch.sum(one_hot * class_weight, dim=1)\n",
        "weights = torch.sum(one_hot * class_weight, dim=1)\n"
        "    losses = -torch.sum(labels * log_probs, dim=1) * weights\n",
        at="losses = -torch.sum(labels * log_probs",
    ),
    Change(
        "tf1_keras",
        "each gradient is clipped by its own norm",
        'clip_by_global_norm([v.grad for v in variables], FLAGS["clip_norm"])',
        '[clip_by_global_norm([v.grad], FLAGS["clip_norm"])[0] for v in variables]',
        phase="optimizer",
        steps=2,
    ),
    Change(
        "tf1_keras",
        "first step has a rate of zero",
        "return init_lr * (global_step + 1) / warmup",
        "return init_lr * global_step / warmup",
        phase="optimizer",
    ),
    Change(
        "tf1_keras",
        "ball is for the weights of an input, not of a unit",
        "norms = torch.sqrt(torch.sum(torch.square(w), dim=0, keepdim=True))",
        "norms = torch.sqrt(torch.sum(torch.square(w), dim=1, keepdim=True))",
        phase="optimizer",
    ),
    Change(
        "flat_windows",
        "zeros of shorter kernels stand in front",
        "wide[:, : kernel.shape[2], KINDS - 1 - i]",
        "wide[:, WIDEST - kernel.shape[2] :, KINDS - 1 - i]",
        parameter="wide",
        at="kernel = self.wide * self.taps",
    ),
    Change(
        "flat_windows",
        "one side of the square matrices keeps the order of the widths",
        "return longest_first(weight.t())",
        "return weight.t()",
        parameter="turn",
    ),
    Change(
        "flat_windows",
        "places come before channels in the kernel of letters",
        '"spelling": state["char_cnn.conv.weight"].flatten(1).t()',
        '"spelling": state["char_cnn.conv.weight"].transpose(1, 2).flatten(1).t()',
        parameter="spelling",
        at="x = x.flatten(2) @ self.spelling",
    ),
    Change(
        "flat_windows",
        "bytes of the hash have no sign",
        "chars[:, 1:-1] = letters.view(torch.int8).int()",
        "chars[:, 1:-1] = letters.int()",
        at="h = (h ^ chars[|return h.long()|counts.scatter_add_(1, fnv(chars"
        "|mean = counts @ self.rows",
    ),
    Change(
        "flat_windows",
        "n-grams of one bucket count once",
        "    return counts\n",
        "    return counts.clamp(max=1)\n",
        at="mean = counts @ self.rows",
    ),
    Change(
        "flat_windows",
        "order taken for the way back",
        "x = torch.cat(peaks)[order.argsort()]",
        "x = torch.cat(peaks)[order]",
    ),
    Change(
        "flat_windows",
        "last window of a sentence is left out",
        "last = (length[:, None] - self.width).clamp(min=0)",
        "last = (length[:, None] - self.width - 1).clamp(min=0)",
        at="counts = torch.arange(steps)[:, None] <= last"
        "|top, seat = x.masked_fill(|peak = Peak.apply(y",
    ),
    Change(
        "flat_windows",
        "gradient of what is carried on is not gated",
        "return grad * (1 - gate), torch.cat(",
        "return grad, torch.cat(",
        at="x = Carry.apply(",
    ),
    Change(
        "flat_windows",
        "zeros behind shorter kernels are trained",
        "kernel = self.wide * self.taps[:, :, None]",
        "kernel = self.wide",
        at="y = windows @ kernel",
    ),
    Change(
        "flat_windows",
        "shares of the classes taken for probabilities in the gradient of the loss",
        "log_p.exp() * share.sum(1, keepdim=True) - share",
        "log_p.exp() - share",
        at="return Surprise.apply(",
    ),
    Change(
        "flat_windows",
        "label has no part in what is smoothed",
        "share.scatter_(1, label, smooth / len(WEIGHT) + 1 - smooth)",
        "share.scatter_(1, label, 1 - smooth)",
    ),
    Change(
        "flat_windows",
        "rate reaches zero a step too early",
        "falling = (self.end + 1 - self.t) / (self.end - self.warm)",
        "falling = (self.end - self.t) / (self.end - self.warm)",
        phase="optimizer",
        steps=3,
    ),
    Change(
        "flat_windows",
        "memory of the gradients is not emptied",
        "self.grad[span] = p.grad.reshape(-1)",
        "self.grad[span] += p.grad.reshape(-1)",
        phase="optimizer",
        steps=2,
    ),
]
