"""LoRA: the weights of a language model are frozen, small matrices beside them are trained.

    torchrun --nproc-per-node 2 examples/finetune_lora.py     # two ranks over gloo
    python examples/finetune_lora.py                          # both ranks in one process

The frozen weights are sharded and gathered like all others, but have no gradients and no optimizer
states: what that saves is printed before anything runs. At the end the adapters alone are saved,
and added into the weights of a plain model. The model is small and has random weights, as nothing
is downloaded.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import fxshard

RANKS = int(os.environ.get("WORLD_SIZE", "2"))  # torchrun sets it
RANK = int(os.environ.get("RANK", "0"))
SEQUENCE, BATCH = 128, 8


class Lora(nn.Module):
    """``base(x) + up(down(x))`` with a frozen linear layer; starts as `base`."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def main() -> None:
    args = arguments()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)  # every rank starts with the same weights
    text = corpus()
    batch = sample(text, seed=0)

    everything = build()
    show("all trained", everything, batch)
    model = with_adapters(everything)
    show("adapters trained", model, batch)

    model = fxshard.compile(model, world_size=RANKS)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr)
    for step in range(args.steps):
        loss = model(**sample(text, seed=RANKS * step + RANK)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 or (step + 1) % args.log_every == 0:
            say(f"step {step + 1:3}  loss {mean_over_ranks(loss.detach()):.4f}")

    with torch.no_grad():
        tell(f"loss {model(**batch).loss:.7f} on the first batch")
    weights = model.full_state_dict()  # full tensors on rank 0; every rank takes part
    if RANK == 0:
        adapters = {name: w for name, w in weights.items() if ".down." in name or ".up." in name}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        torch.save(adapters, args.out)
        say(f"{args.out}: {args.out.stat().st_size:,} B, {len(adapters)} tensors")
        torch.manual_seed(0)
        plain = merged(build(), torch.load(args.out))
        say(f"plain PyTorch, adapters added in: loss {plain(**batch).loss:.7f}")
    if dist.is_initialized():
        dist.destroy_process_group()


def show(what: str, model: nn.Module, batch: dict[str, Tensor]) -> None:
    """What gradients and optimizer states take on each rank; nothing runs for that."""
    plan = fxshard.plan(model, kwargs=batch, world_size=RANKS, optimizer=torch.optim.AdamW)
    held = plan.memory.snapshot("", "After Post-Backward")
    found = {category.value: size for category, size in held.items()}
    say(
        f"{what:16}: gradients {found['Sharded Grad']:>9,} B, optimizer states "
        f"{found['OptState']:>9,} B, peak {plan.memory.peak_bytes:>10,} B on each rank"
    )


def build() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.04,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def with_adapters(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Lora(child))
    return model


@torch.no_grad()
def merged(model: nn.Module, adapters: dict[str, Tensor]) -> nn.Module:
    """A plain `model` with ``up @ down`` added to each weight."""
    for name, up in adapters.items():
        if name.endswith(".up.weight"):
            path = name.removesuffix(".up.weight")
            model.get_submodule(path).weight += up @ adapters[f"{path}.down.weight"]
    return model


def corpus() -> Tensor:
    """The source of Python's standard library, as bytes."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = bytearray(b"".join(file.read_bytes() for file in files))
    return torch.frombuffer(text, dtype=torch.uint8)


def sample(text: Tensor, seed: int) -> dict[str, Tensor]:
    """Sequences from random places, the same for the same seed; int64 [batch, sequence]."""
    places = torch.randint(
        len(text) - SEQUENCE, (BATCH,), generator=torch.Generator().manual_seed(seed)
    )
    tokens = torch.stack([text[at : at + SEQUENCE] for at in places.tolist()]).long()
    return {"input_ids": tokens, "labels": tokens}


def mean_over_ranks(value: Tensor) -> float:
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= RANKS
    return value.item()


def tell(text: str) -> None:
    """Print on every rank; a line in one write, as all ranks share the terminal."""
    print(f"rank {RANK}: {text}\n", end="", flush=True)


def say(text: str) -> None:
    if RANK == 0:
        print(f"{text}\n", end="", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/lora/adapters.pt"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
