"""torch's test_fsdp_state_dict.py: full and sharded state dicts of the model."""

import copy
import io
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import CPUOffload
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from tests.fsdp2 import full
from tests.peers.fsdp1.models import LAYERS, Transformer
from tests.peers.fsdp1.shared import HALF, compiled, ddp, params_of, same, zeroed
from tests.peers.fsdp1.test_misc import all_alike

KINDS = ("full", "rank0", "sharded")
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


def saved(model: Any, kind: str) -> dict[str, Any]:
    """The state dict of that kind; that of rank 0 alone is checked, and sent to all."""
    if kind == "sharded":
        return {name: value.clone() for name, value in model.state_dict().items()}
    only = kind == "rank0"
    found = model.full_state_dict(cpu_offload=only, rank0_only=only)
    if only and dist.get_rank():
        assert found == {}
    assert not any(isinstance(value, DTensor) for value in found.values())
    sent = [found]
    if only:
        dist.broadcast_object_list(sent)
    return {name: value.clone() for name, value in sent[0].items()}


def simple() -> nn.Module:
    return nn.Linear(10, 10, bias=False)


def nested() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))


def container() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 10), nested(), nested())


def with_buffers() -> nn.Module:
    layers = nn.Linear(10, 10, bias=False), nn.BatchNorm1d(10), nn.Linear(10, 10, bias=False)
    return nn.Sequential(*layers)


MODELS: dict[Any, list[str]] = {
    simple: [],
    nested: ["0"],
    container: ["1", "1.0", "2", "2.0"],
    with_buffers: ["0", "1"],
}


