# params in a flat dict; cells written out; forward algorithm in matrices
import pathlib

import torch

H = 9


def cell(x, h, c, w, u, b):
    gates = x @ w + h @ u + b
    i, o, f, g = gates.split(H, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def reorder(w):
    i, f, g, o = w.chunk(4)
    return torch.cat([i, o, f, g])


class Params(torch.nn.Module):
    def __init__(self, sd):
        super().__init__()

        def put(name, v):
            v = v.contiguous().clone()
            self.register_parameter(name, torch.nn.Parameter(v))

        put("word_table", sd["words.weight"])
        put("char_table", sd["chars.weight"])
        put("char_kernel", sd["char_cnn.weight"].permute(2, 1, 0))
        put("char_bias", sd["char_cnn.bias"])
        for way, tail in (("fw", ""), ("bw", "_reverse")):
            put(f"{way}_w", reorder(sd[f"lstm.weight_ih_l0{tail}"]).T)
            put(f"{way}_u", reorder(sd[f"lstm.weight_hh_l0{tail}"]).T)
            put(
                f"{way}_b",
                reorder(sd[f"lstm.bias_ih_l0{tail}"] + sd[f"lstm.bias_hh_l0{tail}"]),
            )
        put("ln_gamma", sd["norm.weight"])
        put("ln_beta", sd["norm.bias"])
        put("proj", sd["emit.weight"].T)
        put("proj_b", sd["emit.bias"])
        put("edges", sd["crf.trans"])
        put("first", sd["crf.start"])
        put("last", sd["crf.stop"])


def scan(p, way, xs):
    h = xs.new_zeros(xs.shape[1], H)
    c = xs.new_zeros(xs.shape[1], H)
    w, u, b = (getattr(p, f"{way}_{k}") for k in "wub")
    hs = []
    for x in xs:
        h, c = cell(x, h, c, w, u, b)
        hs.append(h)
    return torch.stack(hs)


def layer_norm(x, gamma, beta):
    mu = x.mean(-1, keepdim=True)
    var = (x - mu).pow(2).mean(-1, keepdim=True)
    return (x - mu) * torch.rsqrt(var + 1e-5) * gamma + beta


def encode(p, words, chars):
    e = p.char_table[chars]
    padded = torch.nn.functional.pad(e, (0, 0, 1, 1))
    n = e.shape[2]
    windows = torch.stack([padded[:, :, k : k + n] for k in range(3)], dim=3)
    conv = torch.einsum("btnki,kio->btno", windows, p.char_kernel) + p.char_bias
    letters = conv.tanh().amax(2)
    xs = torch.cat([p.word_table[words], letters], -1).transpose(0, 1)
    forwards = scan(p, "fw", xs)
    backwards = scan(p, "bw", xs.flip(0)).flip(0)
    hs = torch.cat([forwards, backwards], -1)
    return layer_norm(hs, p.ln_gamma, p.ln_beta) @ p.proj + p.proj_b


def log_partition(p, emit):
    a = p.first + emit[0]
    for e in emit[1:]:
        top = a.max(1, keepdim=True).values
        a = top + torch.log(torch.exp(a - top) @ torch.exp(p.edges)) + e
    return torch.log(torch.exp(a + p.last).sum(1))


def path_score(p, emit, tags):
    hot = torch.nn.functional.one_hot(tags, 5).to(emit.dtype)
    score = (emit * hot).sum((0, 2))
    score = score + torch.einsum("tbi,ij,tbj->b", hot[:-1], p.edges, hot[1:])
    return score + hot[0] @ p.first + hot[-1] @ p.last


def model():
    return Params(torch.load(pathlib.Path(__file__).parent / "weights.pt"))


def forward(p, batch):
    emit = encode(p, batch["words"], batch["chars"])
    return log_partition(p, emit) - path_score(p, emit, batch["tags"].T)


def loss(output, batch):
    return output.sum() / output.numel()


def optimizer(p):
    return torch.optim.SGD(p.parameters(), lr=0.05)
