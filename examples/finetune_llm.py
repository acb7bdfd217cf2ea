"""Train a Hugging Face causal language model in a loop of your own; stop, and resume.

    torchrun --nproc-per-node 2 examples/finetune_llm.py                # two ranks over gloo
    torchrun --nproc-per-node 2 examples/finetune_llm.py --resume       # goes on where it was
    python examples/finetune_llm.py                                     # both ranks in one process

AdamW without decay on norms, warm-up and cosine, gradient accumulation, gradient clipping,
evaluation, checkpoints that survive a crash, and weights that plain transformers loads. The model
is small and has random weights, as nothing is downloaded; `AutoModelForCausalLM.from_pretrained`
in `build` makes it a fine-tune. The text is the source of Python's standard library.
"""

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import fxshard

RANKS = int(os.environ.get("WORLD_SIZE", "2"))  # torchrun sets it
RANK = int(os.environ.get("RANK", "0"))
SEQUENCE, BATCH = 128, 4


def main() -> None:
    args = arguments()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    checkpoint = args.out / "checkpoint"
    text, held_out = corpus()
    model = fxshard.compile(build(), world_size=RANKS)
    optimizer = torch.optim.AdamW(groups(model), lr=args.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: warm_up_cosine(n, args.steps))

    first = 0
    if args.resume:
        extra = fxshard.load_checkpoint(checkpoint, model, optimizer)
        first = extra["step"]
        schedule.load_state_dict(extra["schedule"])
        say(f"resumed after step {first}")

    say(f"validation loss before step {first + 1}: {evaluate(model, held_out):.4f}")
    last = min(args.steps, args.stop_after or args.steps)
    for step in range(first, last):
        total = torch.zeros(())
        for micro in range(args.accumulate):
            batch = sample(text, seed=RANKS * (args.accumulate * step + micro) + RANK)
            model.set_requires_gradient_sync(micro == args.accumulate - 1)  # reduce once
            loss = model(**batch).loss / args.accumulate
            loss.backward()
            total += loss.detach()
        norm = model.clip_grad_norm_(1.0)
        rate = schedule.get_last_lr()[0]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % args.log_every == 0 or step + 1 == last:
            loss_of_all = mean_over_ranks(total)
            say(f"step {step + 1:3}  loss {loss_of_all:.4f}  norm {norm:.3f}  lr {rate:.2e}")
        if (step + 1) % args.save_every == 0 or step + 1 == last:
            extra = {"step": step + 1, "schedule": schedule.state_dict()}
            fxshard.save_checkpoint(checkpoint, model, optimizer, extra=extra)

    # Each rank evaluates all of it, so that the ranks can be compared.
    tell(f"validation loss {evaluate(model, held_out):.7f}")
    weights = model.full_state_dict()  # full tensors on rank 0; every rank takes part
    if RANK == 0:
        model.save_pretrained(args.out / "model", state_dict=weights)
        plain = transformers.AutoModelForCausalLM.from_pretrained(args.out / "model")
        say(f"plain transformers: validation loss {evaluate(plain, held_out):.7f}")
    if dist.is_initialized():
        dist.destroy_process_group()


def build() -> nn.Module:
    torch.manual_seed(0)  # every rank starts with the same weights
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


def groups(model: nn.Module) -> list[dict[str, object]]:
    """Matrices decay, vectors do not."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def warm_up_cosine(step: int, steps: int, warm_up: int = 5) -> float:
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def corpus() -> tuple[Tensor, Tensor]:
    """Bytes to train on and others to evaluate on."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    return text[: -len(text) // 10], text[-len(text) // 10 :]


def sample(text: Tensor, seed: int) -> dict[str, Tensor]:
    """Sequences from random places, the same for the same seed; int64 [batch, sequence]."""
    places = torch.randint(
        len(text) - SEQUENCE, (BATCH,), generator=torch.Generator().manual_seed(seed)
    )
    tokens = torch.stack([text[at : at + SEQUENCE] for at in places.tolist()]).long()
    return {"input_ids": tokens, "labels": tokens}


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor) -> float:
    """Mean loss over four batches, in nats per byte."""
    model.eval()
    losses = [model(**sample(text, seed)).loss.item() for seed in range(4)]
    model.train()
    return sum(losses) / len(losses)


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
    parser.add_argument("--stop-after", type=int, help="a job that ends before its last step")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune_llm"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
