"""One layer of a model of a library written anew, as workload files: right, and with bugs planted.

The weights are those of the library; the layer that takes them is by another hand.
"""

from __future__ import annotations

from .workloads import WorkloadCase

LAYERS: list[WorkloadCase] = []


def _layer(name: str, text: str, **truths: list[str]) -> None:
    case = WorkloadCase(
        name=name,
        text=text,
        truths={bug[-1]: tuple(parts) for bug, parts in truths.items()},
    )
    LAYERS.extend(case.variants())


LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama as library
def base(**more):
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2, max_position_embeddings=32, **more))
    return made.eval()
def batches():
    return [{"input_ids": torch.randint(61, (2, 9), generator=gen(n)), "use_cache": False} for n in range(2)]
"""
_layer(
    "llama_own_attention_function",
    LLAMA
    + """
B|from transformers import AttentionInterface
B|def mine(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
B|    b, h, t, d = query.shape
B|    groups = h // key.shape[1]
C|    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
1|    key, value = key.repeat(1, groups, 1, 1), value.repeat(1, groups, 1, 1)
2|    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
B|    later = torch.ones(t, t, dtype=torch.bool).triu(1)
C|    scores = torch.einsum("bhtd,bhsd->bhts", query, key) / math.sqrt(d)
1|    scores = torch.einsum("bhtd,bhsd->bhts", query, key) / math.sqrt(d)
2|    scores = torch.einsum("bhtd,bhsd->bhts", query, key)
B|    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
B|    return torch.einsum("bhts,bhsd->bthd", weights, value), weights
B|AttentionInterface.register("mine", mine)
def model():
A|    return base(attn_implementation="eager")
B|    return base(attn_implementation="mine")
""",
    bug1=["key.repeat(1,"],
    bug2=['bhts", query, key)', "softmax"],
)
_layer(
    "llama_sdpa_for_eager",
    LLAMA
    + """
def model():
A|    return base(attn_implementation="eager")
C|    return base(attn_implementation="sdpa")
1|    made = base(attn_implementation="sdpa")
1|    for layer in made.model.layers: layer.self_attn.scaling = 1 / 8
1|    return made
""",
    bug1=["0.353553, not 0.125"],
)
_layer(
    "llama_own_rms_norm",
    LLAMA
    + """
B|class Norm(nn.Module):
B|    def __init__(self, gain, eps):
B|        super().__init__()
B|        self.scale, self.eps = nn.Parameter(gain.detach().clone()), eps
B|    def forward(self, x):
C|        rms = (x.square().sum(-1, keepdim=True) / x.shape[-1] + self.eps).sqrt()
1|        rms = (x.square().sum(-1, keepdim=True) / x.shape[-1]).sqrt() + 100 * self.eps
2|        rms = (x.square().mean(-2, keepdim=True) + self.eps).sqrt()
B|        return x / rms * self.scale
def model():
    made = base(attn_implementation="eager")
B|    for layer in made.model.layers:
B|        for name in ("input_layernorm", "post_attention_layernorm"):
B|            setattr(layer, name, Norm(getattr(layer, name).weight, 1e-6))
    return made
""",
    bug1=["100 * self.eps"],
    bug2=["x.square().mean(-2"],
)
_layer(
    "llama_rotary_interleaved",
    LLAMA
    + """
B|def interleaved(linear, heads):
B|    w = linear.weight.detach().view(heads, 2, -1, linear.in_features)
B|    linear.weight = nn.Parameter(w.transpose(1, 2).reshape(-1, linear.in_features).clone())
B|def turn(x, angles):
B|    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
B|    return torch.view_as_real(pairs * angles).flatten(-2)
B|class Attention(nn.Module):
B|    def __init__(self, old):
B|        super().__init__()
B|        self.q_proj, self.k_proj, self.v_proj, self.o_proj = old.q_proj, old.k_proj, old.v_proj, old.o_proj
B|        interleaved(self.q_proj, 4)
C|        interleaved(self.k_proj, 2)
2|        interleaved(self.k_proj, 2)
B|    def forward(self, hidden_states, **kwargs):
B|        b, t, _ = hidden_states.shape
B|        q = self.q_proj(hidden_states).view(b, t, 4, 8).transpose(1, 2)
B|        k = self.k_proj(hidden_states).view(b, t, 2, 8).transpose(1, 2)
B|        v = self.v_proj(hidden_states).view(b, t, 2, 8).transpose(1, 2)
B|        steps = torch.arange(t)[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
B|        angles = torch.polar(torch.ones_like(steps), steps)
C|        q, k = turn(q, angles), turn(k, angles)
1|        q, k = turn(q, angles), turn(k, angles)
2|        q, k = turn(q, angles), turn(k, angles.roll(1, 0))
B|        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
B|        return self.o_proj(y.transpose(1, 2).reshape(b, t, 32)), None
def model():
    made = base(attn_implementation="eager")
B|    for layer in made.model.layers: layer.self_attn = Attention(layer.self_attn)
    return made
""",
    bug1=["k_proj"],
    bug2=["angles.roll(1, 0)"],
)
_layer(
    "llama_fused_projections",
    LLAMA
    + """
B|class Mlp(nn.Module):
B|    def __init__(self, old):
B|        super().__init__()
B|        self.gate_up = nn.Linear(32, 96, bias=False)
B|        self.gate_up.weight = nn.Parameter(torch.cat([old.gate_proj.weight, old.up_proj.weight]).detach())
B|        self.down = old.down_proj
B|    def forward(self, x):
B|        gate, up = self.gate_up(x).chunk(2, -1)
C|        return self.down(F.silu(gate) * up)
1|        return self.down(F.silu(up) * gate)
2|        return self.down(torch.sigmoid(gate) * up)
def model():
    made = base(attn_implementation="eager").train()
B|    for layer in made.model.layers: layer.mlp = Mlp(layer.mlp)
    return made
def loss(output, batch):
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
def optimizer(model): return torch.optim.AdamW(model.parameters(), lr=1e-3)
""",
    bug1=["F.silu(up) * gate", "stand in another order"],
    bug2=["torch.sigmoid(gate)"],
)
_layer(
    "llama_checkpointed_and_compiled",
    LLAMA
    + """
B|from torch.utils.checkpoint import checkpoint
B|def gated(gate, up):
C|    return F.silu(gate) * up
1|    return F.silu(gate.clamp(max=0.5)) * up
B|gated = torch.compile(gated, backend="aot_eager")
B|class Mlp(nn.Module):
B|    def __init__(self, old):
B|        super().__init__()
B|        self.gate_proj, self.up_proj, self.down_proj = old.gate_proj, old.up_proj, old.down_proj
B|    def inner(self, x): return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))
B|    def forward(self, x): return checkpoint(self.inner, x, use_reentrant=False)
def model():
    made = base(attn_implementation="sdpa").train()
