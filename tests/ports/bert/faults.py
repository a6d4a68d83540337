"""Faulty ports of BERT."""

from ..bank import Change

FAULTS = [
    Change(
        "torch_layers",
        "eps of the library's default",
        "layer_norm_eps=1e-12,",
        "layer_norm_eps=1e-3,",
        at="self.encoder(",
    ),
    Change(
        "torch_layers",
        "relu for gelu",
        'activation="gelu"',
        'activation="relu"',
        at="self.encoder(",
    ),
    Change(
        "torch_layers",
        "no mask",
        "src_key_padding_mask=mask == 0",
        "src_key_padding_mask=None",
        at="self.encoder(",
    ),
    Change(
        "torch_layers", "inverted mask", "mask == 0", "mask == 1", at="self.encoder("
    ),
    Change(
        "torch_layers",
        "mean over padding too",
        "(x * keep).sum(dim=1) / keep.sum(dim=1)",
        "x.mean(dim=1)",
    ),
    Change(
        "torch_layers",
        "segment left out",
        " + self.segment[0]",
        "",
        at="self.where[: ids.shape[1]]",
    ),
    Change("torch_layers", "other segment", "self.segment[0]", "self.segment[1]"),
    Change(
        "torch_layers",
        "positions from one",
        "self.where[: ids.shape[1]]",
        "self.where[1 : ids.shape[1] + 1]",
    ),
    Change(
        "torch_layers",
        "norm first",
        "batch_first=True,",
        "batch_first=True,\n            norm_first=True,",
        at="self.encoder(",
    ),
    Change("torch_layers", "two heads", "heads=4", "heads=2", at="self.encoder("),
    Change(
        "torch_layers",
        "q and k exchanged",
        '("query", "key", "value")',
        '("key", "query", "value")',
        parameter="encoder.layers.0.self_attn.in_proj_weight|encoder.layers.0.self_attn.in_proj_bias",
    ),
    Change(
        "torch_layers",
        "no start norm",
        "self.start(x)",
        "x",
        at="self.where[: ids.shape[1]]|self.encoder(",
    ),
    Change(
        "torch_layers",
        "no weight decay",
        "lr=1e-3)",
        "lr=1e-3, weight_decay=0.0)",
        phase="optimizer",
    ),
    Change(
        "torch_layers",
        "adam for adamw",
        "torch.optim.AdamW(model.parameters(), lr=1e-3)",
        "torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.01)",
        phase="optimizer",
    ),
    Change(
        "torch_layers",
        "head bias lost",
        '"out.bias": w["head.bias"]',
        '"out.bias": w["head.bias"] * 0',
        parameter="out.bias",
    ),
    Change(
        "torch_layers",
        "label smoothing",
        "batch[2])\n",
        "batch[2], label_smoothing=0.05)\n",
    ),
]
