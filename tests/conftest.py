from collections.abc import Callable, Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(world_size)`: the session's pool of that many gloo ranks."""
    pools: dict[int, Ranks] = {}

    def pool(world_size: int) -> Ranks:
        return pools.setdefault(world_size, Ranks(world_size))

    yield pool
    for each in pools.values():
        each.close()
