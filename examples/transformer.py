"""Trains a transformer to read handwritten digits line by line; where it is cut is found by measuring its layers.

    python examples/transformer.py

On a machine with GPUs, leave `devices` out, or name them, and move pictures to the first and digits to the last.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchrelay import GPipe, trace
from torchrelay.balance import balance_by_time

WIDTH, LINES, PIXELS, SHADES = 48, 8, 8, 17


class Embed(nn.Module):
    """Shades (pictures, lines, pixels) to a vector a line, and which lines are blank: a tuple is handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.pixel = nn.Embedding(PIXELS * SHADES, WIDTH)  # a vector for each shade at each place in the line
        nn.init.normal_(self.pixel.weight, std=PIXELS**-0.5)
        self.line = nn.Parameter(torch.randn(LINES, WIDTH))

    def forward(self, shades: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(PIXELS, device=shades.device) * SHADES
        return self.pixel(places + shades).sum(2) + self.line, (shades == 0).all(2)


class Block(nn.Module):
    """Attention among the lines that are not blank; the mask needs no gradient, and is handed on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=96, dropout=0.1, batch_first=True, norm_first=True
        )

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, blank = value
        return self.layer(x, src_key_padding_mask=blank), blank


class Read(nn.Module):
    """A score for each digit, from the lines that are not blank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.scores = nn.Linear(LINES * WIDTH, 10)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        x, blank = value
        return self.scores(self.norm(x).masked_fill(blank.unsqueeze(2), 0).flatten(1))


torch.manual_seed(0)
images, digits = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
order = torch.randperm(len(digits))  # else the last writers' hands would be new to it
shades, digits = images.long().view(-1, LINES, PIXELS)[order], digits[order]  # shades are 0 to 16
train, test = slice(0, 1500), slice(1500, None)

torch.set_num_threads(1)  # the partitions share the processors
layers = nn.Sequential(Embed(), *(Block() for _ in range(3)), Read())
balance = balance_by_time(2, layers, shades[:10], timeout=0.5)
model = GPipe(layers, balance=balance, devices=["cpu"] * 2, chunks=5)  # micro-batches of 10 images
print(model.plan)

optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, epochs=8, steps_per_epoch=30)
for epoch in range(1, 9):
    model.train()
    for batch in torch.randperm(1500).split(50):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(shades[train][batch]), digits[train][batch])
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        right = model(shades[test]).argmax(1) == digits[test]
    print(f"epoch {epoch}: {right.float().mean():.1%} of the test images are read right")

model.train()
with trace.record(model) as timeline:
    for batch in torch.arange(250).split(50):
        nn.functional.cross_entropy(model(shades[batch]), digits[batch]).backward()
print(timeline)
