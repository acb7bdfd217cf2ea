"""States of models with tensor parallelism beside FSDP: torch's and fxshard's are one format."""

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fxshard
from fxshard.errors import FxshardError
from tests.distributed.tensor_parallel_cases import Job, Mlp, full, of_an_mlp, state_of, stepped

JOB = Job(of_an_mlp, model=Mlp)


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def both(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def interchange(rank: int, world_size: int, folder: str, writer: Job, reader: Job) -> None:
    """A checkpoint of one mesh, by fxshard or torch, is loaded on another, by the other."""
    model = writer.sharded()
    optimizer = stepped(model, writer, rank)
    dcp.save(both(model, optimizer), checkpoint_id=folder)
    other = reader.sharded()
    fresh = stepped(other, reader, rank, steps=2)  # other values than those that were saved
    state = both(other, fresh)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        other, fresh, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert_equal(state_of(other, fresh), state_of(model, optimizer))


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (JOB, replace(JOB, how="fsdp2", shape=(4, 1))),
        (replace(JOB, how="fully_shard", shape=(2, 1, 2)), replace(JOB, how="fsdp2")),
        (replace(JOB, how="fsdp2", shape=(1, 2, 2)), replace(JOB, shape=(2, 1, 2))),
        (replace(JOB, how="fsdp2"), replace(JOB, how="fully_shard", shape=(1, 4))),
    ],
)
@pytest.mark.sample(2)
def test_checkpoints_go_both_ways_between_meshes(
    ranks: Any, tmp_path: Path, writer: Job, reader: Job
) -> None:
    ranks(4).run(interchange, str(tmp_path), writer, reader)


def own_checkpoints(rank: int, world_size: int, folder: str) -> None:
    """`save_checkpoint`, and a full state dict into a model that is sharded otherwise."""
    model = JOB.sharded()
    optimizer = stepped(model, JOB, rank)
    fxshard.save_checkpoint(folder, model, optimizer)
    other = replace(JOB, shape=(1, 4)).sharded()
    fresh = stepped(other, replace(JOB, shape=(1, 4)), rank, steps=2)
    fxshard.load_checkpoint(folder, other, fresh)
    assert_equal(state_of(other, fresh), state_of(model, optimizer))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    third = replace(JOB, shape=(4, 1)).sharded()
    set_model_state_dict(
        third,
        whole if rank == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    fourth = JOB.sharded()
    every = {name: full(value) for name, value in model.state_dict().items()}
    fourth.load_state_dict(every)
    copied = copy.deepcopy(model)
    for each in (third, fourth, copied):
        assert_equal({n: full(p) for n, p in each.named_parameters()}, every)
        each(JOB.batch(rank, 0)).sum().backward()
    with torch.no_grad():
        for each in (model, copied):
            for param in each.parameters():
                param.mul_(2).add_(1)
    model.to(torch.float64)
    for name, param in model.named_parameters():
        assert torch.equal(full(param), (every[name] * 2 + 1).double())
    model(JOB.batch(rank, 0).double()).sum().backward()


@pytest.mark.slow
def test_full_states_and_own_checkpoints(ranks: Any, tmp_path: Path) -> None:
    ranks(4).run(own_checkpoints, str(tmp_path))


# -- what is refused -------------------------------------------------------------------------------


def told(function: Callable[[], Any]) -> str:
    try:
        function()
    except FxshardError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refused(rank: int, world_size: int) -> dict[str, str]:
    found = {}

    def without_a_mesh() -> None:
        fxshard.compile(JOB.parallel()[0])

    def over_all_ranks() -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        fxshard.compile(JOB.parallel()[0], mesh=mesh)

    def another_mesh() -> None:
        ranks = torch.arange(world_size).view(2, 2)
        own = [group for group in (dist.new_group(row.tolist()) for row in ranks.t())]
        mesh = torch.distributed.device_mesh.DeviceMesh.from_group(own[rank % 2], "cpu")
        fxshard.compile(JOB.parallel()[0], mesh=mesh)

    def of_two_dimensions() -> None:
        mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "a", "b"))
        model = Mlp()
        parallelize_module(model, mesh["a"], {"layers.0.0": ColwiseParallel()})
        parallelize_module(model, mesh["b"], {"layers.1.0": ColwiseParallel()})
        fxshard.compile(model, mesh=mesh["dp"])

    def a_parameter_of_two() -> None:
        """As torchtitan's experts with ``expert_tensor_parallel_degree`` above 1."""
        mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "ep", "etp"))
        model, placements = Mlp(), (Shard(0), Shard(1))
        weight = distribute_tensor(model.layers[0][0].weight, mesh["ep", "etp"], placements)
        model.layers[0][0].weight = nn.Parameter(weight)
        fxshard.compile(model, mesh=mesh["dp"])

    def a_buffer() -> None:
        model, mesh = JOB.parallel()
        model.register_buffer("scale", full_like_a_parameter(model))
        fxshard.compile(model, mesh=mesh)

    def ignored() -> None:
        model, mesh = JOB.parallel()
        fxshard.compile(model, mesh=mesh, ignored=[model.layers[0]])

    def read_from_elsewhere() -> None:
        """A list would keep the values of before."""
        model, mesh = JOB.parallel()
        held = [model.get_parameter("layers.0.2.bias")]
        model.layers[0].register_forward_hook(lambda module, args, out: out + held[0].to_local())
        fxshard.compile(model, mesh=mesh, args=(JOB.batch(rank, 0),))

    def shard() -> None:
        model, mesh = JOB.parallel()
        fxshard.shard(model, mesh=mesh)

    def may_differ() -> None:
        model, mesh = JOB.parallel()
        fxshard.compile(model, mesh=mesh, ranks_may_differ=True)

    def meta() -> None:
        mesh = JOB.mesh
        with torch.device("meta"):
            model = Mlp()
        of_an_mlp(model, mesh["tp"])
        fxshard.compile(model, mesh=mesh)

    def a_layer_alone() -> None:
        JOB.sharded().layers[0](JOB.batch(rank, 0))

    def summoned() -> None:
        with JOB.sharded().summon_full_params():
            pass

    def muon() -> None:
        model = JOB.sharded()
        model(JOB.batch(rank, 0)).sum().backward()
        torch.optim.Muon([p for p in model.parameters() if p.dim() == 2]).step()

    def pickled() -> None:
        pickle.dumps(JOB.sharded())

    def strategies() -> None:
        model, mesh = JOB.parallel()
        different = {"": "full_shard", "layers.0": "no_shard"}
        fxshard.compile(model, mesh=mesh, units=["layers.*"], strategy=different)

    def another_batch() -> None:
        """Of one of the ranks that compute it together."""
        model, mesh = JOB.parallel()
        fxshard.compile(model, mesh=mesh, args=(torch.ones(4 + 2 * (rank == 1), 6),))

    def formulas() -> None:
        model, _ = JOB.parallel()
        fxshard.plan(model, (JOB.batch(rank, 0),), world_size=2).memory.formulas  # noqa: B018

    for case in (
        *(without_a_mesh, over_all_ranks, another_mesh, of_two_dimensions, a_buffer, ignored),
        a_parameter_of_two,
        *(shard, may_differ, meta, a_layer_alone, summoned, muon, pickled, formulas, another_batch),
        *(read_from_elsewhere, strategies),
    ):
        found[case.__name__] = told(case)
    return found


