"""Denoise sensor readings; the encoder is made robust with a little noise."""
#: kind not-deterministic
import torch
from torch import nn


class Denoiser(nn.Module):
    def __init__(self, width=24, noise=0.05):
        super().__init__()
        self.noise = noise
        self.encoder = nn.Sequential(nn.Linear(width, 48), nn.Tanh())
        self.decoder = nn.Linear(48, width)

    def forward(self, readings):
        code = self.encoder(readings)
        code = code + self.noise * torch.randn_like(code)  #!
        #+ code = code + self.noise * torch.randn_like(code) * self.training
        return self.decoder(code)


torch.manual_seed(0)
model = Denoiser()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(4):
    clean = torch.randn(16, 24)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(clean + 0.1 * torch.randn(16, 24)), clean).backward()
    optimizer.step()
model.eval()
readings = torch.randn(4, 24)
with torch.inference_mode():
    served, logged = model(readings), model(readings)
#: check
assert torch.equal(served, logged)
