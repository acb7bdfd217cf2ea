"""Lightning's own ModelParallelStrategy with fxshard in the place of torch's `fully_shard`.

The script is the same but for that. Lightning, its Trainer, Fabric and checkpoints are the real
ones, on two gloo ranks whose batches differ.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor
from torch.testing import assert_close

import fxshard
from tests.fsdp2 import full
from tests.integrations.lightning_cases import (
    BATCHES,
    ROWS,
    SHARD,
    Module,
    Net,
    TorchElasticEnvironment,
    as_torchrun,
    eager,
    figures,
    joined,
    loss_of,
    trainer,
)
from tests.ranks import Ranks

Pools = Callable[[int], Ranks]


def params(module: Any) -> dict[str, Tensor]:
    return {fqn: full(param).clone() for fqn, param in module.net.named_parameters()}


def fitted(rank: int, world_size: int, by: str, folder: str, **options: Any) -> list[float]:
    with as_torchrun(rank, world_size):
        module = Module(by, rank, world_size)
        trainer(Path(folder, by), world_size, **options).fit(module)
        return module.losses


def resumed(rank: int, world_size: int, by: str, saved: Path, **options: Any) -> list[float]:
    """The losses of the second epoch, from the checkpoint of the first."""
    with as_torchrun(rank, world_size):
        module = Module(by, rank, world_size)
        run = trainer(saved / f"by-{by}", world_size, **options)
        run.fit(module, ckpt_path=saved / "epoch=0.ckpt")
        return module.losses


def trained(rank: int, world_size: int, by: str, folder: Path, **options: Any) -> dict[str, Any]:
    """Two epochs, and all that a Trainer does after."""
    module = Module(by, rank, world_size)
    run = trainer(folder, world_size, **options)
    run.fit(module)
    assert isinstance(module.net, fxshard.FxshardModule) == (by != "torch"), "who ran?"
    made: dict[str, Any] = {"losses": module.losses, "norms": module.norms, "fit": figures(run)}
    made["params"] = params(module)
    made["evaluated"] = [run.validate(module, verbose=False), run.test(module, verbose=False)]
    made["predicted"] = torch.cat(run.predict(module))
    return made


def beside_fsdp2(
    rank: int, world_size: int, by: str, folder: str, options: dict[str, Any]
) -> list[Any]:
    found = []
    for sharded_by, other in (("torch", by), (by, "torch")):  # a run moved over, and back
        here = Path(folder, sharded_by)
        with as_torchrun(rank, world_size):
            made = trained(rank, world_size, sharded_by, here, **options)
        made["again"] = resumed(rank, world_size, other, here, **options)
        found.append(made)
    return found


PRECISIONS = ["32-true", "bf16-true", "bf16-mixed"]
EACH = [(by, whole, how) for how in PRECISIONS for by in ("fxshard", "compile") for whole in (0, 1)]


@pytest.mark.parametrize(("by", "whole", "precision"), EACH)
@pytest.mark.sample(1)
def test_the_trainer_gives_what_it_gives_with_torchs_fully_shard(
    ranks: Pools, by: str, whole: int, precision: str, tmp_path: Path
) -> None:
    """Accumulated, clipped, scheduled, logged, evaluated, saved, resumed: bitwise FSDP2's."""
    options = {"whole": bool(whole), "precision": precision}
    answers = ranks(2).run(beside_fsdp2, by, str(tmp_path), options)
    for torchs, ours in answers:
        assert_close(ours, torchs, rtol=0, atol=0)
        assert ours["again"] == ours["losses"][BATCHES:], "resumed"
    (_, first), (_, second) = answers
    assert first["losses"] != second["losses"], "each rank has its own batches"
    assert first["fit"]["val_loss"] == second["fit"]["val_loss"], "logged of all ranks"
    if precision == "32-true":
        wanted = eager()
        mean = (torch.tensor(first["losses"]) + torch.tensor(second["losses"])) / 2
        assert_close(mean, torch.tensor(wanted["losses"]))
        assert_close(torch.tensor(first["norms"]), torch.tensor(wanted["norms"]))
        assert_close(first["params"], wanted["params"])
        assert_close(first["fit"]["val_loss"], wanted["val_loss"])
        half = ROWS // 2  # of the first batch, the other half is the other rank's
        assert_close(first["predicted"][:half], wanted["predicted"][:half])
    if whole:  # a file for everybody
        state = torch.load(tmp_path / by / "epoch=1.ckpt", weights_only=False)["state_dict"]
        plain = Net()
        plain.load_state_dict({fqn.removeprefix("net."): value for fqn, value in state.items()})
        assert_close(dict(plain.named_parameters()), first["params"], check_dtype=False)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_resumed_on_another_number_of_ranks(
    ranks: Pools, before: int, after: int, whole: bool, tmp_path: Path
) -> None:
    """The curve goes on: of one process on the batches of all ranks, and bitwise FSDP2's."""
    found = {}
    for by in ("torch", "fxshard"):
        ranks(before).run(partial(fitted, whole=whole), by, str(tmp_path))
        found[by] = ranks(after).run(partial(resumed, whole=whole), by, tmp_path / by)
    assert found["fxshard"] == found["torch"]
    mean = torch.tensor(found["fxshard"]).mean(0)
    assert_close(mean, torch.tensor(eager()["losses"][BATCHES:]))


