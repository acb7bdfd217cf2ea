"""`@pytest.mark.sample(n)`: of the cases of a parametrized test, n run in `make test`.

They are spread evenly, the first and the last among them; `make test-slow` runs the others. For
grids whose cases take long and prove one claim. A case that is asked for by its name always runs.
"""

from collections import defaultdict

import pytest


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    grids = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            grids[item.nodeid.partition("[")[0]].append(item)
    for cases in grids.values():
        mark = cases[0].get_closest_marker("sample")
        assert mark is not None
        for i in set(range(len(cases))) - set(spread(len(cases), mark.args[0])):
            cases[i].add_marker(pytest.mark.slow)


def spread(count: int, n: int) -> list[int]:
    """At most `n` of ``range(count)``, from the first to the last."""
    n = min(n, count)
    return [round(i * (count - 1) / max(1, n - 1)) for i in range(n)]
