"""Channels last, kernels (height, width, in, out), heads an axis of each kernel."""

from pathlib import Path

import torch
from torch import nn

IMAGE_SIZE = 32


def variable(value):
    return nn.Parameter(value.clone().contiguous())


def gelu(x):
    return nn.functional.gelu(x, approximate="none")


class Dense(nn.Module):
    def __init__(self, weights, name):
        super().__init__()
        self.kernel = variable(weights[name + ".weight"].T)
        self.bias = variable(weights[name + ".bias"])

    def forward(self, x):
        return torch.matmul(x, self.kernel) + self.bias


class Conv2D(nn.Module):
    """A kernel that is laid on patches, with padding around or with strides of its size."""

    def __init__(self, weights, name, padding=0, strides=1):
        super().__init__()
        self.kernel = variable(weights[name + ".weight"].permute(2, 3, 1, 0))
        self.bias = None
        if name + ".bias" in weights:
            self.bias = variable(weights[name + ".bias"])
        self.padding, self.strides = padding, strides

    def forward(self, x):
        p = self.padding
        kh, kw = self.kernel.shape[:2]
        x = nn.functional.pad(x, (0, 0, p, p, p, p))
        x = x.unfold(1, kh, self.strides).unfold(2, kw, self.strides)
        x = torch.einsum("bhwcij,ijco->bhwo", x, self.kernel)
        return x if self.bias is None else x + self.bias


class Conv2DTranspose(nn.Module):
    """Strides of the kernel's size: each place becomes a small block."""

    def __init__(self, weights, name):
        super().__init__()
        self.kernel = variable(weights[name + ".weight"].permute(2, 3, 1, 0))
        self.bias = variable(weights[name + ".bias"])

    def forward(self, x):
        b, h, w, _ = x.shape
        kh, kw, filters, _ = self.kernel.shape
        blocks = torch.einsum("bhwc,ijoc->bhiwjo", x, self.kernel)
        return blocks.reshape(b, h * kh, w * kw, filters) + self.bias


class LayerNormalization(nn.Module):
    def __init__(self, weights, name, epsilon):
        super().__init__()
        self.gamma = variable(weights[name + ".weight"])
        self.beta = variable(weights[name + ".bias"])
        self.epsilon = epsilon

    def forward(self, x):
        centered = x - x.mean(dim=-1, keepdim=True)
        variance = centered.square().mean(dim=-1, keepdim=True)
        return centered * torch.rsqrt(variance + self.epsilon) * self.gamma + self.beta


class ToHeads(nn.Module):
    """(..., channels) to (..., heads, size)."""

    def __init__(self, weight, bias, heads):
        super().__init__()
        channels = weight.shape[1]
        self.kernel = variable(weight.T.reshape(channels, heads, -1))
        self.bias = variable(bias.reshape(heads, -1))

    def forward(self, x):
        return torch.einsum("...c,cnd->...nd", x, self.kernel) + self.bias


class FromHeads(nn.Module):
    """(..., heads, size) to (..., channels)."""

    def __init__(self, weights, name, heads):
        super().__init__()
        kernel = weights[name + ".weight"].T
        self.kernel = variable(kernel.reshape(heads, -1, kernel.shape[1]))
        self.bias = variable(weights[name + ".bias"])

    def forward(self, x):
        return torch.einsum("...nd,ndc->...c", x, self.kernel) + self.bias


