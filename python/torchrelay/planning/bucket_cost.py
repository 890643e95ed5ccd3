"""How large buckets should be on a link whose latency and bandwidth are known.

Small buckets pay the latency often; large ones start late, and what is left when the backward is over is long. The best
size lies between, and depends on the link and on how long the backward takes. The model:

1. Gradients arrive evenly: when a part of the bytes has arrived, the same part of the backward's time is over.
2. A bucket is sent when it is complete and the one before it is through; that takes the latency, and a time in
   proportion to its bytes.
"""

import dataclasses
from collections.abc import Sequence

from torchrelay import _core
from torchrelay.planning.bucket_plan import (
    DEFAULT_BUCKET_MIB,
    FIRST_BUCKET_BYTES,
    MIB,
    BucketPlan,
    ParameterFacts,
    Prediction,
    plan_buckets,
)

__all__ = ["Link", "plan_for_link", "predict"]

_CAPS_MIB = (DEFAULT_BUCKET_MIB, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Link:
    """What an all-reduce costs: `latency` in seconds, and `per_byte` seconds for each byte of the tensor."""

    latency: float
    per_byte: float


def predict(
    plan: BucketPlan, parameters: Sequence[ParameterFacts], arrival: Sequence[int], backward: float, link: Link
) -> Prediction:
    """When the reduction would be through.

    Args:
        plan: The buckets.
        parameters: In the order of definition.
        arrival: Positions in `parameters`, each once, in the order in which the gradients arrive.
        backward: Seconds that the backward takes by itself.
        link: What sending costs.
    """
    whole = sum(facts.bytes for facts in parameters)
    arrived, so_far = [0.0] * len(parameters), 0
    for member in arrival:
        so_far += parameters[member].bytes
        arrived[member] = backward * so_far / whole if whole else backward
    ready = [max(arrived[member] for member in bucket.members) for bucket in plan.buckets]
    end = _core.reduction_end([bucket.bytes for bucket in plan.buckets], ready, link.latency, link.per_byte)
    return Prediction(backward, max(0.0, end - backward), link.latency, link.per_byte)


def plan_for_link(
    parameters: Sequence[ParameterFacts], arrival: Sequence[int], backward: float, link: Link, *, world_size: int
) -> BucketPlan:
    """The plan that is through first of those with the default limit and with powers of two, by the model.

    Args:
        parameters: In the order of definition.
        arrival: Positions in `parameters`, each once, in the order in which the gradients arrive.
        backward: Seconds that the backward takes by itself.
        link: What sending costs.
        world_size: How many ranks average.
    """
    best: BucketPlan | None = None
    for cap in _CAPS_MIB:
        limits = [min(FIRST_BUCKET_BYTES, int(cap * MIB)), int(cap * MIB)]
        plan = plan_buckets(parameters, limits, world_size=world_size, arrival=arrival)
        plan = dataclasses.replace(plan, predicted=predict(plan, parameters, arrival, backward, link))
        if best is None or _exposed(plan) < _exposed(best):
            best = plan
    assert best is not None
    return best


def _exposed(plan: BucketPlan) -> float:
    assert plan.predicted is not None
    return plan.predicted.exposed
