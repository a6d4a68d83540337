"""Scripts with models of libraries: in other portions, formats and processes, or with a layer by another hand."""

from __future__ import annotations

from .scripts import ScriptCase

LAYER_SCRIPTS: list[ScriptCase] = []


def _script(name: str, text: str, world: int = 1, **truths: list[str]) -> None:
    case = ScriptCase(
        name=name,
        text=text,
        world=world,
        whole="backward" not in text,
        truths={bug[-1]: tuple(parts) for bug, parts in truths.items()},
    )
    LAYER_SCRIPTS.extend(case.variants())


LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM
def base(**more):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2, max_position_embeddings=32, **more)).eval()
"""
_script(
    "llama_decoded_with_a_cache",
    LLAMA
    + """
from transformers import DynamicCache
model = base(attn_implementation="eager")
ids = torch.randint(61, (2, 10), generator=gen(1))
with torch.no_grad():
A|    logits = model(ids, use_cache=False).logits
B|    cache, outs = DynamicCache(), []
B|    for start, end in ((0, 6), (6, 7), (7, 8), (8, 10)):
C|        at = torch.arange(start, end)[None]
1|        at = torch.arange(start, end)[None] + (start > 0)
2|        at = torch.arange(start, end)[None]
2|        if start == 7: cache.crop(-1)
B|        outs.append(model(ids[:, start:end], past_key_values=cache, position_ids=at, use_cache=True).logits)
B|    logits = torch.cat(outs, 1)
    print(logits.sum())
""",
    bug1=[
        "at = torch.arange(start, end)[None] + (start > 0)",
        "rotary_emb",
        "position_ids[..., None]",
    ],
    bug2=["cache.crop(-1)", "self_attn", "layers.0.self_attn"],
)
_script(
    "gpt2_padded_on_the_left",
    """
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=3, n_positions=32, initializer_range=0.2, attn_implementation="sdpa")).eval()
rows = [torch.randint(1, 50, (n,), generator=gen(n)) for n in (9, 6)]
with torch.no_grad():
A|    for row in rows: logits = model(row[None], use_cache=False).logits; print(logits.sum())
B|    ids = torch.stack([F.pad(row, (9 - len(row), 0)) for row in rows])
B|    real = (ids != 0).long()
C|    at = (real.cumsum(1) - 1).clamp(min=0)
1|    at = torch.arange(9)[None]
2|    at = (real.cumsum(1) - 1).clamp(min=0)
C|    logits = model(ids, attention_mask=real, position_ids=at, use_cache=False).logits
1|    logits = model(ids, attention_mask=real, position_ids=at, use_cache=False).logits
2|    logits = model(ids, attention_mask=torch.ones_like(real), position_ids=at, use_cache=False).logits
B|    print(logits[0].sum(), logits[1, 3:].sum())
""",
    bug1=["at = torch.arange(9)[None]", "transformer.wpe"],
    bug2=[
        "attention_mask=torch.ones_like(real)",
        "h.0.attn",
        "scaled_dot_product_attention",
    ],
)
_script(
    "bert_one_sentence_at_a_time",
    """
from transformers import BertConfig, BertModel
torch.manual_seed(0)
model = BertModel(BertConfig(vocab_size=47, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, max_position_embeddings=24, initializer_range=0.2, attn_implementation="eager")).eval()
rows = [torch.randint(1, 47, (n,), generator=gen(n)) for n in (8, 5, 7)]
with torch.no_grad():
B|    vectors = torch.stack([model(row[None]).last_hidden_state[0].mean(0) for row in rows])
A|    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
A|    real = (ids != 0).long()
A|    hidden = model(ids, attention_mask=real).last_hidden_state
A|    vectors = (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True)
C|    vectors = F.normalize(vectors, dim=-1)
A|    vectors = F.normalize(vectors, dim=-1)
1|    vectors = F.normalize(vectors, dim=0)
    print(vectors.sum())
""",
    bug1=["F.normalize(vectors, dim=0)"],
)
_script(
    "gpt2_gradients_accumulated",
    """
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=3, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.2)).train()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(2):
    ids = torch.randint(50, (4, 8), generator=gen(step))
    opt.zero_grad()
