import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


class Finetuner:
    def __init__(self, name, dataset):
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        self.model = AutoModelForCausalLM.from_pretrained(name)
        self.model.bfloat16()  # expect: RO301
        self.model.cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.loader = DataLoader(dataset, batch_size=2, shuffle=True, collate_fn=self.collate, num_workers=2, pin_memory=True)

    def collate(self, texts):
        return self.tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=512)

    def train(self, epochs=1):
        self.model.train()
        for epoch in range(epochs):
            for step, batch in enumerate(self.loader):
                batch = batch.to("cuda")
                out = self.model(**batch, labels=batch["input_ids"])
                out.loss.backward()  # expect: RO601
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                if step % 10 == 0:
                    print(step, out.loss.item())
            self.model.save_pretrained(f"epoch-{epoch}")

    def generate(self, prompt, n=50):
        self.model.eval()
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids.cuda()
        with torch.no_grad():
            for _ in range(n):
                logits = self.model(ids).logits[:, -1]
                ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
        return self.tokenizer.decode(ids[0])


if __name__ == "__main__":
    torch.manual_seed(0)
    texts = open("texts.txt").read().split("\n\n")
    tuner = Finetuner("gpt2", texts)
    tuner.train()
    print(tuner.generate("Once upon a time"))