class SpatialAttention(nn.Module):
    def __init__(self, weights, name, heads=3):
        super().__init__()
        q, k, v = weights[name + ".qkv.weight"].chunk(3)
        q_bias, k_bias, v_bias = weights[name + ".qkv.bias"].chunk(3)
        self.query = ToHeads(q, q_bias, heads)
        self.key = ToHeads(k, k_bias, heads)
        self.value = ToHeads(v, v_bias, heads)
        self.attention_output = FromHeads(weights, name + ".proj", heads)
        self.vertical = variable(weights[name + ".rel_pos_h"])
        self.horizontal = variable(weights[name + ".rel_pos_w"])

    def relative(self, table, length):
        place = torch.arange(length)
        return table[place.unsqueeze(1) - place.unsqueeze(0) + length - 1]

    def forward(self, x):
        query, key, value = self.query(x), self.key(x), self.value(x)
        height, width, _, size = query.shape[1:]
        scores = torch.einsum("bijnd,bklnd->bnijkl", query, key) * size**-0.5
        rows = self.relative(self.vertical, height)
        columns = self.relative(self.horizontal, width)
        rows = torch.einsum("bijnd,ikd->bnijk", query, rows)
        columns = torch.einsum("bijnd,jld->bnijl", query, columns)
        scores = scores + rows.unsqueeze(-1)
        scores = scores + columns.unsqueeze(-2)
        probabilities = torch.softmax(scores.flatten(-2), dim=-1)
        probabilities = probabilities.unflatten(-1, (height, width))
        x = torch.einsum("bnijkl,bklnd->bijnd", probabilities, value)
        return self.attention_output(x)


class EncoderLayer(nn.Module):
    def __init__(self, weights, name, window):
        super().__init__()
        self.window = window
        self.norm_before = LayerNormalization(weights, name + ".norm1", 1e-6)
        self.attention = SpatialAttention(weights, name + ".attn")
        self.norm_between = LayerNormalization(weights, name + ".norm2", 1e-6)
        self.expand = Dense(weights, name + ".mlp.0")
        self.contract = Dense(weights, name + ".mlp.2")

    def partition(self, x):
        """(b, h, w, c) to windows, and how many of them lie below and beside another."""
        size = self.window
        below, beside = -x.shape[1] % size, -x.shape[2] % size
        x = nn.functional.pad(x, (0, 0, 0, beside, 0, below))
        x = x.unflatten(2, (-1, size)).unflatten(1, (-1, size))
        return x.swapaxes(2, 3).flatten(0, 2), (x.shape[1], x.shape[3])

    def merge(self, windows, counts, height, width):
        x = windows.unflatten(0, (-1, *counts)).swapaxes(2, 3)
        x = x.flatten(3, 4).flatten(1, 2)
        return x[:, :height, :width]

    def forward(self, x):
        shortcut = x
        x = self.norm_before(x)
        if self.window:
            windows, counts = self.partition(x)
            windows = self.attention(windows)
            x = self.merge(windows, counts, *x.shape[1:3])
        else:
            x = self.attention(x)
        x = shortcut + x
        hidden = gelu(self.expand(self.norm_between(x)))
        return x + self.contract(hidden)


class Backbone(nn.Module):
    def __init__(self, weights, name):
        super().__init__()
        self.patching = Conv2D(weights, name + ".patch_embed", strides=4)
        self.positions = variable(weights[name + ".pos_embed"])
        self.transformer_layers = nn.ModuleList(
            EncoderLayer(weights, f"{name}.blocks.{i}", window)
            for i, window in enumerate((3, 0, 3))
        )
        self.neck_1 = Conv2D(weights, name + ".neck.0")
        self.neck_1_norm = LayerNormalization(weights, name + ".neck.1", 1e-6)
        self.neck_2 = Conv2D(weights, name + ".neck.2", padding=1)
        self.neck_2_norm = LayerNormalization(weights, name + ".neck.3", 1e-6)

    def forward(self, image):
        x = self.patching(image) + self.positions
        for layer in self.transformer_layers:
            x = layer(x)
        x = self.neck_1_norm(self.neck_1(x))
        return self.neck_2_norm(self.neck_2(x))