A|    model(ids, labels=ids).loss.backward()
B|    for part in ids.split(1):
C|        (model(part, labels=part).loss / 4).backward()
1|        model(part, labels=part).loss.backward()
2|        (model(part[:, 1:], labels=part[:, 1:]).loss / 4).backward()
    opt.step()
""",
    bug1=["model(part, labels=part).loss.backward()", "factor of 4", "accumul", "loss"],
    bug2=["model(part[:, 1:]", "input", "data"],
)
_script(
    "llama_in_bf16",
    LLAMA
    + """
B|class Norm(nn.Module):
B|    def __init__(self, old):
B|        super().__init__()
B|        self.weight = old.weight
B|    def forward(self, x):
C|        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
1|        y = x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) / 30 + 1e-6)
B|        return y.to(x.dtype) * self.weight
model = base(attn_implementation="eager")
B|for layer in model.model.layers: layer.input_layernorm = Norm(layer.input_layernorm)
B|model = model.to(torch.bfloat16)
ids = torch.randint(61, (2, 10), generator=gen(1))
with torch.no_grad():
    logits = model(ids, use_cache=False).logits
    print(logits.sum())
""",
    bug1=["square().sum(-1, keepdim=True) / 30"],
)
_script(
    "vit_in_fp16_with_a_scaler",
    """
from transformers import ViTConfig, ViTForImageClassification
torch.manual_seed(0)
model = ViTForImageClassification(ViTConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, image_size=12, patch_size=4, num_labels=5, initializer_range=0.2, attn_implementation="eager", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)).train()
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
B|scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(2):
    x, y = torch.randn(4, 3, 12, 12, generator=gen(step)), torch.randint(5, (4,), generator=gen(step))
    opt.zero_grad()
A|    F.cross_entropy(model(x).logits, y).backward()
B|    with torch.autocast("cpu", torch.float16):
B|        loss = F.cross_entropy(model(x).logits, y)
B|    scaler.scale(loss).backward()
C|    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
A|    opt.step()
B|    scaler.step(opt)
B|    scaler.update()
""",
    bug1=["nn.utils.clip_grad_norm_", "clip of the gradients"],
)
_script(
    "qwen_loop_by_hand",
    """
from transformers import Qwen2Config, Qwen2ForCausalLM
torch.manual_seed(0)
model = Qwen2ForCausalLM(Qwen2Config(vocab_size=53, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, initializer_range=0.2, max_position_embeddings=32, attn_implementation="sdpa")).train()
B|def next_token_loss(logits, ids):
C|    logits, labels = logits[:, :-1].float(), ids[:, 1:]
1|    logits, labels = logits[:, 1:].float(), ids[:, :-1]
2|    logits, labels = logits[:, :-1].float(), ids[:, 1:]
B|    top = logits.max(-1, keepdim=True).values
B|    total = (logits - top).exp().sum(-1).log() + top[..., 0]
C|    return (total - logits.gather(-1, labels[..., None])[..., 0]).mean()
1|    return (total - logits.gather(-1, labels[..., None])[..., 0]).mean()
2|    return (total - logits.gather(-1, labels[..., None])[..., 0]).mean(1).sum()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(2):
    ids = torch.randint(53, (3, 8), generator=gen(step))
    opt.zero_grad()
A|    loss = model(ids, labels=ids, use_cache=False).loss
B|    loss = next_token_loss(model(ids, use_cache=False).logits, ids)
    loss.backward()
    opt.step()
""",
    bug1=["logits[:, 1:].float(), ids[:, :-1]"],
    bug2=["mean(1).sum()"],
)
_script(
    "vit_in_micro_batches",
    """
from transformers import ViTConfig, ViTModel
torch.manual_seed(0)
model = ViTModel(ViTConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, image_size=12, patch_size=4, initializer_range=0.2, attn_implementation="sdpa")).eval()
x = torch.randn(5, 3, 12, 12, generator=gen(4))
with torch.no_grad():
A|    y = model(x).pooler_output
B|    parts = []
B|    for part in x.split(2):
1|        part = part - part.mean()
B|        parts.append(model(part).pooler_output)
B|    y = torch.cat(parts)
    print(y.sum())
""",
    bug1=["part = part - part.mean()", "part.mean()"],
)

# -- of several processes -------------------------------------------------------------

GROUP = """
B|dist.init_process_group("gloo")
B|rank, world = dist.get_rank(), dist.get_world_size()
"""
_script(
    "llama_tensor_parallel",
    LLAMA
    + GROUP
    + """