def made(build: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return compiled(build(), units=MODELS[build], **options)


def loads(model: Any, other: Any, kind: str) -> None:
    """`other` is overwritten, loaded, and then is as `model`; buffers too."""
    state = saved(model, kind)
    zeroed(other, buffers=True)
    assert not torch.equal(full(next(other.parameters())), full(next(model.parameters())))
    other.load_state_dict(state, strict=True)
    same(other, model)
    assert_close(dict(other.named_buffers()), dict(model.named_buffers()))


# -- saved and loaded ------------------------------------------------------------------------------


def round_trip(rank: int, world_size: int, kind: str, half: bool, options: Any) -> None:
    """With gradients there; in fp16 if so asked."""
    for build in (container, nested, simple):
        pair = [made(build, **options) for _ in range(2)]
        for model in pair:
            if half:
                model.half()
            model(torch.randn(3, 10, dtype=torch.float16 if half else None)).sum().backward()
        if half:
            assert {value.dtype for value in saved(pair[0], kind).values()} == {torch.float16}
        loads(pair[0], pair[1], kind)


@pytest.mark.sample(2)
@pytest.mark.parametrize("half", [True, False], ids=["fp16", "fp32"])
@pytest.mark.parametrize("offload", [True, False], ids=["offload", "stays"])
@EACH_KIND
def test_saved_and_loaded(ranks: Any, kind: str, offload: bool, half: bool) -> None:
    ranks(2).run(round_trip, kind, half, {"offload": CPUOffload(offload)})


def buffers_too(rank: int, world_size: int, kind: str, options: Any) -> None:
    loads(made(with_buffers, **options), made(with_buffers, **options), kind)


@pytest.mark.sample(2)
@pytest.mark.parametrize("policy", [HALF, None], ids=["fp16", "fp32"])
@pytest.mark.parametrize("offload", [True, False], ids=["offload", "stays"])
@EACH_KIND
def test_buffers(ranks: Any, kind: str, offload: bool, policy: Any) -> None:
    options = {"offload": CPUOffload(offload), "mixed_precision": policy}
    ranks(2).run(buffers_too, kind, options)


def after_training(rank: int, world_size: int, kind: str, policy: Any) -> None:
    model = made(nested, mixed_precision=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = params_of(model)
    for _ in range(6):
        loss = model(torch.randn(10)).sum()
        assert loss.dtype == (torch.float16 if policy else torch.float32)
        loss.backward()
        optimizer.step()
    trained = params_of(model)
    assert not any(torch.equal(before[name], trained[name]) for name in trained)
    state = saved(model, kind)
    zeroed(model)
    assert {value.dtype for value in state.values()} == {torch.float32}
    model.load_state_dict(state, strict=True)
    assert_close(params_of(model), trained)


@pytest.mark.sample(2)
@pytest.mark.parametrize("policy", [HALF, None], ids=["fp16", "fp32"])
@EACH_KIND
def test_after_training(ranks: Any, kind: str, policy: Any) -> None:
    ranks(2).run(after_training, kind, policy)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 5)
        for layer in (self.inner, self.outer):
            layer.register_buffer("buffer", torch.randn(3))
            layer.register_buffer("unsaved", torch.randn(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x) + self.inner(x))


def trained(rank: int, model: nn.Module) -> Any:
    torch.manual_seed(rank)
    width = next(model.parameters()).shape[1]
    x = torch.rand(64, width, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def as_ddp(rank: int, world_size: int, kind: str, on_cpu: bool) -> None:
    model = trained(rank, compiled(Model(), units=["inner"]))
    state = saved(model, kind)
    if on_cpu:
        state = {name: value.cpu() for name, value in state.items()}
    other = compiled(Model(), units=["inner"])
    zeroed(other)
    other.load_state_dict(state, strict=True)
    same(other, trained(rank, ddp(Model())))
    assert list(state) == list(Model().state_dict())


@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu", "as_saved"])
@EACH_KIND
def test_trained_as_ddp_and_loaded(ranks: Any, kind: str, on_cpu: bool) -> None:
    """Its keys are those of the plain model."""
    ranks(2).run(as_ddp, kind, on_cpu)


def in_a_group_of_backends(rank: int, world_size: int, on_cpu: bool) -> None:
    """The group's backends are named by device; parameters are zeroed as this rank holds them."""
    model = compiled(Transformer(), process_group=dist.new_group(backend="cpu:gloo"))
    state = saved(model, "sharded")
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict({n: value.cpu() if on_cpu else value for n, value in state.items()})
    for name, param in model.named_parameters():
        assert torch.equal(param.to_local(), before[name].to_local()), name


@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu", "as_saved"])
def test_loaded_in_a_group_of_backends(ranks: Any, on_cpu: bool) -> None:
    ranks(2).run(in_a_group_of_backends, on_cpu)


def into_plain(rank: int, world_size: int, kind: str, build: Any) -> None:
    torch.manual_seed(0)
    model = trained(rank, compiled(build(), units=["inner"] if build is Model else MODELS[build]))
    state = saved(model, kind)
    if kind == "sharded":
        state = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in state.items()}
    plain = build()
    with torch.no_grad():
        for param in plain.parameters():
            param.zero_()
    plain.load_state_dict(state, strict=True)
    same(model, plain)


@pytest.mark.parametrize("build", [Model, container])
@EACH_KIND
def test_loaded_into_the_plain_model(ranks: Any, kind: str, build: Any) -> None:
    ranks(2).run(into_plain, kind, build)


# -- activation checkpointing ----------------------------------------------------------------------


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def wrapped(build: Any, when: str) -> Any:
    """With torch's wrappers around each layer and the model itself before it is compiled, around
    the layers inside of it after that, or without."""
    torch.manual_seed(0)
    module = build()
    if when == "before":
        apply_activation_checkpointing(module, check_fn=is_linear)
        module = checkpoint_wrapper(module)
    model = compiled(module, units=[nn.Linear])
    if when == "after":
        apply_activation_checkpointing(model, check_fn=is_linear)
    return model


def checkpointed(rank: int, world_size: int, kind: str, build: Any, source: str, into: str) -> None:
    """Names are those of the plain model, wherever the wrappers are."""
    model, other = wrapped(build, source), wrapped(build, into)
    state = saved(model, kind)
    assert list(state) == list(build().state_dict())
    zeroed(other)
    other.load_state_dict(state, strict=True)
    got, want = (params_of(each).values() for each in (other, model))
    assert_close(list(got), list(want))
    x = torch.randn(3, 10)
    assert_close(other(x), model(x))


@pytest.mark.sample(6)
@pytest.mark.parametrize("build", [nested, simple])
@pytest.mark.parametrize(
    ("source", "into"),
    [
        ("before", "no"),
        ("no", "before"),
        ("before", "before"),
        ("after", "no"),
        ("after", "after"),
    ],
    ids=["from", "to", "both", "from_after", "both_after"],
)
@EACH_KIND
def test_with_checkpoint_wrappers(
    ranks: Any, kind: str, build: Any, source: str, into: str
) -> None:
    ranks(2).run(checkpointed, kind, build, source, into)


def wrapped_after(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    reference = nested()
    model, reference = compiled(copy.deepcopy(reference)), ddp(reference)
    apply_activation_checkpointing(model, check_fn=is_linear)
    assert list(model.state_dict()) == ["0.weight", "1.weight"]
    x = torch.randn(3, 10, generator=torch.Generator().manual_seed(rank))
    for each in (model, reference):
        each(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(full(mine.grad), theirs.grad)


def test_wrapped_after_compile(ranks: Any) -> None:
    """Saved under the names of the plain model, and trained."""
    ranks(2).run(wrapped_after)


def wrapped_layers(rank: int, world_size: int, kind: str) -> None:
    plain, module = Transformer(), Transformer()
    for layers in (module.transformer.encoder.layers, module.transformer.decoder.layers):
        for i, layer in enumerate(layers):
            layers[i] = checkpoint_wrapper(layer)
    model, other = compiled(module), compiled(plain)
    states = [saved(each, kind) for each in (model, other)]
    assert list(states[0]) == list(states[1])
    model.load_state_dict(states[1])
    assert_close([*params_of(model).values()], [*params_of(other).values()])


@EACH_KIND
def test_with_wrapped_layers(ranks: Any, kind: str) -> None:
    ranks(2).run(wrapped_layers, kind)


# -- shared parameters -----------------------------------------------------------------------------


def shared(rank: int, world_size: int, kind: str) -> None:
    model, other = compiled(Transformer()), compiled(Transformer())
    state = saved(model, kind)
    assert {"embed_tokens.weight", "output_proj.weight"} <= state.keys()
    zeroed(other, buffers=True)
    other.load_state_dict(state)
    same(other, model)
    assert other.output_proj.weight is other.embed_tokens.weight


@EACH_KIND
def test_shared_parameters(ranks: Any, kind: str) -> None:
    ranks(2).run(shared, kind)


class SharedModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.random = nn.Parameter(torch.rand(10))
        self.shared = self.random
        self.net1 = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.net2 = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.net3 = self.net2

    def forward(self, x: Tensor) -> Tensor:
        return self.net3(self.net2(self.net1(x))) + self.random.sum() + self.shared.sum()


def shared_modules(rank: int, world_size: int) -> None:
    state = compiled(SharedModules(), units=[]).full_state_dict(rank0_only=False)
    assert torch.equal(state["random"], state["shared"])
    assert torch.equal(state["net2.0.weight"], state["net3.0.weight"])
    assert torch.equal(state["net2.0.bias"], state["net3.0.bias"])


def test_shared_modules(ranks: Any) -> None:
    ranks(2).run(shared_modules)


# -- the rest --------------------------------------------------------------------------------------


def by_rank_0(rank: int, world_size: int) -> None:
    """Rank 0 loads into its plain model, and `sync_module_states` gives it to all."""
    model = compiled(Transformer())
    with model.summon_full_params(), torch.no_grad():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            if not tensor.any():
                tensor.add_(torch.ones_like(tensor))
    state = model.full_state_dict(cpu_offload=True, rank0_only=True)
    plain = Transformer()
    with torch.no_grad():
        for tensor in itertools.chain(plain.parameters(), plain.buffers()):
            tensor.zero_()
    if rank == 0:
        plain.load_state_dict(state, strict=True)
    assert not all_alike(plain)
    other = compiled(plain, units=LAYERS, sync_module_states=True)
    with other.summon_full_params():
        assert all_alike(other)
    same(other, model)


def test_loaded_by_rank_0(ranks: Any) -> None:
    ranks(2).run(by_rank_0)


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.linear_skip = nn.Linear(10, 5), nn.Linear(10, 5)
        self.inner = nn.Sequential(nn.Linear(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.linear(x) + self.linear_skip(x))


def skipping(rank: int, world_size: int, kind: str) -> None:
    """FSDP1 detaches a module while it wraps; `ignored` says so."""
    torch.manual_seed(0)
    options = {"units": ["linear", "inner", "inner.0"], "ignored": ["linear_skip"]}
    model, other = (compiled(Skips(), **options) for _ in "ab")
    model(torch.randn(1, 10)).sum().backward()
    assert not isinstance(model.linear_skip.weight, DTensor)
    state = saved(model, kind)
    assert sorted(state) == sorted(Skips().state_dict())
    other.load_state_dict(copy.deepcopy(state), strict=True)
    same(other, model)
    plain = Skips()
    plain.load_state_dict({name: full(state[name]) for name in sorted(state)}, strict=True)
    same(plain, model)


@EACH_KIND
def test_skipped_module(ranks: Any, kind: str) -> None:
    ranks(2).run(skipping, kind)


def ignoring(
    rank: int, world_size: int, prefix: str, whole: bool, inner: bool, policy: Any
) -> None:
    """Ignored parameters are not copied, under any prefix, nor buffers; nor cast."""
    module = Model()
    names = ["outer", "inner"] if inner else ["outer"]
    model = compiled(module, units=[], ignored=names, mixed_precision=policy)

    def saved() -> dict[str, Any]:
        if whole:
            return model.full_state_dict(cpu_offload=False, rank0_only=False)
        return model.state_dict(prefix=prefix)

    states = [saved() for _ in range(2)]
    kept = [f"{name}.{what}" for name in names for what in ("weight", "bias", "buffer")]
    if policy is None and not inner:
        kept.append("inner.buffer")
    for name in kept:
        tensor = model.get_parameter(name) if "buffer" not in name else model.get_buffer(name)
        for state in states:
            assert state[prefix + name].data_ptr() == tensor.data_ptr(), name
            assert state[prefix + name].dtype == torch.float32
    plain = Model()
    full_state = {name.removeprefix(prefix): full(value) for name, value in states[0].items()}
    plain.load_state_dict(full_state, strict=True)
    same(model, plain)


@pytest.mark.parametrize("policy", [HALF, None], ids=["fp16", "fp32"])
@pytest.mark.parametrize("inner", [True, False], ids=["both", "outer"])
@pytest.mark.parametrize(
    ("prefix", "whole"),
    [("foo.", False), ("", False), ("", True)],
    ids=["prefix", "none", "full"],
)
def test_ignored_modules(ranks: Any, prefix: str, whole: bool, inner: bool, policy: Any) -> None:
    """`full_state_dict` has no prefix."""
    ranks(2).run(ignoring, prefix, whole, inner, policy)


def one_element(rank: int, world_size: int) -> None:
    """Rank 1 has no row of it."""
    model = compiled(nn.Linear(1, 1, bias=False), units=[])
    before = full(model.weight).item()
    model(torch.ones(1)).sum().backward()
    state = copy.deepcopy(model.state_dict())
    with model.summon_full_params(), torch.no_grad():
        model.weight.fill_(1.75)
    assert full(model.weight).item() == 1.75
    model.load_state_dict(state)
    assert full(model.weight).item() == before


def test_ranks_without_rows(ranks: Any) -> None:
    ranks(2).run(one_element)


def through_a_file(rank: int, world_size: int, weights_only: bool) -> None:
    state = compiled(Model(), units=[]).state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    read = torch.load(file, weights_only=weights_only)
    assert list(read) == list(state)
    for name, value in state.items():
        assert torch.equal(full(read[name]), full(value))


@pytest.mark.parametrize("weights_only", [True, False], ids=["weights_only", "any"])
def test_torch_save(ranks: Any, weights_only: bool) -> None:
    ranks(2).run(through_a_file, weights_only)


def wrong_keys(rank: int, world_size: int) -> Any:
    model = made(nested)
    state = dict(model.state_dict())
    state["unexpected"] = state.pop("0.weight")
    return tuple(model.load_state_dict(state, strict=False))


def test_missing_and_unexpected_keys(ranks: Any) -> None:
    assert ranks(2).run(wrong_keys) == [(["0.weight"], ["unexpected"])] * 2


def alone(rank: int, world_size: int) -> None:
    """A group of one rank."""
    groups = [dist.new_group(ranks=[each]) for each in range(world_size)]
    model = compiled(Transformer(), process_group=groups[rank])
    want = params_of(model)
    model.load_state_dict(model.state_dict())
    assert_close(params_of(model), want)


def test_group_of_one_rank(ranks: Any) -> None:
    ranks(2).run(alone)


def on_fewer(rank: int, world_size: int) -> None:
    """What 4 ranks have saved, 2 load."""
    model = trained(rank, compiled(Model(), units=["inner"]))
    state = model.full_state_dict(rank0_only=False)
    group = dist.new_group(ranks=[0, 1])
    if rank < 2:
        other = compiled(Model(), units=["inner"], process_group=group)
        zeroed(other)
        other.load_state_dict(state)
        got = other.full_state_dict(rank0_only=False)
        assert_close(got, state)
    dist.barrier()


def test_loaded_on_fewer_ranks(ranks: Any) -> None:
    ranks(4).run(on_fewer)
