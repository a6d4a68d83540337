"""Transformers quantized: MiniLM in int8 (who is near whom?), and a GPT-2 with 4-bit weights (its perplexity).

MiniLM is calibrated on sentences of the play in examples/ and of docs/, and judged on the sentences of examples/, which
calibration never saw. GPT-2 is trained on the play first, for a few minutes, and kept in out/; perplexity is of characters
of the last tenth of the play, which neither training nor calibration saw. The rows:

- nearest: min-max scales, weights rounded to nearest; for GPT-2's weights that is RTN.
- awq: factors folded into the norms before the layers (arXiv:2306.00978), then nearest.
- smoothquant: folded, or divided before the layers (arXiv:2211.10438), then ours.
- ours: scales by search, GPTQ with the quantized network's inputs, bias correction.
- outliers: at most 5 % of each value's channels in full precision beside int8 (arXiv:2208.07339), then ours.
"""

from __future__ import annotations

import copy
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from common import ROOT, options, progress, table, verdict
from torch import Tensor, nn

from roundoff.export.weights import write_checkpoint
from roundoff.formats import parse_format
from roundoff.plan.budget import sqnr_db
from roundoff.quantize.graph import Graph, trace
from roundoff.quantize.model import QuantizedModel
from roundoff.quantize.options import Options
from roundoff.quantize.repair.smoothing import smooth_, split_outliers_
from roundoff.quantize.scheme import scheme
from roundoff.quantize.sequential import Rounding, round_in_order_
from roundoff.workload import Workload

sys.path.insert(0, str(ROOT / "examples"))
import gpt2_text
import minilm

OUT = ROOT / "out" / "quantize_text"
EPOCHS = 6
NEAREST = Rounding(observer="minmax", weights="nearest", scales="minmax", bias=False)
OURS = Rounding(observer="mse")


Laid = tuple[QuantizedModel, Workload, Graph]


def laid(model: nn.Module, fmt: str, batches: list[Any], forward: Any, how: Options) -> Laid:
    """A copy with quantizers at every linear layer and product with a weight, but the head, whose weight is the table's."""
    workload = Workload(copy.deepcopy(model), batches, forward=forward)
    graph = trace(workload, batches[:2])
    sites = {
        site: parse_format(fmt)
        for site, node in graph.nodes.items()
        if node.kind in ("linear", "matmul") and any(use.weight for use in node.uses) and not site.startswith("lm_head")
    }
    return QuantizedModel(workload.model, scheme(graph, sites, how), graph), workload, graph


