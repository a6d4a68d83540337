"""Odd scripts: each has something that a recorder may stumble over, and prints what it computed.

All begin with ``PRELUDE`` and end by ``said(...)``, which prints the bits of tensors.
"""

from __future__ import annotations

PRELUDE = """
import hashlib, sys, threading, warnings
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
X = torch.linspace(-1, 1, 24).reshape(4, 6)
def said(*tensors):
    for t in tensors:
        t = t.detach()
        if t.is_complex(): t = torch.view_as_real(t.resolve_conj())
        print(tuple(t.shape), str(t.dtype), hashlib.sha256(t.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16] if t.numel() else "")
def train(model, optimizer, x=X, steps=3, loss=lambda y: y.square().mean()):
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model(x))
        value.backward()
        optimizer.step()
    said(value, *model.parameters())
"""

SCRIPTS: dict[str, str] = {
    "fp64 model": "m = nn.Linear(6, 3).double(); train(m, torch.optim.SGD(m.parameters(), 0.1), X.double())",
    "fp64 by default": "torch.set_default_dtype(torch.float64); m = nn.Linear(6, 3); train(m, torch.optim.Adam(m.parameters()), X.double())",
    "complex parameters": """
class C(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))
    def forward(self, x): return x.to(torch.complex64) @ self.w
m = C()
train(m, torch.optim.Adam(m.parameters()), loss=lambda y: y.abs().square().mean())
""",
    "lazy linear": """
m = nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(2))
m(X)
train(m, torch.optim.SGD(m.parameters(), 0.1))
""",
    "lazy until the loop": """
m = nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.Linear(5, 2))
o = torch.optim.SGD(m.parameters(), 0.1)
train(m, o)
""",
    "jagged nested tensors": """
m = nn.Linear(6, 3)
o = torch.optim.SGD(m.parameters(), 0.1)
for _ in range(3):
    n = torch.nested.nested_tensor([X[:2], X[:3]], layout=torch.jagged)
    o.zero_grad()
    y = m(n)
    loss = y.values().square().mean()
    loss.backward()
    o.step()
said(loss, *m.parameters())
""",
    "strided nested tensors": """
m = nn.Linear(6, 3)
n = torch.nested.nested_tensor([X[:2], X[:3]])
y = torch.nested.to_padded_tensor(m(n), 0.0)
y.sum().backward()
torch.optim.SGD(m.parameters(), 0.1).step()
said(y, *m.parameters())
""",
    "adafactor without lr": """
m = nn.Linear(6, 3)
from transformers.optimization import Adafactor
train(m, Adafactor(m.parameters()))
""",
    "an optimizer without lr": """
class Plain(torch.optim.Optimizer):
    def __init__(self, parameters): super().__init__(parameters, {})
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None: p -= 0.1 * p.grad
m = nn.Linear(6, 3)
train(m, Plain(m.parameters()))
""",
    "an optimizer whose lr is a text": """
class Named(torch.optim.SGD):
    pass
m = nn.Linear(6, 3)
o = Named(m.parameters(), 0.1)
o.param_groups[0]["name"] = "all"
o.param_groups[0]["initial_lr"] = "0.1"
train(m, o)
""",
    "lr as a tensor": "m = nn.Linear(6, 3); train(m, torch.optim.Adam(m.parameters(), torch.tensor(0.1)))",
    "lr of nan": "m = nn.Linear(6, 3); train(m, torch.optim.SGD(m.parameters(), float('nan')) if False else torch.optim.SGD(m.parameters(), 1e30))",
    "no optimizer": "m = nn.Linear(6, 3); y = m(X); y.sum().backward(); said(y, m.weight.grad)",
    "no model": "a = X @ X.T; said(a.softmax(-1))",
    "LBFGS with a closure": """
m = nn.Linear(6, 3)
o = torch.optim.LBFGS(m.parameters(), max_iter=3)
def closure():
    o.zero_grad()
    loss = m(X).square().mean()
    loss.backward()
    return loss
for _ in range(2): o.step(closure)
said(*m.parameters())
""",
    "sparse gradients": """
m = nn.Embedding(10, 3, sparse=True)
train(m, torch.optim.SparseAdam(list(m.parameters())), torch.tensor([1, 2, 2]))
""",
    "a sparse matrix": "s = torch.eye(6).to_sparse(); said(torch.sparse.mm(s, X.T), (X.to_sparse_csr() @ X.T))",
    "threads that compute": """
m = nn.Linear(6, 3)
out = [None] * 3
def work(i): out[i] = m(X * i).sum()
ts = [threading.Thread(target=work, args=(i,)) for i in range(3)]
for t in ts: t.start()
train(m, torch.optim.SGD(m.parameters(), 0.1))
for t in ts: t.join()
print([o is not None for o in out])
""",
    "a training loop in a thread": """
m = nn.Linear(6, 3)
t = threading.Thread(target=train, args=(m, torch.optim.SGD(m.parameters(), 0.1)))
t.start(); t.join()
""",
    "a forward pass in a pool, beside another": """
from concurrent.futures import ThreadPoolExecutor
m = nn.Linear(6, 3); h = nn.Linear(6, 3)
o = torch.optim.SGD([*m.parameters(), *h.parameters()], 0.1)
with ThreadPoolExecutor(2) as pool:
    for _ in range(3):
        o.zero_grad()
        y = pool.submit(m, X); z = h(X)
        (y.result() * z).square().mean().backward()
        o.step()
said(*m.parameters(), *h.parameters())
""",
    "a thread that fails": """
def fail(): raise ValueError("mine")
t = threading.Thread(target=fail); t.start(); t.join()
m = nn.Linear(6, 3)
train(m, torch.optim.SGD(m.parameters(), 0.1))
""",
    "an optimizer that cannot be hashed": """
class Compared(torch.optim.SGD):
    def __eq__(self, other): return self is other
m = nn.Linear(6, 3)
train(m, Compared(m.parameters(), 0.1))
""",
    "data loaders' workers": """
from torch.utils.data import DataLoader, TensorDataset
m = nn.Linear(6, 3)
o = torch.optim.SGD(m.parameters(), 0.1)
for (x,) in DataLoader(TensorDataset(X), batch_size=2, num_workers=0):
    o.zero_grad(); m(x).sum().backward(); o.step()
said(*m.parameters())
""",
    "a fork": """
import os
m = nn.Linear(6, 3)
m(X)
if os.fork() == 0:
    nn.Linear(2, 2)(torch.ones(1, 2))
    os._exit(0)
os.wait()
train(m, torch.optim.SGD(m.parameters(), 0.1))
""",
    "checkpointing": """
from torch.utils.checkpoint import checkpoint
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6); self.b = nn.Linear(6, 3)
    def forward(self, x): return self.b(checkpoint(self.a, x, use_reentrant=False).relu())
m = M()
train(m, torch.optim.SGD(m.parameters(), 0.1))
""",
    "its own autograd function": """
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return 2 * x
    @staticmethod
    def backward(ctx, g): return 2 * g
m = nn.Linear(6, 3)
train(m, torch.optim.SGD(m.parameters(), 0.01), loss=lambda y: Double.apply(y).square().mean())
""",
    "its own operator": """
@torch.library.custom_op("odd::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor: return x * 2
said(twice(X))
""",
    "a tensor subclass": """
class Tagged(torch.Tensor): pass
x = X.as_subclass(Tagged)
m = nn.Linear(6, 3)
y = m(x)
y.sum().backward()
print(type(y).__name__)
said(y.as_subclass(torch.Tensor), m.weight.grad)
""",
    "its own dispatch mode": """
from torch.utils._python_dispatch import TorchDispatchMode
class Count(TorchDispatchMode):
    n = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Count.n += 1
        return func(*args, **(kwargs or {}))
m = nn.Linear(6, 3)
with Count(): y = m(X)
print(Count.n)
said(y)
""",
    "vmap and grad": """
from torch.func import vmap, grad
f = lambda x: (x ** 3).sum()
said(vmap(grad(f))(X))
""",
    "second derivatives": """
x = X.clone().requires_grad_()
g, = torch.autograd.grad((x ** 3).sum(), x, create_graph=True)
g.sum().backward()
said(g, x.grad)
""",
    "inference mode": "m = nn.Linear(6, 3)\nwith torch.inference_mode(): y = m(X)\nsaid(y.clone())",
    "tensors on meta": "m = nn.Linear(6, 3, device='meta'); y = m(torch.empty(4, 6, device='meta')); print(y.shape); said(X.sin())",
    "a quantized model": """
m = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(6, 3)), {nn.Linear}, torch.qint8)
said(m(X))
""",
    "no elements": "m = nn.Linear(6, 3); y = m(X[:0]); y.sum().backward(); said(y, m.weight.grad)",
    "no dimensions": "w = nn.Parameter(torch.tensor(2.0)); o = torch.optim.SGD([w], 0.1); (w * w).backward(); o.step(); said(w)",
    "a loss of nan": """
m = nn.Linear(6, 3)
train(m, torch.optim.SGD(m.parameters(), 0.1), loss=lambda y: (y * float("nan")).sum())
""",
    "parameters shared and frozen": """
a = nn.Linear(6, 6); b = nn.Linear(6, 6); b.weight = a.weight; a.bias.requires_grad_(False)
m = nn.Sequential(a, b)
train(m, torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1))
""",
    "a model that is changed while it trains": """
m = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
o = torch.optim.SGD(m.parameters(), 0.1)
for i in range(3):
    o.zero_grad(); m(X).sum().backward(); o.step()
    m.append(nn.Linear(6, 6)); o.add_param_group({"params": m[-1].parameters()})
said(*m.parameters())
""",
    "forward with odd arguments": """
class M(nn.Module):
    def forward(self, *parts, **named): return [parts[0]["x"] * named["by"], None, "text", {"n": 3}]
y = M()({"x": X, 3: object()}, by=2.0)
said(y[0])
""",
    "a forward that raises and is caught": """
class M(nn.Module):
    def forward(self, x): raise ValueError("mine")
m = nn.Sequential(nn.Linear(6, 3), M())
try: m(X)
except ValueError as e: print("caught", e)
said(m[0](X))
""",
    "an exit code": "said(nn.Linear(6, 3)(X)); sys.exit(7)",
    "an exception": "said(nn.Linear(6, 3)(X)); raise KeyError('mine')",
    "warnings as errors": "warnings.simplefilter('error'); m = nn.Linear(6, 3); train(m, torch.optim.SGD(m.parameters(), 0.1))",
    "streams replaced": """
import io
out = sys.stdout; sys.stdout = io.StringIO()
m = nn.Linear(6, 3); m(X).sum().backward()
print("hidden"); text = sys.stdout.getvalue(); sys.stdout = out
print(repr(text)); said(m.weight.grad)
""",
    "arguments and names": """
import inspect, os
print(__name__, sys.argv[1:], os.path.basename(__file__))
print(inspect.signature(nn.Linear.forward), len(inspect.getsource(nn.Linear.forward)) > 0)
""",
    "random state": """
torch.manual_seed(3)
m = nn.Dropout(0.5)
a = m(X); b = torch.rand(3)
said(a, b, torch.get_rng_state())
""",
    "deterministic algorithms and grad mode": """
torch.use_deterministic_algorithms(True)
with torch.no_grad(): y = nn.Linear(6, 3)(X)
print(torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(), torch.get_num_threads())
said(y)
""",
    "a scaler and autocast": """
m = nn.Linear(6, 3); o = torch.optim.SGD(m.parameters(), 0.1)
s = torch.amp.GradScaler("cpu", init_scale=4.0)
for _ in range(2):
    o.zero_grad()
    with torch.autocast("cpu", torch.bfloat16): loss = m(X).float().square().mean()
    s.scale(loss).backward(); s.step(o); s.update()
said(loss, *m.parameters())
""",
    "hooks that read the graph": """
m = nn.Linear(6, 3)
seen = []
m.register_forward_hook(lambda mod, i, o: seen.append(type(o.grad_fn).__name__))
m.register_full_backward_hook(lambda mod, gi, go: seen.append(len(go)))
x = X.clone().requires_grad_()
m(x).sum().backward()
print(seen); said(x.grad)
""",
    "a traced and a scripted model": """
m = nn.Sequential(nn.Linear(6, 3), nn.ReLU())
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    t = torch.jit.trace(m, X); s = torch.jit.script(m)
said(t(X), s(X))
""",
    "float8 and unsigned integers": """
a = X.to(torch.float8_e4m3fn); b = (X * 100).to(torch.uint16)
said(a.float(), b.to(torch.int32))
""",
    "pickled and copied": """
import copy, pickle
m = nn.Linear(6, 3); m(X)
n = pickle.loads(pickle.dumps(m)); k = copy.deepcopy(m)
o = torch.optim.Adam(m.parameters()); m(X).sum().backward(); o.step()
p = copy.deepcopy(o.state_dict()); o.load_state_dict(p)
said(n(X), k(X), *m.parameters())
""",
    "a hook for what is raised": """
sys.excepthook = lambda kind, value, trace: print("caught", kind.__name__)
m = nn.Linear(6, 3); train(m, torch.optim.SGD(m.parameters(), 0.1)); m(X[:, :2])
""",
    "a fork in the middle of a step": """
import os
m = nn.Linear(6, 3); o = torch.optim.Adam(m.parameters())
for i in range(3):
    o.zero_grad(); l = m(X).square().mean()
    pid = os.fork()
    if pid == 0:
        l.backward(); os._exit(int(m.weight.grad is None))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0)
    l.backward(); o.step()
said(*m.parameters())
""",
    "a wrapper subclass and a layer of it": """
from torch.utils._pytree import tree_map
class W(torch.Tensor):
    @staticmethod
    def __new__(cls, t): return torch.Tensor._make_wrapper_subclass(cls, t.shape, dtype=t.dtype)
    def __init__(self, t): self.t = t
    @classmethod
    def __torch_dispatch__(cls, f, types, args=(), kwargs=None):
        un = lambda v: v.t if isinstance(v, W) else v
        wr = lambda v: W(v) if isinstance(v, torch.Tensor) else v
        return tree_map(wr, f(*tree_map(un, args), **tree_map(un, kwargs or {})))
m = nn.Linear(6, 3); m.weight = nn.Parameter(W(m.weight.detach())); z = m(X); said(z.t if isinstance(z, W) else z)
""",
}
