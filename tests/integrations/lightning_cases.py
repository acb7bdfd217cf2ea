"""Lightning's Trainer and Fabric on ranks: a small model, sharded by torch or by fxshard."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

import fxshard

WIDTH = 8
BATCHES = 4  # of a rank and an epoch
ROWS = 4  # of all ranks' batches together, however many they are


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch.roll(1, -1)).square().mean()


def joined(number: int) -> Tensor:
    """The batch of all ranks."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


def by_calls(fully_shard: Callable[..., Any]) -> Callable[[Net, DeviceMesh], Net]:
    """What a user's ``configure_model`` does: a call per block, and one on the model."""

    def shard(model: Net, mesh: DeviceMesh) -> Net:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(model, mesh=mesh["data_parallel"])
        return model

    return shard


def compiled(model: Net, mesh: DeviceMesh) -> Net:
    return fxshard.compile(model, mesh=mesh["data_parallel"])


SHARD = {
    "torch": by_calls(fsdp.fully_shard),
    "fxshard": by_calls(fxshard.fully_shard),
    "compile": compiled,
}


class Module(lightning.LightningModule):
    def __init__(self, by: str, rank: int, world_size: int) -> None:
        super().__init__()
        self.by = by
        self.rank, self.world_size = rank, world_size
        self.losses: list[float] = []
        self.norms: list[float] = []

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = SHARD[self.by](Net(), self.device_mesh)

    def training_step(self, batch: Tensor) -> Tensor:
        loss = loss_of(self.net, batch)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        grads = [param.grad for param in self.net.parameters()]
        norm: Any = nn.utils.get_total_norm(grads)
        self.norms.append(norm.full_tensor().item())

    def validation_step(self, batch: Tensor) -> None:
        self.log("val_loss", loss_of(self.net, batch), sync_dist=True)

    def test_step(self, batch: Tensor) -> None:
        self.log("test_loss", loss_of(self.net, batch), sync_dist=True)

    def predict_step(self, batch: Tensor) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def loader(self, start: int) -> DataLoader[Tensor]:
        batches = [joined(start + i).chunk(self.world_size)[self.rank] for i in range(BATCHES)]
        return DataLoader(batches, batch_size=None)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return self.loader(BATCHES * self.current_epoch)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return self.loader(100)

    test_dataloader = predict_dataloader = val_dataloader


@contextmanager
def as_torchrun(rank: int, world_size: int) -> Iterator[None]:
    """The variables that it sets; of the process group of the pool Lightning makes use as it is."""
    about = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "GROUP_RANK": 0}
    about |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in about.items()}):
        yield


def trainer(folder: Path, world_size: int, *, whole: bool = False, **options: Any) -> Any:
    strategy = ModelParallelStrategy(world_size, 1, save_distributed_checkpoint=not whole)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        plugins=[TorchElasticEnvironment()],
        default_root_dir=folder,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        reload_dataloaders_every_n_epochs=1,
        use_distributed_sampler=False,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        **quiet,
        **options,
    )


def figures(run: Any) -> dict[str, float]:
    """What was logged, of this rank where it is not of all."""
    return {name: float(value) for name, value in run.callback_metrics.items()}


def eager() -> dict[str, Any]:
    """The same two epochs in one process, without Lightning, on the batches of all ranks."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses, norms = [], []
    for number in range(2 * BATCHES):
        loss = loss_of(model, joined(number))
        losses.append(loss.item())
        (loss / 2).backward()
        if number % 2:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        if number % BATCHES == BATCHES - 1:
            scheduler.step()
    with torch.no_grad():
        validated = [loss_of(model, joined(100 + i)).item() for i in range(BATCHES)]
        predicted = model(joined(100))
    return {
        "losses": losses,
        "norms": norms,
        "val_loss": sum(validated) / BATCHES,
        "predicted": predicted,
        "params": {fqn: param.detach() for fqn, param in model.named_parameters()},
    }
