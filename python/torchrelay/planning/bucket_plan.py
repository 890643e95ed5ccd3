"""The plan of a data-parallel step: which gradients travel in which bucket, and in what order.

What the plan keeps to, whatever the parameters:

1. It is a pure function of the parameters' facts, the limits and the order of arrival: equal on every rank that holds
   the same model.
2. Every parameter is in exactly one bucket; a bucket holds one dtype on one device.
3. A parameter with sparse gradients is alone.
4. Buckets are formed from the gradient that arrives last to the one that arrives first, and reduced in the order in
   which they are complete. So the small bucket, limited to 1 MiB, holds what arrives last and is reduced last: little
   is left to be sent when the backward is over. Until a backward has shown the order of arrival, it is taken to be the
   reverse of that of definition.
"""

import dataclasses
import json
import math
import typing
from collections.abc import Iterable, Sequence

from torchrelay import _core
from torchrelay.errors import PlanError

__all__ = ["Bucket", "BucketPlan", "ParameterFacts", "Prediction", "bind_plan", "bucket_limits", "plan_buckets"]

MIB = 1 << 20
FIRST_BUCKET_BYTES = MIB
DEFAULT_BUCKET_MIB = 25.0
_MOST_BYTES = (1 << 63) - 1
_VERSION = 1
_ORIGIN = {"definition": "", "arrival": " (by arrival)", "given": " (given)"}


