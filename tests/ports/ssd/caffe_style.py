"""After Caffe: layers by name with bottoms and tops, blobs, and a solver with multipliers.

Pictures are BGR. Convolutions are a product with columns. Layers with a loss have their
backward pass written out.
"""

import math
from pathlib import Path

import torch
from torch import nn
from torch.autograd import Function

# ------------------------------------------------------------------ net.prototxt

TRANSFORM_PARAM = {"mean_value": (104, 117, 123), "scale": 0.015625}
NUM_CLASSES = 5
IMG_HEIGHT, IMG_WIDTH = 76, 100


def convolution(name, bottom, num_output, kernel_size=3, pad=1, **more):
    param = {"num_output": num_output, "kernel_size": kernel_size, "pad": pad, **more}
    return {
        "name": name,
        "type": "Convolution",
        "bottom": [bottom],
        "top": name,
        "param": [{"lr_mult": 1, "decay_mult": 1}, {"lr_mult": 2, "decay_mult": 0}],
        "convolution_param": param,
    }


def relu(top):
    name = top.replace("conv", "relu")
    return {"name": name, "type": "ReLU", "bottom": [top], "top": top}


def pool(name, bottom, kernel_size=2, stride=2, pad=0):
    return {
        "name": name,
        "type": "Pooling",
        "bottom": [bottom],
        "top": name,
        "pooling_param": {"kernel_size": kernel_size, "stride": stride, "pad": pad},
    }


def conv_relu(name, bottom, num_output, **more):
    return [convolution(name, bottom, num_output, **more), relu(name)]


def features():
    return [
        *conv_relu("conv1_1", "data", 8),
        *conv_relu("conv1_2", "conv1_1", 8),
        pool("pool1", "conv1_2"),
        *conv_relu("conv2_1", "pool1", 12),
        *conv_relu("conv2_2", "conv2_1", 12),
        pool("pool2", "conv2_2"),
        *conv_relu("conv3_1", "pool2", 16),
        *conv_relu("conv3_2", "conv3_1", 16),
        pool("pool3", "conv3_2"),
        *conv_relu("conv4_1", "pool3", 20),
        *conv_relu("conv4_2", "conv4_1", 20),
        pool("pool4", "conv4_2"),
        *conv_relu("conv5_1", "pool4", 20),
        pool("pool5", "conv5_1", kernel_size=3, stride=1, pad=1),
        *conv_relu("fc6", "pool5", 24, pad=2, dilation=2),
        *conv_relu("fc7", "fc6", 24, kernel_size=1, pad=0),
        *conv_relu("conv6_1", "fc7", 12, kernel_size=1, pad=0),
        *conv_relu("conv6_2", "conv6_1", 20, stride=2),
        *conv_relu("conv7_1", "conv6_2", 10, kernel_size=1, pad=0),
        *conv_relu("conv7_2", "conv7_1", 16, pad=0),
        {
            "name": "conv4_2_norm",
            "type": "Normalize",
            "bottom": ["conv4_2"],
            "top": "conv4_2_norm",
            "param": [{"lr_mult": 1, "decay_mult": 1}],
            "norm_param": {"across_spatial": False},
        },
    ]


PRIOR_BOX_PARAM = {
    "conv4_2_norm": {
        "layer": (10, 13),
        "min_size": 14,
        "max_size": 26,
        "aspect_ratio": [2],
        "step": 8,
    },
    "fc7": {
        "layer": (5, 7),
        "min_size": 26,
        "max_size": 42,
        "aspect_ratio": [2, 3],
        "step": 16,
    },
    "conv6_2": {
        "layer": (3, 4),
        "min_size": 42,
        "max_size": 60,
        "aspect_ratio": [2, 3],
        "step": 32,
    },
    "conv7_2": {
        "layer": (1, 2),
        "min_size": 60,
        "max_size": 84,
        "aspect_ratio": [2],
        "step": 64,
    },
}
VARIANCE = [0.1, 0.1, 0.2, 0.2]


