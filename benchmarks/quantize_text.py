"""Transformers quantized: MiniLM in int8 (who is near whom?), and a GPT-2 with 4-bit weights (its perplexity).

MiniLM is calibrated on sentences of the play in examples/ and of docs/, and judged by whose nearest neighbour among the
others is the same one as in fp32: among sentences of the play, and of Python's language reference (pydoc_data, of this
Python), that calibration never saw. GPT-2 is trained on the play first, and kept in out/; perplexity is of characters of the
last tenth of the play, which neither training nor calibration saw. The rows:

- all in bf16: no quantization at all; what a change of format costs that nobody asks about.
- nearest: min-max scales, weights rounded to nearest; for GPT-2's weights that is RTN.
- awq: factors folded into the norms before the layers (arXiv:2306.00978), then nearest.
- ours: scales by search, GPTQ with the quantized network's inputs, bias correction.
- divided: channels divided before linear layers by what the output loses (repair.divide), then ours.
- all products: the operands of every linear layer and of attention's two products are int8. Embeddings are looked up in
  fp32.
"""

from __future__ import annotations

import copy
import random
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pydoc_data.topics import topics
from typing import Any

import torch
from common import ROOT, options, progress, table, verdict
from torch import Tensor, nn

from roundoff.budget import sqnr_db
from roundoff.export import write_checkpoint
from roundoff.formats import parse_format
from roundoff.quantize import (
    Graph,
    Options,
    QuantizedModel,
    Rounding,
    quantize,
    round_in_order_,
    scheme,
    smooth_,
    trace,
)
from roundoff.workload import Workload

sys.path.insert(0, str(ROOT))
from examples import gpt2_text, minilm

OUT = ROOT / "out" / "quantize_text"
EPOCHS = 20
NEAREST = Rounding(observer="minmax", weights="nearest", scales="minmax", bias=False)
OURS = Rounding(observer="mse")


Laid = tuple[QuantizedModel, Workload, Graph]


def laid(
    model: nn.Module, fmt: str, batches: list[Any], forward: Any, how: Options
) -> Laid:
    """A copy with quantizers at every linear layer and product with a weight, but the head, whose weight is the table's."""
    workload = Workload(copy.deepcopy(model), batches, forward=forward)
    graph = trace(workload, batches[:2])
    sites = {
        site: parse_format(fmt)
        for site, node in graph.nodes.items()
        if node.kind in ("linear", "matmul")
        and any(use.weight for use in node.uses)
        and not site.startswith("lm_head")
    }
    return (
        QuantizedModel(workload.model, scheme(graph, sites, how), graph),
        workload,
        graph,
    )


def sentences(text: str) -> list[str]:
    """The sentences of 30 to 200 characters, each once."""
    each = (" ".join(s.split()) for s in re.split(r"(?<=[.!?;])\s", text))
    return list(dict.fromkeys(s for s in each if 30 < len(s) < 200))


def corpora() -> tuple[list[str], dict[str, list[str]]]:
    """Sentences to calibrate on, and others to judge by: of the other half of the play, and of Python's reference."""
    docs = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    play = sentences(gpt2_text.text())
    random.Random(0).shuffle(play)
    words = re.compile(r"[A-Z][^`|{}*=<>\[\]_#]+[.!?]")
    reference = [
        s for s in sentences("\n\n".join(topics.values())) if words.fullmatch(s)
    ]
    prose = [
        s
        for s in sentences(re.sub(r"```.*?```", "", docs, flags=re.DOTALL))
        if words.fullmatch(s)
    ]
    return play[:600] + prose[:300], {
        "play": play[600:],
        "Python's reference": reference,
    }


def tokenized(lines: list[str]) -> list[dict[str, Tensor]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm.folder(), local_files_only=True)
    size = minilm.BATCH
    return [
        dict(tokenizer(lines[i : i + size], padding=True, return_tensors="pt"))
        for i in range(0, len(lines), size)
    ]


def nearest_one(outputs: Tensor, reference: Tensor) -> float:
    """Share of sentences whose nearest neighbour is the same one."""
    ours, theirs = (
        (x @ x.T).fill_diagonal_(-torch.inf).argmax(1) for x in (outputs, reference)
    )
    return float((ours == theirs).double().mean())