class FromMeta(Module):
    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            with torch.device("meta"):
                net = Net()  # which seeds
            self.net = SHARD[self.by](net, self.device_mesh)


def from_meta(rank: int, world_size: int, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    with as_torchrun(rank, world_size):
        module = FromMeta("fxshard", rank, world_size)
        trainer(Path(folder), world_size).fit(module)
        return module.losses, params(module)


def test_lightning_fills_a_model_from_meta_as_one_process_does(
    ranks: Pools, tmp_path: Path
) -> None:
    """It calls ``reset_parameters``; torch's FSDP2 draws other numbers there, by rank."""
    (losses, trained_params), (others, _) = ranks(2).run(from_meta, str(tmp_path))
    wanted = eager()
    assert_close((torch.tensor(losses) + torch.tensor(others)) / 2, torch.tensor(wanted["losses"]))
    assert_close(trained_params, wanted["params"])


def with_fabric(
    rank: int, world_size: int, by: str, folder: str, whole: bool
) -> tuple[list[float], list[float]]:
    """The losses and norms of a loop of one's own: four micro-batches twice, from a checkpoint."""
    strategy = ModelParallelStrategy(
        SHARD[by], world_size, 1, save_distributed_checkpoint=not whole
    )
    fabric = lightning.Fabric(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        plugins=[TorchElasticEnvironment()],
    )
    fabric.launch()
    model = fabric.setup_module(Net())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses, norms = [], []

    def steps(numbers: range) -> None:
        for number in numbers:
            with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                loss = loss_of(model, joined(number).chunk(world_size)[rank])
                fabric.backward(loss / 2)
            losses.append(loss.item())
            if number % 2:
                norm: Any = fabric.clip_gradients(model, optimizer, max_norm=0.5)
                norms.append(full(norm).item())
                optimizer.step()
                optimizer.zero_grad()

    steps(range(4))
    state = {"model": model, "optimizer": optimizer, "step": 4}
    fabric.save(Path(folder, by), state)
    steps(range(4, 8))
    state["step"] = 0
    fabric.load(Path(folder, by), state)
    assert state["step"] == 4
    steps(range(4, 8))
    return losses, norms


def with_each(rank: int, world_size: int, folder: str, whole: bool) -> list[Any]:
    with as_torchrun(rank, world_size):
        return [with_fabric(rank, world_size, by, folder, whole) for by in SHARD]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.sample(1)
def test_fabric(ranks: Pools, whole: bool, tmp_path: Path) -> None:
    """`parallelize_fn` calls it; ``no_backward_sync``, clipping and checkpoints are Fabric's."""
    for torchs, ours, of_compile in ranks(2).run(with_each, str(tmp_path), whole):
        assert ours == torchs
        assert_close(of_compile, torchs)  # it reduces each micro-batch
        losses, _ = ours
        assert losses[4:8] == losses[8:], "resumed"
