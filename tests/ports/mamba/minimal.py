# Single-class state space decoder; time first; weights as (in, out) matrices.
from pathlib import Path

import torch

EPS = 1e-5


def rms(v, gain):
    return v / (v.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * gain


class Decoder(torch.nn.Module):
    LAYERS = 2

    def __init__(self, sd):
        super().__init__()
        P = torch.nn.Parameter
        self.tok = P(sd["embedding.weight"].clone())
        self.last_gain = P(sd["norm_f.g"].clone())
        for i in range(self.LAYERS):
            k = f"layers.{i}.mixer."
            wx, wz = sd[k + "in_proj.weight"].split(24)
            wd, wb, wc = sd[k + "x_proj.weight"].split([2, 4, 4])
            p = {
                "gain": sd[f"layers.{i}.norm.g"],
                "wx": wx.t(),
                "wz": wz.t(),
                "taps": sd[k + "conv1d.weight"].squeeze(1).t(),
                "tap_bias": sd[k + "conv1d.bias"],
                "wdt": wd.t(),
                "wb": wb.t(),
                "wc": wc.t(),
                "up": sd[k + "dt_proj.weight"].t(),
                "up_bias": sd[k + "dt_proj.bias"],
                "decay": sd[k + "A_log"].exp().neg(),
                "skip": sd[k + "D"],
                "out": sd[k + "out_proj.weight"].t(),
            }
            for name, value in p.items():
                self.register_parameter(f"{name}{i}", P(value.clone().contiguous()))

    def block(self, i, s):
        w = {n[:-1]: p for n, p in self.named_parameters() if n.endswith(str(i))}
        T = s.shape[0]
        r = rms(s, w["gain"])
        x = r @ w["wx"]
        gate = r @ w["wz"]
        past = torch.cat([x.new_zeros(3, *x.shape[1:]), x])
        x = w["tap_bias"]
        for j in range(4):
            x = x + past[j : j + T] * w["taps"][j]
        x = x * torch.sigmoid(x)
        step = (x @ w["wdt"]) @ w["up"] + w["up_bias"]
        step = torch.log1p(torch.exp(step))
        keep = torch.exp(torch.einsum("tbe,en->tben", step, w["decay"]))
        drive = torch.einsum("tbe,tbn->tben", step * x, x @ w["wb"])
        read = x @ w["wc"]
        state = torch.zeros_like(drive[0])
        out = []
        for t in range(T):
            state = keep[t] * state + drive[t]
            out.append(torch.einsum("ben,bn->be", state, read[t]))
        y = torch.stack(out) + w["skip"] * x
        return s + (y * (gate * gate.sigmoid())) @ w["out"]

    def forward(self, ids):
        s = self.tok[ids.T]
        for i in range(self.LAYERS):
            s = self.block(i, s)
        return (rms(s, self.last_gain) @ self.tok.T).transpose(0, 1)


def model():
    return Decoder(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["ids"][:, :-1])


def loss(output, batch):
    logp = torch.log_softmax(output, -1)
    targets = batch["ids"][:, 1:]
    return -logp.gather(-1, targets[..., None]).mean()


def optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-3)
