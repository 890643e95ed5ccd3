"""Ways to wrap a module that make no difference to its gradients."""

import pytest

__all__ = ["OPTIONS", "every_option"]

OPTIONS = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "each alone": {"bucket_cap_mb_list": [0]},
    "lazy": {"lazy_bucket_allocation": True, "bucket_cap_mb_list": [0]},
}

every_option = pytest.mark.parametrize("options", OPTIONS)
