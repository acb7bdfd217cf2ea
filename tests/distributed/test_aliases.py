"""What a rank has sent is given back when its work is over, on gloo ranks."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from fxshard.runtime import eager
from fxshard.runtime.world.aliases import Aliases
from fxshard.runtime.world.c10d import C10dWorld
from fxshard.validation.eager_collectives import EagerCollectives
from tests.ranks import Ranks

LONG = 60.0  # seconds: more than any thread waits to be run


def test_memory_is_given_back_though_an_alias_is_kept() -> None:
    tensor, aliases = torch.ones(2), Aliases()
    kept = aliases.of(tensor)
    storage = weakref.ref(tensor.untyped_storage())
    del tensor
    assert storage() is not None and kept.sum() == 2
    aliases.drop()
    assert storage() is None and kept.numel() == 0


def test_an_alias_is_the_tensor() -> None:
    tensor = torch.ones(2, 3).t()
    alias = Aliases().of(tensor)
    assert alias is not tensor and alias.stride() == tensor.stride()
    assert alias.data_ptr() == tensor.data_ptr()


def test_a_tensor_that_is_held_is_replaced() -> None:
    made, aliases = torch.ones(2), Aliases()
    mine = aliases.instead(made)
    aliases.drop()
    assert made.numel() == 0 and mine.sum() == 2


# -- on ranks ---------------------------------------------------------------------------------


def launched(world: C10dWorld, name: str, sent: Tensor) -> list[Tensor]:
    """A collective, and its wait."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    launches: dict[str, Callable[[], list[Tensor]]] = {
        "all_gather": lambda: world.all_gather([sent], 0),
        "all_gather of eager code": lambda: eager.gathered([sent], world),
        "all_gather of eager code, packed": lambda: eager.gathered([sent, sent], world, 1024),
        "reduce_scatter": lambda: world.reduce_scatter([sent], 0),
        "all_reduce": lambda: world.all_reduce([sent], 0, "shard"),
        "reduce_now": lambda: world.reduce_now([sent]),
        "all_to_all": lambda: (
            [world.all_to_all(made := torch.empty(4), sent, [2, 2], [2, 2])] and [made]
        ),
        "model_all_gather": lambda: world.model_all_gather([sent], 0, "tp", group),
        "model_reduce_scatter": lambda: world.model_reduce_scatter([sent], 0, "tp", group, "sum"),
        "model_all_reduce": lambda: world.model_all_reduce([sent], 0, "tp", group, "sum"),
        "model_all_to_all": lambda: world.model_all_to_all([sent], 0, "tp", group, [2, 2], [2, 2]),
        "model_broadcast": lambda: world.model_broadcast([sent], 0, "tp", group, 0),
    }
    made = launches[name]()
    if name not in ("reduce_now", "all_to_all") and "eager" not in name:
        world.wait(made, 0)
    return made


COLLECTIVES = (
    *("all_gather", "all_gather of eager code", "all_gather of eager code, packed"),
    *("reduce_scatter", "all_reduce", "reduce_now", "all_to_all"),
    *("model_all_gather", "model_reduce_scatter", "model_all_reduce", "model_all_to_all"),
    "model_broadcast",
)


def alive_after(rank: int, world_size: int, times: int) -> dict[str, int]:
    """Per collective, how often memory was alive after its wait, and its tensors' deletion."""
    world = C10dWorld(init_device_mesh("cpu", (world_size,)))
    found = dict.fromkeys(COLLECTIVES, 0)
    buffers: list[Any] = []  # that several parameters are unpacked from
    unpack = world.unpack

    def unpacked(packed: list[Tensor], *given: Any) -> list[Tensor]:
        buffers.extend(weakref.ref(t.untyped_storage()) for t in packed)
        return unpack(packed, *given)

    world.unpack = unpacked  # type: ignore[method-assign]
    for name in COLLECTIVES * times:
        buffers.clear()
        sent = torch.ones(4)
        made = launched(world, name, sent)
        # gloo holds parts of what an all-gather of parameters writes, which is freed explicitly.
        written = () if name == "all_gather" else made
        storages = [weakref.ref(t.untyped_storage()) for t in (sent, *written)]
        storages += buffers
        del sent, made, written
        found[name] += any(storage() is not None for storage in storages)
    return found


class Watched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.collectives = EagerCollectives()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types:  # what a collective that runs on gives
            return NotImplemented
        return self.collectives.run(func, args, kwargs or {})


FUNCTIONAL: dict[str, Callable[[Tensor], Tensor]] = {
    "all_gather": lambda sent: funcol.all_gather_tensor(sent, 0, dist.group.WORLD),
    "all_gather of a scalar": lambda sent: funcol.all_gather_tensor(sent[0], 0, dist.group.WORLD),
    "all_reduce": lambda sent: funcol.all_reduce(sent, "sum", dist.group.WORLD),
    "reduce_scatter": lambda sent: funcol.reduce_scatter_tensor(sent, "sum", 0, dist.group.WORLD),
    "all_to_all": lambda sent: funcol.all_to_all_single(sent, None, None, dist.group.WORLD),
    "broadcast": lambda sent: funcol.broadcast(sent, 0, dist.group.WORLD),
}


def functional_alive_after(rank: int, world_size: int, times: int) -> dict[str, int]:
    """Per functional collective, how often memory was alive after its result was read."""
    found = dict.fromkeys(FUNCTIONAL, 0)
    with Watched():
        for name in [*FUNCTIONAL] * times:
            sent = torch.arange(4.0) + rank
            waits: Any = FUNCTIONAL[name](sent)
            made = waits.trigger_wait()
            assert torch.equal(made, expected(name, rank, world_size))
            storages = [weakref.ref(t.untyped_storage()) for t in (sent, made)]
            del sent, made, waits
            found[name] += any(storage() is not None for storage in storages)
    return found


def expected(name: str, rank: int, world_size: int) -> Tensor:
    of_ranks = torch.stack([torch.arange(4.0) + rank for rank in range(world_size)])
    own = slice(rank * 4 // world_size, (rank + 1) * 4 // world_size)
    return {
        "all_gather": of_ranks.flatten(),
        "all_gather of a scalar": of_ranks[:, 0],
        "all_reduce": of_ranks.sum(0),
        "reduce_scatter": of_ranks.sum(0)[own],
        "all_to_all": of_ranks[:, own].flatten(),
        "broadcast": of_ranks[0],
    }[name]


def test_no_functional_collective_holds_memory_after_its_wait(
    ranks: Callable[[int], Ranks],
) -> None:
    found = ranks(2).run(functional_alive_after, 100)
    assert found == [dict.fromkeys(FUNCTIONAL, 0)] * 2


@pytest.mark.parametrize("world_size", [2])
def test_no_collective_holds_memory_after_its_wait(
    ranks: Callable[[int], Ranks], world_size: int
) -> None:
    assert ranks(world_size).run(alive_after, 100) == [dict.fromkeys(COLLECTIVES, 0)] * world_size
