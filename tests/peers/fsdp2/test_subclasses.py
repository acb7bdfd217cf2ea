"""test_fully_shard_extensions.py: parameters of a tensor subclass with FSDP2's extension point."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard
from tests.peers.fsdp2.common import MLP, adam, average_grads, made, shard, train_alike
from tests.ranks import told
from tests.subclasses import Bf16, Int8, Narrow, wrapped

MESHES: list[Any] = []  # those that the extension point was given


class Two(Tensor):
    """Around two tensors, as the one of torch's tests is."""

    a: Tensor
    b: Tensor

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, device=a.device)

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a, b

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: None, size: Any, stride: Any) -> Any:
        return Two(inner["a"], inner["b"])

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Two({self.a}, {self.b})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.detach.default
        return Two(args[0].a, args[0].b)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        return (self.a, self.b), None

    def fsdp_post_all_gather(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("nothing is gathered")


def of_two(rank: int, world_size: int) -> str:
    model = nn.Linear(8, 8, bias=False)
    model.weight = nn.Parameter(Two(model.weight.detach(), model.weight.detach()))
    return told(lambda: fxshard.fully_shard(model))


def test_a_class_around_two_tensors_is_refused(ranks: Any) -> None:
    for said in ranks(2).run(of_two):
        assert "fxshard shards one plain tensor of the parameter's own shape" in said, said


class Noted(Narrow):
    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        MESHES.append(mesh)
        return super().fsdp_pre_all_gather(mesh)


def stack(kind: Any) -> Any:
    return wrapped(nn.Sequential(*(MLP(8, bias=False) for _ in range(3))), kind)


class Whole(Bf16):
    """Sends what it is around, as it is."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        return (self.data_inside,), None


class WholeOfFive(Whole):
    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        return (self.data_inside,), None


def beside_plain(rank: int, world_size: int, kind: Any, reshard: bool) -> None:
    """Gradients, optimizer and parameters of ten steps, beside a model without the class."""
    ref = made(lambda: nn.Sequential(*(MLP(8, bias=False) for _ in range(3))))
    model = wrapped(copy.deepcopy(ref), kind)
    shard(model, reshard_after_forward=reshard)
    x = torch.randn(2, 8)
    assert [type(param._local_tensor) for param in model.parameters()] == [kind] * 6
    train_alike(ref, model, lambda: (x,), after=average_grads, optimizer=adam)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", [Whole, WholeOfFive])
def test_they_train_as_data_parallelism(ranks: Any, kind: Any, reshard: bool) -> None:
    ranks(2).run(beside_plain, kind, reshard)


def from_meta(rank: int, world_size: int) -> None:
    """On the meta device, then memory, then values; a few steps run in bf16. The function before
    the all-gather takes the mesh alone, or more."""
    for reshard, kind in itertools.product((True, False), (Narrow, Int8)):
        with torch.device("meta"):
            model = stack(kind)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        shard(model, reshard_after_forward=reshard, mp_policy=policy)
        assert all(param.is_meta for param in model.parameters())
        model.to_empty(device="cpu")
        for param in model.parameters():
            nn.init.trunc_normal_(param)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(43 + rank))
        for _ in range(3):
            before = [unwrapped(param) for param in model.parameters()]
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for param, old in zip(model.parameters(), before, strict=True):
                assert type(param._local_tensor) is kind
                assert not unwrapped(param).equal(old) and unwrapped(param).isfinite().all()


def unwrapped(param: Any) -> Tensor:
    return param._local_tensor.data_inside.detach().clone()


def test_such_a_model_on_meta_is_initialised_and_trained(ranks: Any) -> None:
    ranks(2).run(from_meta)


def hybrid(rank: int, world_size: int) -> None:
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=names)
    model = made(lambda: stack(Noted))
    shard(model, mesh=mesh)
    MESHES.clear()
    model(torch.randn(2, 8))
    assert MESHES
    for each in MESHES:
        assert (each.ndim, each.size(), each.size(0)) == (1, world_size // 2, world_size // 2)
        assert each.mesh_dim_names == ("shard",) and each.device_type == "cpu"
        assert each.get_group("shard") == each.get_group() == mesh.get_group("shard")


def test_of_a_hybrid_mesh_it_is_given_the_shards(ranks: Any) -> None:
    ranks(4).run(hybrid)