def encoder(quick: bool) -> None:
    model = minilm.model()
    calibration, judged = corpora()
    if quick:
        calibration, judged = (
            calibration[:8],
            {name: lines[:8] for name, lines in judged.items()},
        )
    batches = tokenized(sorted(calibration, key=len))
    held = {name: tokenized(sorted(lines, key=len)) for name, lines in judged.items()}
    exact = {name: embedded(model, data) for name, data in held.items()}
    every, linear = {"op:linear": "int8", "op:matmul": "int8"}, {"op:linear": "int8"}
    token, groups = (
        Options(activation="token"),
        Options(activation="group:32", weight="group:32"),
    )
    small = Options(activation="group:16", weight="group:16")
    cases: list[tuple[str, str, dict[str, str], Options, Rounding, bool]] = [
        ("a tensor, static", "nearest", every, Options(), NEAREST, False),
        ("a tensor, static", "ours", every, Options(), Rounding(), False),
        ("a token", "ours", every, token, OURS, False),
        ("a token", "ours, divided", every, token, OURS, True),
        ("32 channels", "ours, divided", every, groups, OURS, True),
        ("32 channels", "ours, divided", linear, groups, OURS, True),
        ("16 channels", "ours, divided", every, small, OURS, True),
        ("16 channels", "ours, divided", linear, small, OURS, True),
    ]

    def judge(made: nn.Module, *case: str) -> Iterator[tuple[object, ...]]:
        for corpus, data in held.items():
            found = nn.functional.normalize(embedded(made, data).float(), dim=-1)
            share = nearest_one(found, exact[corpus])
            db = sqnr_db(
                float(
                    (found - exact[corpus]).square().sum()
                    / exact[corpus].square().sum()
                )
            )
            row = (
                *case[:3],
                corpus,
                len(found),
                f"{100 * share:.1f}",
                f"{db:.1f}",
                case[3],
                verdict(share, 0.99),
            )
            progress(" | ".join(map(str, row)))
            yield row

    def rows() -> Iterator[tuple[object, ...]]:
        yield from judge(
            copy.deepcopy(model).bfloat16(), "nothing: all in bf16", "", "", ""
        )
        for values, name, plan, how, rounding, divide in cases[:1] if quick else cases:
            start = time.process_time()
            made = quantize(
                model,
                plan,
                batches,
                forward=minilm.forward,
                options=replace(how, divide=divide),
                rounding=rounding,
                spread=rounding is not NEAREST,
            )
            seconds = time.process_time() - start
            what = "all products" if plan is every else "linear layers"
            yield from judge(made, what, values, name, f"{seconds:.0f}")

    table(
        "MiniLM, int8 weights and activations, calibrated on other sentences",
        (
            "in int8",
            "a scale for",
            "method",
            "judged by",
            "sentences",
            "nearest the same, %",
            "SQNR, dB",
            "CPU s",
            "bar 99 %",
        ),
        rows(),
    )


@torch.no_grad()
def embedded(model: nn.Module, data: list[Any]) -> Tensor:
    return torch.cat([minilm.forward(model, batch) for batch in data])


def trained(quick: bool) -> nn.Module:
    """The GPT-2 of examples/gpt2_text.py, trained once and kept; its first block alone with ``quick``."""
    epochs = 1 if quick else EPOCHS
    torch.manual_seed(0)
    model = gpt2_text.model()
    if quick:
        blocks = list(model.get_submodule("transformer.h").children())
        model.get_submodule("transformer").add_module("h", nn.ModuleList(blocks[:1]))
    path = OUT / ("gpt2_quick.pt" if quick else f"gpt2_{epochs}.pt")
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    batches = gpt2_text.batches()[: 2 if quick else None]
    optimizer = gpt2_text.optimizer(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 2e-3, total_steps=epochs * len(batches), pct_start=0.1
    )
    model.train()
    for epoch in range(epochs):
        progress(f"training gpt2, epoch {epoch + 1} of {epochs}")
        for index in torch.randperm(len(batches)).tolist():
            loss = gpt2_text.loss(
                gpt2_text.forward(model, batches[index]), batches[index]
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    OUT.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model.eval()


@torch.no_grad()
def perplexity(model: nn.Module, quick: bool) -> float:
    """Of a character of the held-out text; of its first batch with ``quick``."""
    held = gpt2_text.held_out()[: 1 if quick else None]
    return float(
        2
        ** -gpt2_text.metric([gpt2_text.forward(model, batch) for batch in held], held)
    )


def decoder(quick: bool) -> None:
    model = trained(quick)
    batches = gpt2_text.batches()[: 1 if quick else 16]
    exact = perplexity(model, quick)

    def rows() -> Iterator[tuple[object, ...]]:
        cases = [
            ("nearest", "", NEAREST),
            ("awq", "awq", NEAREST),
            ("ours", "", OURS),
            ("awq, then ours", "awq", OURS),
        ]
        for fmt in ("w4g64",) if quick else ("w4g64", "w4", "w3g64", "w2g64"):
            for name, repair, rounding in cases:
                progress(f"gpt2, {fmt}, {name}")
                start = time.process_time()
                made, workload, graph = laid(
                    model, fmt, batches, gpt2_text.forward, Options()
                )
                if repair:
                    smooth_(made, graph, workload, method=repair)
                round_in_order_(made, workload, batches, rounding)
                seconds = time.process_time() - start
                rise = perplexity(made, quick) / exact - 1
                sizes = write_checkpoint(made, OUT / f"{fmt}_{name.split(',')[0]}")
                bits = 8 * (sizes.weights + sizes.qparams) / sum_of_weights(made)
                bar = verdict(rise, 0.02, at_most=True) if fmt.startswith("w4") else ""
                row = (
                    fmt,
                    name,
                    f"{100 * rise:+.2f}",
                    f"{bits:.2f}",
                    f"{seconds:.0f}",
                    bar,
                )
                progress(" | ".join(row))
                yield row

    table(
        f"GPT-2 (perplexity {exact:.3f} a character), weights alone",
        (
            "format",
            "method",
            "perplexity, %",
            "bits a weight, stored",
            "CPU s",
            "bar +2 %",
        ),
        rows(),
    )


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
