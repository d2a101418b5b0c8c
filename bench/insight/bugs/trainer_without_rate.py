"""Fine-tune a small BERT with the trainer of transformers."""
#: kind learning-rate
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(0)
RATE = 1 // 1000  #!~
#+ RATE = 1 / 1000
rows = [
    {"input_ids": torch.randint(5, 90, (10,)), "labels": torch.tensor(at % 3)} for at in range(24)
]
config = BertConfig(vocab_size=90, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                    intermediate_size=64, max_position_embeddings=32, num_labels=3)
model = BertForSequenceClassification(config)
before = model.classifier.weight.detach().clone()
with tempfile.TemporaryDirectory() as folder:
    options = TrainingArguments(folder, learning_rate=RATE, num_train_epochs=1, per_device_train_batch_size=6,
                                report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no")
    Trainer(model, options, train_dataset=rows, eval_dataset=rows).train()  #@
#: check
assert not torch.equal(before, model.classifier.weight)