B|    torch.compiler.reset()
B|    for layer in made.model.layers: layer.mlp = Mlp(layer.mlp)
    return made
def loss(output, batch):
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
def optimizer(model): return torch.optim.SGD(model.parameters(), lr=1e-2)
""",
    bug1=["gate.clamp(max=0.5)", "mlp/clamp"],
)
_layer(
    "qwen_own_layer_in_training",
    """
from transformers import Qwen2Config, Qwen2ForCausalLM
def base():
    torch.manual_seed(0)
    made = Qwen2ForCausalLM(Qwen2Config(vocab_size=53, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, initializer_range=0.2, max_position_embeddings=32, attn_implementation="eager"))
    for name, p in made.named_parameters():
        if name.endswith("bias"): nn.init.normal_(p, std=0.3, generator=gen(3))
    return made
def batches():
    return [{"input_ids": torch.randint(53, (3, 8), generator=gen(n)), "use_cache": False} for n in range(2)]
B|class Attention(nn.Module):
B|    def __init__(self, old):
B|        super().__init__()
B|        self.wq, self.wk, self.wv, self.wo = (nn.Parameter(p.weight.detach().t().contiguous()) for p in (old.q_proj, old.k_proj, old.v_proj, old.o_proj))
B|        self.bq, self.bk, self.bv = (nn.Parameter(p.bias.detach().clone()) for p in (old.q_proj, old.k_proj, old.v_proj))
B|    def forward(self, hidden_states, position_embeddings=None, **kwargs):
B|        b, t, _ = hidden_states.shape
B|        q = (hidden_states @ self.wq + self.bq).view(b, t, 3, 8)
B|        k = (hidden_states @ self.wk + self.bk).view(b, t, 1, 8)
C|        v = (hidden_states @ self.wv + self.bv).view(b, t, 1, 8)
1|        v = (hidden_states @ self.wv).view(b, t, 1, 8)
2|        v = (hidden_states @ self.wv + self.bv).view(b, t, 1, 8)
B|        cos, sin = (x[..., None, :4] for x in position_embeddings)
B|        def turn(x):
B|            a, z = x[..., :4], x[..., 4:]
B|            return torch.cat([a * cos - z * sin, z * cos + a * sin], -1)
B|        q, k = turn(q), turn(k)
B|        scores = torch.einsum("bthd,bsd->bhts", q, k[:, :, 0]) * 8 ** -0.5
C|        scores = scores + torch.full((t, t), -1e9).triu(1)
1|        scores = scores + torch.full((t, t), -1e9).triu(1)
2|        scores = scores + torch.full((t, t), -1e9).triu(2)
B|        y = torch.einsum("bhts,bsd->bthd", scores.softmax(-1), v[:, :, 0])
B|        return y.reshape(b, t, 24) @ self.wo, None
def model():
    made = base()
B|    for layer in made.model.layers: layer.self_attn = Attention(layer.self_attn)
    return made
def loss(output, batch):
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
def optimizer(model): return torch.optim.SGD(model.parameters(), lr=1e-2)
""",
    bug1=["(hidden_states @ self.wv)", "v_proj.bias"],
    bug2=["-1e9).triu(2)"],
)
GPT2 = """
from transformers import GPT2Config, GPT2LMHeadModel
def base():
    torch.manual_seed(0)
    made = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=3, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.2, attn_implementation="eager"))
    return made
def batches():
    return [{"input_ids": torch.randint(1, 50, (3, 10), generator=gen(n)), "use_cache": False} for n in range(2)]
"""
_layer(
    "gpt2_linear_for_conv1d",
    GPT2
    + """
B|def linear(old, transposed=True):
B|    weight = old.weight.detach()
B|    made = nn.Linear(weight.shape[0], weight.shape[1])
B|    made.weight = nn.Parameter(weight.t().contiguous() if transposed else weight.clone())
B|    made.bias = nn.Parameter(old.bias.detach().clone())
B|    return made
B|class Mlp(nn.Module):
B|    def __init__(self, old):
B|        super().__init__()
B|        self.up, self.down = linear(old.c_fc), linear(old.c_proj)
B|    def forward(self, x):
C|        return self.down(F.gelu(self.up(x), approximate="tanh"))
1|        return self.down(F.gelu(self.up(x), approximate="tanh"))
2|        return self.down(F.gelu(self.up(x)))
def model():
    made = base().eval()
