"""How much memory each layer takes."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from torchrelay.profiling.layers import ProfiledLayer, each_layer
from torchrelay.profiling.progress import shown
from torchrelay.profiling.surroundings import put_back

__all__ = ["LayerSize", "profile_sizes"]


class LayerSize(NamedTuple):
    """In bytes: what a layer's forward saves for its backward, and its parameters."""

    activations: int
    parameters: int


def profile_sizes(module: nn.Sequential, sample: Any, device: torch.device) -> list[LayerSize]:
    """What the layers take for a `sample`, each byte counted once: for the first layer that saves or has it."""
    sizes: list[LayerSize] = []
    waiting: dict[Any, Any] = {}
    saved_before: set[int] = set()
    parameters: set[Tensor] = set()
    layers = shown(each_layer(module, sample, device, waiting), len(module), "measuring layers")
    with put_back(device), closing(layers):
        for layer, original in zip(layers, module, strict=True):
            with layer.told():
                saved = _saved(layer)
            activations = sum(size for key, size in saved.items() if key not in saved_before)
            own = set(original.parameters()) - parameters
            parameters |= own
            sizes.append(LayerSize(activations, sum(p.numel() * p.element_size() for p in own)))
            # What is handed on can be met again, and nothing else: its place in memory may be given to another tensor.
            handed_on = _storages([*layer.outputs, *layer.exported, *waiting.values()])
            saved_before = (saved_before | saved.keys()) & handed_on.keys()
    return sizes


def _saved(layer: ProfiledLayer) -> dict[int, int]:
    """The memory that a forward saves apart from the layer's own tensors: identities and bytes."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = layer.run(layer.given(shared=True))
    layer.keep(outputs)
    found = _storages(kept)
    for key in _storages([*layer.module.parameters(), *layer.module.buffers()]):
        found.pop(key, None)
    return found


def _storages(tensors: Iterable[Any]) -> dict[int, int]:
    return {
        storage._cdata: storage.nbytes()
        for tensor in tensors
        if isinstance(tensor, Tensor)
        for part in _dense(tensor)
        for storage in [part.untyped_storage()]
    }


def _dense(tensor: Tensor) -> Iterator[Tensor]:
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout is torch.strided:
        yield tensor
