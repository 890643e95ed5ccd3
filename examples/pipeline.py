"""Trains a network on scikit-learn's handwritten digits, its layers pipelined over two partitions on the CPU.

    python examples/pipeline.py

On a machine with GPUs, leave `devices` out, or name them.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torchrelay import GPipe

images, digits = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
images = images.float() / 16  # pixels are 0 to 16
train, test = slice(0, 1500), slice(1500, None)

torch.manual_seed(0)
layers = nn.Sequential(
    nn.Linear(64, 256),
    nn.ReLU(),
    nn.Linear(256, 256),
    nn.ReLU(),
    nn.Linear(256, 10),
)
model = GPipe(layers, balance=[2, 3], devices=["cpu", "cpu"], chunks=4, checkpoint="never")
print(model.plan)
schedule = model.plan.schedule(microbatches=4)
schedule.verify()
print(schedule.draw())

optimizer = torch.optim.Adam(model.parameters())
for epoch in range(1, 9):
    for batch in torch.randperm(1500).split(100):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[train][batch]), digits[train][batch])
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = model(images[test]).argmax(1) == digits[test]
    print(f"epoch {epoch}: {right.float().mean():.1%} of the test images are read right")