def sentences(count: int) -> list[str]:
    """Sentences of 30 to 120 characters of the play and of the documentation, as many of each."""
    docs = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    docs = re.sub(r"[`*\[\]|#]", "", re.sub(r"```.*?```", "", docs, flags=re.DOTALL))
    found = []
    for text in (gpt2_text.text(), docs):
        each = [" ".join(s.split()) for s in re.split(r"(?<=[.!?;])\s", text)]
        found += [s for s in each if 30 < len(s) < 120][: count // 2]
    return sorted(found, key=len)


def tokenized(lines: list[str]) -> list[dict[str, Tensor]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm.folder(), local_files_only=True)
    size = minilm.BATCH
    return [dict(tokenizer(lines[i : i + size], padding=True, return_tensors="pt")) for i in range(0, len(lines), size)]


def nearest_one(outputs: Tensor, reference: Tensor) -> float:
    """Share of sentences whose nearest neighbour is the same one."""
    ours, theirs = ((x @ x.T).fill_diagonal_(-torch.inf).argmax(1) for x in (outputs, reference))
    return float((ours == theirs).double().mean())


def encoder(quick: bool) -> None:
    model, judged = minilm.model(), minilm.batches()
    batches = tokenized(sentences(64 if quick else 320))
    with torch.no_grad():
        reference = [minilm.forward(model, batch) for batch in judged]

    def rows() -> Iterator[tuple[object, ...]]:
        token, groups = Options(activation="token"), Options(activation="token", weight="group:64")
        cases: list[tuple[str, str, Options, str, Rounding]] = [
            ("a tensor, static", "nearest", Options(), "", NEAREST),
            ("a token", "nearest", token, "", NEAREST),
            ("a token", "ours", token, "", OURS),
            ("a token", "smoothquant", token, "smoothquant", OURS),
            ("a token", "outliers", token, "outliers", OURS),
            ("a token; 64 weights", "outliers", groups, "outliers", OURS),
        ]
        for values, name, how, repair, rounding in cases[:2] if quick else cases:
            progress(f"minilm, {values}, {name}")
            start = time.process_time()
            made, workload, graph = laid(model, "int8", batches, minilm.forward, how)
            gain = ""
            if repair == "smoothquant":
                gain = f"{smooth_(made, graph, workload, batches=batches[:4]).gain.db:+.1f}"
            elif repair:
                gain = f"{split_outliers_(made, graph, workload, threshold=3.0, batches=batches[:4])[1].db:+.1f}"
            round_in_order_(made, workload, batches, rounding)
            seconds = time.process_time() - start
            with torch.no_grad():
                outputs = [minilm.forward(made, batch) for batch in judged]
            agree, exact, found = minilm.agreement(outputs, reference), torch.cat(reference), torch.cat(outputs)
            db = sqnr_db(float((found - exact).square().sum() / exact.square().sum()))
            yield (values, name, f"{100 * agree:.1f}", f"{100 * nearest_one(found, exact):.1f}", f"{db:.1f}", gain,
                   f"{seconds:.0f}", verdict(agree, 0.99))  # fmt: skip

    table("MiniLM, int8 weights and activations, calibrated on other text",
          ("a scale for", "method", "ten nearest the same, %", "nearest the same, %", "SQNR, dB", "repair alone, dB",
           "CPU s", "bar 99 %"), rows())  # fmt: skip


def trained(quick: bool) -> nn.Module:
    """The GPT-2 of examples/gpt2_text.py, trained once and kept."""
    epochs = 1 if quick else EPOCHS
    torch.manual_seed(0)
    model, path = gpt2_text.model(), OUT / f"gpt2_{epochs}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    batches = gpt2_text.batches()[: 30 if quick else None]
    optimizer = gpt2_text.optimizer(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=epochs * len(batches), pct_start=0.1)
    model.train()
    for epoch in range(epochs):
        progress(f"training gpt2, epoch {epoch + 1} of {epochs}")
        for index in torch.randperm(len(batches)).tolist():
            loss = gpt2_text.loss(gpt2_text.forward(model, batches[index]), batches[index])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    OUT.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model.eval()


@torch.no_grad()
def perplexity(model: nn.Module) -> float:
    """Of a character of the held-out text."""
    held = gpt2_text.held_out()
    return float(2 ** -gpt2_text.metric([gpt2_text.forward(model, batch) for batch in held], held))


def decoder(quick: bool) -> None:
    model = trained(quick)
    batches = gpt2_text.batches()[: 2 if quick else 16]
    exact = perplexity(model)

    def rows() -> Iterator[tuple[object, ...]]:
        cases = [("nearest", "", NEAREST), ("awq", "awq", NEAREST), ("ours", "", OURS), ("awq, then ours", "awq", OURS)]
        for fmt in ("w4g64",) if quick else ("w4g64", "w4", "w3g64", "w2g64"):
            for name, repair, rounding in cases:
                progress(f"gpt2, {fmt}, {name}")
                start = time.process_time()
                made, workload, graph = laid(model, fmt, batches, gpt2_text.forward, Options())
                if repair:
                    smooth_(made, graph, workload, method=repair)
                round_in_order_(made, workload, batches, rounding)
                seconds = time.process_time() - start
                rise = perplexity(made) / exact - 1
                sizes = write_checkpoint(made, OUT / f"{fmt}_{name.split(',')[0]}")
                bits = 8 * (sizes.weights + sizes.qparams) / sum_of_weights(made)
                bar = verdict(rise, 0.02, at_most=True) if fmt.startswith("w4") else ""
                yield fmt, name, f"{100 * rise:+.2f}", f"{bits:.2f}", f"{seconds:.0f}", bar

    table(f"GPT-2 (perplexity {exact:.3f} a character), weights alone",
          ("format", "method", "perplexity, %", "bits a weight, stored", "CPU s", "bar +2 %"), rows())  # fmt: skip


def sum_of_weights(model: QuantizedModel) -> int:
    return sum(model.model.get_parameter(name).numel() for name in model.weight_names())


def main() -> None:
    args = options(__doc__)
    torch.set_num_threads(1)
    for name, run in (("minilm", encoder), ("gpt2", decoder)):
        if args.only is None or name in args.only:
            run(args.quick)


if __name__ == "__main__":
    main()
