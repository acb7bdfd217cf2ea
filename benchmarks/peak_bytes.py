"""Peak bytes of a training step on one rank of many: fxshard beside FSDP2, measured alike.

    python -m benchmarks.peak_bytes                                   # all
    python -m benchmarks.peak_bytes --models llama-8b --worlds 8 64 --explain 12

Rank 0 of a fake process group of 8 runs real steps on the CPU in a process of its own.
The instrument is the same on both sides and belongs to neither: torch.profiler's memory events of
one steady step, summed, on top of the bytes that model, optimizer and batch hold between steps. It
sees every allocation, inside kernels too. The loop is the user's, the loss in it; AdamW (foreach).

Shapes (chosen before any ratio was looked at): published shapes scaled down by one number in width,
inner width, vocabulary and tokens per rank alike, so that units, activations, logits and optimizer
states stand to each other as they do at full size; depth stays as published.

- llama-1b: Llama 3.2 1B (2048 wide, 16 layers, tied), 2 x 4096 tokens per rank; by 16.
- llama-8b: Llama 3 8B (4096 wide, 32 layers), 1 x 8192 tokens per rank; by 16. The loss is in the
  loop; "llama-8b, labels" is the same with the loss in the model, as Hugging Face's Trainer has it.
- bert-large: BERT large (1024 wide, 24 layers), 16 x 512 tokens per rank; by 8.
- resnet-50: ResNet-50 with widths by 4 (parameters by 16, activations of an image by 4), so 8
  images of 224 x 224 stand for 32.

Settings, the same on both sides: fp32; and bf16 with gradients reduced in fp32 and each block
checkpointed. "Best" is the lowest of fxshard's schedules under the same setting, for the same
numbers: smaller buckets without prefetch, or, where nothing is checkpointed, values recomputed in
backward, all but products and attention ("selective") or all. What those cost in time: Step time.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

import fxshard
from benchmarks.figures import RESULTS, geometric_mean, write
from benchmarks.models import SMOKE, Batch, Model
from benchmarks.ranks import here, on_ranks
from benchmarks.sides import BF16, Setting, Training
from fxshard._torch import dtensors, process_groups

WORLDS = (8,)
# The two ends: nothing saved on, and what large models are trained with.
SETTINGS = (Setting(), Setting(bf16=True, checkpoint=True))
# Options of fxshard that leave the numbers as they are, to the bit; {} is the default.
SCHEDULES: tuple[dict[str, Any], ...] = (
    {},
    {"forward_prefetch": 0, "backward_prefetch": 0, "max_bucket_bytes": "1MiB"},
    {"checkpoint": "selective"},
    {"checkpoint": "full"},
)
TARGETS = {"default": 0.80, "selective": None, "best": 0.75}


def llama_like(
    name: str,
    by: int,
    *,
    dim: int,
    inner: int,
    depth: int,
    heads: int,
    kv_heads: int,
    batch: int,
    seq: int,
    tied: bool = False,
    labels: bool = False,
) -> Model:
    """A published Llama shape, divided by `by`."""
    vocab = 128_256 // by

    def build() -> nn.Module:
        config = transformers.LlamaConfig(
            vocab_size=vocab,
            hidden_size=dim // by,
            intermediate_size=inner // by,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=seq // by,
            tie_word_embeddings=tied,
            use_cache=False,
        )
        return transformers.LlamaForCausalLM(config)

    def make() -> Batch:
        tokens = torch.randint(0, vocab, (batch, seq // by))
        return tokens, tokens

    def loss(output: Any, targets: Tensor) -> Tensor:
        if labels:
            found: Tensor = output.loss
            return found
        return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())

    title = f"{name} by {by}: {dim // by} wide, {depth} layers, {batch} x {seq // by} tokens"
    name += ", labels" * labels
    return Model(name, title, build, make, loss, "model.layers.*", labels)


def bert_like(name: str, by: int) -> Model:
    """BERT large, divided by `by`."""

    def build() -> nn.Module:
        config = transformers.BertConfig(
            vocab_size=30_522 // by,
            hidden_size=1024 // by,
            intermediate_size=4096 // by,
            num_hidden_layers=24,
            num_attention_heads=4,
            max_position_embeddings=512 // by * 8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return transformers.BertForMaskedLM(config)

    def make() -> Batch:
        tokens = torch.randint(0, 30_522 // by, (2, 512))
        return tokens, tokens.roll(1)

    def loss(output: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())

    title = f"{name} by {by}: {1024 // by} wide, 24 layers, 2 x 512 tokens"
    return Model(name, title, build, make, loss, "bert.encoder.layer.*")


def resnet_like(name: str) -> Model:
    """ResNet-50 with a quarter of its widths."""

    def build() -> nn.Module:
        config = transformers.ResNetConfig(
            embedding_size=16,
            hidden_sizes=[64, 128, 256, 512],
            depths=[3, 4, 6, 3],
            num_labels=1000 // 4,
        )
        return transformers.ResNetForImageClassification(config)

    def make() -> Batch:
        return torch.randn(8, 3, 224, 224), torch.randint(0, 250, (8,))

    def loss(output: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.logits, targets)

    title = f"{name}, widths by 4, 8 images of 224 x 224"
    return Model(name, title, build, make, loss, "resnet.encoder.stages.*.layers.*")


LLAMA_8B: dict[str, Any] = {
    "dim": 4096, "inner": 14_336, "depth": 32, "heads": 8, "kv_heads": 2, "batch": 1, "seq": 8192
}  # fmt: skip
MODELS = {
    model.name: model
    for model in (
        llama_like(
            "llama-1b", 16, dim=2048, inner=8192, depth=16, heads=8, kv_heads=2, batch=2, seq=4096,
            tied=True,
        ),
        llama_like("llama-8b", 16, **LLAMA_8B),
        llama_like("llama-8b", 16, **LLAMA_8B, labels=True),
        bert_like("bert-large", 8),
        resnet_like("resnet-50"),
    )
}  # fmt: skip
# On a CPU, batch norm refuses the bf16 weights with fp32 running statistics that FSDP2 gives it.
ONLY_FP32 = ("resnet-50",)
EVERY = {**MODELS, SMOKE.name: SMOKE}


@dataclasses.dataclass(frozen=True)
class Measured:
    """Bytes of one side of one case.

    Attributes:
        held: by parameters, buffers, optimizer states and batch, between steps.
        phases: phase -> most bytes at once in it, `held` among them.
        planned: fxshard's own figure, without what kernels take, if it was asked for.
        explained: lines of what is alive at fxshard's peak.
    """

    held: int
    phases: dict[str, int]
    planned: int | None = None
    explained: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """Of the step."""
        return max(self.phases.values())


def measure(recipe: Model, side: str, world: int, setting: Setting, top: int = 0) -> Measured:
    """One side of a case."""
    with process_groups.fake_process_group(0, world):
        training = Training(recipe, side, setting)
        training.step()
        held = held_bytes(training)
        phases = peaks(training, held)
    if side == "fxshard" and top:
        memory = planned(recipe, world, setting).memory
        lines = str(memory.explain_peak(top, what_ifs=False)).splitlines()
        return Measured(held, phases, memory.peak_bytes, tuple(lines))
    return Measured(held, phases)


def planned(recipe: Model, world: int, setting: Setting) -> Any:
    """What fxshard says of the case beforehand."""
    options: dict[str, Any] = dict(setting.schedule)
    if setting.bf16:
        options["mixed_precision"] = BF16
    if setting.checkpoint:
        options["checkpoint"] = "full"
    batch = recipe.batch()
    targets = batch[1]
    return fxshard.plan(
        recipe.build(),
        *recipe.call(batch),
        world_size=world,
        units=[recipe.blocks],
        loss=None if recipe.labels else lambda output: recipe.loss(output, targets),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, foreach=True),
        **options,
    )


def held_bytes(training: Training) -> int:
    """Of the storages that are there between two steps, each once."""
    states = [v for each in training.optimizer.state.values() for v in each.values()]
    model = training.model
    found: dict[int, int] = {}
    for tensor in (*model.parameters(), *model.buffers(), *states, *training.batch):
        local = dtensors.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def peaks(training: Training, held: int) -> dict[str, int]:
    """Most bytes at once in each phase of a step; `held` are there between two steps."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        training.step()  # so that the profiler knows what the next one frees
        for phase, run in training.phases():
            with record_function(f"phase {phase}"):
                run()
    return tops(seen.profiler.kineto_results.events(), held)


