# converted from fine_tune.ipynb
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForSequenceClassification, get_linear_schedule_with_warmup

torch.manual_seed(42)
np.random.seed(42)

# In[2]:
device = "cuda"
model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=2)
model.to(device)

# In[3]:
data = torch.load("encoded.pt", weights_only=True)
train_ds = TensorDataset(data["ids"], data["mask"], data["labels"])
train_dl = DataLoader(train_ds, batch_size=32, shuffle=True, num_workers=2, pin_memory=True)
valid_dl = DataLoader(TensorDataset(data["vids"], data["vmask"], data["vlabels"]), batch_size=64, num_workers=2, pin_memory=True)

# In[4]:
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.01)
total = len(train_dl) * 3
scheduler = get_linear_schedule_with_warmup(optimizer, int(0.1 * total), total)

# In[5]:
for epoch in range(3):
    model.train()
    losses = []
    for step, (ids, mask, labels) in enumerate(train_dl):
        ids = ids.to(device, non_blocking=True)
        mask = mask.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    print("train", torch.stack(losses).mean().item())

    model.eval()
    preds = []
    for ids, mask, labels in valid_dl:
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(ids.to(device), attention_mask=mask.to(device)).logits
        preds.append(logits.float().softmax(-1).cpu())
    probs = torch.cat(preds)
    print("valid", (probs.argmax(-1) == data["vlabels"]).float().mean().item())

# In[6]:
model.save_pretrained("out")
