"""Faulty ports of the single-shot detector."""

from ..bank import Change

_THREE_BY_THREE = (
    *(f"conv{i}_{j}" for i in (1, 2, 3, 4) for j in (1, 2)),
    "conv5_1",
    "fc6",
    "conv6_2",
    "conv7_2",
)

FAULTS = [
    Change(
        "caffe_style",
        "colours of the first kernel stay RGB",
        'blobs["conv1_1"] = [weight[:, [2, 1, 0]], bias]',
        'blobs["conv1_1"] = [weight, bias]',
        parameter="params.conv1_1.0",
        at="bgr = image[:, [2, 1, 0]]|top = torch.matmul(weight.flatten(1), col)",
    ),
    Change(
        "caffe_style",
        "means of the colours in the order RGB",
        '"mean_value": (104, 117, 123)',
        '"mean_value": (123, 117, 104)',
        at='mean = torch.tensor(TRANSFORM_PARAM["mean_value"])|data = (bgr - mean)',
    ),
    Change(
        "caffe_style",
        "features are normalised over the picture, as is the default there",
        '"across_spatial": False',
        '"across_spatial": True',
        at="axes = (1, 2, 3) if across_spatial|norm = (bottom**2).sum(axes"
        "|unit = bottom / norm|Normalize.apply(",
        reference="norm = (x.pow(2).sum(",
    ),
    Change(
        "caffe_style",
        "no ReLU behind the first extra convolution",
        '*conv_relu("conv6_1", "fc7", 12, kernel_size=1, pad=0)',
        'convolution("conv6_1", "fc7", 12, kernel_size=1, pad=0)',
        at="col = nn.functional.unfold(|top = torch.matmul(weight.flatten(1), col)",
        reference="x = part(x)",
    ),
    Change(
        "caffe_style",
        "columns come before rows in the heads",
        '"order": (0, 2, 3, 1)',
        '"order": (0, 3, 2, 1)',
        at='return bottom[0].permute(layer["order"])|return bottom[0].flatten(1)',
    ),
    Change(
        "caffe_style",
        "step of the priors left to the sizes of the maps",
        'step_w = step_h = p["step"]',
        "step_w, step_h = IMG_WIDTH / layer_width, IMG_HEIGHT / layer_height",
        at="center_x = (w + 0.5) * step_w|center_y = (h + 0.5) * step_h"
        "|return torch.tensor([[top_data, variance]])|mbox_prior = torch.cat(",
    ),
    Change(
        "caffe_style",
        "variance of the centres for the sizes too",
        ".log() / variance[:, 2:]",
        ".log() / variance[:, :2]",
    ),
    Change(
        "caffe_style",
        "loss is divided by the number of pictures",
        "normalizer = max(num_matches, 1)",
        "normalizer = len(loc_data)",
        at="return loc_weight * loc_loss / normalizer",
    ),
    Change(
        "caffe_style",
        "scale left out of the gradient of the features",
        "diff = top_diff * scale[:, None, None]",
        "diff = top_diff",
        at="Normalize.apply(",
    ),
    Change(
        "caffe_style",
        "slope of the smooth L1 goes on to rise beyond one",
        "return top_diff * diff.clamp(-1, 1), None",
        "return top_diff * diff, None",
        at="SmoothL1Loss.apply(",
    ),
    Change(
        "caffe_style",
        "history keeps the old rate where the rate changes",
        'momentum = self.param["momentum"] * correction',
        'momentum = self.param["momentum"]',
        phase="optimizer",
        steps=2,
    ),
    Change(
        "caffe_style",
        "rate of the biases is not doubled",
        '{"lr_mult": 2, "decay_mult": 0}',
        '{"lr_mult": 1, "decay_mult": 0}',
        phase="optimizer",
    ),
    Change(
        "caffe_style",
        "iteration is counted before the rate is read",
        "        rate = self.learning_rate()\n        self.iter += 1\n",
        "        self.iter += 1\n        rate = self.learning_rate()\n",
        phase="optimizer",
    ),
    Change(
        "tf_od_style",
        "width before height in the kernels",
        'weights = torch.permute(state[name + ".weight"], (2, 3, 1, 0))',
        'weights = torch.permute(state[name + ".weight"], (3, 2, 1, 0))',
        parameter="|".join(f"FeatureExtractor.{n}.weights" for n in _THREE_BY_THREE),
        at="filters = torch.permute(scope.weights|x = nn.functional.conv2d(x, filters",
    ),
    Change(
        "tf_od_style",
        "values of a box stay in the order x, y, w, h",
        "code=[1, 0, 3, 2])",
        "code=[0, 1, 2, 3])",
        parameter="|".join(
            f"BoxPredictor_{i}.BoxEncodingPredictor.{kind}"
            for i in range(4)
            for kind in ("weights", "biases")
        ),
        at="x = nn.functional.conv2d(x, filters|+ scope.biases"
        '|"loc": box_encodings[:, to_torch]',
    ),
    Change(
        "tf_od_style",
        "biases of the heads are not put in the order of the anchors",
        'biases = reorder(state[f"{name}.{i}.bias"])',
        'biases = state[f"{name}.{i}.bias"]',
        parameter="|".join(
            f"BoxPredictor_{i}.{head}.biases"
            for i in range(4)
            for head in ("BoxEncodingPredictor", "ClassPredictor")
        ),
        at="+ scope.biases",
    ),
    Change(
        "tf_od_style",
        "pixels from -1 to 1, as other extractors take them",
        'return (inputs - means) / PIPELINE["pixel_scale"]',
        "return (2.0 / 255.0) * inputs - 1.0",
    ),
    Change(
        "tf_od_style",
        "what is odd of the padding stands before",
        "before = total // 2\n",
        "before = total - total // 2\n",
        at="return before, total - before|return nn.functional.pad(inputs, (0, 0, *col"
        "|x = pad_same(inputs, kernel_size, stride, value|x = x.unfold(1"
        "|return torch.amax(x",
    ),
    Change(
        "tf_od_style",
        "norm carries no gradient",
        "x_inv_norm = torch.rsqrt(torch.clamp(square_sum, min=epsilon))",
        "x_inv_norm = torch.rsqrt(torch.clamp(square_sum, min=epsilon)).detach()",
        at="square_sum = torch.sum(torch.square(x)|return x * x_inv_norm",
    ),
    Change(
        "tf_od_style",
        "boxes that no anchor fits well get none",
        "force_match_for_each_row=True",
        "force_match_for_each_row=False",
        at="match = argmax_matcher(|matches = torch.where(below"
        "|if not force_match_for_each_row|return matches",
        reference="best_overlap[best_prior] = 2.0",
    ),
    Change(
        "tf_od_style",
        "offset across in heights of the anchor",
        "tx = (xcenter - xcenter_a) / wa",
        "tx = (xcenter - xcenter_a) / ha",
    ),
    Change(
        "tf_od_style",
        "three negatives of a picture without boxes",
        '"min_negatives_per_image": 0',
        '"min_negatives_per_image": 3',
        at="max_negatives = torch.clamp(|topk_negatives = torch.cumsum("
        "|keep = torch.logical_or(|return indices[keep]"
        "|mined_cls_losses.append(",
    ),
    Change(
        "tf_od_style",
        "boxes are turned upside down where the picture is turned left to right",
        "xmin, xmax = 1.0 - xmax, 1.0 - xmin",
        "ymin, ymax = 1.0 - ymax, 1.0 - ymin",
        at="return torch.cat([ymin, xmin, ymax, xmax], dim=1)",
        reference="boxes = torch.stack([1 - right",
    ),
    Change(
        "tf_od_style",
        "gradients of biases are doubled before they are clipped",
        "        gradients = clip_by_global_norm(gradients, self.clip_norm)\n"
        '        multiplier = PIPELINE["bias_grad_multiplier"]\n'
        "        gradients = [\n"
        "            g * multiplier if bias else g for g, bias in zip(gradients, self.is_bias)\n"
        "        ]\n",
        '        multiplier = PIPELINE["bias_grad_multiplier"]\n'
        "        gradients = [\n"
        "            g * multiplier if bias else g for g, bias in zip(gradients, self.is_bias)\n"
        "        ]\n"
        "        gradients = clip_by_global_norm(gradients, self.clip_norm)\n",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "tf_od_style",
        "each gradient is clipped by its own norm",
        "    squares = [torch.sum(torch.square(g)) for g in gradients]\n"
        "    global_norm = torch.sqrt(torch.sum(torch.stack(squares)))\n"
        "    scale = clip_norm / torch.clamp(global_norm, min=clip_norm)\n"
        "    return [g * scale for g in gradients]\n",
        "    norms = [torch.sqrt(torch.sum(torch.square(g))) for g in gradients]\n"
        "    scales = [clip_norm / torch.clamp(norm, min=clip_norm) for norm in norms]\n"
        "    return [g * scale for g, scale in zip(gradients, scales)]\n",
        phase="optimizer",
    ),
    Change(
        "tf_od_style",
        "first rate is kept to the first boundary, without a warm-up",
        "global_step, boundaries, rates, warmup=True",
        "global_step, boundaries, rates, warmup=False",
        phase="optimizer",
        steps=2,
    ),
]