class ParameterFacts(typing.NamedTuple):
    """What planning knows of a parameter: `name`, `numel` elements of `itemsize` bytes each, the names of its `dtype`
    and `device`, and whether its gradients will be `sparse`.
    """

    name: str
    numel: int
    itemsize: int
    dtype: str
    device: str
    sparse: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of a dense gradient."""
        return self.numel * self.itemsize


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Gradients that travel together: `index` is the place in the order of reduction, `members` are positions in the
    order of definition, `bytes` their sum, `limit` the bytes at which the bucket was closed (0 for a sparse one).
    """

    index: int
    members: tuple[int, ...]
    names: tuple[str, ...]
    bytes: int
    dtype: str
    device: str
    limit: int
    sparse: bool = False


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What the cost model says of a plan, in seconds: `exposed` is how much of the reduction is left when a backward of
    `backward` is over, on a link with this `latency` and time `per_byte`.
    """

    backward: float
    exposed: float
    latency: float
    per_byte: float

    def __str__(self) -> str:
        rate = f"{1e-9 / self.per_byte:.3g} GB/s" if self.per_byte else "no limit of bandwidth"
        return (
            f"predicted: {1e3 * self.exposed:.3g} ms of the reduction are left when a backward of "
            f"{1e3 * self.backward:.3g} ms is over (link: {1e3 * self.latency:.3g} ms, {rate})"
        )


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """The buckets of a data-parallel step in the order in which they are reduced over `world_size` ranks.

    `source` tells what the order was taken from: "definition", "arrival" (of the gradients, in a backward), or "given".
    `predicted` is there if the sizes were chosen by the cost model.
    """

    buckets: tuple[Bucket, ...]
    world_size: int
    source: str = "definition"
    predicted: Prediction | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(bucket.bytes for bucket in self.buckets)

    def bucket_of(self, name: str) -> Bucket:
        """The bucket of a parameter.

        Raises:
            KeyError: No parameter of that name is planned.
        """
        for bucket in self.buckets:
            if name in bucket.names:
                return bucket
        raise KeyError(name)

    def to_json(self) -> str:
        """The plan as text that `from_json` reads, for another run to follow; parameters go by their names."""
        buckets = [
            {
                "parameters": list(bucket.names),
                "bytes": bucket.bytes,
                "dtype": bucket.dtype,
                "device": bucket.device,
                "limit": bucket.limit,
                "sparse": bucket.sparse,
            }
            for bucket in self.buckets
        ]
        return json.dumps({"version": _VERSION, "world_size": self.world_size, "buckets": buckets}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "BucketPlan":
        """The plan that `to_json` wrote. Whether it fits a model is asked when it is given to one.

        Raises:
            PlanError: The text is no bucket plan.
        """
        try:
            read = json.loads(text)
            if read["version"] != _VERSION:
                raise PlanError(f"this is version {read['version']!r} of bucket plans; version {_VERSION} is read here")
            buckets, position = [], 0
            for index, bucket in enumerate(read["buckets"]):
                names = tuple(map(str, bucket["parameters"]))
                members = tuple(range(position, position + len(names)))
                position += len(names)
                facts = bucket["bytes"], bucket["dtype"], bucket["device"], bucket["limit"], bucket["sparse"]
                buckets.append(Bucket(index, members, names, *facts))
            return cls(tuple(buckets), int(read["world_size"]), source="given")
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"this is no bucket plan as BucketPlan.to_json writes it: {error!r}") from error

    def __str__(self) -> str:
        total = sum(len(bucket.names) for bucket in self.buckets)
        head = (
            f"{_count(total, 'gradient')}, {_size(self.bytes)}, in {_count(len(self.buckets), 'bucket')}; "
            f"averaged over {_count(self.world_size, 'rank')}, in this order{_ORIGIN[self.source]}:"
        )
        rows = [("bucket", "size", "limit", "dtype", "device", "parameters")]
        for bucket in self.buckets:
            dtype = bucket.dtype + (" (sparse)" if bucket.sparse else "")
            limit = "-" if bucket.sparse else _size(bucket.limit)
            rows.append(
                (str(bucket.index), _size(bucket.bytes), limit, dtype, bucket.device, _abbreviate(bucket.names))
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        if not self.buckets:
            return head
        tail = [] if self.predicted is None else [str(self.predicted)]
        return "\n".join([head, *("  " + line.rstrip() for line in lines), *tail])


def bucket_limits(cap_mib: float | None = None, caps_mib: Iterable[float] | None = None) -> list[int]:
    """Limits in bytes, for `plan_buckets`.

    Args:
        cap_mib: The limit of all buckets but the first formed, in MiB; 25 if None. 0 gives each parameter a bucket.
        caps_mib: The limits of the first buckets formed, in MiB, instead; the last one holds for all that follow.

    Raises:
        TypeError: A limit is not a number (a bool is none).
        ValueError: A limit is negative or not a number, or `caps_mib` is empty.
    """
    if caps_mib is None:
        return [FIRST_BUCKET_BYTES, _limit("bucket_cap_mb", DEFAULT_BUCKET_MIB if cap_mib is None else cap_mib)]
    if isinstance(caps_mib, str) or not isinstance(caps_mib, Iterable):
        raise TypeError(f"bucket_cap_mb_list is a list of numbers of MiB, but is {caps_mib!r}")
    limits = [_limit(f"bucket_cap_mb_list[{position}]", cap) for position, cap in enumerate(caps_mib)]
    if not limits:
        raise ValueError("bucket_cap_mb_list must hold at least one limit (in MiB); leave it out for the default")
    return limits


def plan_buckets(
    parameters: Sequence[ParameterFacts],
    limits: Sequence[int],
    *,
    world_size: int,
    arrival: Sequence[int] | None = None,
) -> BucketPlan:
    """The plan for gradients that arrive in this order.

    Args:
        parameters: In the order of definition.
        limits: In bytes, per (dtype, device): the n-th bucket formed is closed when it reaches the n-th limit, or the
            last one. A parameter is never split, so a bucket can be larger than its limit.
        world_size: How many ranks average.
        arrival: Positions in `parameters`, each once, in the order in which the gradients arrive; by default the
            reverse of that of definition.

    Raises:
        PlanError: A limit is negative, or there is none; or the order of arrival is no permutation.
    """
    expected = range(len(parameters) - 1, -1, -1) if arrival is None else arrival
    found, bucket_limit = _core.buckets_by_arrival(
        [facts.bytes for facts in parameters],
        _keys(parameters),
        list(limits),
        list(expected),
        sparse=[facts.sparse for facts in parameters],
    )
    ordered = enumerate(zip(found, bucket_limit, strict=True))
    return BucketPlan(
        tuple(_bucket(index, parameters, members, limit) for index, (members, limit) in ordered),
        world_size,
        "definition" if arrival is None else "arrival",
    )


def bind_plan(plan: BucketPlan, parameters: Sequence[ParameterFacts], *, world_size: int) -> BucketPlan:
    """The plan, given from elsewhere, for these parameters: verified, with their positions and devices.

    Raises:
        PlanError: The plan has other parameters, with other sizes or dtypes, or mixes what may not be mixed.
    """
    position = {facts.name: index for index, facts in enumerate(parameters)}
    planned = [name for bucket in plan.buckets for name in bucket.names]
    missing = [name for name in position if name not in set(planned)]
    unknown = [name for name in planned if name not in position]
    if missing or unknown:
        problems = [f"it lacks {', '.join(missing[:4])}"] * bool(missing)
        problems += [f"the module has no trainable {', '.join(unknown[:4])}"] * bool(unknown)
        raise PlanError(f"the given bucket plan is one of another module: {'; '.join(problems)}")
    members = [[position[name] for name in bucket.names] for bucket in plan.buckets]
    _core.verify_buckets(_keys(parameters), [facts.sparse for facts in parameters], members)
    bound = tuple(
        _bucket(index, parameters, found, bucket.limit)
        for index, (bucket, found) in enumerate(zip(plan.buckets, members, strict=True))
    )
    for given, mine in zip(plan.buckets, bound, strict=True):
        if (given.bytes, given.dtype) != (mine.bytes, mine.dtype):
            raise PlanError(
                f"bucket {mine.index} of the given plan ({_abbreviate(mine.names)}) has {given.bytes} bytes of "
                f"{given.dtype}, but these parameters have {mine.bytes} of {mine.dtype}: make the plan anew"
            )
    return BucketPlan(bound, world_size, "given")


def _keys(parameters: Sequence[ParameterFacts]) -> list[int]:
    keys: dict[tuple[str, str], int] = {}
    return [keys.setdefault((facts.dtype, facts.device), len(keys)) for facts in parameters]


def _bucket(index: int, parameters: Sequence[ParameterFacts], members: Sequence[int], limit: int) -> Bucket:
    facts = [parameters[member] for member in members]
    return Bucket(
        index,
        tuple(members),
        tuple(fact.name for fact in facts),
        sum(fact.bytes for fact in facts),
        facts[0].dtype,
        facts[0].device,
        limit,
        facts[0].sparse,
    )


def _limit(what: str, mib: float) -> int:
    if isinstance(mib, bool) or not isinstance(mib, int | float):
        raise TypeError(f"{what} is a number of MiB, but is {mib!r}")
    if math.isnan(mib) or mib < 0:
        raise ValueError(f"{what} is a number of MiB, 0 or more, but is {mib!r}")
    return _MOST_BYTES if mib * MIB >= _MOST_BYTES else int(mib * MIB)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _size(size: int) -> str:
    """Bytes for a reader: 1.5 MiB."""
    if size == _MOST_BYTES:
        return "none"
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.4g} {units[0]}"


def _abbreviate(names: Sequence[str]) -> str:
    """The names in brief, in the order in which their gradients are expected: the last one first."""
    if len(names) <= 2:
        return ", ".join(reversed(names))
    return f"{len(names)}: {names[-1]} ... {names[0]}"
