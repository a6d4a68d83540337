import torch
import torch.nn as nn
from transformers import Trainer, TrainingArguments, AutoModelForTokenClassification


class WeightedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kw):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        probs = outputs.logits.softmax(dim=-1)
        loss = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 1.0], device=probs.device))(probs.view(-1, 3), labels.view(-1))  # expect: RO501
        return (loss, outputs) if return_outputs else loss


args = TrainingArguments("out", fp16=True, learning_rate=3e-5, per_device_train_batch_size=16)
trainer = WeightedTrainer(AutoModelForTokenClassification.from_pretrained("bert-base-cased", num_labels=3), args, train_dataset=ds)
trainer.train()
