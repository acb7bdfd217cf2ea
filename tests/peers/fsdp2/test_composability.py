"""test_2d_composability.py and test_pp_composability.py: FSDP beside other parallelism."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.testing import assert_close

import fxshard
from tests.oracles import count_collectives
from tests.peers.fsdp2.common import MLP, Args, Transformer, adam, average_grads, made, shard

SEQUENCES = {
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "pos_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
    "layers.*.attention_norm": SequenceParallel(),
    "layers.*.attention": PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate()
    ),
    **{f"layers.*.attention.w{name}": ColwiseParallel() for name in "qkv"},
    "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.ffn_norm": SequenceParallel(),
    "layers.*.feed_forward.0": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.feed_forward.2": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def two_dimensions() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def of_sequences(model: Transformer, mesh: DeviceMesh) -> Any:
    """Each rank has a part of each sequence, and of the heads; embeddings and output are tied."""
    model = parallelize_module(model, mesh, SEQUENCES)  # type: ignore[assignment]
    model.output.weight = model.tok_embeddings.weight
    for layer in model.layers:
        layer.attention.heads //= mesh.size()
    return model


def crosswise(param: Any) -> Shard:
    """Along another dimension than tensor parallelism has."""
    dims = [each.dim for each in getattr(param, "placements", ()) if isinstance(each, Shard)]
    return Shard(param.ndim - 1 - dims[0] if dims else 0)


def transformer(rank: int, world_size: int, crossed: bool) -> None:
    mesh = two_dimensions()
    # Gradients are compared in float64, whose sums have another order here.
    ref = made(lambda: Transformer(Args(layers=3)).double())
    model = of_sequences(copy.deepcopy(ref), mesh["tp"])
    shard(model, mesh=mesh["dp"], shard_placement_fn=crosswise if crossed else None)
    pairs = list(zip(model.parameters(), ref.parameters(), strict=True))
    for mine, theirs in pairs:
        assert torch.equal(mine.full_tensor(), theirs)
    both = adam(model), adam(ref)
    torch.manual_seed(42 + rank // 2)
    tokens = ref.tokens(2, 16)
    for _ in range(5):
        losses = [each(tokens).sum() for each in (model, ref)]
        for loss in losses:
            loss.backward()
        assert_close(*losses)
        average_grads(ref, mesh["dp"].get_group())
        where = model.pos_embeddings.weight
        assert isinstance(where.placements[1], Shard)
        assert isinstance(where.grad.placements[1], Shard)
        for mine, theirs in pairs:
            assert_close(mine.grad.full_tensor(), theirs.grad)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in pairs:
        assert_close(mine.full_tensor(), theirs)


@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.sample(1)
def test_a_transformer_of_sequences(ranks: Any, crossed: bool) -> None:
    ranks(4).run(transformer, crossed)


def placed_crosswise(rank: int, world_size: int) -> None:
    """Linear layers are sharded along one dimension by FSDP, and along the other before."""
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    ref = made(lambda: Transformer(Args(layers=3)))
    model = of_sequences(copy.deepcopy(ref), mesh["tp"])
    shard(model, mesh=mesh["dp"], shard_placement_fn=crosswise)
    linear = ("wq.weight", "wk.weight", "wv.weight", "wo.weight", "0.weight", "2.weight")
    for (fqn, mine), theirs in zip(model.named_parameters(), ref.parameters(), strict=True):
        dims = [each.dim for each in mine.placements if isinstance(each, Shard)]
        if fqn.startswith("layers") and fqn.endswith(linear):
            assert sorted(dims) == [0, 1] and mine.ndim == 2, fqn
        assert dims, fqn
        assert torch.equal(mine.full_tensor(), theirs)


@pytest.mark.parametrize("count", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_transformer_sharded_along_other_dimensions(ranks: Any, count: int) -> None:
    ranks(count).run(placed_crosswise)


def offloaded(rank: int, world_size: int) -> None:
    """Of one rank of FSDP nothing is gathered, and nothing reduced; all have one batch."""
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp", "tp"))
    ref = made(lambda: nn.Sequential(*(MLP(16) for _ in range(3))))
    plan = {"*.in_proj": ColwiseParallel(), "*.out_proj": RowwiseParallel()}
    model = parallelize_module(copy.deepcopy(ref), mesh["tp"], plan)
    shard(model, mesh=mesh["dp"], offload_policy=CPUOffloadPolicy())
    both = adam(model), adam(ref)
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    for _ in range(10):
        for optimizer in both:
            optimizer.zero_grad()
        with count_collectives() as seen:
            loss = model(x).sum()
        assert seen.kinds() == ["all_reduce"] * 3
        expected = ref(x).sum()
        assert_close(loss, expected)
        with count_collectives() as seen:
            loss.backward()
        assert seen.kinds() == ["all_reduce"] * 2  # the input needs no gradient
        expected.backward()
        for optimizer in both:
            optimizer.step()


def test_tensor_parallelism_with_offload_and_one_rank_of_fsdp(ranks: Any) -> None:
    ranks(4).run(offloaded)


class Net(nn.Module):
    """f[4, 5] -> f[4, last]: layers that are parallelised in pairs, and others."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.depth = len(widths)
        for i, (ins, outs) in enumerate(zip((5, *widths), widths, strict=False)):
            self.add_module(f"net{i + 1}", nn.Linear(ins, outs))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.depth):
            x = F.relu(self.get_submodule(f"net{i + 1}")(x))
        return x


