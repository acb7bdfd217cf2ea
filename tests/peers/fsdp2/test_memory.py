"""test_fully_shard_memory.py: bytes at points of a step, beside the bounds of torch's test.

The model has the sizes that torch's has. torch's test reads CUDA's active bytes. Here a meter sums
up the storages that are alive on a real rank (`tests.dryrun.measure`). It knows nothing of
programs, and of offload only which operators run for the host.
"""

import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard
from torch.multiprocessing.reductions import StorageWeakRef

import fxshard
from fxshard.runtime.world.c10d import C10dWorld
from tests.dryrun.measure import Measure, without_collector
from tests.peers.fsdp2.common import Args, Transformer, made, replaced, shard

BUFFER = 4_000_000  # bytes, of what is neither; both are torch's
ALLOWED = 16_000_000  # of activations and workspaces
ON_CPU = CPUOffloadPolicy(pin_memory=False)


def transformer() -> Transformer:
    return Transformer(Args(layers=3, dim=768, heads=12, vocab=32, tied=False))


class Meter(Measure):
    """Bytes of the storages that are alive, but of those that were made for the host."""

    def __init__(self) -> None:
        super().__init__()
        self._of_host: list[weakref.ref[torch.UntypedStorage]] = []
        self._to_host = False
        self._reported = 0

    @contextlib.contextmanager
    def for_host(self) -> Iterator[None]:
        """What operators make inside is the host's."""
        self.close()
        before, self._to_host = self._to_host, True
        try:
            yield
        finally:
            self.close()
            self._to_host = before

    def give(self, tensors: list[torch.Tensor]) -> None:
        """These are the host's."""
        self._of_host += [weakref.ref(each.untyped_storage()) for each in tensors]

    def now(self) -> int:
        """Bytes that are alive."""
        host = {id(ref()) for ref in self._of_host}
        alive = (ref() for ref in self._alive.values())
        return sum(each.nbytes() for each in alive if each is not None and id(each) not in host)

    def close(self) -> None:
        """The operator before is over."""
        if self._name:
            self.points.append((self._name, self.now()))
        self._name = ""

    def peak(self) -> int:
        """The largest of all sums since it was asked last, and of the one now."""
        self.close()
        new = [nbytes for _, nbytes in self.points[self._reported :]]
        self._reported = len(self.points)
        return max([*new, self.now()])

    def _see(self, tree: Any) -> None:
        known = set(self._alive.values())
        super()._see(tree)
        if self._to_host:
            self._of_host += set(self._alive.values()) - known


@contextlib.contextmanager
def metered() -> Iterator[Meter]:
    """Gradients that are stored are the host's."""
    store = C10dWorld.store
    with without_collector(), Meter() as meter:

        def stored(*args: Any, **kwargs: Any) -> Any:
            with meter.for_host():
                return store(*args, **kwargs)

        with replaced(C10dWorld, "store", stored):
            yield meter


def steps_in_backward(model: nn.Module, make: Callable[..., Any]) -> None:
    """An optimizer of each parameter steps in its hook, and frees its gradient."""
    own = {param: make([param]) for param in model.parameters()}

    def hook(param: nn.Parameter) -> None:
        own[param].step()
        own[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2, foreach=False)  # which makes small tensors alone


def points(
    rank: int, world_size: int, reshard: bool | int, offload: bool, in_backward: bool, ahead: int
) -> None:
    """After sharding, and of forward, backward, the optimizer's step, and after zero_grad."""
    with metered() as meter:
        model: Any = made(transformer)
        whole = sum(param.numel() for param in model.parameters()) * 4
        block = sum(param.numel() for param in model.layers[0].parameters()) * 4
        rest, shards = whole - 3 * block, (whole + world_size - 1) // world_size
        if offload and not ahead:
            mesh = init_device_mesh("cpu", (world_size,))
            options: dict[str, Any] = {"offload": ON_CPU, "backward_prefetch": ahead}
            model = fxshard.compile(model, mesh=mesh, units=["layers.*"], **options)
        else:
            options = {"offload_policy": ON_CPU} if offload else {}
            shard(model, reshard_after_forward=reshard, **options)
        if in_backward:
            steps_in_backward(model, adam)
        else:
            optimizer = adam(model.parameters())

        # The model was whole on the CPU; each call frees what it has sharded, when it is over.
        peak, left = meter.peak(), meter.now()
        once = shards if offload and not ahead else block // world_size
        assert peak <= whole + once + BUFFER, peak
        assert left <= shards + BUFFER, left
        if offload:
            meter.give([param.to_local() for param in model.parameters()])
        on_device = 0 if offload else shards
        kept = whole // 2 if reshard == 2 else 0  # by two ranks, from forward to backward

        tokens = torch.randint(32, (1, 4))
        loss = model(tokens)
        peak = meter.peak()
        if reshard:  # what is gathered, the copy out of it, and the next one
            bound = on_device + kept + 3 * block + rest
        else:
            bound = on_device + whole + block
        assert on_device + block < peak <= bound + ALLOWED, peak

        loss.sum().backward()
        peak = meter.peak()
        if not reshard:
            bound = on_device + whole + 1.5 * block
        elif in_backward:  # no more than a block has gradients
            bound = on_device + 4 * block + rest + block // world_size
        else:  # the same, the gradients, and what of them is being reduced
            bound = 2 * on_device + kept + 4 * block + rest
        if offload and ahead:  # what is loaded ahead, and what was reduced, not stored yet
            bound += block
        assert on_device + 2 * block < peak <= bound + ALLOWED, peak

        del loss
        meter.peak()
        if not in_backward:
            with meter.for_host() if offload else contextlib.nullcontext():
                optimizer.step()
        peak = meter.peak()
        assert peak <= (3 if in_backward else 4) * on_device + ALLOWED, peak

        if not in_backward:
            optimizer.zero_grad()
        left = meter.now()
        assert left <= 3 * on_device + ALLOWED * (not offload) + 500_000, left
        gone = [param.grad is None for param in model.parameters()]
        assert all(gone)


