"""test_fully_shard_extensions.py: parameters of a tensor subclass with FSDP2's extension point."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from tests.peers.fsdp2.common import MLP, made, shard
from tests.ranks import told
from tests.subclasses import Narrow, wrapped

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


def on_meta(rank: int, world_size: int) -> str:
    with torch.device("meta"):
        model = stack(Narrow)
    return told(lambda: fxshard.fully_shard(model))


def test_such_a_model_on_meta_is_refused(ranks: Any) -> None:
    for said in ranks(2).run(on_meta):
        assert "Make the model on a real device" in said, said


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


class Scaled(Narrow):
    """As torchao's float8 weights: a scale that is computed beforehand lies beside the weight."""

    _precomputed_scale: Any = None

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names, context = super().__tensor_flatten__()
        return names + ["_precomputed_scale"] * (self._precomputed_scale is not None), context


def scaled(rank: int, world_size: int) -> str:
    """What torchao's function of that name does to each weight after a step."""
    model = made(lambda: stack(Scaled))
    shard(model)
    model(torch.randn(2, 8)).sum().backward()
    for param in model.parameters():
        param._local_tensor._precomputed_scale = torch.ones(())
    return told(lambda: model(torch.randn(2, 8)))


def test_scales_that_are_computed_beforehand_are_refused(ranks: Any) -> None:
    for said in ranks(2).run(scaled):
        assert (
            "Leave torchao's precompute_float8_dynamic_scale_for_fsdp out: each all-gather" in said
        )