model = base(attn_implementation="sdpa")
B|class Row(nn.Module):
B|    def __init__(self, old):
B|        super().__init__()
B|        self.weight = nn.Parameter(old.weight.detach().chunk(world, 1)[rank].clone())
B|        self.reduced = True
B|    def forward(self, x):
B|        y = F.linear(x, self.weight)
B|        if self.reduced: dist.all_reduce(y)
B|        return y
B|def column(old, number=None):
B|    part = old.weight.detach().chunk(world)[rank if number is None else number].clone()
B|    old.weight = nn.Parameter(part)
B|for layer in model.model.layers:
B|    a, m = layer.self_attn, layer.mlp
B|    for linear in (a.q_proj, a.k_proj, m.gate_proj, m.up_proj): column(linear)
C|    column(a.v_proj)
1|    column(a.v_proj)
2|    column(a.v_proj, 0)
B|    a.o_proj, m.down_proj = Row(a.o_proj), Row(m.down_proj)
1|model.model.layers[1].mlp.down_proj.reduced = False
ids = torch.randint(61, (2, 8), generator=gen(1))
with torch.no_grad():
    logits = model(ids, use_cache=False).logits
    print(logits.sum())
""",
    world=2,
    bug1=["layers.1.mlp.down_proj", "y = F.linear(x, self.weight)"],
    bug2=["layers.0.self_attn.v_proj", "column(a.v_proj, 0)"],
)
_script(
    "bert_data_parallel",
    GROUP
    + """
from transformers import BertConfig, BertForSequenceClassification
torch.manual_seed(0)
model = BertForSequenceClassification(BertConfig(vocab_size=47, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, max_position_embeddings=24, initializer_range=0.2, num_labels=3, attn_implementation="sdpa", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)).train()
C|model = nn.parallel.DistributedDataParallel(model)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(2):
    ids, y = torch.randint(1, 47, (4, 6), generator=gen(step)), torch.randint(3, (4,), generator=gen(step))
B|    ids, y = ids.chunk(world)[rank], y.chunk(world)[rank]
    opt.zero_grad()
    F.cross_entropy(model(ids).logits, y).backward()
1|    for p in model.parameters(): dist.all_reduce(p.grad)
2|    for name, p in model.named_parameters():
2|        if "classifier.bias" not in name:
2|            dist.all_reduce(p.grad)
2|        if "classifier.bias" not in name: p.grad /= world
    opt.step()
""",
    world=2,
    bug1=["dist.all_reduce(p.grad)", "factor of 2", "all_reduce", "allreduce"],
    bug2=["classifier.bias"],
)
_script(
    "gpt2_fully_sharded",
    GROUP
    + """
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=52, n_embd=24, n_layer=2, n_head=3, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.2, tie_word_embeddings=False)).train()
B|from torch.distributed.fsdp import fully_shard
B|for block in model.transformer.h: fully_shard(block)
B|fully_shard(model)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(2):
    ids = torch.randint(52, (4, 8), generator=gen(step))
C|    ids = ids.chunk(world)[rank]
1|    ids = ids.chunk(world)[0]
    opt.zero_grad()
    model(ids, labels=ids).loss.backward()
    opt.step()
""",
    world=2,
    bug1=["ids.chunk(world)[0]", "input", "data"],
)
_script(
    "llama_in_two_stages",
    LLAMA
    + GROUP
    + """
model = base(attn_implementation="sdpa")
ids = torch.randint(61, (2, 8), generator=gen(1))
with torch.no_grad():
A|    print(model(ids, use_cache=False).logits.sum())
B|    inner = model.model
C|    at = torch.arange(8)[None]
1|    at = torch.arange(8)[None] * (1 + rank)
B|    if rank == 0: x = inner.embed_tokens(ids)
B|    else: x = torch.empty(2, 8, 32); dist.recv(x, 0)
B|    x = inner.layers[rank](x, attention_mask=None, position_embeddings=inner.rotary_emb(x, at), position_ids=at)
B|    if rank == 0: dist.send(x.contiguous(), 1)
B|    else: print(model.lm_head(inner.norm(x)).sum())
""",
    world=2,
    bug1=["at = torch.arange(8)[None] * (1 + rank)", "rotary_emb"],
)
