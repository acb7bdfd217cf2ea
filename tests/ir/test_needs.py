"""What ranks need is put in one order that each of them can follow."""

import itertools
import random
from collections.abc import Sequence

import pytest

from fxshard.ir.needs import Needs, in_one_order, merged

PLACES = {name: i for i, name in enumerate("abcdefgh")}


def needs(forward: str, backward: str, **more: frozenset[str]) -> Needs:
    """Of one letter per parameter; in `backward`, a capital letter is the gradient."""
    events = tuple(("grad" if c.isupper() else "read", c.lower()) for c in backward)
    ends = tuple(range(1, len(forward) + 1))
    return Needs(tuple(forward), ends, events, frozenset(), mode="training", **more)


def written(found: Needs) -> tuple[str, str]:
    back = (fqn.upper() if kind == "grad" else fqn for kind, fqn in found.backward)
    return "".join(found.forward), "".join(back)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        # Towers a and c, and a head.
        ([("abh", "hHbBaA"), ("cdh", "hHdDcC")], ("abcdh", "hHdDcCbBaA")),
        # A layer that one rank skips.
        ([("abc", "cCbBaA"), ("ac", "cCaA")], ("abc", "cCbBaA")),
        # b is shared: its gradient is ready earlier where one tower reads it alone.
        ([("abcd", "dDcCbaBA"), ("ab", "bBaA")], ("abcd", "dDcCbaBA")),
        # Orders that contradict each other: by their places in the model.
        ([("ab", "bBaA"), ("ba", "aAbB")], ("ab", "baBA")),
        ([("", ""), ("a", "aA")], ("a", "aA")),
    ],
)
def test_one_order(ranks: Sequence[tuple[str, str]], expected: tuple[str, str]) -> None:
    every = [needs(*rank) for rank in ranks]
    for order in itertools.permutations(every):  # ranks have no part in it
        assert written(merged(order, PLACES)) == expected


def test_any_ranks_can_follow() -> None:
    """A gradient comes after every parameter that some rank reads before it has the gradient."""
    rng = random.Random(0)
    for _ in range(300):
        every = []
        for _ in range(rng.randint(1, 4)):
            used = rng.sample("abcdefgh", rng.randint(0, 8))
            back = rng.sample([*used, *(u.upper() for u in used)], 2 * len(used))
            every.append(needs("".join(rng.sample(used, len(used))), "".join(back)))
        found = merged(every, PLACES)
        _, order = written(found)
        assert len({*order}) == len(order)
        assert {*order} == {*"".join(written(each)[1] for each in every)}
        assert {*found.forward} == {*itertools.chain(*(each.forward for each in every))}
        for each in every:
            _, mine = written(each)
            for i, event in enumerate(mine):
                if event.isupper():
                    reads = [other for other in mine[:i] if other.islower()]
                    assert all(order.index(read) < order.index(event) for read in reads)
        assert all(i < end <= len(found.forward) for i, end in enumerate(found.ends))


def test_last_uses_are_the_latest_of_any_rank() -> None:
    one = Needs(("a", "b"), (2, 2))  # a is read again after b
    other = Needs(("a", "c", "d"), (1, 2, 3))
    found = merged([one, other], PLACES)
    assert found.forward == tuple("abcd") and found.ends == (2, 2, 3, 4)
    assert found.uses["a"] == (0, 3) and found.uses["b"] == (2, 3)


def test_what_stays_unsharded_is_not_gathered_again() -> None:
    one = needs("a", "A", kept=frozenset("a"))
    other = needs("", "a", kept=frozenset("a"))
    assert written(merged([one, other], PLACES)) == ("a", "A")


def test_order_without_contradiction_is_kept() -> None:
    assert in_one_order(["ca", "bd"], PLACES) == list("bcad")
    assert in_one_order(["dcb", "ba"], PLACES) == list("dcba")


def test_text_both_ways() -> None:
    found = needs("ab", "bBaA", kept=frozenset("ab"))
    assert Needs.of_text(found.text()) == found
    assert found.digest != needs("ab", "bBaA").digest