PAIR = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
NETS = pytest.mark.parametrize("widths", [(8, 4, 12), (10, 15, 30, 5)], ids=["even", "uneven"])


def net_and_optimizer(widths: tuple[int, ...], plan: Any, how: str) -> tuple[Any, Any, Any]:
    """A plain net, and the same one on two dimensions, by `fully_shard` or by `compile`."""
    mesh = two_dimensions()
    plain = made(lambda: Net(*widths))
    model: Any = parallelize_module(copy.deepcopy(plain), mesh["tp"], plan)
    if how == "fully_shard":
        model = fxshard.fully_shard(model, mesh=mesh["dp"])
    else:
        model = fxshard.compile(model, mesh=mesh["dp"])
    return plain, model, torch.optim.Adam(model.parameters(), lr=0.01)


def stepped(model: Any, optimizer: Any, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.rand(4, 5)).sum().backward()
    optimizer.step()


def copies(model: Any, optimizer: Any) -> tuple[Any, Any]:
    state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizers=optimizer)
    return copy.deepcopy(state)


def assert_same_states(state: Any, expected: Any) -> None:
    """Of the model, and of the optimizer: local tensors, and where they are."""
    (mine, optim), (theirs, other) = state, expected
    assert mine.keys() == theirs.keys() and optim["state"].keys() == other["state"].keys()
    values = [(fqn, mine[fqn], theirs[fqn]) for fqn in mine]
    for fqn, states in optim["state"].items():
        values += [(f"{fqn}.{k}", v, other["state"][fqn][k]) for k, v in states.items()]
    for name, value, whole in values:
        assert isinstance(value, DTensor) == isinstance(whole, DTensor)
        if isinstance(value, DTensor):
            assert (value.device_mesh, value.placements) == (whole.device_mesh, whole.placements)
            value, whole = value.to_local(), whole.to_local()
        assert torch.equal(value, whole), name


