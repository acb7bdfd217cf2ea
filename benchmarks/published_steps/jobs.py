"""The jobs behind published figures, as far as they can be run dry; of the others, why not."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import platform
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config as inductor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxshard
from benchmarks.published_steps import lightning_demo
from benchmarks.published_steps.llama import LLAMA3_8B, LLAMA_7B, Llama, Shape
from benchmarks.published_steps.parallel import SAVED, WITH_ABS, in_float8, scales_computed, sharded

STEPS = 3  # reserved memory grows in the first two
PLAIN, EXPANDABLE = "expandable_segments:False", "expandable_segments:True"
FIGURES = Path(__file__).with_name("figures.csv")


def figures() -> dict[str, dict[str, str]]:
    """The rows of figures.csv by their id."""
    with FIGURES.open() as file:
        return {row["id"]: row for row in csv.DictReader(file)}


def metric_of(row: dict[str, str]) -> str:
    """Which of the allocator's peaks was published: "active", "allocated" or "reserved"."""
    text = row["metric"]
    return next((kind for kind in ("active", "allocated") if kind in text), "reserved")


@dataclasses.dataclass(frozen=True)
class LlamaJob:
    """A job of torchtitan's.

    Attributes:
        length: tokens of a sequence.
        checkpoint: "none", "full" or "per-op", by `saved`.
        compiles: "no", "blocks" or "model".
        reuse: compiled code writes into buffers that are not read any more.
        loss: "kept": the loop holds the logits, in fp32, until those of the next step are there, as
            torchtitan's did until e10cb9494 (2024-10-22); "dropped": they do not live through
            backward; "compiled": nor do they, and the loss is compiled.
        fused: AdamW is fused, not foreach.
        float8: recipe of `parallel.in_float8`, or None.
        tensors: ranks of tensor parallelism, with sequence and loss parallel.
        root: what becomes of embedding and head, as in `parallel.sharded`.
        device: of the dry run.
        attention: the kernel of the job.
        settings: of the allocator.
    """

    shape: Shape = LLAMA3_8B
    gpus: int = 8
    batch: int = 2
    length: int = 8192
    by: str = "fsdp2"
    checkpoint: str = "per-op"
    saved: frozenset[Any] = SAVED
    compiles: str = "no"
    reuse: bool = True
    loss: str = "dropped"
    fused: bool = False
    float8: str | None = None
    tensors: int = 1
    root: str = "kept"
    device: str = "h100"
    attention: SDPBackend = SDPBackend.FLASH_ATTENTION
    settings: str = PLAIN

    def dry(self, steps: int = STEPS) -> fxshard.DryRun:
        """So many steps of it."""
        with contextlib.ExitStack() as stack:
            run = stack.enter_context(fxshard.dry_run(world_size=self.gpus, device=self.device))
            stack.enter_context(sdpa_kernel(self.attention))
            stack.enter_context(inductor.patch(allow_buffer_reuse=self.reuse))
            self._train(run, steps)
        return run

    def _model(self) -> torch.nn.Module:
        kept = self.loss == "kept"
        with torch.device("meta"):
            model = Llama(self.shape, self.length, fp32_logits=kept, folded=kept)
        if self.float8:
            in_float8(model, self.float8)
        return sharded(
            model,
            by=self.by,
            checkpoint=self.checkpoint,
            saved=self.saved,
            compiles=self.compiles,
            tensors=self.tensors,
            root=self.root,
        )

    def _train(self, run: fxshard.DryRun, steps: int) -> None:
        model = self._model()
        how = {"fused": True} if self.fused else {"foreach": True}
        optimizer = torch.optim.AdamW(model.parameters(), 3e-4, (0.9, 0.95), **how)
        loss_function = torch.compile(loss_of) if self.loss == "compiled" else loss_of
        for _ in range(steps):
            shape = (self.batch, self.length)
            tokens, labels = (torch.randint(100, shape).cuda() for _ in range(2))
            optimizer.zero_grad()
            logits = model(tokens)  # those of the step before lived until here, if they are kept
            with loss_parallel() if self.tensors > 1 else contextlib.nullcontext():
                loss = loss_function(logits, labels)
                if self.loss != "kept":
                    del logits
                loss.backward()
            if self.by == "fsdp1":
                model.clip_grad_norm_(1.0)  # type: ignore[operator]
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            scales_computed(model, self.float8)
            del loss
            run.step()


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """In fp32, outside of the model."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


OF_2024_03 = LlamaJob(LLAMA_7B, batch=8, length=2048, loss="kept")
OF_2024_12 = LlamaJob(compiles="blocks", saved=WITH_ABS)
OF_AO = LlamaJob(batch=1, compiles="blocks", settings=EXPANDABLE)
OF_2025 = dataclasses.replace(OF_AO, loss="compiled", fused=True)
ON_B200 = dataclasses.replace(  # of 2025-08
    OF_2025, root="apart", device="b200", attention=SDPBackend.CUDNN_ATTENTION
)
_but = dataclasses.replace

JOBS: dict[str, LlamaJob | lightning_demo.DemoJob] = {
    "tt165-fsdp1-ac": _but(OF_2024_03, by="fsdp1", checkpoint="full"),
    "tt165-fsdp1-sac": _but(OF_2024_03, by="fsdp1"),
    "tt165-fsdp2-ac": _but(OF_2024_03, checkpoint="full"),
    "tt165-fsdp2-sac": OF_2024_03,
    "tt165-fsdp2-ac-compile": _but(OF_2024_03, checkpoint="full", compiles="model", reuse=False),
    "tt165-fsdp2-ac-compile-reuse": _but(OF_2024_03, checkpoint="full", compiles="model"),
    "tt165-fsdp2-sac-compile": _but(OF_2024_03, compiles="model"),
    "tt165-fsdp2-sac-compile-bs16": _but(OF_2024_03, compiles="model", batch=16),
    "tt165-fsdp2-noac-compile": _but(OF_2024_03, compiles="model", checkpoint="none"),
    "tt165-2d-ac": _but(OF_2024_03, tensors=2, batch=16, checkpoint="full"),
    "tt165-2d-sac": _but(OF_2024_03, tensors=2, batch=16),
    "tt820-rowwise-abs-saved": _but(OF_AO, float8="rowwise", saved=WITH_ABS),
    "tt820-rowwise-abs-dropped": _but(OF_AO, float8="rowwise"),
    "ttb-8b-8gpu-eager": _but(OF_2024_12, compiles="no"),
    "ttb-8b-8gpu-compile": OF_2024_12,
    "ttb-8b-8gpu-compile-f8": _but(OF_2024_12, float8="gathered"),
    "ttb-8b-128gpu-eager": _but(OF_2024_12, gpus=128, compiles="no"),
    "ttb-8b-128gpu-compile": _but(OF_2024_12, gpus=128),
    "ttb-8b-128gpu-compile-f8": _but(OF_2024_12, gpus=128, float8="gathered"),
    "ttb-8b-cp1": _but(OF_2024_12, batch=1, length=32768, checkpoint="full", float8="gathered"),
    "ttb-h200-32": _but(OF_2025, gpus=32, batch=2, device="h200", float8="recomputed"),
    "ttb-h200-64": _but(OF_2025, gpus=64, batch=2, device="h200", float8="recomputed"),
    "ao-h100-bf16": OF_AO,
    "ao-h100-tensorwise-f8ag": _but(OF_AO, float8="gathered"),
    "ao-h100-rowwise": _but(OF_AO, float8="rowwise"),
    "ao-b200-bf16": ON_B200,
    "ao-b200-f8-tensorwise": _but(ON_B200, float8="gathered"),
    "ao-b200-f8-rowwise": _but(ON_B200, float8="rowwise"),
    "ao-tut-bf16": OF_2025,
    "ao-tut-rowwise": _but(OF_2025, float8="rowwise"),
    "ao-tut-tensorwise": _but(OF_2025, float8="gathered"),
    "li-fabric-ddp": lightning_demo.DemoJob("ddp"),
    "li-fabric-noshard": lightning_demo.DemoJob("NO_SHARD"),
    "li-fabric-shardgradop": lightning_demo.DemoJob("SHARD_GRAD_OP"),
    "li-fabric-fullshard": lightning_demo.DemoJob("FULL_SHARD"),
    "li-fabric-offload": lightning_demo.DemoJob("FULL_SHARD", offload=True),
    "li-trainer-ddp": lightning_demo.DemoJob("ddp", trainer=True),
    "li-trainer-noshard": lightning_demo.DemoJob("NO_SHARD", trainer=True),
    "li-trainer-shardgradop": lightning_demo.DemoJob("SHARD_GRAD_OP", trainer=True),
    "li-trainer-fullshard": lightning_demo.DemoJob("FULL_SHARD", trainer=True),
    "li-trainer-offload": lightning_demo.DemoJob("FULL_SHARD", offload=True, trainer=True),
}

UNSTATED = "settings that decide it are not stated"
COMPILED_TP = "compiled blocks under tensor parallelism are refused in a dry run"
# By the beginning of an id.
NOT_RUN = {
    "ttb-8b-cp": "context parallelism is not followed, and how keys rotate is not stated",
    "ttb-70b-2d": COMPILED_TP,
    "ttb-405b-3d": "pipeline parallelism: micro-batches and the split of stages are not stated",
    "tt-chunkedloss": f"{UNSTATED}: dtypes, optimizer, date; attention by `flash_attn`",
    "ao-mi300x": "AMD's kernels and libraries are not modelled",
    "ao-b200-mxfp8": "torchao's CUDA extension for MXFP8 does not load without CUDA",
    "ao-tp2": COMPILED_TP,
    "ao-llama4-2l": f"{UNSTATED}: versions, optimizer; the routing of experts decides",
    "nemo-1b": f"{UNSTATED}: dtypes of weights and reduction, cumulative rows or not, GB or GiB",
    "nemo-8b-tp4": f"{UNSTATED}: batch, length, dtypes, checkpointing, optimizer, GB or GiB",
    "nemo-gemma4-31b": f"{UNSTATED}: dtype of the reduction, compilation",
    "cosmos388": f"{UNSTATED}: GPU, batch, length, dtypes, checkpointing, optimizer, GB or GiB",
    "mfsdp158": f"{UNSTATED}: micro-batch, checkpointing, kind of peak",
    "mfsdp169": f"{UNSTATED}: widths, micro-batch, checkpointing, GB or GiB",
}


def measured(name: str) -> dict[str, Any]:
    """What the allocator's peaks of a job are in a dry run, in bytes."""
    torch.set_num_threads(1)
    began, job = time.process_time(), JOBS[name]
    run = job.dry()
    memory = run.device_memory(job.settings)
    kinds = ("requested", "allocated", "active", "reserved")
    made: dict[str, Any] = {kind: getattr(memory, kind) for kind in kinds}
    if memory.keeping_up is not None:
        made["least"] = {kind: getattr(memory.keeping_up.peaks, kind) for kind in kinds}
    made["reserved, expandable"] = run.device_memory(EXPANDABLE).reserved
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    cpu = round(time.process_time() - began, 1)
    return made | {"date": time.strftime("%Y-%m-%d"), **versions, "cpu_s": cpu}


def job_of(figure: str) -> str | None:
    """The job of `JOBS` that a figure is of; two peaks of one job have ids that end with them."""
    names = (figure, figure.removesuffix("-active"), figure.removesuffix("-reserved"))
    return next((name for name in names if name in JOBS), None)
