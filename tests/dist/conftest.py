"""The fixtures of the tests on several ranks."""

from ranks import pool_of_four, pool_of_two, ranks

__all__ = ["pool_of_four", "pool_of_two", "ranks"]
