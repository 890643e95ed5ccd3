"""Decides whether the parallel training did what the plain one does."""

from torchrelay.cli.demo.job import Outcome

__all__ = ["ACCURACY_WANTED", "GRADIENT_TOLERANCE", "faults"]

ACCURACY_WANTED = 0.97
# float64 rounds at 1e-16; sums over a mini-batch in another order differ by some multiples of that.
GRADIENT_TOLERANCE = 1e-10


def faults(parallel: Outcome, plain: Outcome) -> list[str]:
    """One sentence for each thing that is wrong; none if nothing is."""
    found = []
    for name, outcome in (("parallel", parallel), ("plain", plain)):
        if not outcome.accuracy >= ACCURACY_WANTED:
            found.append(
                f"The {name} model reads {outcome.accuracy:.1%} of the test images, less than {ACCURACY_WANTED:.0%}."
            )
    if not parallel.gradient_error < GRADIENT_TOLERANCE:
        found.append(
            f"A gradient differs from the plain model's by {parallel.gradient_error:.1e}, "
            f"{GRADIENT_TOLERANCE:.0e} or more."
        )
    if not parallel.checks:
        found.append("No gradient was compared.")
    if not parallel.ranks_equal:
        found.append("The ranks ended with different parameters.")
    return found