B|    for block in made.transformer.h:
B|        block.mlp = Mlp(block.mlp)
C|        block.attn.c_proj = linear(block.attn.c_proj)
1|        block.attn.c_proj = linear(block.attn.c_proj, transposed=False)
2|        block.attn.c_proj = linear(block.attn.c_proj)
    return made
""",
    bug1=["attn.c_proj"],
    bug2=["F.gelu(self.up(x)))"],
)
_layer(
    "gpt2_own_cross_entropy",
    GPT2
    + """
def model(): return base().train()
def forward(model, batch): return model(**batch).logits
def loss(output, batch):
    ids = batch["input_ids"].clone()
    real = torch.arange(10) < torch.tensor([[10], [6], [8]])
    labels = ids.masked_fill(~real, -100)[:, 1:]
    logits = output[:, :-1]
A|    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
B|    kept = labels != -100
B|    at = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
B|    each = (torch.logsumexp(logits, -1) - at) * kept
C|    return each.sum() / kept.sum()
1|    return each.mean()
2|    return (each.sum(1) / kept.sum(1)).mean()
def optimizer(model): return torch.optim.AdamW(model.parameters(), lr=1e-3)
""",
    bug1=["each.mean()"],
    bug2=["(each.sum(1) / kept.sum(1))"],
)
_layer(
    "gpt2_block_by_hand",
    GPT2
    + """
B|class Block(nn.Module):
B|    def __init__(self, old, number):
B|        super().__init__()
B|        self.old, self.number = old, number
B|    def forward(self, x, *args, **kwargs):
B|        old = self.old
B|        b, t, d = x.shape
B|        h = F.layer_norm(x, (d,), old.ln_1.weight, old.ln_1.bias, 1e-5)
B|        qkv = torch.addmm(old.attn.c_attn.bias, h.flatten(0, 1), old.attn.c_attn.weight)
C|        q, k, v = qkv.view(b, t, 3, 3, 8).permute(2, 0, 3, 1, 4)
1|        q, k, v = qkv.view(b, t, 3, 3, 8).permute(2, 0, 3, 1, 4)
2|        q, k, v = qkv.view(b, t, 3, 8, 3).permute(2, 0, 4, 1, 3)
B|        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
B|        y = y @ old.attn.c_proj.weight + old.attn.c_proj.bias
C|        x = x + y
1|        x = x + y if self.number == 0 else y
2|        x = x + y
B|        h = F.layer_norm(x, (d,), old.ln_2.weight, old.ln_2.bias, 1e-5)
B|        h = F.gelu(h @ old.mlp.c_fc.weight + old.mlp.c_fc.bias, approximate="tanh")
B|        return x + (h @ old.mlp.c_proj.weight + old.mlp.c_proj.bias)
def model():
    made = base().train()
B|    for n, block in enumerate(made.transformer.h): made.transformer.h[n] = Block(block, n)
    return made
