"""Faults, by kind: each changes one node, or one tag, of a program that is after the pipeline.

A fault takes a program and a random number generator that chooses the place, changes the program
and returns what it did; or raises `NoPlace`. Whether that does harm is not decided here
(tests/verify/test_faults.py finds out).
"""

from tests.faults import anything, changed, dropped, moved, streams  # noqa: F401  # they register
from tests.faults.kinds import FAULTS, NoPlace

__all__ = ["FAULTS", "NoPlace"]
