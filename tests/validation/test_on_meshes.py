"""`validate(mesh=...)`: gloo ranks that parallelise a model, beside eager with the plain one."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import fxshard
from fxshard.errors import ConfigError, RankDiedError
from fxshard.validation.compare import Validation
from tests.distributed.tensor_parallel_cases import (
    LENGTH,
    VOCABULARY,
    Llama,
    Mlp,
    WithLogits,
    of_an_mlp,
    of_sequences,
    of_sequences_and_logits,
    of_transformers,
)

adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
MESH = {"dp": 2, "tp": 2}


def on_tp(plan: Any, model: nn.Module, mesh: DeviceMesh) -> None:
    plan(model, mesh["tp"])


def by(plan: Any) -> Any:
    return functools.partial(on_tp, plan)


def loss(logits: Any) -> Tensor:
    """Every sample is to say something else."""
    flat = logits.flatten(0, 1) if logits.dim() == 3 else logits
    return F.cross_entropy(flat, torch.arange(len(flat)) % flat.shape[-1])


def of_losses(model: nn.Module, mesh: DeviceMesh) -> Any:
    return loss_parallel()


class WithLoss(Llama):
    """Tokens -> loss, of logits whose classes may be spread over ranks."""

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(tokens).flatten(0, 1), tokens.roll(-1).flatten())


def checked(model: Any = Mlp, plan: Any = of_an_mlp, **options: Any) -> Validation:
    torch.manual_seed(0)
    made = model()
    call = torch.randn(4, 6) if model is Mlp else torch.randint(0, VOCABULARY, (2, LENGTH))
    given = {"mesh": MESH, "parallelize": by(plan), "loss": loss, "ranks": "processes", **options}
    return fxshard.validate(made, (call,), **given)


def require_right(result: Validation) -> None:
    assert result.numerics is not None
    assert result.numerics.verdict != "wrong", result.numerics.table(only_different=True)
    assert result.max_abs_difference == 0, result.table(only_different=True)
    assert result.holds


@pytest.mark.parametrize(
    ("model", "plan", "options"),
    [
        pytest.param(
            WithLogits, of_transformers, {"optimizer": adamw}, marks=pytest.mark.slow
        ),  # ranks import transformers
        (WithLoss, of_sequences_and_logits, {"context": of_losses, "loss": None, "steps": 1}),
        (Mlp, of_an_mlp, {"mesh": {"tp": 2}, "optimizer": sgd, "micro_batches": 2}),
        (
            Mlp,
            of_an_mlp,
            {
                "mesh": {"one": 1, "dp": 2, "tp": 2},
                "optimizer": sgd,
                "optimizer_in_backward": True,
                "reduce_op": "sum",
            },
        ),
    ],
    ids=["transformers", "sequences and losses", "no data parallelism", "a dimension of one"],
)
@pytest.mark.sample(2)
def test_ranks_of_a_mesh_compute_what_the_plain_model_does(
    model: Any, plan: Any, options: dict[str, Any]
) -> None:
    require_right(checked(model, plan, **options))


@pytest.mark.slow
def test_hybrid_ranks_beside_tensor_parallelism() -> None:
    mesh = {"replicas": 2, "shards": 2, "tp": 2}
    result = checked(mesh=mesh, strategy="hybrid_shard", optimizer=adamw)
    require_right(result)
    assert len(result.peaks) == 8


def test_all_is_compared_and_only_places_in_data_parallelism_have_batches_of_their_own() -> None:
    result = checked(optimizer=adamw, steps=1)
    require_right(result)
    rows = result.numerics.rows
    assert {r.name for r in rows if r.kind == "loss"} == {f"loss (rank {i})" for i in range(4)}
    assert "Measured on 4 gloo ranks, with 2 batches" in result.summary()
    shapes = {name: tuple(param.shape) for name, param in Mlp().named_parameters()}
    for kind in ("gradient", "parameter"):
        assert {row.name: row.shape for row in rows if row.kind == kind} == shapes


def test_a_loss_of_dtensors_outside_of_the_model_is_compared() -> None:
    """Logits come as a DTensor, which is put together."""
    result = checked(Llama, of_sequences_and_logits, context=of_losses, steps=1)
    require_right(result)
    assert ("output", (2, LENGTH, VOCABULARY)) in {(r.kind, r.shape) for r in result.numerics.rows}


def of_all_classes(logits: Any) -> Tensor:
    return loss(logits.full_tensor())


def of_own_classes(logits: Any) -> Tensor:
    return logits.to_local().square().mean()


def summed(logits: Any) -> Tensor:
    return (2 * logits.redistribute(placements=[Replicate()])).square().sum().to_local()


@pytest.mark.parametrize("reads", [loss, of_all_classes, of_own_classes, summed])
def test_bytes_of_losses_that_read_dtensors(reads: Any) -> None:
    """Collectives outside of the program too."""
    context = of_losses if reads is loss else None
    options = {"context": context, "loss": reads, "optimizer": adamw, "ranks": "fake"}
    result = checked(Llama, of_sequences_and_logits, **options)
    assert result.holds and result.max_abs_difference == 0, result.table(only_different=True)


# -- plans that are wrong --------------------------------------------------------------------------


def not_reduced(model: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank has its part of the sum over ranks, of the second pair."""
    plan = {"layers.*.0": ColwiseParallel(), "layers.0.2": RowwiseParallel()}
    part = RowwiseParallel(output_layouts=Partial())
    parallelize_module(model, mesh, plan | {"layers.1.2": part})


