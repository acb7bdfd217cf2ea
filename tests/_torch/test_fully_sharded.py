"""`fxshard._torch.fully_sharded` and `remembered_device`: what they rely on in torch."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fxshard._torch import autograd, fully_sharded, remembered_device
from fxshard._torch.fake_tensors import swaps_of_fakes
from fxshard._torch.process_groups import fake_process_group


class Told:
    """A `Listener` that writes down what it is told."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, type]] = []

    @contextlib.contextmanager
    def _around(self, what: str, module: nn.Module) -> Iterator[None]:
        self.heard.append((what, type(module)))
        yield

    def gathering(self, module: nn.Module) -> Any:
        return self._around("gather", module)

    def copying_out(self, module: nn.Module) -> Any:
        return self._around("copy out", module)

    def reducing(self, module: nn.Module, grads: list[torch.Tensor]) -> Any:
        assert grads
        return self._around("reduce", module)

    def unsharded(self, module: nn.Module) -> None:
        self.heard.append(("unsharded", type(module)))

    def resharded(self, module: nn.Module) -> None:
        self.heard.append(("resharded", type(module)))


def test_fsdp2_tells_what_it_does() -> None:
    told = Told()
    with fake_process_group(0, 2), fully_sharded.watched(told):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0])
        fully_shard(model)
        model(torch.randn(2, 4)).sum().backward()
        assert [type(module) for module, _ in fully_sharded.units_of(model)] == [
            type(model), type(model[0])
        ]  # fmt: skip
        weight = model[0].weight
        assert isinstance(weight, DTensor)
        assert fully_sharded.local_of(weight) is weight._local_tensor
    order = [what for what, kind in told.heard if issubclass(kind, nn.Linear)]
    gathered = ["gather", "copy out", "unsharded"]
    assert order == [*gathered, "resharded", *gathered, "resharded", "reduce"]
    assert {what for what, _ in told.heard} == {*gathered, "resharded", "reduce"}


def test_methods_of_a_mesh_compute_under_fake_tensors() -> None:
    with fake_process_group(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        with fully_sharded.meshes_with_values(), FakeTensorMode(allow_non_fake_inputs=True):
            assert mesh["b"].size() == 2 and list(mesh.get_coordinate() or ()) == [0, 0]


def test_attributes_are_put_back() -> None:
    class Owner:
        kept = 1

    with fully_sharded.replaced([(Owner, "kept", 2), (Owner, "new", 3)]):
        assert vars(Owner)["kept"] == 2 and vars(Owner)["new"] == 3
    assert Owner.kept == 1 and not hasattr(Owner, "new")


def test_nodes_are_numbered_as_forward_makes_them() -> None:
    seen: list[int | None] = []
    x = torch.ones(2, requires_grad=True)
    number = autograd.next_node_number()
    y = x * 2
    assert autograd.next_node_number() == number + 1
    y.register_hook(lambda grad: seen.append(autograd.running_node_number()))
    y.sum().backward()
    assert seen == [number + 1] or seen == [number]  # the hook runs before its node, in the last
    assert autograd.running_node_number() is None


def test_a_fake_tensor_says_where_it_was_asked_to_be() -> None:
    with FakeTensorMode(), remembered_device.remembered(lambda tensor: tensor.dim() == 2):
        there, here = torch.zeros(2, 2), torch.zeros(2)
        assert there.device == torch.device("cuda", 0) and here.device == torch.device("cpu")
        assert (there + 1).shape == (2, 2)  # torch's own code sees the CPU
        optimizer = torch.optim.AdamW([nn.Parameter(there)])
        optimizer.param_groups[0]["params"][0].grad = torch.zeros(2, 2)
        optimizer.step()
    assert FakeTensor.device.fget is not None  # type: ignore[attr-defined]
    assert there.device == torch.device("cpu")


def test_fake_parameters_that_are_referred_to_weakly_are_exchanged() -> None:
    import weakref

    with FakeTensorMode():
        first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2).half())
        kept = weakref.ref(first)
        swaps_of_fakes()(first, second)
    assert first.dtype is torch.half and kept() is first