def head(source, what, per_box):
    """Convolution, permute and flatten for one source."""
    name = f"{source}_mbox_{what}"
    boxes = 2 + 2 * len(PRIOR_BOX_PARAM[source]["aspect_ratio"])
    return [
        convolution(name, source, boxes * per_box),
        {
            "name": f"{name}_perm",
            "type": "Permute",
            "bottom": [name],
            "top": f"{name}_perm",
            "order": (0, 2, 3, 1),
        },
        {
            "name": f"{name}_flat",
            "type": "Flatten",
            "bottom": [f"{name}_perm"],
            "top": f"{name}_flat",
        },
    ]


def net_param():
    layers = features()
    for source in PRIOR_BOX_PARAM:
        layers += head(source, "loc", 4) + head(source, "conf", NUM_CLASSES)
    for what in ("loc", "conf"):
        bottom = [f"{source}_mbox_{what}_flat" for source in PRIOR_BOX_PARAM]
        layers.append(
            {
                "name": f"mbox_{what}",
                "type": "Concat",
                "bottom": bottom,
                "top": f"mbox_{what}",
            }
        )
    return layers


MULTIBOX_LOSS_PARAM = {
    "loc_weight": 1.5,
    "overlap_threshold": 0.5,
    "neg_overlap": 0.5,
    "neg_pos_ratio": 3.0,
    "background_label_id": 0,
}

# ------------------------------------------------------------------------ layers


def im2col_forward(bottom, weight, bias, p):
    kernel, pad = p["kernel_size"], p["pad"]
    stride, dilation = p.get("stride", 1), p.get("dilation", 1)
    extent = dilation * (kernel - 1) + 1
    height, width = (
        (size + 2 * pad - extent) // stride + 1 for size in bottom.shape[2:]
    )
    col = nn.functional.unfold(bottom, kernel, dilation, pad, stride)
    top = torch.matmul(weight.flatten(1), col) + bias[:, None]
    return top.view(-1, p["num_output"], height, width)


def pooling_forward(bottom, p):
    """Maximum; a window that is begun is pooled."""
    kernel, stride, pad = p["kernel_size"], p["stride"], p["pad"]
    behind = []
    for size in bottom.shape[2:]:
        pooled = math.ceil((size + 2 * pad - kernel) / stride) + 1
        if (pooled - 1) * stride >= size + pad:
            pooled -= 1
        behind.append((pooled - 1) * stride + kernel - size - pad)
    padded = nn.functional.pad(
        bottom, (pad, behind[1], pad, behind[0]), value=-math.inf
    )
    return nn.functional.max_pool2d(padded, kernel, stride)


class Normalize(Function):
    @staticmethod
    def forward(ctx, bottom, scale, across_spatial):
        axes = (1, 2, 3) if across_spatial else (1,)
        norm = (bottom**2).sum(axes, keepdim=True).add(1e-10).sqrt()
        unit = bottom / norm
        ctx.save_for_backward(unit, norm, scale)
        ctx.axes = axes
        return unit * scale[:, None, None]

    @staticmethod
    def backward(ctx, top_diff):
        unit, norm, scale = ctx.saved_tensors
        scale_diff = (top_diff * unit).sum((0, 2, 3))
        diff = top_diff * scale[:, None, None]
        along = (diff * unit).sum(ctx.axes, keepdim=True)
        return (diff - unit * along) / norm, scale_diff, None


class SmoothL1Loss(Function):
    @staticmethod
    def forward(ctx, pred, gt):
        diff = pred - gt
        ctx.save_for_backward(diff)
        size = diff.abs()
        return torch.where(size < 1, 0.5 * diff**2, size - 0.5).sum()

    @staticmethod
    def backward(ctx, top_diff):
        (diff,) = ctx.saved_tensors
        return top_diff * diff.clamp(-1, 1), None


class SoftmaxWithLoss(Function):
    @staticmethod
    def forward(ctx, score, label):
        prob = softmax(score)
        ctx.save_for_backward(prob, label)
        picked = prob.gather(1, label[:, None])
        return -picked.log().sum()

    @staticmethod
    def backward(ctx, top_diff):
        prob, label = ctx.saved_tensors
        diff = prob.clone()
        diff[torch.arange(len(label)), label] -= 1
        return top_diff * diff, None


def softmax(score):
    data = (score - score.amax(-1, keepdim=True)).exp()
    return data / data.sum(-1, keepdim=True)


