"""torch's full grids are `make test-slow`'s: of each, two cases run in `make test`."""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    if not item.get_closest_marker("sample"):
        item.add_marker(pytest.mark.sample(2))