def norm_forgotten(model: Any, mesh: DeviceMesh) -> None:
    """Each rank has a part of the sequence before the last norm, which nothing tells."""
    norm = copy.deepcopy(model.norm)
    of_sequences(model, mesh)
    model.norm = norm


def test_a_partial_sum_that_is_not_reduced_is_wrong() -> None:
    result = checked(plan=not_reduced, optimizer=sgd, steps=1)
    assert not result.holds and result.max_abs_difference == 0
    wrong = {(row.kind, row.name) for row in result.numerics.of("wrong")}
    assert {("loss", f"loss (rank {rank})") for rank in range(4)} <= wrong
    assert ("gradient", "head.weight") in wrong
    assert "wrong: " in result.numerics.summary()


def test_a_gradient_that_is_not_reduced_is_named() -> None:
    """Losses are right; each rank has the gradient of its part of the sequence."""
    result = checked(functools.partial(Llama, layers=1), norm_forgotten, steps=1)
    wrong = {(row.kind, row.name) for row in result.numerics.of("wrong")}
    assert wrong == {("gradient", f"norm.weight{of}") for of in ("", " (rank 1)", " (rank 3)")}


# -- fake ranks, and what is refused ---------------------------------------------------------------


def test_fake_ranks_of_a_mesh_are_compared_in_bytes() -> None:
    result = checked(ranks="fake", optimizer=adamw)
    assert result.holds and result.max_abs_difference == 0 and result.numerics is None
    lonely = checked(ranks="fake", mesh={"tp": 2})
    assert lonely.holds and not dist.is_initialized()


def fails_on_data(model: nn.Module, mesh: DeviceMesh) -> None:
    of_an_mlp(model, mesh["tp"])
    if not any(p.is_meta for p in model.parameters()):
        raise ArithmeticError("real data")


def renames(model: Any, mesh: DeviceMesh) -> nn.Module:
    of_an_mlp(model, mesh["tp"])
    return nn.Sequential(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallelize": lambda m, mesh: of_an_mlp(m, mesh["tp"])}, "parallelize cannot be sent"),
        ({"context": lambda model, mesh: loss_parallel()}, "context cannot be sent"),
        ({"ranks": "fake", "numerics": True}, "Give ranks='processes'"),
        ({"mesh": {"dp": 2, "cp": 2}}, "Validate without 'cp'"),
        ({"mesh": {"dp": 2, "ep": 2}}, "Validate without 'ep'"),
        ({"world_size": 2}, "both given"),
        ({"mesh": None}, "parallelize=... needs the mesh"),
        ({"mesh": None, "parallelize": None}, "for how many ranks"),
        ({"parallelize": renames}, "leaves no parameter 'layers.0.0.weight'"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(**options)


def test_a_parallelize_that_fails_on_a_rank_is_told() -> None:
    with pytest.raises(RankDiedError, match=r"parallelize\(model, mesh\) raised ArithmeticError"):
        checked(parallelize=fails_on_data)
