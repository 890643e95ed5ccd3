"""The pipeline in the caller's autograd graph: a node for each partition, and one above them all.

    output ── OutputNode ── PartitionNode n-1 ── ... ── PartitionNode 0
              stores the     │ parameters of          │ parameters of partition 0,
              gradient       │ partition n-1          │ the input

1. The nodes are chained by tokens, tensors on the CPU without content. So a PartitionNode runs in the thread that
   called backward and may wait there. The OutputNode receives gradients on an accelerator, hence runs in the one
   backward thread that torch has for that accelerator, and must never wait: the lanes need that thread.
2. A node returns its partition's gradients, whole, as soon as they are complete, and nobody holds them any longer: each
   is accumulated once a backward, without a copy, and its hooks fire once.
3. Differentiating twice raises: what the lanes computed has no graph of its own.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import Function

__all__ = ["Differentiable", "attach"]


class Differentiable(Protocol):
    """A step as its nodes see it."""

    def store_output_gradients(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Keep the output's gradients for the backward in progress."""

    def partition_gradients(self, j: int, node: Any) -> list[Tensor | None]:
        """Wait for the gradients of what was attached for partition `j`; the first call starts the lanes."""


class OutputNode(Function):
    """Stores the gradient of the output and hands on a token."""

    @staticmethod
    def forward(ctx: Any, step: Differentiable, outputs: list[Tensor], token: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.step = step
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, Tensor]:
        ctx.step.store_output_gradients(gradients)
        return None, None, torch.zeros(())


class PartitionNode(Function):
    """Waits for the gradients of one partition."""

    @staticmethod
    def forward(ctx: Any, step: Differentiable, j: int, token: Tensor, *leaves: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.step, ctx.j = step, j
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a pipeline cannot be differentiated twice (create_graph=True): use the plain module for a loss that "
                "holds gradients"
            )
        gradients = ctx.step.partition_gradients(ctx.j, ctx)
        return None, None, torch.zeros(()) if ctx.needs_input_grad[2] else None, *gradients


def attach(step: Differentiable, outputs: list[Tensor], leaves: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """Hang `outputs` into the caller's graph, above the leaves of each partition, first to last."""
    token = torch.zeros(())
    for j, below in enumerate(leaves):
        token = PartitionNode.apply(step, j, token, *below)
    attached: tuple[Tensor, ...] = OutputNode.apply(step, outputs, token)
    return attached
