"""Programs with each kind of group of ranks, for test_faults_of_groups: planned, nothing runs."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fxshard
from fxshard.errors import VerifyError
from fxshard.ir.program import Program
from tests.distributed import context_parallel_cases as contexts
from tests.distributed import expert_parallel_cases as experts
from tests.distributed.tensor_parallel_cases import Llama, Mlp, of_an_mlp, of_sequences
from tests.planner.test_on_mesh import of_experts, of_experts_and_tensors

Function = Callable[[nn.Module, DeviceMesh], Any]
X = torch.zeros(4, 6)
TOKENS = torch.zeros(2, 8, dtype=torch.int64)


def loss(made: Tensor) -> Tensor:
    return made.square().mean()


def on_tp(function: Any) -> Function:
    return lambda model, mesh: function(model, mesh["tp"])


def mlp(mesh: dict[str, int], **options: Any) -> fxshard.Plan:
    if "tp" in mesh:
        options["parallelize"] = on_tp(of_an_mlp)
    return fxshard.plan(Mlp(), (X,), mesh=mesh, loss=loss, **options)


def sequences(**options: Any) -> fxshard.Plan:
    given = {"mesh": {"dp": 2, "tp": 2}, "parallelize": on_tp(of_sequences), "loss": loss}
    return fxshard.plan(Llama(), (TOKENS,), **given, **options)


def of_contexts(rotate: str, **options: Any) -> fxshard.Plan:
    job = contexts.Job(rotate=rotate)
    tokens, _ = job.batch(0, 0)
    return fxshard.plan(
        *(job.model(), (tokens,)),
        mesh={"dp": 2, "cp": 2},
        context=lambda model, mesh: job.around(mesh, model, tokens),
        loss=loss,
        **options,
    )


def with_experts(mesh: dict[str, int], function: Function, **options: Any) -> fxshard.Plan:
    given = {"data_sizes": {"**.experts": 12}, "units": ["layers.*"], **options}
    call = (experts.batch(0, 0),)
    return fxshard.plan(experts.Net(), call, mesh=mesh, parallelize=function, **given)


FULL, HYBRID = {"checkpoint": "full"}, {"strategy": "hybrid_shard"}


# name -> its plan, with further options
PLANS: dict[str, Callable[..., fxshard.Plan]] = {
    "tp": functools.partial(sequences, **FULL),
    "ep": functools.partial(with_experts, {"dp": 2, "ep": 2}, of_experts, **FULL),
    "ep, not recomputed": functools.partial(with_experts, {"dp": 2, "ep": 2}, of_experts),
    "ep x tp": functools.partial(with_experts, {"dp": 2, "tp": 2}, of_experts_and_tensors, **FULL),
    "hybrid x ep": functools.partial(
        with_experts, {"copies": 2, "dp": 1, "ep": 2}, of_experts, **FULL, **HYBRID
    ),
    "cp, ring": functools.partial(of_contexts, "alltoall", **FULL),
    "cp, all-gather": functools.partial(of_contexts, "allgather", **FULL),
    "hybrid": functools.partial(mlp, {"copies": 2, "dp": 2}, **HYBRID),
    "hybrid x tp": functools.partial(mlp, {"copies": 2, "dp": 2, "tp": 2}, **HYBRID),
}


@functools.cache
def program(name: str) -> Program:
    """One of `PLANS`, after the pipeline."""
    return PLANS[name]().program


class Break:
    """A pass of the user's own that breaks a program, alike on all ranks."""

    name = "break"
    requires = ensures = frozenset()  # type: ignore[var-annotated]

    def __init__(self, change: Callable[[Program], bool]) -> None:
        self.change, self.changed = change, False

    def apply(self, program: Program) -> None:
        self.changed |= self.change(program)


def refused_after(
    name: str, behind: str, change: Callable[[Program], bool], left_out: str = ""
) -> VerifyError | None:
    """What is said of a program that a pass breaks right after the pass `behind`; None: nothing.

    Args:
        left_out: a pass that does not run.
    """
    step = Break(change)

    def passes(default: Any) -> list[Any]:
        default = [each for each in default if each.name != left_out]
        at = [each.name for each in default].index(behind) + 1
        return [*default[:at], step, *default[at:]]

    try:
        assert PLANS[name](passes=passes).program
    except VerifyError as error:
        return error
    assert step.changed, f"no place for this fault in {name}"
    return None