def tops(events: Sequence[Any], held: int) -> dict[str, int]:
    """Most bytes at once inside each span named ``phase <name>``; `held` when the first begins."""
    events = sorted(events, key=lambda event: event.start_ns())
    spans = [event for event in events if event.name().startswith("phase ")]
    changes = [event for event in events if event.name() == "[memory]"]
    found: dict[str, int] = {}
    live, at = held, 0
    while at < len(changes) and changes[at].start_ns() < spans[0].start_ns():
        at += 1
    for span in spans:
        top = live
        while at < len(changes) and changes[at].start_ns() <= span.end_ns():
            live += changes[at].nbytes()
            top = max(top, live)
            at += 1
        found[span.name().removeprefix("phase ")] = top
    return found


def compared(name: str, world: int, settings: list[Setting], top: int = 0) -> list[dict[str, Any]]:
    """FSDP2, and fxshard under each schedule, under each setting; in a process of its own."""
    recipe = EVERY[name]
    chosen = [s for s in settings if not (s.bf16 and name in ONLY_FP32)]
    return [case(recipe, world, setting, top) for setting in chosen]


def case(recipe: Model, world: int, setting: Setting, top: int) -> dict[str, Any]:
    """The same under one setting."""
    theirs = measure(recipe, "fsdp2", world, setting)
    schedules = [each for each in SCHEDULES if not (setting.checkpoint and "checkpoint" in each)]
    ours = [
        measure(recipe, "fxshard", world, dataclasses.replace(setting, schedule=each), top)
        for each in schedules
    ]
    best = min(range(len(ours)), key=lambda i: ours[i].peak)
    again = next((i for i, s in enumerate(schedules) if s == {"checkpoint": "selective"}), 0)
    return {
        "model": recipe.name,
        "title": recipe.title,
        "world_size": world,
        "setting": setting.name,
        "fsdp2": {"peak": theirs.peak, "held": theirs.held, "phases": theirs.phases},
        "fxshard": [
            {
                "schedule": said(schedule),
                "peak": each.peak,
                "held": each.held,
                "phases": each.phases,
                "planned": each.planned,
            }
            for schedule, each in zip(schedules, ours, strict=True)
        ],
        "ratios": {
            "default": round(ours[0].peak / theirs.peak, 4),
            "selective": round(ours[again].peak / theirs.peak, 4),
            "best": round(ours[best].peak / theirs.peak, 4),
        },
        "best": said(schedules[best]),
        "explained": list(ours[0].explained),
    }