class Net(nn.Module):
    def __init__(self, layers, blobs):
        super().__init__()
        self.layers = layers
        self.params = nn.ModuleDict()
        self.param_specs = []
        for layer in layers:
            if "param" in layer:
                values = [nn.Parameter(blob.clone()) for blob in blobs[layer["name"]]]
                self.params[layer["name"]] = nn.ParameterList(values)
                self.param_specs += zip(values, layer["param"])

    def layer_forward(self, layer, bottom):
        if layer["type"] == "Convolution":
            weight, bias = list(self.params[layer["name"]])
            return im2col_forward(bottom[0], weight, bias, layer["convolution_param"])
        if layer["type"] == "Normalize":
            scale = list(self.params[layer["name"]])[0]
            spatial = layer["norm_param"]["across_spatial"]
            return Normalize.apply(bottom[0], scale, spatial)
        if layer["type"] == "Pooling":
            return pooling_forward(bottom[0], layer["pooling_param"])
        if layer["type"] == "ReLU":
            return torch.where(bottom[0] > 0, bottom[0], torch.zeros_like(bottom[0]))
        if layer["type"] == "Permute":
            return bottom[0].permute(layer["order"])
        if layer["type"] == "Flatten":
            return bottom[0].flatten(1)
        return torch.cat(bottom, 1)

    def forward(self, data):
        blobs = {"data": data}
        for layer in self.layers:
            bottom = [blobs[name] for name in layer["bottom"]]
            blobs[layer["top"]] = self.layer_forward(layer, bottom)
        return blobs


# -------------------------------------------------------------------- caffemodel


def conv_names():
    """Names in the checkpoint and here."""
    names = {}
    for index, name in zip(
        (0, 2, 5, 7, 10, 12, 15, 17),
        [f"conv{i}_{j}" for i in (1, 2, 3, 4) for j in (1, 2)],
    ):
        names[f"lower.{index}"] = name
    names |= {"upper.1": "conv5_1", "upper.4": "fc6", "upper.6": "fc7"}
    for i in (1, 2):
        names[f"extra{i}.0"] = f"conv{i + 5}_1"
        names[f"extra{i}.2"] = f"conv{i + 5}_2"
    for i, source in enumerate(PRIOR_BOX_PARAM):
        names[f"loc.{i}"] = f"{source}_mbox_loc"
        names[f"conf.{i}"] = f"{source}_mbox_conf"
    return names


def convert(state):
    blobs = {
        name: [state[f"{key}.weight"], state[f"{key}.bias"]]
        for key, name in conv_names().items()
    }
    weight, bias = blobs["conv1_1"]
    blobs["conv1_1"] = [weight[:, [2, 1, 0]], bias]
    blobs["conv4_2_norm"] = [state["l2_norm.weight"]]
    return blobs


def model():
    state = torch.load(Path(__file__).with_name("weights.pt"))
    return Net(net_param(), convert(state))


# -------------------------------------------------------------------- data layer


def transform(image, mirror):
    """RGB bytes -> BGR without the mean, some turned left to right."""
    mean = torch.tensor(TRANSFORM_PARAM["mean_value"])[:, None, None]
    bgr = image[:, [2, 1, 0]].float()
    data = (bgr - mean) * TRANSFORM_PARAM["scale"]
    turned = [datum.flip(2) if m else datum for datum, m in zip(data, mirror.tolist())]
    return torch.stack(turned)


def annotated_data(targets, mirror):
    """Rows of item, label, xmin, ymin, xmax, ymax."""
    rows = []
    for item_id, target in enumerate(targets):
        for label, box in zip(target["labels"], target["boxes"]):
            xmin, ymin, xmax, ymax = box
            if mirror[item_id]:
                xmin, xmax = 1 - xmax, 1 - xmin
            item = torch.tensor(float(item_id))
            rows.append(torch.stack([item, label.float(), xmin, ymin, xmax, ymax]))
    return torch.stack(rows)


def forward(net, batch):
    blobs = net(transform(batch["image"], batch["mirror"]))
    num = len(batch["image"])
    return {
        "loc": blobs["mbox_loc"].view(num, -1, 4),
        "conf": blobs["mbox_conf"].view(num, -1, NUM_CLASSES),
    }


# ----------------------------------------------------------------- multibox loss