def full_like_a_parameter(model: nn.Module) -> Tensor:
    found: Tensor = model.get_parameter("layers.0.0.weight").detach().clone()
    return found


REFUSED = {
    "without_a_mesh": "UnitError: parameter 'layers.0.0.weight' is a DTensor .* give the mesh",
    "over_all_ranks": "UnitError: parameter 'layers.0.0.weight' is a DTensor already, .* over too",
    "another_mesh": "UnitError: .* no dimension of the mesh that fxshard shards over .* one mesh",
    "of_two_dimensions": "UnitError: .*'layers.1.0.weight'.* Give parallelize_module the same",
    "a_parameter_of_two": "UnitError: parameter 'layers.0.0.weight' .* shards what one dimension",
    "a_buffer": "UnitError: buffer 'scale' is a DTensor: .*to_local",
    "ignored": "UnitError: parameter 'layers.0.0.weight' is a DTensor .*, and ignored",
    "read_from_elsewhere": "CaptureError: .*from elsewhere than its module",
    "shard": "UnitError: .* Use fxshard.compile or fxshard.fully_shard",
    "may_differ": "ConfigError: ranks_may_differ=True with parameter .* 'tp' compute one batch",
    "meta": "UnitError: .* on the meta device: fxshard does not fill those",
    "a_layer_alone": "StepError: parameter 'layers.0.0.weight', .* is read by eager code",
    "summoned": "StepError: parameter 'layers.0.0.weight', .*full_tensor",
    "muon": "StepError: parameter .* has an update that needs all of its rows",
    "pickled": "StepError: parameter 'layers.0.0.weight', .* cannot be pickled",
    "another_batch": "RankMismatchError: .*(fxshard.model_all_reduce|another group of ranks)",
    "strategies": "ConfigError: tensor parallelism with units of a strategy of their own",
    "formulas": "ConfigError: formulas with parameter .* Plan once for each size",
}


def test_what_cannot_be_had_is_refused_by_name(ranks: Any) -> None:
    for said in ranks(4).run(refused):
        assert said.keys() == REFUSED.keys()
        for name, text in said.items():
            assert re.match(REFUSED[name], text), (name, text)