class Prompts(nn.Module):
    """Kinds: no point, background, foreground, the two corners of a box."""

    def __init__(self, weights, name):
        super().__init__()
        names = "not_a_point background foreground top_left bottom_right"
        kinds = [weights[f"{name}.{kind}"] for kind in names.split()]
        self.kinds = variable(torch.stack(kinds))
        self.without_mask = variable(weights[name + ".no_mask"])
        self.register_buffer("frequencies", weights[name + ".gaussian"].clone())

    def fourier(self, x, y):
        """x and y from 0 to 1."""
        x, y = 2.0 * x - 1.0, 2.0 * y - 1.0
        angle = x.unsqueeze(-1) * self.frequencies[0]
        angle = angle + y.unsqueeze(-1) * self.frequencies[1]
        angle = angle * (2.0 * torch.pi)
        return torch.cat([torch.sin(angle), torch.cos(angle)], dim=-1)

    def of_pixels(self, coordinates):
        x, y = ((coordinates + 0.5) / IMAGE_SIZE).unbind(-1)
        return self.fourier(x, y)

    def of_grid(self, height, width):
        y = (torch.arange(height) + 0.5) / height
        x = (torch.arange(width) + 0.5) / width
        return self.fourier(x.expand(height, width), y[:, None].expand(height, width))

    def forward(self, points, labels, boxes):
        there = (labels >= 0).unsqueeze(-1)
        points = self.of_pixels(points) * there + self.kinds[labels + 1]
        corners = self.of_pixels(boxes.unflatten(-1, (2, 2))) + self.kinds[3:]
        return torch.cat([points, corners], dim=1)


class MultiHeadAttention(nn.Module):
    def __init__(self, weights, name, heads=4):
        super().__init__()
        for attribute, part in (("query", "q"), ("key", "k"), ("value", "v")):
            weight = weights[f"{name}.{part}_proj.weight"]
            bias = weights[f"{name}.{part}_proj.bias"]
            setattr(self, attribute, ToHeads(weight, bias, heads))
        self.attention_output = FromHeads(weights, name + ".out_proj", heads)

    def forward(self, query, value, key):
        query, key, value = self.query(query), self.key(key), self.value(value)
        query = query * query.shape[-1] ** -0.5
        scores = torch.einsum("bqnd,bknd->bnqk", query, key)
        probabilities = torch.softmax(scores, dim=-1)
        x = torch.einsum("bnqk,bknd->bqnd", probabilities, value)
        return self.attention_output(x)


class DecoderLayer(nn.Module):
    def __init__(self, weights, name):
        super().__init__()
        self.among_tokens = MultiHeadAttention(weights, name + ".self_attn")
        self.among_tokens_norm = LayerNormalization(weights, name + ".norm1", 1e-5)
        self.read_image = MultiHeadAttention(weights, name + ".token_to_image")
        self.read_image_norm = LayerNormalization(weights, name + ".norm2", 1e-5)
        self.hidden = Dense(weights, name + ".mlp.0")
        self.contract = Dense(weights, name + ".mlp.2")
        self.mlp_norm = LayerNormalization(weights, name + ".norm3", 1e-5)
        self.read_tokens = MultiHeadAttention(weights, name + ".image_to_token")
        self.read_tokens_norm = LayerNormalization(weights, name + ".norm4", 1e-5)

    def forward(self, tokens, image, token_positions, image_positions, initial):
        if initial:
            tokens = self.among_tokens(tokens, tokens, tokens)
        else:
            placed = tokens + token_positions
            tokens = tokens + self.among_tokens(placed, tokens, placed)
        tokens = self.among_tokens_norm(tokens)
        placed_image = image + image_positions
        read = self.read_image(tokens + token_positions, image, placed_image)
        tokens = self.read_image_norm(tokens + read)
        tokens = tokens + self.contract(torch.relu(self.hidden(tokens)))
        tokens = self.mlp_norm(tokens)
        read = self.read_tokens(placed_image, tokens, tokens + token_positions)
        return tokens, self.read_tokens_norm(image + read)


