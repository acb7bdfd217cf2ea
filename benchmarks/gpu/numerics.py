"""Losses, gradients and parameters of a step on a GPU, against eager PyTorch and FSDP2.

    python -m benchmarks.gpu.numerics                  # one GPU
    python -m benchmarks.gpu.numerics --device cpu     # small models, to try it

One GPU has no second rank, so the ranks of most cases are alike: each holds the same shard (every
parameter is one shard, repeated) and the same batch. What other ranks would send is then known: an
all-gather repeats this rank's shard, an average is its own chunk (benchmarks/gpu/emulated.py). The
link is slow and copies when its time is over, so that what does not wait for it reads what was
there before. The reference is eager PyTorch on the whole model, whose parameters become the first
shard, repeated, after each step; for bfloat16 it is FSDP2 on the same network. The case "nccl" runs
one rank of NCCL itself: clipping, and checkpoints into a new model.

Where cuDNN and cuBLASLt choose kernels by where parameters lie, eager PyTorch does not give the
same bits twice: "elsewhere" says how far it is from itself with parameters moved by one element.

Exit status 1 if a case is wrong or fails.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import fxshard
from benchmarks.figures import RESULTS, machine
from benchmarks.gpu.emulated import Link, emulated_world
from benchmarks.gpu.models import BF16, Batch, ConvNet, Gpt, Llama, images, tokens
from benchmarks.ranks import alone

STEPS = 4
SLOW = Link(2e-3, 5e9)  # an all-gather of a layer takes longer than its compute
EXACT, ROUNDED = 1e-5, 2e-2  # of the norm of a tensor: fp32, and bf16 in which sums differ
FUSED = 1e-4  # inductor adds in another order
# cuDNN and cuBLASLt choose kernels by alignment, which is that of parameters in one buffer here.
ALIGNED = 1e-4


@dataclasses.dataclass(frozen=True)
class Case:
    """One model and its options.

    Attributes:
        model: a key of `MODELS`.
        options: of `fxshard.compile`.
        within: largest difference of a tensor, by the norm of the reference.
        world: ranks.
        micro: backwards before each step of the optimizer.
        reference: "eager" or "fsdp2".
    """

    model: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    within: float = EXACT
    world: int = 8
    micro: int = 1
    reference: str = "eager"


def _llama(big: bool) -> nn.Module:
    if big:
        return Llama(
            vocab=32_000, dim=1024, heads=16, kv_heads=8, hidden=4096, depth=4, seq=1024, tied=False
        )  # fmt: skip
    return Llama(vocab=64, dim=32, heads=4, kv_heads=2, hidden=64, depth=2, seq=16, tied=False)


def _gpt(big: bool) -> nn.Module:
    if big:
        return Gpt(vocab=32_000, dim=1024, heads=16, depth=4, seq=1024, dropout=0.0)
    return Gpt(vocab=64, dim=32, heads=4, depth=2, seq=16, dropout=0.0)


def _convnet(big: bool) -> nn.Module:
    channels, inner = (256, 192) if big else (16, 8)
    return ConvNet(channels=channels, inner=inner, depth=3, classes=10)


def _tokens(big: bool) -> Callable[[torch.device], Batch]:
    return tokens(2, 1024, 32_000) if big else tokens(2, 16, 64)


def _images(big: bool) -> Callable[[torch.device], Batch]:
    return images(16, 128, 10) if big else images(4, 16, 10)


MODELS: dict[str, tuple[Callable[[bool], nn.Module], Any]] = {
    "llama": (_llama, _tokens),
    "gpt, tied": (_gpt, _tokens),
    "convnet": (_convnet, _images),
}

CASES = {
    "fp32": Case("llama"),
    "tied weights": Case("gpt, tied"),
    "batch norm, 2 ranks": Case("convnet", within=ALIGNED, world=2),
    "full checkpoints": Case("llama", {"checkpoint": "full"}),
    "selective, prefetch 2": Case(
        "llama", {"checkpoint": "selective", "forward_prefetch": 2, "backward_prefetch": 2}
    ),
    "no prefetch": Case("llama", {"forward_prefetch": 0, "backward_prefetch": "post"}),
    "kept after forward": Case("llama", {"reshard_after_forward": False}),
    "resharded over 2": Case("llama", {"reshard_after_forward": 2}),
    "packed and split": Case(
        "llama", {"pack_bytes": "16MiB", "max_bucket_bytes": "8MiB", "min_bucket_bytes": "1MiB"}
    ),
    "offloaded activations": Case("llama", {"offload_activations": True}),
    "offloaded shards": Case("llama", {"offload": CPUOffloadPolicy()}),
    "two micro-batches": Case("llama", micro=2),
    "bf16": Case("llama", {"mixed_precision": BF16}, ROUNDED, reference="fsdp2"),
    "bf16, full checkpoints": Case(
        "llama", {"mixed_precision": BF16, "checkpoint": "full"}, ROUNDED, reference="fsdp2"
    ),
    "inductor": Case("llama", {"backend": "inductor", "checkpoint": None}, FUSED),
}


def built(case: Case, place: torch.device) -> tuple[nn.Module, list[Batch]]:
    """The whole model, each parameter a shard repeated, and one batch per micro-batch of a step."""
    torch.manual_seed(0)
    big = place.type == "cuda"
    make, batch = MODELS[case.model]
    with place:
        model = make(big)
    for param in model.parameters():
        if param.ndim > 1:
            nn.init.normal_(param, std=0.02)
    repeat(model, case.world)
    batches = [batch(big)(place) for _ in range(STEPS * case.micro)]
    return model, batches


@torch.no_grad()
def repeat(model: nn.Module, world: int) -> None:
    """Let every shard of each parameter be the first one."""
    for name, param in model.named_parameters():
        if param.shape[0] % world:
            raise ValueError(f"{name} {tuple(param.shape)} has no {world} equal shards.")
        first = param[: param.shape[0] // world].clone()
        param.copy_(first.repeat(world, *[1] * (param.ndim - 1)))


def moved(model: nn.Module) -> nn.Module:
    """A copy with the same values, each parameter one element after where it would begin."""
    made = copy.deepcopy(model)
    for param in made.parameters():
        room = param.new_empty(param.numel() + 1)
        param.data = room[1:].view(param.shape).copy_(param.detach())
    return made


def first_shard(tensor: Tensor, world: int) -> Tensor:
    """Rank 0's rows, of what is full or sharded."""
    if isinstance(tensor, DTensor):
        return tensor.to_local().detach()
    return tensor.detach()[: tensor.shape[0] // world]


Found = dict[str, Tensor]


def trained(
    model: nn.Module, batches: Sequence[Batch], case: Case, after: Callable[[], Any]
) -> Found:
    """Losses of all steps, and rank 0's rows of gradients and parameters after the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found: Found = {}
    for step in range(STEPS):
        mine = batches[step * case.micro : (step + 1) * case.micro]
        for micro, batch in enumerate(mine):
            loss = model(*batch)
            (loss / case.micro).backward()
            found[f"loss {step}.{micro}"] = loss.detach().float().cpu()
        if step == STEPS - 1:
            for name, param in model.named_parameters():
                if param.grad is not None:
                    found[f"grad {name}"] = first_shard(param.grad, case.world).cpu().clone()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        after()
    for name, param in model.named_parameters():
        found[name] = first_shard(param, case.world).cpu().clone()
    for name, buffer in model.named_buffers():
        found[name] = buffer.detach().cpu().clone()
    return found


def of_fsdp2(model: nn.Module, case: Case, mesh: Any) -> nn.Module:
    """The model by FSDP2, its blocks as units."""
    policy = case.options["mixed_precision"]
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def difference(ours: Found, theirs: Found) -> dict[str, Any]:
    """How far apart, by the norm of the reference: the worst tensor, and how many are bitwise."""
    if ours.keys() != theirs.keys():
        return {"worst": float("inf"), "at": str(ours.keys() ^ theirs.keys())}
    far = {}
    for name, right in theirs.items():
        norm = right.double().norm().item()
        gap = (ours[name].double() - right.double()).norm().item()
        far[name] = gap / norm if norm else gap
    at = max(far, key=lambda name: far[name] if far[name] == far[name] else float("inf"))
    same = sum(torch.equal(ours[name], theirs[name]) for name in theirs)
    largest = max(theirs[f"loss {step}.0"].item() for step in range(STEPS))
    return {
        "worst": far[at], "at": at, "bitwise": same, "tensors": len(far), "largest_loss": largest
    }  # fmt: skip


def one_way() -> None:
    """Let kernels add in one order, where they can."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.enable_mem_efficient_sdp(False)  # its backward adds in any order


def emulated(name: str, device: str) -> dict[str, Any]:
    """One case of alike ranks."""
    case, place = CASES[name], torch.device(device)
    one_way()
    model, batches = built(case, place)
    whole = copy.deepcopy(model)
    other = moved(model)
    link = SLOW if place.type == "cuda" else Link(0.0, float("inf"))
    found: dict[str, Any] = {"within": case.within}
    with emulated_world(case.world, link):
        mesh = init_device_mesh(place.type, (case.world,))
        if case.reference == "fsdp2":
            theirs = trained(of_fsdp2(whole, case, mesh), batches, case, lambda: None)
        else:
            theirs = trained(whole, batches, case, lambda: repeat(whole, case.world))
            again = trained(other, batches, case, lambda: repeat(other, case.world))
            found["elsewhere"] = difference(again, theirs)["worst"]
        mine = fxshard.compile(model, mesh=mesh, units=["layers.*"], **case.options)
        ours = trained(mine, batches, case, lambda: None)
    return difference(ours, theirs) | found


def nccl(name: str, device: str) -> dict[str, Any]:
    """One rank of NCCL (gloo on a CPU): clipping, a checkpoint, an asynchronous one."""
    place = torch.device(device)
    one_way()
    case = Case("llama", world=1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl" if place.type == "cuda" else "gloo",
            init_method=f"file://{folder}/store", rank=0, world_size=1,
        )  # fmt: skip
        try:
            mesh = init_device_mesh(place.type, (1,))
            model, batches = built(case, place)
            whole = copy.deepcopy(model)

            def clipped(model: nn.Module, clip: Any) -> tuple[Found, Any]:
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                found: Found = {}
                for step, batch in enumerate(batches):
                    loss = model(*batch)
                    loss.backward()
                    found[f"norm {step}"] = clip(model, 0.5).detach().float().cpu()
                    found[f"loss {step}.0"] = loss.detach().cpu()
                    optimizer.step()
                    optimizer.zero_grad()
                for name, param in model.named_parameters():
                    found[name] = first_shard(param, 1).cpu().clone()
                return found, optimizer

            theirs, _ = clipped(
                whole, lambda m, most: nn.utils.clip_grad_norm_(m.parameters(), most)
            )
            mine = fxshard.compile(model, mesh=mesh, units=["layers.*"])
            ours, optimizer = clipped(mine, lambda m, most: m.clip_grad_norm_(most))
            found = difference(ours, theirs) | {"within": EXACT}
            fxshard.save_checkpoint(f"{folder}/now", mine, optimizer)
            fxshard.async_save(f"{folder}/later", mine, optimizer).result()
            for path in ("now", "later"):
                other = fxshard.compile(built(case, place)[0], mesh=mesh, units=["layers.*"])
                second = torch.optim.AdamW(other.parameters(), lr=1e-3)
                fxshard.load_checkpoint(f"{folder}/{path}", other, second)
                for (name, a), b in zip(mine.named_parameters(), other.parameters(), strict=True):
                    if not torch.equal(first_shard(a, 1), first_shard(b, 1)):
                        found |= {"worst": float("inf"), "at": f"{name} as loaded from {path}"}
            return found
        finally:
            dist.destroy_process_group()


def ran(name: str, device: str) -> dict[str, Any]:
    """A case in a process of its own, whatever becomes of it."""
    try:
        function = nccl if name == "nccl" else emulated
        # cuBLAS adds in one order only with buffers of its own.
        found = alone(
            function, name, device, timeout=240.0,
            environment={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        )  # fmt: skip
    except Exception:
        return {"case": name, "right": False, "why": traceback.format_exc(limit=2)}
    return {"case": name, "right": found["worst"] <= found["within"], **found}


def main(arguments: list[str] | None = None) -> int:
    """Run the cases, print, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--cases", nargs="+", choices=[*CASES, "nccl"], default=[*CASES, "nccl"])
    parser.add_argument("--jobs", type=int, default=4, help="cases at once (default 4)")
    parser.add_argument("--out", type=Path, help="folder for the results")
    given = parser.parse_args(arguments)
    cpu = given.device == "cpu"
    out = given.out or (Path(tempfile.mkdtemp(prefix="fxshard-numerics-")) if cpu else RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(given.jobs) as pool:
        rows = []
        for row in pool.map(lambda name: ran(name, given.device), given.cases):
            rows.append(row)
            print(json.dumps({k: v for k, v in row.items() if k != "why"}), flush=True)
            if "why" in row:
                print(row["why"], flush=True)
    gpu = None if cpu else torch.cuda.get_device_name(0)
    path = out / f"numerics_{given.device}.json"
    path.write_text(json.dumps({**machine(), "gpu": gpu, "cases": rows}, indent=1) + "\n")
    print(f"{sum(row['right'] for row in rows)} of {len(rows)} cases right; wrote {path}")
    return int(not all(row["right"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