def forward(model, batch): return model(**batch).logits
def loss(output, batch):
    return F.cross_entropy(output[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
def optimizer(model): return torch.optim.SGD(model.parameters(), lr=1e-2)
""",
    bug1=[
        "if self.number == 0 else y",
        "h = F.layer_norm(x, (d,), old.ln_2.weight",
        "left out is add of transformer.h.1/add ",
    ],
    bug2=["qkv.view(b, t, 3, 8, 3)"],
)
BERT = """
from transformers import BertConfig, BertModel
def base(**more):
    torch.manual_seed(0)
    made = BertModel(BertConfig(vocab_size=47, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, max_position_embeddings=24, initializer_range=0.2, **more))
    for name, p in made.named_parameters():
        if name.endswith("bias"): nn.init.normal_(p, std=0.2, generator=gen(len(name)))
    return made.eval()
def batches():
    lengths = torch.tensor([[9], [5], [7]])
    return [{"input_ids": torch.randint(1, 47, (3, 9), generator=gen(n)), "attention_mask": (torch.arange(9) < lengths).long()} for n in range(2)]
"""
_layer(
    "bert_fused_attention",
    BERT
    + """
B|class Attention(nn.Module):
B|    def __init__(self, old):
B|        super().__init__()
B|        parts = (old.query, old.key, old.value)
B|        self.qkv = nn.Linear(24, 72)
B|        self.qkv.weight = nn.Parameter(torch.cat([p.weight for p in parts]).detach())
C|        self.qkv.bias = nn.Parameter(torch.cat([p.bias for p in parts]).detach())
1|        self.qkv.bias = nn.Parameter(torch.cat([p.bias for p in parts]).detach())
2|        self.qkv.bias = nn.Parameter(torch.cat([old.query.bias, old.value.bias, old.key.bias]).detach())
B|    def forward(self, hidden_states, attention_mask=None, **kwargs):
B|        b, t, d = hidden_states.shape
B|        q, k, v = self.qkv(hidden_states).view(b, t, 3, 3, 8).permute(2, 0, 3, 1, 4).unbind(0)
C|        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
1|        y = F.scaled_dot_product_attention(q, k, v)
2|        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
B|        return y.transpose(1, 2).reshape(b, t, d), None
def model():
    made = base(attn_implementation="eager")
B|    for layer in made.encoder.layer: layer.attention.self = Attention(layer.attention.self)
    return made
""",
    bug1=["F.scaled_dot_product_attention(q, k, v)"],
    bug2=["qkv.bias", "old.value.bias, old.key.bias"],
)
_layer(
    "bert_layer_norm_by_hand",
    BERT
    + """
B|class Norm(nn.Module):
B|    def __init__(self, old):
B|        super().__init__()
B|        self.gamma, self.beta = old.weight, old.bias
B|    def forward(self, x):
C|        var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
1|        var, mean = torch.var_mean(x, -1, keepdim=True)
2|        var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
C|        return torch.addcmul(self.beta, (x - mean) * (var + 1e-12).rsqrt(), self.gamma)
1|        return torch.addcmul(self.beta, (x - mean) * (var + 1e-12).rsqrt(), self.gamma)
2|        return torch.addcmul(self.beta, (x - mean) / (var.sqrt() + 0.01), self.gamma)
def model():
    made = base(attn_implementation="sdpa", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
B|    for layer in made.encoder.layer:
B|        layer.attention.output.LayerNorm = Norm(layer.attention.output.LayerNorm)
B|        layer.output.LayerNorm = Norm(layer.output.LayerNorm)
    return made
def loss(output, batch): return output.pooler_output.square().mean() + output.last_hidden_state[:, 0].sin().mean()
def optimizer(model): return torch.optim.SGD(model.parameters(), lr=1e-2)
""",
    bug1=["torch.var_mean(x, -1, keepdim=True)"],
    bug2=["var.sqrt() + 0.01"],
)
_layer(
    "sentence_encoder_own_pooling",
    BERT
    + """
class Sentence(nn.Module):
    def __init__(self):
        super().__init__()
        self.bert = base(attn_implementation="sdpa")
    def forward(self, input_ids, attention_mask):
        x = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
A|        mask = attention_mask.unsqueeze(-1).expand(x.size()).float()
A|        pooled = torch.sum(x * mask, 1) / torch.clamp(mask.sum(1), min=1e-9)
A|        return F.normalize(pooled, p=2, dim=1)
B|        share = attention_mask / attention_mask.sum(1, keepdim=True)
C|        pooled = torch.einsum("btd,bt->bd", x, share)
1|        pooled = x.mean(1)
2|        pooled = torch.einsum("btd,bt->bd", x, share)
C|        return pooled / pooled.norm(dim=-1, keepdim=True)
1|        return pooled / pooled.norm(dim=-1, keepdim=True)
2|        return pooled / pooled.norm(dim=0, keepdim=True)
def model(): return Sentence()
""",
    bug1=["x.mean(1)"],
    bug2=["pooled.norm(dim=0"],
)
_layer(
    "t5_own_attention",
    """
from transformers import T5Config, T5EncoderModel
def base():
    torch.manual_seed(0)
    return T5EncoderModel(T5Config(vocab_size=41, d_model=24, d_kv=8, d_ff=32, num_layers=2, num_heads=3, relative_attention_num_buckets=8, relative_attention_max_distance=12, feed_forward_proj="gated-gelu")).eval()
def batches():
    lengths = torch.tensor([[9], [6]])
    return [{"input_ids": torch.randint(1, 41, (2, 9), generator=gen(n)), "attention_mask": (torch.arange(9) < lengths).long()} for n in range(2)]
B|class Attention(nn.Module):
B|    def __init__(self, old):
B|        super().__init__()
B|        self.q, self.k, self.v, self.o = old.q, old.k, old.v, old.o
B|        self.bucket = old._relative_position_bucket
B|        self.table = old.relative_attention_bias.weight if old.has_relative_attention_bias else None
B|    def bias(self, t):
C|        distance = torch.arange(t)[None, :] - torch.arange(t)[:, None]
1|        distance = torch.arange(t)[None, :] - torch.arange(t)[:, None]
2|        distance = torch.arange(t)[:, None] - torch.arange(t)[None, :]
B|        buckets = self.bucket(distance, bidirectional=True, num_buckets=8, max_distance=12)
B|        return (F.one_hot(buckets, 8).float() @ self.table).permute(2, 0, 1)[None]
B|    def forward(self, hidden_states, mask=None, position_bias=None, **kwargs):
B|        b, t, _ = hidden_states.shape
B|        q, k, v = (f(hidden_states).view(b, t, 3, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
B|        if position_bias is None: position_bias = self.bias(t)
C|        y = F.scaled_dot_product_attention(q, k, v, attn_mask=position_bias + mask, scale=1.0)
1|        y = F.scaled_dot_product_attention(q, k, v, attn_mask=position_bias + mask)
2|        y = F.scaled_dot_product_attention(q, k, v, attn_mask=position_bias + mask, scale=1.0)
B|        return self.o(y.transpose(1, 2).reshape(b, t, 24)), position_bias, None
def model():
    made = base()
    made.set_attn_implementation("eager")
B|    for block in made.encoder.block: block.layer[0].SelfAttention = Attention(block.layer[0].SelfAttention)
    return made
""",
    bug1=["attn_mask=position_bias + mask)"],
    bug2=["torch.arange(t)[:, None] - torch.arange(t)[None, :]"],
)
_layer(
    "vit_patches_by_unfold",
    """
from transformers import ViTConfig, ViTForImageClassification
def base():
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, image_size=12, patch_size=4, num_channels=3, num_labels=5, initializer_range=0.2, attn_implementation="sdpa", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)).train()
def batches():
    return [(torch.randn(4, 3, 12, 12, generator=gen(n)), torch.randint(5, (4,), generator=gen(n + 9))) for n in range(2)]
def forward(model, batch): return model(batch[0]).logits
B|class Patches(nn.Module):
B|    def __init__(self, old):
B|        super().__init__()
C|        self.weight = nn.Parameter(old.weight.detach().flatten(1).t().contiguous())
1|        self.weight = nn.Parameter(old.weight.detach().permute(0, 2, 3, 1).flatten(1).t().contiguous())
2|        self.weight = nn.Parameter(old.weight.detach().flatten(1).t().contiguous())
B|        self.bias = nn.Parameter(old.bias.detach() + 0)
B|    def forward(self, x):
C|        rows = F.unfold(x, 4, stride=4).transpose(1, 2)
1|        rows = F.unfold(x, 4, stride=4).transpose(1, 2)
2|        rows = F.unfold(x.transpose(2, 3), 4, stride=4).transpose(1, 2)
B|        return (rows @ self.weight + self.bias).transpose(1, 2).unflatten(-1, (3, 3))
def model():
    made = base()
B|    made.vit.embeddings.patch_embeddings.projection = Patches(made.vit.embeddings.patch_embeddings.projection)
    return made
def loss(output, batch): return F.cross_entropy(output, batch[1])
def optimizer(model): return torch.optim.AdamW(model.parameters(), lr=1e-3)
""",
    bug1=["patch_embeddings.projection.weight"],
    bug2=["x.transpose(2, 3)"],
)
_layer(
    "mixtral_dense_experts",
    """
from transformers import MixtralConfig, MixtralForCausalLM
def base():
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(vocab_size=43, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, initializer_range=0.2, attn_implementation="eager", experts_implementation="eager")).eval()
def batches():
    return [{"input_ids": torch.randint(43, (2, 7), generator=gen(n)), "use_cache": False} for n in range(2)]
B|class Experts(nn.Module):
B|    def __init__(self, old):
B|        super().__init__()
B|        self.gate = old.gate
B|        self.w1, self.w3 = (nn.Parameter(w.detach().clone()) for w in old.experts.gate_up_proj.chunk(2, 1))
B|        self.w2 = nn.Parameter(old.experts.down_proj.detach().clone())
B|    def forward(self, x):
B|        share = F.softmax(x @ self.gate.weight.t(), -1)
B|        top, which = share.topk(2, -1)
C|        top = top / top.sum(-1, keepdim=True)
2|        top = top / top.sum(-1, keepdim=True)
B|        dense = torch.zeros_like(share).scatter(-1, which, top)
B|        h = F.silu(torch.einsum("btd,eid->beti", x, self.w1)) * torch.einsum("btd,eid->beti", x, self.w3)
B|        y = torch.einsum("beti,edi->betd", h, self.w2)
C|        return torch.einsum("betd,bte->btd", y, dense)
1|        return torch.einsum("betd,bte->btd", y, dense)
2|        return torch.einsum("betd,bte->btd", y, dense.flip(-1))
def model():
    made = base()
B|    for layer in made.model.layers: layer.mlp = Experts(layer.mlp)
    return made
""",
    bug1=["dense = torch.zeros_like(share)", "left out is div"],
    bug2=["dense.flip(-1)"],
)
_layer(
    "mamba_own_scan",
    """
from transformers import MambaConfig, MambaForCausalLM
def base():
    torch.manual_seed(0)
    return MambaForCausalLM(MambaConfig(vocab_size=37, hidden_size=16, state_size=4, num_hidden_layers=2, time_step_rank=3, initializer_range=0.3)).eval()
def batches():
    return [{"input_ids": torch.randint(37, (2, 6), generator=gen(n)), "use_cache": False} for n in range(2)]
B|class Mixer(nn.Module):
B|    def __init__(self, old):
B|        super().__init__()
B|        self.in_proj, self.conv1d, self.x_proj, self.dt_proj, self.out_proj = old.in_proj, old.conv1d, old.x_proj, old.dt_proj, old.out_proj
B|        self.A_log, self.D = old.A_log, old.D
B|    def forward(self, hidden_states, **kwargs):
B|        t = hidden_states.shape[1]
B|        x, z = self.in_proj(hidden_states).chunk(2, -1)
C|        x = F.silu(self.conv1d(x.transpose(1, 2))[..., :t]).transpose(1, 2)
1|        x = F.silu(self.conv1d(x.transpose(1, 2))[..., 1 : t + 1]).transpose(1, 2)
2|        x = F.silu(self.conv1d(x.transpose(1, 2))[..., :t]).transpose(1, 2)
B|        dt, B, C = self.x_proj(x).split([3, 4, 4], -1)
B|        dt = F.softplus(self.dt_proj(dt))
B|        A = -self.A_log.exp()
B|        state, outs = torch.zeros(x.shape[0], x.shape[2], 4), []
B|        for n in range(t):
B|            state = torch.exp(dt[:, n, :, None] * A) * state + (dt[:, n] * x[:, n])[..., None] * B[:, n, None]
B|            outs.append((state * C[:, n, None]).sum(-1))
C|        y = torch.stack(outs, 1) + self.D * x
1|        y = torch.stack(outs, 1) + self.D * x
2|        y = torch.stack(outs, 1)
B|        return self.out_proj(y * F.silu(z))
def model():
    made = base()
B|    for layer in made.backbone.layers: layer.mixer = Mixer(layer.mixer)
    return made
""",
    bug1=["[..., 1 : t + 1]"],
    bug2=["y = torch.stack(outs, 1)", "y * F.silu(z)", "mixer.D"],
)
_layer(
    "whisper_own_front_and_cross",
    """
from transformers import WhisperConfig, WhisperModel
def base():
    torch.manual_seed(0)
    made = WhisperModel(WhisperConfig(vocab_size=33, num_mel_bins=6, d_model=24, encoder_layers=1, decoder_layers=2, encoder_attention_heads=3, decoder_attention_heads=3, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=10, max_target_positions=12, init_std=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, attn_implementation="eager"))
    for name, p in made.named_parameters():
        if name.endswith("bias"): nn.init.normal_(p, std=0.2, generator=gen(len(name)))
    return made.eval()
def batches():
    return [{"input_features": torch.randn(2, 6, 20, generator=gen(n)), "decoder_input_ids": torch.randint(1, 33, (2, 5), generator=gen(n)), "use_cache": False} for n in range(2)]
B|class Conv(nn.Module):
B|    def __init__(self, old):
B|        super().__init__()
B|        self.weight, self.bias, self.stride = old.weight, old.bias, old.stride
B|    def forward(self, x):
C|        windows = F.pad(x, (1, 1)).unfold(2, 3, self.stride[0])
1|        windows = F.pad(x, (2, 0)).unfold(2, 3, self.stride[0])
2|        windows = F.pad(x, (1, 1)).unfold(2, 3, self.stride[0])
B|        return torch.einsum("bctk,dck->bdt", windows, self.weight) + self.bias[:, None]
B|class Cross(nn.Module):
B|    def __init__(self, old):
B|        super().__init__()
B|        self.q, self.k, self.v, self.o = old.q_proj, old.k_proj, old.v_proj, old.out_proj
B|    def forward(self, hidden_states, key_value_states=None, **kwargs):
B|        b, t, d = hidden_states.shape
B|        q = self.q(hidden_states).view(b, t, 3, 8)
B|        k, v = (f(key_value_states).view(b, -1, 3, 8) for f in (self.k, self.v))
C|        w = (torch.einsum("bthd,bshd->bhts", q, k) / 8 ** 0.5).softmax(-1)
1|        w = (torch.einsum("bthd,bshd->bhts", q, k) / 8 ** 0.5).softmax(-1)
2|        w = (torch.einsum("bthd,bshd->bhts", q, k) / 8 ** 0.5).softmax(-2)
B|        return self.o(torch.einsum("bhts,bshd->bthd", w, v).reshape(b, t, d)), None
def model():
    made = base()
B|    made.encoder.conv1, made.encoder.conv2 = Conv(made.encoder.conv1), Conv(made.encoder.conv2)
B|    for layer in made.decoder.layers: layer.encoder_attn = Cross(layer.encoder_attn)
    return made
""",
    bug1=["F.pad(x, (2, 0))"],
    bug2=["softmax(-2)"],
)

# -- of torch's own layers ------------------------------------------------------------

_layer(
    "lstm_by_cells",
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.rnn, self.head = nn.Embedding(30, 8), nn.LSTM(8, 12, 2, batch_first=True), nn.Linear(12, 30)
    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])
B|class Cells(nn.Module):
B|    def __init__(self, old):
B|        super().__init__()
B|        self.cells = nn.ModuleList(nn.LSTMCell(size, 12) for size in (8, 12))
B|        for n, cell in enumerate(self.cells):
B|            for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
B|                setattr(cell, kind, nn.Parameter(getattr(old, f"{kind}_l{n}").detach().clone()))
B|    def forward(self, x):
B|        for cell in self.cells:
B|            h = c = x.new_zeros(x.shape[0], 12)
B|            outs = []
B|            for n in range(x.shape[1]):
B|                h, c = self.step(cell, x[:, n], h, c)
B|                outs.append(h)
B|            x = torch.stack(outs, 1)
B|        return x, None
B|    def step(self, cell, x, h, c):
B|        gates = x @ cell.weight_ih.t() + cell.bias_ih + h @ cell.weight_hh.t() + cell.bias_hh
C|        i, f, g, o = gates.chunk(4, 1)
1|        f, i, g, o = gates.chunk(4, 1)
2|        i, f, g, o = gates.chunk(4, 1)
B|        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
C|        return torch.sigmoid(o) * torch.tanh(c), c
1|        return torch.sigmoid(o) * torch.tanh(c), c
2|        return torch.sigmoid(o) * c, c
def model():
    made = Net()
B|    made.rnn = Cells(made.rnn)
    return made
def batches(): return [torch.randint(30, (3, 6), generator=gen(n)) for n in range(2)]
def loss(output, batch): return F.cross_entropy(output[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
def optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.1)
""",
    bug1=["f, i, g, o = gates.chunk", "torch.sigmoid(f) * c"],
    bug2=["torch.sigmoid(o) * c, c"],
)
_layer(
    "embedding_by_one_hot",
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.word, self.kind = nn.Embedding(20, 12, padding_idx=0), nn.Embedding(3, 12)
        self.norm, self.head = nn.LayerNorm(12), nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 4))
    def forward(self, ids, kinds):
        return self.head(self.norm(self.word(ids) + self.kind(kinds)).mean(1))
