"""Trains a network on scikit-learn's handwritten digits over several processes, whose gradients are averaged.

    torchrun --nproc-per-node 2 examples/data_parallel.py

Each rank reads its share of every mini-batch. On GPUs, use the backend "nccl" and move the model and its input.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torchrelay import DistributedDataParallel

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

images, digits = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
images = images.float() / 16  # pixels are 0 to 16
train, test = slice(0, 1500), slice(1500, None)

torch.manual_seed(0)  # the same order of the images on every rank; the weights are rank 0's in any case
layers = nn.Sequential(
    nn.Linear(64, 256),
    nn.ReLU(),
    nn.Linear(256, 256),
    nn.ReLU(),
    nn.Linear(256, 10),
)
model = DistributedDataParallel(layers)
if rank == 0:
    print(model.plan)

optimizer = torch.optim.Adam(model.parameters())
for epoch in range(1, 9):
    for batch in torch.randperm(1500).split(100):
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[train][mine]), digits[train][mine])
        loss.backward()
        optimizer.step()
    if rank == 0:
        with torch.no_grad():
            right = model(images[test]).argmax(1) == digits[test]
        print(f"epoch {epoch}: {right.float().mean():.1%} of the test images are read right")

dist.destroy_process_group()
