"""Faulty ports of the wide residual network."""

from ..bank import Change

_BLOCKS = [f"group_{i}_block_{j}" for i in range(3) for j in range(2)]
_UNITS = [f"units.{i}.{norm}" for i in range(6) for norm in ("bn_a", "bn_b")]
_NORMS = [f"{block}/norm_{k}" for block in _BLOCKS for k in range(2)] + ["final_norm"]
_CONVS = [f"{block}/conv_{k}/w" for block in _BLOCKS for k in range(2)]
_CONVS += ["initial_conv/w"]
_STATISTICS = [f"{norm}/{kind}_ema" for norm in _NORMS for kind in ("mean", "var")]
_AVERAGED = [
    *(f"params/{conv}" for conv in _CONVS),
    *(f"params/{block}/shortcut/w" for block in _BLOCKS if block.endswith("0")),
    *(f"params/{norm}/{kind}" for norm in _NORMS for kind in ("scale", "offset")),
    *(f"params/logits/{kind}" for kind in ("w", "b")),
    *(f"state/{statistic}/average" for statistic in _STATISTICS),
]

FAULTS = [
    Change(
        "keras_style",
        "kernel of the dense layer reshaped, not turned",
        'torch.transpose(state[f"{root}.fc.weight"], 0, 1)',
        'torch.reshape(state[f"{root}.fc.weight"], (-1, NUM_CLASSES))',
        parameter="student.predictions.kernel|teacher.predictions.kernel",
        at="return torch.matmul(inputs, self.kernel) + self.bias",
    ),
    Change(
        "keras_style",
        "epsilon of Keras",
        "momentum=0.9, epsilon=1e-5",
        "momentum=0.9, epsilon=1e-3",
        at="inv = self.gamma * torch.rsqrt(variance + self.epsilon)",
    ),
    Change(
        "keras_style",
        "convolutions of stride 2 are padded at the end only",
        "ZeroPadding2D(((1, 1), (1, 1)))",
        "ZeroPadding2D(((2 - strides, 1), (2 - strides, 1)))",
        at="x = self.conv_a(self.pad(x))"
        "|return nn.functional.pad(inputs, (0, 0, left, right, top, bottom))",
    ),
    Change(
        "keras_style",
        "shortcut begins before norm and activation",
        "residual = self.projection(x)",
        "residual = self.projection(inputs)",
    ),
    Change(
        "keras_style",
        "teacher norms by the statistics of the batch",
        "self.teacher(teacher_images, training=False)",
        "self.teacher(teacher_images, training=True)",
        at="mean = torch.mean(inputs, dim=|variance = torch.mean(torch.square(inputs"
        "|self.assign_moving_averages(mean|mean, variance = self.moving_mean"
        "|variable.copy_(",
        reference="self.teacher.eval()",
    ),
    Change(
        "keras_style",
        "pictures are turned upside down, not left to right",
        "torch.flip(images, (2,))",
        "torch.flip(images, (1,))",
    ),
    Change(
        "keras_style",
        "squares of zeros come before the mean is taken off",
        '    images = standardize(random_flip(images, batch["flip"]))\n'
        '    hidden = random_cutout(images, batch["hole"])\n',
        '    images = random_flip(images, batch["flip"])\n'
        '    hidden = standardize(random_cutout(images, batch["hole"]))\n'
        "    images = standardize(images)\n",
        at="return torch.where(hidden[|return (images - mean) / stddev",
    ),
    Change(
        "keras_style",
        "labels are mixed with the share of the partner",
        "y_true = mixup(one_hot.to(torch.float32), partner, lam)",
        "y_true = mixup(one_hot.to(torch.float32), partner, 1.0 - lam)",
        at="return values * lam + torch.index_select(",
    ),
    Change(
        "keras_style",
        "squared error is a sum over the classes",
        "squares = torch.mean(torch.square(y_true - y_pred), dim=-1)",
        "squares = torch.sum(torch.square(y_true - y_pred), dim=-1)",
    ),
    Change(
        "keras_style",
        "gradient of the consistency stops at the student",
        "MeanSquaredError()(target.detach(), prediction)",
        "MeanSquaredError()(target, prediction.detach())",
        at='prediction = torch.softmax(output["logits"]',
    ),
    Change(
        "keras_style",
        "factor of the regularisers is the decay, not half of it",
        '"l2": 0.01,',
        '"l2": 0.02,',
        phase="optimizer",
    ),
    Change(
        "keras_style",
        "velocities keep the old rate where it changes",
        "m.copy_(m * ratio * self.momentum - gradient * lr)",
        "m.copy_(m * self.momentum - gradient * lr)",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "keras_style",
        "moving statistics are not averaged",
        "student, teacher = self.model.student.weights, self.model.teacher.weights",
        "student = self.model.student.trainable_weights\n"
        "        teacher = self.model.teacher.trainable_weights",
        parameter="|".join(
            f"teacher.{norm}.moving_{kind}"
            for norm in [*_UNITS, "bn_top"]
            for kind in ("mean", "variance")
        ),
        at="average.copy_(",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "haiku_style",
        "height and width of the kernels exchanged",
        "weight(name).permute(2, 3, 1, 0)",
        "weight(name).permute(3, 2, 1, 0)",
        parameter="|".join(
            [f"params/{name}" for name in _CONVS]
            + [
                f"ema/params/{name}/{kind}"
                for name in _CONVS
                for kind in ("hidden", "average")
            ]
        ),
        at="return torch.tensordot(windows, w",
    ),
    Change(
        "haiku_style",
        "hidden values begin as the averages, with nothing taken off",
        "hidden = average * (1.0 - decay**counter)",
        "hidden = average",
        parameter="|".join(
            f"ema/{name}/{kind}" for name in _AVERAGED for kind in ("hidden", "average")
        ),
        at='hidden = old["hidden"] * decay|average = hidden / (1.0',
        phase="optimizer",
        steps=2,
    ),
    Change(
        "haiku_style",
        "statistics of the norms without bias to zero, as is the default",
        "decay_rate, zero_debias=False)",
        "decay_rate, zero_debias=True)",
        parameter="|".join(
            [f"state/{name}/average" for name in _STATISTICS]
            + [
                f"ema/state/{name}/average/{kind}"
                for name in _STATISTICS
                for kind in ("hidden", "average")
            ]
        ),
        at="average = hidden / (1.0",
        steps=2,
    ),
    Change(
        "haiku_style",
        "slope of jax.nn",
        "negative_slope=0.1):",
        "negative_slope=0.01):",
        at="return torch.where(x >= 0|leaky_relu(",
    ),
    Change(
        "haiku_style",
        "statistics of the batch are constants for the gradient",
        "        var = mean_of_squares - mean * mean\n",
        "        mean, mean_of_squares = mean.detach(), mean_of_squares.detach()\n"
        "        var = mean_of_squares - mean * mean\n",
        at="mean = torch.mean(x, dim=|mean_of_squares = torch.mean(x * x"
        "|inv = params|return (x - mean) * inv",
    ),
    Change(
        "haiku_style",
        "border pixels are doubled by the mirror",
        "    index = torch.abs(index)\n"
        "    return (size - 1) - torch.abs((size - 1) - index)\n",
        "    index = torch.where(index < 0, -1 - index, index)\n"
        "    return torch.where(index < size, index, 2 * size - 1 - index)\n",
        at="image = image[torch.arange(n)",
    ),
    Change(
        "haiku_style",
        "holes are crosses of whole rows and columns",
        'return 1.0 - torch.einsum("nh,nw->nhw", rows, cols)',
        'return torch.einsum("nh,nw->nhw", 1.0 - rows, 1.0 - cols)',
        at="holed = image * hole_mask(",
    ),
    Change(
        "haiku_style",
        "smoothing is shared by the other classes alone",
        "return labels + alpha * (1.0 / NUM_CLASSES - labels)",
        "others = (1.0 - labels) / (NUM_CLASSES - 1)\n"
        "    return labels + alpha * (others - labels)",
    ),
    Change(
        "haiku_style",
        "softmax of the teacher over the batch",
        'torch.softmax(output["target"] / temperature, dim=-1)',
        'torch.softmax(output["target"] / temperature, dim=0)',
    ),
    Change(
        "haiku_style",
        "answers of the teacher are not mixed",
        "    guess = interpolate(lam, guess, guess[partner])\n",
        "",
        at="error = torch.exp(log_probs) - guess",
        reference='target = mix((output["target"] / TEMPERATURE)',
    ),
    Change(
        "haiku_style",
        "scales and offsets of the norms decay too",
        'lambda name, _: name == "w"',
        'lambda name, _: name != "b"',
        phase="optimizer",
    ),
    Change(
        "haiku_style",
        "second schedule counts from the beginning",
        "second(count - boundary)",
        "second(count)",
        phase="optimizer",
        steps=3,
    ),
    Change(
        "haiku_style",
        "average takes the parameters from before the step",
        '"params": new_params,',
        '"params": params,',
        phase="optimizer",
        steps=2,
    ),
]