B|class Lookup(nn.Module):
B|    def __init__(self, old, shift=0):
B|        super().__init__()
B|        self.table, self.shift = nn.Parameter(old.weight.detach().clone()), shift
B|    def forward(self, ids):
B|        return F.one_hot((ids + self.shift) % len(self.table), len(self.table)).float() @ self.table
B|class Gelu(nn.Module):
B|    def forward(self, x):
C|        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
1|        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
2|        return x * 0.5 * (1 + torch.erf(x * math.sqrt(2)))
def model():
    made = Net()
C|    made.kind = Lookup(made.kind)
1|    made.kind = Lookup(made.kind, 1)
2|    made.kind = Lookup(made.kind)
B|    made.head[1] = Gelu()
    return made
def batches(): return [(torch.randint(1, 20, (4, 5), generator=gen(n)), torch.randint(3, (4, 5), generator=gen(n + 5)), torch.randint(4, (4,), generator=gen(n))) for n in range(2)]
def forward(model, batch): return model(*batch[:2])
def loss(output, batch): return F.cross_entropy(output, batch[2])
def optimizer(model): return torch.optim.Adam(model.parameters(), lr=1e-2)
""",
    bug1=["(ids + self.shift)"],
    bug2=["torch.erf(x * math.sqrt(2))"],
)
_layer(
    "own_multihead_attention",
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attn, self.norm, self.head = nn.MultiheadAttention(16, 2, batch_first=True), nn.LayerNorm(16), nn.Linear(16, 3)
        nn.init.normal_(self.attn.in_proj_bias, std=0.3); nn.init.normal_(self.attn.out_proj.bias, std=0.3)
    def forward(self, x, hidden):
A|        y = self.attn(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
B|        y = self.attn(x, hidden)
        return self.head(self.norm(x + y)).mean(1)
B|class Attention(nn.Module):
B|    def __init__(self, old):
B|        super().__init__()
B|        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
B|        for layer, w, b in zip((self.q, self.k, self.v), old.in_proj_weight.chunk(3), old.in_proj_bias.chunk(3)):
B|            layer.weight, layer.bias = nn.Parameter(w.detach().clone()), nn.Parameter(b.detach().clone())
B|        self.out = nn.Linear(16, 16)
B|        self.out.weight, self.out.bias = nn.Parameter(old.out_proj.weight.detach().clone()), nn.Parameter(old.out_proj.bias.detach().clone())
B|    def forward(self, x, hidden):
B|        b, t, d = x.shape
C|        q, k, v = (f(x).view(b, t, 2, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
1|        q, k, v = (f(x).view(b, 2, t, 8) for f in (self.q, self.k, self.v))
2|        q, k, v = (f(x).view(b, t, 2, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
B|        scores = q @ k.mT / math.sqrt(8)
C|        weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
1|        weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
2|        weights = scores.softmax(-1).masked_fill(hidden[:, None, None], 0.0)
B|        return self.out((weights @ v).transpose(1, 2).reshape(b, t, d))
def model():
    made = Net()
B|    made.attn = Attention(made.attn)
    return made
def batches(): return [(torch.randn(3, 6, 16, generator=gen(n)), torch.arange(6) >= torch.tensor([[6], [3], [5]]), torch.randint(3, (3,), generator=gen(n))) for n in range(2)]
def forward(model, batch): return model(*batch[:2])
def loss(output, batch): return F.cross_entropy(output, batch[2])
def optimizer(model): return torch.optim.SGD(model.parameters(), lr=1e-2)
""",
    bug1=["f(x).view(b, 2, t, 8)"],
    bug2=["scores.softmax(-1).masked_fill"],
)
_layer(
    "batch_norm_and_conv_by_hand",
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.group = nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.head = nn.Linear(8, 4)
    def forward(self, x):
        return self.head(F.relu(self.group(F.relu(self.bn(self.conv(x))))).mean((2, 3)))
B|class Conv(nn.Module):
B|    def __init__(self, old):
B|        super().__init__()
B|        self.weight, self.bias = old.weight, old.bias
B|    def forward(self, x):
B|        columns = F.unfold(x, 3, padding=1, stride=2)
B|        return (self.weight.flatten(1) @ columns + self.bias[:, None]).unflatten(-1, (5, 5))
B|class Norm(nn.Module):
B|    def __init__(self, old):
B|        super().__init__()
B|        self.weight, self.bias = old.weight, old.bias
B|        self.mean, self.var = nn.Buffer(old.running_mean.clone()), nn.Buffer(old.running_var.clone())
B|    def forward(self, x):
B|        mean = x.mean((0, 2, 3))
C|        var = x.var((0, 2, 3), correction=0)
1|        var = x.var((0, 2, 3))
2|        var = x.var((0, 2, 3), correction=0)
B|        with torch.no_grad():
B|            count = x.numel() / 8
C|            self.mean.lerp_(mean, 0.1); self.var.lerp_(var * count / (count - 1), 0.1)
1|            self.mean.lerp_(mean, 0.1); self.var.lerp_(var, 0.1)
2|            self.mean.lerp_(mean, 0.9); self.var.lerp_(var * count / (count - 1), 0.9)
B|        x = (x - mean[:, None, None]) / (var[:, None, None] + 1e-5).sqrt()
B|        return x * self.weight[:, None, None] + self.bias[:, None, None]
B|class Groups(nn.Module):
B|    def __init__(self, old):
B|        super().__init__()
B|        self.weight, self.bias = old.weight, old.bias
B|    def forward(self, x):
B|        parts = zip(x.chunk(4, 1), self.weight.chunk(4), self.bias.chunk(4))
B|        return torch.cat([F.conv2d(p, w, b, padding=1) for p, w, b in parts], 1)
def model():
    made = Net()
B|    made.conv, made.bn, made.group = Conv(made.conv), Norm(made.bn), Groups(made.group)
    return made
def batches(): return [(torch.randn(4, 3, 9, 9, generator=gen(n)), torch.randint(4, (4,), generator=gen(n))) for n in range(2)]
def forward(model, batch): return model(batch[0])
def loss(output, batch): return F.cross_entropy(output, batch[1])
def optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.1)
""",
    bug1=["x.var((0, 2, 3))"],
    bug2=[
        "self.mean.lerp_(mean, 0.9)",
        "bn.running_mean",
        "bn.mean",
        "bn.var",
        "running_var",
    ],
)
_layer(
    "dilated_groups_as_loop",
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv1d(4, 12, 3, padding=1)
        self.depth = nn.Conv1d(12, 12, 3, padding=2, dilation=2, groups=12)
        self.norm, self.point = nn.GroupNorm(3, 12), nn.Conv1d(12, 5, 1)
    def forward(self, x):
        return self.point(F.silu(self.norm(self.depth(self.stem(x)))))
B|class Depth(nn.Module):
B|    def __init__(self, old):
B|        super().__init__()
B|        self.weight, self.bias = old.weight, old.bias
B|    def forward(self, x):
B|        t = x.shape[-1]
B|        padded = F.pad(x, (2, 2))
C|        parts = [padded[..., 2 * n : 2 * n + t] * self.weight[:, 0, n, None] for n in range(3)]
1|        parts = [padded[..., n + 1 : n + 1 + t] * self.weight[:, 0, n, None] for n in range(3)]
2|        parts = [padded[..., 2 * n : 2 * n + t] * self.weight[:, 0, 2 - n, None] for n in range(3)]
B|        return sum(parts) + self.bias[:, None]
B|class Norm(nn.Module):
B|    def __init__(self, old):
B|        super().__init__()
B|        self.weight, self.bias = old.weight, old.bias
B|    def forward(self, x):
B|        y = F.layer_norm(x.view(x.shape[0], 3, -1), (4 * x.shape[-1],)).view_as(x)
B|        return y * self.weight[:, None] + self.bias[:, None]
def model():
    made = Net()
B|    made.depth, made.norm = Depth(made.depth), Norm(made.norm)
B|    made.point = nn.Linear(12, 5)
B|    made.point.weight, made.point.bias = nn.Parameter(Net().point.weight.detach()[..., 0].clone()), nn.Parameter(Net().point.bias.detach().clone())
B|    point = made.point.forward
B|    made.point.forward = lambda x: point(x.mT).mT
    return made.eval()
def batches(): return [torch.randn(2, 4, 11, generator=gen(n)) for n in range(2)]
""",
    bug1=["padded[..., n + 1 : n + 1 + t]"],
    bug2=["self.weight[:, 0, 2 - n, None]"],
)
_layer(
    "own_encoder_layer",
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(6, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2))
        self.out = nn.Linear(16, 2)
        for layer in self.layers:
            for n, p in enumerate((layer.norm1.weight, layer.norm1.bias, layer.norm2.weight, layer.norm2.bias)): nn.init.normal_(p, generator=gen(n))
    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers: x = layer(x)
        return self.out(x)