@pytest.mark.parametrize(
    ("count", "reshard", "in_backward"),
    [
        (2, True, False),
        pytest.param(2, False, False, marks=pytest.mark.slow),
        pytest.param(4, 2, False, marks=pytest.mark.slow),
        pytest.param(2, True, True, marks=pytest.mark.slow),
    ],
)
def test_bytes_at_points_of_a_step(
    ranks: Any, count: int, reshard: bool | int, in_backward: bool
) -> None:
    ranks(count).run(points, reshard, False, in_backward, 1)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_bytes_of_the_device_with_offload(ranks: Any, ahead: int) -> None:
    """4.0 blocks with nothing launched ahead in backward, within torch's bound; by default 5.0."""
    ranks(2).run(points, True, True, False, ahead)


@pytest.mark.slow
@pytest.mark.parametrize(("reshard", "in_backward"), [(True, False), (False, False), (True, True)])
def test_the_peak_of_a_step(reshard: bool, in_backward: bool) -> None:
    model = transformer()
    whole = sum(param.numel() for param in model.parameters()) * 4
    block = sum(param.numel() for param in model.layers[0].parameters()) * 4
    shards, rest = (whole + 1) // 2, whole - 3 * block
    seen = fxshard.validate(
        model,
        (model.tokens(1, 4),),
        world_size=2,
        steps=1,
        units=["layers.*"],
        reshard_after_forward=reshard,
        optimizer=torch.optim.Adam,
        optimizer_in_backward=in_backward,
    )
    assert seen.max_abs_difference == 0
    if in_backward:  # the shards, the optimizer's two states of them, and a block's gradients
        bound = 3 * shards + 3 * block + block // 2 + rest
    elif reshard:  # a gathered block, its gradients, and what of them is being reduced
        bound = 2 * shards + 3 * block + rest
    else:
        bound = shards + whole + 1.5 * block
    assert seen.measured_peak_bytes <= bound + ALLOWED


def many_steps(rank: int, world_size: int) -> list[int]:
    """Bytes after each step, without garbage collection."""
    left = []
    with metered() as meter:
        model = made(lambda: Transformer(Args(tied=False)))
        inner = [(layer.attention, layer.feed_forward, layer) for layer in model.layers]
        shard(model, *itertools.chain(*inner))
        optimizer = adam(model.parameters())
        tokens = model.tokens(2, 16)
        for _ in range(11):
            loss = model(tokens)
            loss.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            meter.close()
            left.append(meter.now())
    return left


@pytest.mark.slow
def test_steps_leave_nothing_for_the_garbage_collector(ranks: Any) -> None:
    for left in ranks(2).run(many_steps):
        assert left[1:] == left[:1] * 10, left


def deleted(rank: int, world_size: int, how: str) -> None:
    """Sharding frees what was whole, though the function knows it; no shard outlives the model."""
    model = made(lambda: Transformer(Args(tied=False)))
    whole = [StorageWeakRef(param.untyped_storage()) for param in model.parameters()]
    known = frozenset(model.layers.parameters())
    options = {
        "shard_placement_fn": lambda param, known=known: Shard(0) if param in known else None
    }
    del known
    if how == "fully_shard":
        shard(model, **options)
    else:
        mesh = init_device_mesh("cpu", (world_size,))
        model = fxshard.compile(model, mesh=mesh, units=["layers.*"], **options)
    options.clear()
    assert all(each.expired() for each in whole)
    shards = [StorageWeakRef(param.to_local().untyped_storage()) for param in model.parameters()]
    assert not any(each.expired() for each in shards)
    del model
    gc.collect()
    assert all(each.expired() for each in shards)


@pytest.mark.parametrize("how", ["fully_shard", "compile"])
def test_a_model_that_is_deleted_leaves_no_shard(ranks: Any, how: str) -> None:
    ranks(2).run(deleted, how)
