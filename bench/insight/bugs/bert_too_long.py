"""Embed documents with a small BERT."""
#: kind failure
import torch
from transformers import BertConfig, BertModel


def batch(documents, length):
    """Documents cut to a length and padded with zeros."""
    rows = torch.zeros(len(documents), length, dtype=torch.long)
    for row, document in zip(rows, documents):
        kept = torch.tensor(document[:length])
        row[: len(kept)] = kept
    return rows


torch.manual_seed(0)
config = BertConfig(vocab_size=120, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                    intermediate_size=64, max_position_embeddings=48)
encoder = BertModel(config).eval()
documents = [list(range(5, 100)), list(range(7, 60))]
rows = batch(documents, 64)  #!
#+ rows = batch(documents, 48)
with torch.no_grad():
    pooled = encoder(input_ids=rows, attention_mask=(rows > 0).long()).pooler_output  #@
print(pooled.shape)
#: check