class MLP(nn.Module):
    def __init__(self, weights, name):
        super().__init__()
        self.dense_1 = Dense(weights, name + ".layers.0")
        self.dense_2 = Dense(weights, name + ".layers.1")
        self.dense_3 = Dense(weights, name + ".layers.2")

    def forward(self, x):
        x = torch.relu(self.dense_1(x))
        x = torch.relu(self.dense_2(x))
        return self.dense_3(x)


class Masks(nn.Module):
    def __init__(self, weights, name):
        super().__init__()
        self.score_token = variable(weights[name + ".iou_token"])
        self.mask_tokens = variable(weights[name + ".mask_tokens"])
        inside = name + ".transformer"
        self.decoder_layers = nn.ModuleList(
            DecoderLayer(weights, f"{inside}.layers.{i}") for i in range(2)
        )
        self.last_read = MultiHeadAttention(weights, inside + ".final_attn")
        self.last_norm = LayerNormalization(weights, inside + ".norm_final", 1e-5)
        self.upscale_1 = Conv2DTranspose(weights, name + ".upscale.0")
        self.upscale_norm = LayerNormalization(weights, name + ".upscale.1", 1e-6)
        self.upscale_2 = Conv2DTranspose(weights, name + ".upscale.3")
        self.hypernetworks = nn.ModuleList(
            MLP(weights, f"{name}.hyper.{i}") for i in range(len(self.mask_tokens))
        )
        self.scores = MLP(weights, name + ".iou_head")

    def forward(self, image, image_positions, prompts):
        batch, height, width, _ = image.shape
        count = len(self.mask_tokens)
        own = torch.cat([self.score_token, self.mask_tokens]).expand(batch, -1, -1)
        tokens = start = torch.cat([own, prompts], dim=1)
        image = image.flatten(1, 2)
        image_positions = image_positions.flatten(0, 1)
        for i, layer in enumerate(self.decoder_layers):
            tokens, image = layer(tokens, image, start, image_positions, i == 0)
        read = self.last_read(tokens + start, image, image + image_positions)
        tokens = self.last_norm(tokens + read)
        x = self.upscale_norm(self.upscale_1(image.unflatten(1, (height, width))))
        x = gelu(self.upscale_2(gelu(x)))
        of_masks = tokens[:, 1 : 1 + count].unbind(1)
        mixed = [net(token) for net, token in zip(self.hypernetworks, of_masks)]
        masks = torch.einsum("bhwc,bmc->bmhw", x, torch.stack(mixed, dim=1))
        return masks, self.scores(tokens[:, 0])


class SegmentAnything(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.backbone = Backbone(weights, "image_encoder")
        self.prompts = Prompts(weights, "prompt_encoder")
        self.masks = Masks(weights, "mask_decoder")

    def forward(self, inputs):
        image = self.backbone(inputs["image"].movedim(1, -1))
        prompts = self.prompts(inputs["points"], inputs["labels"], inputs["boxes"])
        positions = self.prompts.of_grid(*image.shape[1:3])
        image = image + self.prompts.without_mask
        masks, scores = self.masks(image, positions, prompts)
        return {"masks": masks, "iou": scores}


def model():
    return SegmentAnything(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch)


def loss(output, batch):
    logits = output["masks"]
    wanted = batch["target"][:, None]
    inside = torch.sigmoid(logits)
    log_right = -torch.nn.functional.softplus(torch.where(wanted > 0, -logits, logits))
    wrong = torch.where(wanted > 0, 1.0 - inside, inside)
    focal = -(wrong.square() * log_right).mean(dim=(-2, -1))
    shared = (inside * wanted).sum(dim=(-2, -1))
    total = inside.sum(dim=(-2, -1)) + wanted.sum(dim=(-2, -1))
    dice = 1.0 - (2.0 * shared + 1.0) / (total + 1.0)
    truth = (shared / (total - shared)).detach()
    squared = (output["iou"] - truth).square().mean()
    return 20.0 * focal.mean() + dice.mean() + squared


def optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=8e-4, weight_decay=0.1)
