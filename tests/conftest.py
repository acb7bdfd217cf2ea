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


@pytest.fixture
def hasty() -> Iterator[Callable[[int], Ranks]]:
    """Pools of their own, whose collectives wait 16 s."""
    pools: list[Ranks] = []

    def pool(world_size: int) -> Ranks:
        pools.append(Ranks(world_size, timeout_s=24))
        return pools[-1]

    yield pool
    for each in pools:
        each.close()