def prior_box(p):
    """(1, 2, boxes * 4): corners, then variances."""
    layer_height, layer_width = p["layer"]
    step_w = step_h = p["step"]
    middle = math.sqrt(p["min_size"] * p["max_size"])
    sizes = [(p["min_size"], p["min_size"]), (middle, middle)]
    for ar in p["aspect_ratio"]:
        for ratio in (ar, 1.0 / ar):
            box_width = p["min_size"] * math.sqrt(ratio)
            box_height = p["min_size"] / math.sqrt(ratio)
            sizes.append((box_width, box_height))
    top_data = []
    for h in range(layer_height):
        for w in range(layer_width):
            center_x = (w + 0.5) * step_w
            center_y = (h + 0.5) * step_h
            for box_width, box_height in sizes:
                top_data += [
                    (center_x - box_width / 2.0) / IMG_WIDTH,
                    (center_y - box_height / 2.0) / IMG_HEIGHT,
                    (center_x + box_width / 2.0) / IMG_WIDTH,
                    (center_y + box_height / 2.0) / IMG_HEIGHT,
                ]
    variance = VARIANCE * (len(top_data) // 4)
    return torch.tensor([[top_data, variance]])


def jaccard_overlap(gt, prior):
    """(gt, priors)."""
    xmin, ymin, xmax, ymax = prior.unbind(1)
    gt_xmin, gt_ymin, gt_xmax, gt_ymax = gt.t()[:, :, None]
    width = torch.minimum(gt_xmax, xmax) - torch.maximum(gt_xmin, xmin)
    height = torch.minimum(gt_ymax, ymax) - torch.maximum(gt_ymin, ymin)
    intersect = width.clamp(min=0) * height.clamp(min=0)
    prior_size = (xmax - xmin) * (ymax - ymin)
    gt_size = (gt_xmax - gt_xmin) * (gt_ymax - gt_ymin)
    return intersect / (gt_size + prior_size - intersect)


def match_bbox(gt, prior):
    """Index of the ground truth for each prior, or -1; and the best overlap of each."""
    match_indices = torch.full((len(prior),), -1)
    if len(gt) == 0:
        return match_indices, torch.zeros(len(prior))
    overlaps = jaccard_overlap(gt, prior)
    max_overlap, max_idx = overlaps.max(0)
    # Bipartite: the best pair of all first.
    left = overlaps.clone()
    for _ in range(len(gt)):
        j, i = divmod(int(left.argmax()), len(prior))
        match_indices[i] = j
        left[j] = -1.0
        left[:, i] = -1.0
    # Per prediction, where nothing is matched yet.
    more = match_indices.eq(-1) & max_overlap.ge(
        MULTIBOX_LOSS_PARAM["overlap_threshold"]
    )
    return torch.where(more, max_idx, match_indices), max_overlap


def encode_bbox(prior, variance, gt):
    """Code type CENTER_SIZE."""
    prior_size = prior[:, 2:] - prior[:, :2]
    prior_center = (prior[:, :2] + prior[:, 2:]) / 2.0
    bbox_size = gt[:, 2:] - gt[:, :2]
    bbox_center = (gt[:, :2] + gt[:, 2:]) / 2.0
    center = (bbox_center - prior_center) / prior_size / variance[:, :2]
    size = (bbox_size / prior_size).log() / variance[:, 2:]
    return torch.cat([center, size], 1)


def mine_hard_examples(conf, match_indices, match_overlaps):
    """MAX_NEGATIVE: per item the negatives with the highest loss."""
    background = MULTIBOX_LOSS_PARAM["background_label_id"]
    conf_loss = -softmax(conf)[..., background].log()
    neg_indices = []
    for loss_i, match_i, overlap in zip(conf_loss, match_indices, match_overlaps):
        free = match_i.eq(-1) & overlap.lt(MULTIBOX_LOSS_PARAM["neg_overlap"])
        candidates = free.nonzero().flatten()
        num_pos = int(match_i.ne(-1).sum())
        num_neg = int(num_pos * MULTIBOX_LOSS_PARAM["neg_pos_ratio"])
        order = loss_i[candidates].argsort(descending=True)
        neg_indices.append(candidates[order[:num_neg]])
    return neg_indices


def loss(output, batch):
    loc_data, conf_data = output["loc"], output["conf"]
    with torch.no_grad():
        mbox_prior = torch.cat([prior_box(p) for p in PRIOR_BOX_PARAM.values()], 2)
        prior, variance = mbox_prior[0].view(2, -1, 4)
        label = annotated_data(batch["targets"], batch["mirror"])
        gts = [label[label[:, 0] == item] for item in range(len(loc_data))]
        matches = [match_bbox(gt[:, 2:], prior) for gt in gts]
        match_indices = [indices for indices, _ in matches]
        neg_indices = mine_hard_examples(
            conf_data.detach(), match_indices, [overlaps for _, overlaps in matches]
        )
        num_matches = sum(int(indices.ne(-1).sum()) for indices in match_indices)

    loc_pred, loc_gt, conf_pred, conf_gt = [], [], [], []
    for item, (gt, indices, neg) in enumerate(zip(gts, match_indices, neg_indices)):
        pos = indices.ne(-1).nonzero().flatten()
        matched = gt[indices[pos]]
        loc_pred.append(loc_data[item, pos])
        loc_gt.append(encode_bbox(prior[pos], variance[pos], matched[:, 2:]))
        conf_pred += [conf_data[item, pos], conf_data[item, neg]]
        background = MULTIBOX_LOSS_PARAM["background_label_id"]
        conf_gt += [matched[:, 1].long(), torch.full_like(neg, background)]

    loc_loss = SmoothL1Loss.apply(torch.cat(loc_pred), torch.cat(loc_gt))
    conf_loss = SoftmaxWithLoss.apply(torch.cat(conf_pred), torch.cat(conf_gt))
    normalizer = max(num_matches, 1)
    loc_weight = MULTIBOX_LOSS_PARAM["loc_weight"]
    return loc_weight * loc_loss / normalizer + conf_loss / normalizer


# ------------------------------------------------------------------------ solver

SOLVER_PARAM = {
    "base_lr": 0.04,
    "momentum": 0.9,
    "weight_decay": 0.02,
    "clip_gradients": 4.0,
    "warmup_iter": 2,
    "warmup_start": 0.25,
    "stepvalue": [8, 11],
    "gamma": 0.1,
}


class SGDSolver(torch.optim.Optimizer):
    """The rate is part of the history, which is scaled where the rate changes."""

    def __init__(self, param_specs, param):
        super().__init__([blob for blob, _ in param_specs], {})
        self.specs = [spec for _, spec in param_specs]
        self.param = param
        self.iter = 0
        self.last_rate = None

    def learning_rate(self):
        param = self.param
        if self.iter < param["warmup_iter"]:
            alpha = self.iter / param["warmup_iter"]
            return param["base_lr"] * (param["warmup_start"] * (1 - alpha) + alpha)
        current_step = sum(self.iter >= value for value in param["stepvalue"])
        return param["base_lr"] * param["gamma"] ** current_step

    def clip_gradients(self, diffs):
        sumsq_diff = sum((diff**2).sum() for diff in diffs)
        l2norm_diff = sumsq_diff.sqrt()
        clip = self.param["clip_gradients"]
        if l2norm_diff > clip:
            scale_factor = clip / l2norm_diff
            diffs = [diff * scale_factor for diff in diffs]
        return diffs

    @torch.no_grad()
    def step(self, closure=None):
        rate = self.learning_rate()
        self.iter += 1
        blobs = self.param_groups[0]["params"]
        diffs = self.clip_gradients([blob.grad for blob in blobs])
        correction = rate / self.last_rate if self.last_rate else 1.0
        momentum = self.param["momentum"] * correction
        for blob, diff, spec in zip(blobs, diffs, self.specs):
            local_rate = rate * spec["lr_mult"]
            local_decay = self.param["weight_decay"] * spec["decay_mult"]
            diff = diff + local_decay * blob
            if not self.state[blob]:
                self.state[blob]["history"] = torch.zeros_like(blob)
            history = self.state[blob]["history"]
            history.mul_(momentum).add_(diff, alpha=local_rate)
            blob.sub_(history)
        self.last_rate = rate


def optimizer(net):
    return SGDSolver(net.param_specs, SOLVER_PARAM)
