"""What tests of mcore and of its plugins share: real gloo ranks, and conformance suites."""

from mcore_parallel.testing.ranks import run_ranks

__all__ = ["run_ranks"]
