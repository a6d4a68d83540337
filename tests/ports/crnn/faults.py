"""Faulty ports of the text-line recognizer."""

from ..bank import Change

_CELL = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")

FAULTS = [
    Change(
        "keras_style",
        "width before height in the kernels",
        'torch.permute(state[f"{name}.weight"], (2, 3, 1, 0))',
        'torch.permute(state[f"{name}.weight"], (3, 2, 1, 0))',
        parameter="|".join(f"conv_{i}.kernel" for i in (1, 2, 3, 4)),
        at="outputs = nn.functional.conv2d(|kernel = torch.permute(self.kernel",
    ),
    Change(
        "keras_style",
        "second bias of the cells is not loaded",
        'bias = state[f"{name}.bias_ih_l0{suffix}"]'
        ' + state[f"{name}.bias_hh_l0{suffix}"]',
        'bias = state[f"{name}.bias_ih_l0{suffix}"]',
        parameter="|".join(
            f"bidirectional_{i}.{way}_layer.bias"
            for i in (1, 2)
            for way in ("forward", "backward")
        ),
        at="z = z + self.bias",
    ),
    Change(
        "keras_style",
        "epsilon of Keras in the norms",
        "momentum=0.9, epsilon=1e-5",
        "momentum=0.9, epsilon=1e-3",
        at="scale = self.gamma * torch.rsqrt(variance + self.epsilon)",
    ),
    Change(
        "keras_style",
        "both columns of zeros before a pooling stand at the end",
        "ZeroPadding2D(((0, 0), (1, 1)))",
        "ZeroPadding2D(((0, 0), (0, 2)))",
        at="return nn.functional.pad(inputs, (0, 0|x = self.tall_pool(self.pad(x))",
    ),
    Change(
        "keras_style",
        "gates have the hard sigmoid, the older default",
        "torch.sigmoid(",
        "nn.functional.hardsigmoid(",
    ),
    Change(
        "keras_style",
        "mask ends at the dense layer between",
        "x = self.bidirectional_2(x, mask=mask)",
        "x = self.bidirectional_2(x)",
        at="mask = torch.ones(inputs.shape[:2]|outputs.append(torch.where(keep"
        "|h = torch.where(keep|c = torch.where(keep",
    ),
    Change(
        "keras_style",
        "activation of the convolutions comes before the norm",
        "        x = torch.relu(self.bn_2(self.conv_2(x), training=training))\n"
        "        x = self.tall_pool(self.pad(x))\n"
        "        x = torch.relu(self.bn_3(self.conv_3(x), training=training))\n"
        "        x = self.tall_pool(self.pad(x))\n"
        "        x = torch.relu(self.bn_4(self.conv_4(x), training=training))\n",
        "        x = self.bn_2(torch.relu(self.conv_2(x)), training=training)\n"
        "        x = self.tall_pool(self.pad(x))\n"
        "        x = self.bn_3(torch.relu(self.conv_3(x)), training=training)\n"
        "        x = self.tall_pool(self.pad(x))\n"
        "        x = self.bn_4(torch.relu(self.conv_4(x)), training=training)\n",
    ),
    Change(
        "keras_style",
        "paths that end in a blank are not counted",
        "ends = torch.cat([final, final - 1], dim=1)",
        "ends = final - 1",
        at="likelihood = torch.logsumexp(torch.gather(alpha",
    ),
    Change(
        "keras_style",
        "costs are divided by the numbers of letters, as a mean elsewhere is",
        "return torch.mean(costs)",
        'return torch.mean(costs / batch["length"])',
    ),
    Change(
        "keras_style",
        "cell state carries no gradient back",
        "            c = torch.where(keep, new_c, c)\n",
        "            c = torch.where(keep, new_c, c).detach()\n",
        at="c = f * c_tm1 + i * torch.tanh(z2)",
    ),
    Change(
        "keras_style",
        "pixels behind a line are black, not zero",
        "    return images * inside[:, None, :, None]\n",
        "    return torch.where(inside[:, None, :, None], images, -1.0)\n",
        reference="net(x.masked_fill(behind, 0.0)",
    ),
    Change(
        "keras_style",
        "accumulated updates have the rate in them",
        "(1.0 - self.rho) * torch.square(delta)",
        "(1.0 - self.rho) * torch.square(lr * delta)",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "keras_style",
        "gradient of the penalty is clipped with the others",
        "        gradients = self.clip([v.grad for v in variables])\n"
        "        for name, variable, gradient in zip(self.names, variables, gradients):\n"
        '            if name.endswith("kernel"):\n'
        "                gradient = gradient + self.l2 * variable\n",
        "        gradients = [\n"
        '            v.grad + self.l2 * v if name.endswith("kernel") else v.grad\n'
        "            for name, v in zip(self.names, variables)\n"
        "        ]\n"
        "        gradients = self.clip(gradients)\n"
        "        for name, variable, gradient in zip(self.names, variables, gradients):\n",
        phase="optimizer",
    ),
    Change(
        "paddle_style",
        "linear weights are reshaped, not turned",
        '"weight": weight.t()',
        '"weight": weight.reshape(weight.shape[1], -1)',
        parameter="neck.fc1.weight|head.weight",
        at="return torch.matmul(x, self.weight) + self.bias",
    ),
    Change(
        "paddle_style",
        "cells of the way back get the weights of the way forth",
        '"bw": "_l0_reverse"',
        '"bw": "_l0"',
        parameter="|".join(
            f"neck.lstm{i}.rnn_bw.cell.{kind}" for i in (1, 2) for kind in _CELL
        ),
        at="gates = inputs @ self.weight_ih.t()|gates = gates + pre_hidden @",
    ),
    Change(
        "paddle_style",
        "momentum of the norms is the other program's",
        "momentum=0.9, epsilon=1e-05",
        "momentum=0.1, epsilon=1e-05",
        parameter="|".join(
            f"backbone.conv{i}.bn.{kind}"
            for i in (1, 2, 3)
            for kind in ("_mean", "_variance")
        ),
        at="self._mean.copy_(|self._variance.copy_(|old, new = self._momentum",
    ),
    Change(
        "paddle_style",
        "lines have half their width in steps, one too few",
        'return (batch["width"] + 2) // 2',
        'return batch["width"] // 2',
        at="mask = (torch.arange(len(x))[:, None] < lens)",
    ),
    Change(
        "paddle_style",
        "outputs of the way back stay in the order in which they come",
        "        outputs = [h] * len(inputs)\n"
        "        for t in order:\n"
        "            m = mask[t]\n"
        "            new_h, new_c = self.cell(inputs[t], (h, c))\n"
        "            h = m * new_h + (1.0 - m) * h\n"
        "            c = m * new_c + (1.0 - m) * c\n"
        "            outputs[t] = m * new_h\n",
        "        outputs = []\n"
        "        for t in order:\n"
        "            m = mask[t]\n"
        "            new_h, new_c = self.cell(inputs[t], (h, c))\n"
        "            h = m * new_h + (1.0 - m) * h\n"
        "            c = m * new_c + (1.0 - m) * c\n"
        "            outputs.append(m * new_h)\n",
        at="return torch.stack(outputs)|self.rnn_bw(inputs, mask)]",
    ),
    Change(
        "paddle_style",
        "cell comes out without its tanh",
        "h = torch.sigmoid(o) * torch.tanh(c)",
        "h = torch.sigmoid(o) * c",
    ),
    Change(
        "paddle_style",
        "map is reshaped to steps, its axes are not moved",
        "return x.reshape(n, c, w).permute(2, 0, 1)",
        "return x.reshape(w, n, c)",
    ),
    Change(
        "paddle_style",
        "mean and deviation of ImageNet",
        '"mean": 0.5, "std": 0.5',
        '"mean": 0.485, "std": 0.229',
        at='line = (line - NormalizeImage["mean"]) / |canvas[i, 0, :, :w] = line',
    ),
    Change(
        "paddle_style",
        "mean over the lines whose texts fit, not over all",
        "return costs.sum() / len(fits)",
        "return costs.mean()",
    ),
    Change(
        "paddle_style",
        "gradients are divided by the steps, as norm_by_times does",
        "return logits_grad * loss_grad[:, None], None",
        "return logits_grad * loss_grad[:, None] / len(logits_grad), None",
        at="costs = WarpCTC.apply(",
    ),
    Change(
        "paddle_style",
        "each gradient is clipped by its own norm",
        "        global_norm = torch.cat([g.flatten() for g in grads]).norm()\n"
        "        factor = self.clip_norm / max(global_norm, self.clip_norm)\n"
        "        return [g * factor for g in grads]\n",
        "        factors = [self.clip_norm / max(g.norm(), self.clip_norm) for g in grads]\n"
        "        return [g * factor for g, factor in zip(grads, factors)]\n",
        phase="optimizer",
    ),
    Change(
        "paddle_style",
        "regularizer is for all parameters",
        "            if p.ndim > 1:\n                grad = grad + self._coeff * p\n",
        "            grad = grad + self._coeff * p\n",
        phase="optimizer",
    ),
    Change(
        "paddle_style",
        "warm-up starts with a rate of zero",
        "return end_lr * (self.last_epoch + 1) / self.warmup_steps",
        "return end_lr * self.last_epoch / self.warmup_steps",
        phase="optimizer",
    ),
]
