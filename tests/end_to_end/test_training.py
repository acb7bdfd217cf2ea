"""Training loops as people write them, line by line the same under FSDP2 and under fxshard.

A loop is a generator that trains a model and yields what it saw, as (name, value). It runs on 2
gloo ranks under both, and all that it saw has the same bits; and in this process under fxshard and
in plain eager.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.end_to_end.training_cases import assert_same
from tests.end_to_end.training_loops import LOOPS, OPTIMIZER_LOOPS, both, seen
from tests.fsdp2 import full
from tests.ranks import told

# What FSDP2 cannot do, as DTensor has no rule for it, and the same in another form.
REFUSED_BY_DTENSOR = {"optimizer_sgd_fused": "optimizer_sgd_foreach"}
# Its norms are those of a rank's rows under FSDP2, for vectors without an error.
ADAFACTOR = ("optimizer_adafactor", "optimizer_adafactor_loop", "optimizer_adafactor_vectors")


@pytest.mark.parametrize(
    "name", [name for name in LOOPS if name not in (*REFUSED_BY_DTENSOR, *ADAFACTOR)]
)
@pytest.mark.sample(6)
def test_bitwise_with_fsdp2(ranks: Any, name: str) -> None:
    for ours, theirs in ranks(2).run(both, name):
        assert_same(ours, theirs)


def beside_another_form(rank: int, world_size: int, name: str) -> Any:
    with pytest.raises(NotImplementedError, match="does not have a sharding strategy"):
        seen(name, "fsdp2", rank)
    return seen(name, "ranks", rank), seen(REFUSED_BY_DTENSOR[name], "fsdp2", rank)


@pytest.mark.parametrize("name", REFUSED_BY_DTENSOR)
def test_what_dtensor_cannot_do_is_done(ranks: Any, name: str) -> None:
    for ours, theirs in ranks(2).run(beside_another_form, name):
        assert_same(ours, theirs, rtol=1e-6, atol=1e-7)


def adafactor(rank: int, world_size: int, name: str) -> str:
    return told(lambda: seen(name, "ranks", rank))


def adafactor_beside_eager(rank: int, world_size: int) -> float:
    """How far FSDP2's biases are from eager's on the joined batch, after a step.

    On a mesh of their own: DTensors on that of a compiled model give the numbers of one process.
    """
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("control",))
    models = [nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)) for _ in range(2)]
    for model in models:
        for number, param in enumerate(model.parameters()):
            nn.init.normal_(param, generator=torch.Generator().manual_seed(number))
    sharded, eager = fully_shard(models[0], mesh=mesh), models[1]
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    for model, mine in ((sharded, rows[2 * rank : 2 * rank + 2]), (eager, rows)):
        biases = [p for p in model.parameters() if p.dim() == 1]
        optimizer = torch.optim.Adafactor(biases, lr=0.1)
        model(mine).square().mean().backward()
        optimizer.step()
    pairs = zip(sharded.parameters(), eager.parameters(), strict=True)
    return max(float((full(mine.detach()) - other.detach()).abs().max()) for mine, other in pairs)


def test_adafactor_under_fsdp2_is_not_eagers(ranks: Any) -> None:
    assert min(ranks(2).run(adafactor_beside_eager)) > 1e-3


@pytest.mark.parametrize("name", ADAFACTOR)
def test_adafactor_is_refused_on_ranks(ranks: Any, name: str) -> None:
    for found in ranks(2).run(adafactor, name):
        assert found.startswith("StepError: torch.optim.Adafactor scales each step by norms")


@pytest.mark.parametrize(
    "name",
    [n for n in LOOPS if n not in OPTIMIZER_LOOPS or n in (*REFUSED_BY_DTENSOR, *ADAFACTOR)],
)
@pytest.mark.sample(14)
def test_in_process_as_in_eager(name: str) -> None:
    """Parameters are plain tensors here: of the optimizers, those that FSDP2 cannot do."""
    assert_same(seen(name, "in_process", 0), seen(name, "eager", 0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "name",
    [
        "grad_scaler_with_an_infinite_loss_on_one_rank",
        "sharded_grad_scaler",
        "grad_scaler_with_an_infinity_in_one_shard",
        "sharded_grad_scaler_with_an_infinity_in_one_shard",
    ],
)
@pytest.mark.sample(2)
def test_an_infinity_on_one_rank_skips_the_step_on_both(ranks: Any, name: str) -> None:
    for ours, _ in ranks(2).run(both, name):
        assert_same(ours["parameters 1"], ours["parameters 0"])
        assert (ours["scale 0"], ours["scale 1"]) == (2.0**8, 2.0**7)
        for step in (1, 2):
            before, after = (ours[f"parameters {k}"]["head.weight"] for k in (step - 1, step))
            assert torch.equal(before, after) == (step == 1)
