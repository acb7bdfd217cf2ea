"""Which cases of a large grid `make test` runs."""

import pytest

from tests.sampling import spread

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(
    ("count", "n", "chosen"), [(1, 3, [0]), (3, 3, [0, 1, 2]), (9, 3, [0, 4, 8]), (5, 1, [0])]
)
def test_spread(count: int, n: int, chosen: list[int]) -> None:
    assert spread(count, n) == chosen


def test_the_others_are_slow(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.sample(3)
        @pytest.mark.parametrize("i", range(9))
        def test_grid(i):
            pass

        def test_alone():
            pass
        """
    )
    pytester.makeini("[pytest]\nmarkers =\n  slow\n  sample")
    plugin = ("-p", "tests.sampling")
    pytester.runpytest_inprocess(*plugin, "-m", "not slow").assert_outcomes(passed=4, deselected=6)
    pytester.runpytest_inprocess(*plugin, "-m", "slow").assert_outcomes(passed=6, deselected=4)