def said(schedule: dict[str, Any]) -> str:
    """Options as text."""
    return ", ".join(f"{key}={value!r}" for key, value in schedule.items()) or "default"


def claims(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Geometric means: over all cases, and of each setting."""
    found = []
    for which, target in TARGETS.items():
        mean = geometric_mean(row["ratios"][which] for row in rows)
        each = {
            setting: round(
                geometric_mean(r["ratios"][which] for r in rows if r["setting"] == setting), 4
            )
            for setting in dict.fromkeys(row["setting"] for row in rows)
        }
        found.append(
            {
                "claim": f"fxshard ({which} schedule) / FSDP2",
                "geometric_mean": round(mean, 4),
                "settings": each,
                "target": target,
                "met": None if target is None else mean <= target,
            }
        )
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and write where --out says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    settings = {setting.name: setting for setting in SETTINGS}
    parser.add_argument("--models", nargs="+", choices=[*EVERY], default=[*MODELS])
    parser.add_argument("--worlds", nargs="+", type=int, default=[*WORLDS])
    parser.add_argument("--settings", nargs="+", choices=[*settings], default=[*settings])
    parser.add_argument("--explain", type=int, default=0, metavar="N", help="what is alive at ours")
    parser.add_argument("--jobs", type=int, default=2, help="cases at once (default 2)")
    parser.add_argument("--smoke", action="store_true", help="a model without weight, one case")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/peak_bytes.json")
    given = parser.parse_args(arguments)
    if given.smoke:
        given.models, given.worlds, given.settings = ["smoke"], [8], ["fp32"]
    chosen = [settings[name] for name in given.settings]
    cases = [(name, world) for name in given.models for world in given.worlds]
    rows = []
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        start = here if given.smoke else on_ranks
        for (found,) in pool.map(lambda c: start(0, compared, *c, chosen, given.explain), cases):
            for row in found:
                rows.append(row)
                print(shown(row), flush=True)
    result = {"models": rows, "claims": claims(rows)}
    for claim in result["claims"]:
        print(claim)
    everything = (given.models, given.worlds, chosen) == ([*MODELS], [*WORLDS], [*SETTINGS])
    if given.out or everything:
        write(given.out or RESULTS / "peak_bytes.json", result)
    return 0


def shown(row: dict[str, Any]) -> str:
    """A case as text."""
    theirs = row["fsdp2"]
    head = f"{row['model']}, world {row['world_size']}, {row['setting']}"
    lines = [f"{head}: FSDP2 {_text(theirs)}"]
    for each in row["fxshard"]:
        lines.append(
            f"  {each['peak'] / theirs['peak']:.3f}  fxshard, {each['schedule']}: {_text(each)}"
        )
    return "\n".join(lines + [f"    {line}" for line in row["explained"]])


def _text(side: dict[str, Any]) -> str:
    phases = ", ".join(f"{phase} {size / 2**20:.2f}" for phase, size in side["phases"].items())
    return f"{side['peak'] / 2**20:.2f} MiB ({phases}; held {side['held'] / 2**20:.2f})"


if __name__ == "__main__":
    sys.exit(main())