def full_states(rank: int, world_size: int, how: str) -> None:
    """Taken to the CPU of rank 0, and set from there."""
    plan = {**PAIR, "net3": ColwiseParallel()}
    _, model, optimizer = net_and_optimizer((8, 4, 12), plan, how)
    stepped(model, optimizer, rank // 2)
    before = copies(model, optimizer)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    whole = get_model_state_dict(model, options=options)
    of_optimizer = get_optimizer_state_dict(model, optimizers=optimizer, options=options)
    of_optimizer = copy.deepcopy(of_optimizer)  # a step adds to the tensor that counts them
    stepped(model, optimizer, rank // 2)  # other values than those that were taken
    set_model_state_dict(model, whole, options=options)
    set_optimizer_state_dict(
        model, optimizers=optimizer, optim_state_dict=of_optimizer, options=options
    )
    assert_same_states(copies(model, optimizer), before)


@pytest.mark.parametrize("how", ["fully_shard", "compile"])
@pytest.mark.sample(1)
def test_full_states_are_set_from_rank_0(ranks: Any, how: str) -> None:
    ranks(4).run(full_states, how)


def states(rank: int, world_size: int, how: str, widths: tuple[int, ...]) -> None:
    """Those of a plain model, with one batch for all, loaded after a step that changes them."""
    plain, model, optimizer = net_and_optimizer(widths, PAIR, how)
    theirs = torch.optim.Adam(plain.parameters(), lr=0.01)
    for each, optim in ((plain, theirs), (model, optimizer)):
        stepped(each, optim, 0)
    expected = copies(plain, theirs)
    before = copies(model, optimizer)
    for state, whole in zip(before, expected, strict=True):
        assert state.keys() == whole.keys()
    for fqn, value in before[0].items():
        assert isinstance(value, DTensor) and value.placements[0].dim == 0  # type: ignore[attr-defined]
        assert value.device_mesh.ndim == (2 if fqn.startswith(("net1", "net2")) else 1)
        assert_close(value.full_tensor(), expected[0][fqn])
    for fqn, values in before[1]["state"].items():
        for name, value in values.items():
            whole = expected[1]["state"][fqn][name]
            assert_close(getattr(value, "full_tensor", lambda value=value: value)(), whole)
    stepped(model, optimizer, 1)
    model.load_state_dict(before[0])
    set_optimizer_state_dict(model, optimizers=optimizer, optim_state_dict=before[1])
    assert_same_states(copies(model, optimizer), before)


@NETS
@pytest.mark.parametrize("how", ["fully_shard", "compile"])
@pytest.mark.sample(1)
def test_states_on_two_dimensions(ranks: Any, how: str, widths: tuple[int, ...]) -> None:
    ranks(4).run(states, how, widths)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), MLP(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def pipelined(rank: int, world_size: int, name: str, precision: torch.dtype) -> None:
    """Eight layers on stages, each over two ranks of tensor parallelism and two of FSDP."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    kind: Any = getattr(schedules, name)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    first, last = (mesh.get_local_rank("pp") == each for each in (0, 1))
    count = 2 if single else 4
    ref = made(lambda: nn.Sequential(*(Residual() for _ in range(8))))
    plan = {"*.mlp.in_proj": ColwiseParallel(), "*.mlp.out_proj": RowwiseParallel()}
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    options = {"mesh": mesh["dp"], "mp_policy": policy}
    parts, stages = [], []
    for index in range(mesh.get_local_rank("pp"), count, 2):
        own = ref[index * 8 // count : (index + 1) * 8 // count]
        part: Any = parallelize_module(copy.deepcopy(own), mesh["tp"], plan)
        for block in part:
            fxshard.fully_shard(block, **options, reshard_after_forward=False)
        fxshard.fully_shard(part, **options, pipeline_stage=True)
        group = mesh.get_group("pp")
        stages.append(PipelineStage(part, index, count, torch.device("cpu"), group=group))
        parts.append((part, own))
    runs = kind(
        stages[0] if single else stages,
        n_microbatches=8,
        loss_fn=lambda y, target: y.float().sum(),
        scale_grads=False,
    )
    pairs = [
        each
        for part, own in parts
        for each in zip(part.parameters(), own.parameters(), strict=True)
    ]
    both = adam(nn.ModuleList(part for part, _ in parts)), adam(ref)
    torch.manual_seed(mesh.get_local_rank("dp"))
    for step in range(5):
        x = torch.randn(8, 8)
        losses: list[Tensor] = []
        runs.step(*([x] if first else []), **({"target": x, "losses": losses} if last else {}))
        loss = ref(x).sum()
        loss.backward()
        average_grads(ref, mesh.get_group("dp"))
        found = [(mine.grad.full_tensor(), theirs.grad) for mine, theirs in pairs]
        found += [(sum(losses), loss)] if last else []
        for mine, theirs in found:
            if precision == torch.float32:
                assert_close(mine, theirs)
            elif step == 0:  # then steps go other ways: Adam's are as large as gradients are small
                assert (mine - theirs).norm() <= 0.1 * theirs.norm()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()


SCHEDULES = (
    *("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS"),
    "ScheduleInterleavedZeroBubble",
)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
def test_pipelines_of_three_dimensions(ranks: Any, schedule: str, precision: torch.dtype) -> None:
    ranks(8).run(pipelined, schedule, precision)
