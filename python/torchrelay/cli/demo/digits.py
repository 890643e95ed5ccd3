"""The data: scikit-learn's copy of the handwritten digits, 1,797 images of 8 x 8, which needs no download."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrelay.cli.errors import UserError

__all__ = ["Digits", "load"]

_TEST = 357  # images kept for the test; the other 1,440 are trained on


@dataclass(frozen=True)
class Digits:
    """Images of shape (n, 1, 8, 8) in float64, of mean 0 and deviation 1 in training, and their digits (n)."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load() -> Digits:
    """The same split whatever the seed of the training, so that accuracies of different seeds compare."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError(
            "the demo needs scikit-learn for its images; install it with: pip install 'torchrelay[demo]'"
        ) from None
    images, digits = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, digits = images[order].reshape(-1, 1, 8, 8), digits[order]
    train = images[_TEST:]
    images = (images - train.mean()) / train.std()
    return Digits((images[_TEST:], digits[_TEST:]), (images[:_TEST], digits[:_TEST]))
