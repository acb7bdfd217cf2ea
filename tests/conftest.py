from collections.abc import Callable, Iterator

import pytest
import torch

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


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Kernels run in one thread: what some take for themselves grows with the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
