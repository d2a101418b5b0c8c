"""Classify short clips of audio, cut into overlapping frames."""
#: kind failure
import torch
from torch import nn


class FrontEnd(nn.Module):
    def __init__(self, size=64, hop=16):
        super().__init__()
        self.size, self.hop = size, hop
        self.project = nn.Linear(size, 32)

    def frame(self, wave):
        return wave.unfold(1, self.size, self.hop)  #!
        #+ return wave.unfold(1, self.size, 2 * self.hop)

    def forward(self, wave):
        return self.project(self.frame(wave))


class Encoder(nn.Module):
    def __init__(self, length=31, width=32):
        super().__init__()
        self.pos = nn.Parameter(torch.zeros(length, width))
        self.layer = nn.TransformerEncoderLayer(width, 4, 64, batch_first=True)

    def forward(self, x):
        return self.layer(x + self.pos)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = FrontEnd()
        self.encoder = Encoder()
        self.head = nn.Linear(32, 5)

    def forward(self, wave):
        return self.head(self.encoder(self.front(wave)).mean(1))


def main():
    torch.manual_seed(0)
    tagger = Tagger()
    clips, labels = torch.randn(4, 1024), torch.randint(0, 5, (4,))
    loss = nn.functional.cross_entropy(tagger(clips), labels)
    loss.backward()
    print(f"loss {loss.item():.3f}")


main()
#: check
