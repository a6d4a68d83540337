"""As in an engine for edge devices: every layer is a product of matrices and a scatter.

Convolutions gather columns, transposed convolutions scatter them. Rows of all pictures, and
of all slots, stand in one matrix. Kernels have backward passes of their own.
"""

from pathlib import Path

import torch
from torch import nn
from torch.autograd import Function
from torch.nn.functional import fold, unfold

IMAGE_H, IMAGE_W = 16, 24
N_SLOTS, N_DIM = 4, 10
N_COLOUR = 3
ATTN_FLOOR = 1e-8


# Kernels.


class ConvRelu(Function):
    """x (n, c, h, w); w (out, c * k * k); b (out)."""

    @staticmethod
    def forward(ctx, x, w, b, k, stride):
        n, _, height, width = x.shape
        cols = unfold(x, k, padding=k // 2, stride=stride)
        y = torch.matmul(w, cols) + b[:, None]
        y = y.clamp(min=0)
        ctx.save_for_backward(cols, w, y)
        ctx.geometry = (height, width), k, stride
        return y.view(n, len(w), height // stride, width // stride)

    @staticmethod
    def backward(ctx, g):
        cols, w, y = ctx.saved_tensors
        size, k, stride = ctx.geometry
        g = g.flatten(2)
        g = g * (y > 0)
        gw = torch.einsum("nop,ncp->oc", g, cols)
        gb = g.sum((0, 2))
        gx = None
        if ctx.needs_input_grad[0]:
            gcols = torch.matmul(w.t(), g)
            gx = fold(gcols, size, k, padding=k // 2, stride=stride)
        return gx, gw, gb, None, None


class Deconv(Function):
    """x (n, c, h, w); w (out * k * k, c); b (out). The picture grows by the stride."""

    @staticmethod
    def forward(ctx, x, w, b, k, stride):
        height, width = x.shape[2] * stride, x.shape[3] * stride
        x = x.flatten(2)
        cols = torch.matmul(w, x)
        ctx.save_for_backward(x, w)
        ctx.geometry = k, stride, height // stride
        y = fold(cols, (height, width), k, padding=k // 2, stride=stride)
        return y + b[:, None, None]

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        k, stride, rows = ctx.geometry
        gcols = unfold(g, k, padding=k // 2, stride=stride)
        gw = torch.einsum("nop,ncp->oc", gcols, x)
        gb = g.sum((0, 2, 3))
        gx = torch.matmul(w.t(), gcols)
        return gx.unflatten(2, (rows, -1)), gw, gb, None, None


class NormRows(Function):
    """x (rows, c); gb (2, c): gain and shift."""

    @staticmethod
    def forward(ctx, x, gb):
        centred = x - x.mean(1, keepdim=True)
        inv = (centred.pow(2).mean(1, keepdim=True) + 1e-5).rsqrt()
        xhat = centred * inv
        ctx.save_for_backward(xhat, inv, gb)
        return xhat * gb[0] + gb[1]

    @staticmethod
    def backward(ctx, g):
        xhat, inv, gb = ctx.saved_tensors
        ggb = torch.stack([(g * xhat).sum(0), g.sum(0)])
        gh = g * gb[0]
        along = (gh * xhat).mean(1, keepdim=True)
        gx = inv * (gh - gh.mean(1, keepdim=True) - xhat * along)
        return gx, ggb


class Compete(Function):
    """Logits (n, slots, pixels) -> shares of a slot, which come to one over the pixels."""

    @staticmethod
    def forward(ctx, logits):
        p = logits.softmax(1)
        a = p + ATTN_FLOOR
        mass = a.sum(2, keepdim=True)
        share = a / mass
        ctx.save_for_backward(p, mass, share)
        return share

    @staticmethod
    def backward(ctx, g):
        p, mass, share = ctx.saved_tensors
        ga = (g - (g * share).sum(2, keepdim=True)) / mass
        return p * (ga - (ga * p).sum(1, keepdim=True))


class Gates(Function):
    """gx, gh (3, rows, c): update, reset, new, of the input and of the state h (rows, c)."""

    @staticmethod
    def forward(ctx, gx, gh, h):
        z = torch.sigmoid(gx[0] + gh[0])
        r = torch.sigmoid(gx[1] + gh[1])
        c = torch.tanh(gx[2] + r * gh[2])
        ctx.save_for_backward(z, r, c, gh, h)
        return c + z * (h - c)

    @staticmethod
    def backward(ctx, g):
        z, r, c, gh, h = ctx.saved_tensors
        dc = g * (1 - z) * (1 - c * c)
        dz = g * (h - c) * z * (1 - z)
        dr = dc * gh[2] * r * (1 - r)
        dgx = torch.stack([dz, dr, dc])
        dgh = torch.stack([dz, dr, dc * r])
        return dgx, dgh, g * z


# The network.


def border_table(height, width):
    """Rows: share of the way down, across, and what is left of both (4, height * width)."""
    place = torch.arange(height * width)
    down = place.div(width, rounding_mode="floor") / (height - 1)
    across = place.remainder(width) / (width - 1)
    return torch.stack([down, across, 1 - down, 1 - across])


class Engine(nn.Module):
    def __init__(self, weights, constants):
        super().__init__()
        for name, value in weights.items():
            self.register_parameter(name, nn.Parameter(value.contiguous().clone()))
        for name, value in constants.items():
            self.register_buffer(name, value.contiguous().clone())

    def encode(self, x):
        x = ConvRelu.apply(x, self.enc0_w, self.enc0_b, 5, 1)
        x = ConvRelu.apply(x, self.enc1_w, self.enc1_b, 5, 2)
        x = ConvRelu.apply(x, self.enc2_w, self.enc2_b, 5, 1)
        x = x.flatten(2) + torch.addmm(self.enc_pos_b, self.enc_pos_w, self.enc_table)
        rows = x.transpose(1, 2).flatten(0, 1)
        rows = NormRows.apply(rows, self.feature_norm)
        rows = torch.addmm(self.up_b, rows, self.up_w.t()).relu()
        return torch.addmm(self.down_b, rows, self.down_w.t())

    def start(self, n):
        mu, log_sigma = self.slot_init
        first = torch.addcmul(mu, log_sigma.exp(), self.noise)
        return first.repeat(n, 1)

    def refine(self, h, keys, values):
        """h (n * slots, c); keys, values (n, pixels, c)."""
        n = len(keys)
        normed = NormRows.apply(h, self.slot_norms[0])
        q = normed.mm(self.q_w.t()).view(n, N_SLOTS, N_DIM)
        logits = torch.bmm(q, keys.transpose(1, 2)) * N_DIM**-0.5
        update = torch.bmm(Compete.apply(logits), values).view(n * N_SLOTS, N_DIM)

        bias_x, bias_h = self.gru_b.unsqueeze(2)
        gx = torch.matmul(update, self.gru_x.transpose(1, 2)) + bias_x
        gh = torch.matmul(h, self.gru_h.transpose(1, 2)) + bias_h
        h = Gates.apply(gx, gh, h)

        normed = NormRows.apply(h, self.slot_norms[1])
        hidden = torch.addmm(self.slot_up_b, normed, self.slot_up_w.t()).relu()
        return h + torch.addmm(self.slot_down_b, hidden, self.slot_down_w.t())

    def slots(self, rows, n):
        rows = NormRows.apply(rows, self.input_norm)
        both = rows.mm(self.vk_w.t()).view(n, -1, 2 * N_DIM)
        values, keys = both[..., :N_DIM], both[..., N_DIM:]
        h = self.start(n)
        h = self.refine(h, keys, values)
        h = self.refine(h, keys, values)
        return self.refine(h, keys, values)

    def paint(self, h):
        """(n * slots, c) -> (n * slots, colours and alpha, height, width)."""
        plane = torch.addmm(self.dec_pos_b, self.dec_pos_w, self.dec_table)
        x = h.unsqueeze(2) + plane
        x = x.unflatten(2, (IMAGE_H // 4, IMAGE_W // 4))
        x = Deconv.apply(x, self.dec0_w, self.dec0_b, 5, 2).relu()
        x = Deconv.apply(x, self.dec1_w, self.dec1_b, 5, 2).relu()
        return Deconv.apply(x, self.dec2_w, self.dec2_b, 3, 1)

    def forward(self, image):
        n = len(image)
        image = (image - 127.5) / 127.5
        h = self.slots(self.encode(image), n)
        layers = self.paint(h).view(n, N_SLOTS, N_COLOUR + 1, IMAGE_H, IMAGE_W)
        colours, alpha = layers[:, :, :N_COLOUR], layers[:, :, N_COLOUR]
        shares = (alpha - alpha.logsumexp(1, keepdim=True)).exp()
        blended = torch.einsum("nkchw,nkhw->nchw", colours, shares)
        return blended, shares, h.view(n, N_SLOTS, N_DIM)


# Conversion.


def convolutions(source):
    weights = {}
    for i in range(3):
        kernel = source[f"encoder_cnn.{2 * i}.weight"]
        weights[f"enc{i}_w"] = kernel.flatten(1)
        weights[f"enc{i}_b"] = source[f"encoder_cnn.{2 * i}.bias"]
    for i in range(3):
        kernel = source[f"decoder_cnn.{2 * i}.weight"]
        weights[f"dec{i}_w"] = kernel.flatten(1).t()
        weights[f"dec{i}_b"] = source[f"decoder_cnn.{2 * i}.bias"]
    return weights


def positions(source):
    return {
        "enc_pos_w": source["encoder_pos.dense.weight"],
        "enc_pos_b": source["encoder_pos.dense.bias"].unsqueeze(1),
        "dec_pos_w": source["decoder_pos.dense.weight"],
        "dec_pos_b": source["decoder_pos.dense.bias"].unsqueeze(1),
    }


def norm_of(source, name):
    return torch.stack([source[name + ".weight"], source[name + ".bias"]])


def recurrent(source, name):
    """Stack the gates: update, reset, new."""

    def stacked(kind):
        reset, update, new = source[f"{name}.{kind}"].chunk(3)
        return torch.stack([update, reset, new])

    return {
        "gru_x": stacked("weight_ih"),
        "gru_h": stacked("weight_hh"),
        "gru_b": torch.stack([stacked("bias_ih"), stacked("bias_hh")]),
    }


def attention(source, name):
    mu, log_sigma = source[name + ".slots_mu"], source[name + ".slots_log_sigma"]
    values, keys = (
        source[name + ".project_v.weight"],
        source[name + ".project_k.weight"],
    )
    norms = [norm_of(source, f"{name}.{each}") for each in ("norm_slots", "norm_mlp")]
    return {
        "slot_init": torch.cat([mu, log_sigma]).squeeze(1),
        "input_norm": norm_of(source, name + ".norm_inputs"),
        "slot_norms": torch.stack(norms),
        "q_w": source[name + ".project_q.weight"],
        "vk_w": torch.cat([values, keys]),
        **recurrent(source, name + ".gru"),
        "slot_up_w": source[name + ".mlp.0.weight"],
        "slot_up_b": source[name + ".mlp.0.bias"],
        "slot_down_w": source[name + ".mlp.2.weight"],
        "slot_down_b": source[name + ".mlp.2.bias"],
    }


def converted(source):
    return {
        **convolutions(source),
        **positions(source),
        "feature_norm": norm_of(source, "layer_norm"),
        "up_w": source["mlp.0.weight"],
        "up_b": source["mlp.0.bias"],
        "down_w": source["mlp.2.weight"],
        "down_b": source["mlp.2.bias"],
        **attention(source, "slot_attention"),
    }


def model():
    source = torch.load(Path(__file__).with_name("weights.pt"))
    constants = {
        "noise": source["slot_attention.noise"][0],
        "enc_table": border_table(IMAGE_H // 2, IMAGE_W // 2),
        "dec_table": border_table(IMAGE_H // 4, IMAGE_W // 4),
    }
    return Engine(converted(source), constants)


def forward(net, batch):
    blended, shares, slots = net(batch["image"])
    return {"recon": blended, "masks": shares, "slots": slots}


def loss(output, batch):
    target = (batch["image"] - 127.5) / 127.5
    missed = (output["recon"] - target).flatten()
    return missed.dot(missed) / missed.numel()


def optimizer(net):
    return torch.optim.Adam(
        [{"params": [value]} for value in net.parameters()],
        lr=2e-3,
        betas=(0.9, 0.98),
        eps=1e-6,
        weight_decay=1e-2,
    )
