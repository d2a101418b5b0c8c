"""Classify images with a small vision transformer in bfloat16."""
#: kind failure
import torch
from transformers import ViTConfig, ViTForImageClassification


def load(count, size):
    """Images as a camera gives them, scaled to [-1, 1]."""
    raw = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8)
    images = raw.float() / 127.5 - 1  #!
    #+ images = (raw.float() / 127.5 - 1).bfloat16()
    return images


torch.manual_seed(0)
config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
                   image_size=32, patch_size=8, num_labels=4)
model = ViTForImageClassification(config).to(torch.bfloat16).eval()


class Screener(torch.nn.Module):
    """The classifier behind a projection of the channels."""

    def __init__(self, classifier):
        super().__init__()
        self.mix = torch.nn.Linear(3, 3).to(torch.bfloat16)
        self.classifier = classifier

    def forward(self, images):
        mixed = self.mix(images.movedim(1, -1)).movedim(-1, 1)
        return self.classifier(pixel_values=mixed).logits


with torch.no_grad():
    print(Screener(model)(load(2, 32)).argmax(-1))
#: check
