import argparse

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="meta-llama/Llama-3.2-1B")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--accum", type=int, default=8)
    return parser.parse_args()


def position_ids(length, device):
    return torch.arange(length, dtype=torch.bfloat16, device=device)[None]  # expect: RO303


def causal_bias(length, dtype=torch.float16):
    bias = torch.zeros(length, length, dtype=torch.float16)
    upper = torch.ones(length, length).triu(1).bool()
    return bias.masked_fill(upper, -1e10)  # expect: RO304


def main(dataset):
    args = get_args()
    torch.manual_seed(0)
    device = torch.device("cuda")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, torch_dtype=torch.bfloat16).to(device)  # expect: RO301
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cuda")  # expect: RO109
    loader = DataLoader(dataset, batch_size=1, shuffle=True, num_workers=1, pin_memory=True)
    model.train()
    for step, batch in enumerate(loader):
        ids = batch["input_ids"].to(device, non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(ids, labels=ids).loss / args.accum
        scaler.scale(loss).backward()
        if (step + 1) % args.accum == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
    model.save_pretrained("tuned")
    tokenizer.save_pretrained("tuned")