B|class Layer(nn.Module):
B|    def __init__(self, old):
B|        super().__init__()
B|        a = old.self_attn
B|        self.qkv, self.proj, self.fc1, self.fc2 = nn.Linear(16, 48), a.out_proj, old.linear1, old.linear2
B|        self.qkv.weight, self.qkv.bias = nn.Parameter(a.in_proj_weight.detach()), nn.Parameter(a.in_proj_bias.detach())
B|        self.ln1, self.ln2 = old.norm1, old.norm2
B|    def attention(self, x):
B|        b, t, d = x.shape
B|        q, k, v = self.qkv(x).view(b, t, 3, 2, 8).unbind(2)
B|        w = torch.einsum("bthd,bshd->bhts", q, k).mul(8 ** -0.5).softmax(-1)
B|        return self.proj(torch.einsum("bhts,bshd->bthd", w, v).reshape(b, t, d))
B|    def forward(self, x):
C|        x = x + self.attention(self.ln1(x))
1|        x = self.ln1(x + self.attention(x))
2|        x = x + self.attention(self.ln1(x))
C|        return x + self.fc2(torch.relu(self.fc1(self.ln2(x))))
1|        return self.ln2(x + self.fc2(torch.relu(self.fc1(x))))
2|        return x + self.fc2(torch.relu(self.fc1(self.ln1(x))))
def model():
    made = Net()
B|    for n in range(2): made.layers[n] = Layer(made.layers[n])
    return made
def batches(): return [torch.randn(3, 5, 6, generator=gen(n)) for n in range(2)]
def loss(output, batch): return output.logsumexp(-1).mean()
def optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.1)
""",
    bug1=[
        "x = self.ln1(x + self.attention(x))",
        "q, k, v = self.qkv(x)",
        "layers.0.qkv/linear",
    ],
    bug2=["self.fc1(self.ln1(x))"],
)
