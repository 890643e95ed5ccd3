"""The sum of gradients over micro-batches, against adding them one by one in float64."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torchrelay.runtime.gradients import SMALL, TOGETHER, GradientSum

Shapes = Sequence[tuple[int, ...]]
SMALL_ONES: Shapes = [(), (3,), (2, 5), (0, 4)]
LARGE: Shapes = [(SMALL // 8 + 1,), (3,)]


def arriving(shapes: Shapes, count: int, dtype: torch.dtype = torch.float64) -> list[list[Tensor | None]]:
    torch.manual_seed(0)
    return [[torch.randn(shape, dtype=dtype) for shape in shapes] for _ in range(count)]


def total(arrived: list[list[Tensor | None]]) -> list[Tensor | None]:
    sums: list[Tensor | None] = [None] * len(arrived[0])
    for gradients in arrived:
        for k, gradient in enumerate(gradients):
            if gradient is not None:
                sums[k] = gradient if (known := sums[k]) is None else known + gradient
    return sums


def summed(arrived: list[list[Tensor | None]]) -> list[Tensor | None]:
    sums = GradientSum(len(arrived[0]))
    for gradients in arrived:
        sums.add(tuple(gradients))
    return sums.take()


@pytest.mark.parametrize("count", [1, 2, TOGETHER - 1, TOGETHER, TOGETHER + 1, 2 * TOGETHER, 3 * TOGETHER - 2])
@pytest.mark.parametrize("shapes", [SMALL_ONES, LARGE], ids=["small", "large"])
def test_the_sum_is_that_of_all(shapes: Shapes, count: int) -> None:
    arrived = arriving(shapes, count)
    torch.testing.assert_close(summed(arrived), total(arrived), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shapes", [SMALL_ONES, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("missing", [0, 1, TOGETHER - 1, TOGETHER, TOGETHER + 1])
def test_a_gradient_that_is_missing_once_changes_nothing_else(shapes: Shapes, missing: int) -> None:
    arrived = arriving(shapes, 2 * TOGETHER)
    arrived[missing][1] = None
    torch.testing.assert_close(summed(arrived), total(arrived), rtol=0, atol=1e-12)


def test_what_arrives_is_not_written_on() -> None:
    # The engine hands out the same memory twice, or expanded.
    one = torch.ones((), dtype=torch.float64).expand(4)
    for count in (2, TOGETHER + 3):
        sums = GradientSum(2)
        for _ in range(count):
            sums.add((one, one))
        torch.testing.assert_close(sums.take(), [torch.full_like(one, count)] * 2)
    assert one.tolist() == [1.0] * 4


def test_one_microbatch_is_handed_on_without_a_copy() -> None:
    gradient = torch.ones(3)
    sums = GradientSum(1)
    sums.add((gradient,))
    assert sums.take()[0] is gradient


def test_a_sum_keeps_the_dtype_of_each() -> None:
    arrived = [[torch.ones(2, dtype=dtype) for dtype in (torch.bfloat16, torch.float64, torch.complex64)]] * TOGETHER
    with torch.autocast("cpu", torch.bfloat16):
        found = summed(arrived)  # type: ignore[arg-type]
    assert [gradient.dtype for gradient in found if gradient is not None] == [
        torch.bfloat16,
        torch.float64,
        torch.complex64,
    ]


def test_sparse_gradients_are_added_up() -> None:
    def sparse() -> Tensor:
        return torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, 3), (4, 3), check_invariants=True)

    arrived: list[list[Tensor | None]] = [[sparse()] for _ in range(TOGETHER + 1)]
    (found,) = summed(arrived)
    assert found is not None
    torch.testing.assert_close(found.to_dense()[2], torch.full((3,), float(TOGETHER + 1)))


def test_gradients_wait_only_until_there_are_some_together() -> None:
    sums = GradientSum(1)
    for _ in range(3 * TOGETHER):
        sums.add((torch.ones(2),))
        assert len(sums._kept or ()) < TOGETHER
