"""Pipeline parallelism x FSDP: two stages of torch.distributed.pipelining on two ranks each.

    torchrun --nproc-per-node 4 examples/train_pipeline.py

Before anything runs each stage knows its bytes, with as many micro-batches in flight as 1F1B has.
"""

import copy
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import fxshard

STAGES, MICRO_BATCHES, ROWS, LENGTH, WIDTH, STEPS = 2, 4, 4, 32, 64, 30


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(F.gelu(self.up(self.norm(h))))


class Net(nn.Module):
    """Bytes in, logits of the next byte out; a stage lacks what the others have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(4)})
        self.head: nn.Module | None = nn.Linear(WIDTH, 256)

    def forward(self, h: Tensor) -> Tensor:
        h = h if self.embed is None else self.embed(h)
        for block in self.blocks.values():
            h = block(h)
        return h if self.head is None else self.head(h)


def stage_of(model: Net, index: int) -> Net:
    part = copy.deepcopy(model)
    each = len(part.blocks) // STAGES
    for name in list(part.blocks):
        if int(name) // each != index:
            del part.blocks[name]
    part.embed = part.embed if index == 0 else None
    part.head = part.head if index == STAGES - 1 else None
    return part


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (STAGES, 2), mesh_dim_names=("pp", "dp"))
    index, dp_rank = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    torch.manual_seed(0)
    part = stage_of(Net(), index)
    options = {"units": ["blocks.*"], "reshard_after_forward": False, "pipeline_stage": True}

    # What this stage will take, before it is sharded.
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    hidden = torch.zeros(ROWS, LENGTH, WIDTH, requires_grad=True)
    last = {"loss": lambda logits: loss_of(logits, tokens), "keep_outputs": False}
    for in_flight in (MICRO_BATCHES, STAGES - index):  # GPipe, 1F1B
        report = fxshard.plan(
            part,
            (hidden if index else tokens,),
            world_size=2,
            micro_batches=MICRO_BATCHES,
            in_flight=in_flight,
            optimizer=torch.optim.AdamW,
            **(last if index == STAGES - 1 else {}),
            **options,
        ).memory
        if dp_rank == 0:
            print(f"stage {index}, {in_flight} in flight: {report.peak_bytes:>9,} B", flush=True)

    module = fxshard.compile(part, mesh=mesh["dp"], **options)
    stage = PipelineStage(module, index, STAGES, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    text = torch.tensor(list(Path(os.__file__).read_bytes()))
    drawn = torch.Generator().manual_seed(dp_rank)
    for step in range(1, STEPS + 1):
        starts = torch.randint(len(text) - LENGTH - 1, (MICRO_BATCHES * ROWS, 1), generator=drawn)
        both = text[starts + torch.arange(LENGTH + 1)]
        losses: list[Tensor] = []
        if stage.is_first:
            schedule.step(both[:, :-1])
        else:
            schedule.step(target=both[:, 1:], losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        if losses and dp_rank == 0 and step % 10 in (0, 1):
            mean = torch.stack(losses).mean().item()
            print(f"step {step:>3}  loss {mean:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
