"""Will a model of 8 or 70 billion parameters fit on 64 GPUs, and what would a step take?

    python examples/plan_large_model.py                       # 8 billion, 64 H100s
    python examples/plan_large_model.py --layers 80 --hidden 8192 --intermediate 28672 --heads 64

Nothing runs: the model lives on the meta device, and this machine needs no GPU. The answers are for
one rank: what it holds at the peak and where, whether that fits, the largest batch that does, and
an estimate of the time. docs/cuda.md and docs/cost.md say how far to trust them.
"""

import argparse
import functools
from collections.abc import Callable

import torch
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard
from fxshard.errors import DoesNotFitError


def main() -> None:
    args = arguments()
    config = transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=8,
        max_position_embeddings=args.sequence,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        tokens = torch.zeros(1, args.sequence, dtype=torch.int64)
    count = sum(param.numel() for param in model.parameters())
    print(f"{count / 1e9:.2f} billion parameters, {args.ranks} ranks, {args.sequence} tokens each")

    plan = fxshard.plan(
        model,
        kwargs={"input_ids": tokens, "labels": tokens},
        world_size=args.ranks,
        mixed_precision=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        optimizer=functools.partial(torch.optim.AdamW, lr=3e-4),
        device="cuda",
    )
    print("\n1. Where is the peak, and of what?\n")
    print(plan.memory.explain_peak(3, what_ifs=False))
    print("\n2. Does it fit?\n")
    print(answer(plan, args.budget))

    print("\n3. And if backward recomputes activations?\n")
    plan = plan.replan(checkpoint="full")  # the trace is used again
    print(answer(plan, args.budget))

    print("\n4. How large can the batch be, in steps of 4?\n")
    print(first_line(lambda: str(plan.largest_batch(args.budget, multiple_of=4))))

    print("\n5. What would a step take?\n")
    estimate = plan.estimate(args.hardware)
    print(estimate.summary())


def answer(plan: fxshard.Plan, budget: str) -> str:
    def fits() -> str:
        plan.memory.assert_fits(budget)
        return f"Yes: {plan.memory.peak_bytes / 2**30:.1f} GiB at the peak, of {budget}."

    return first_line(fits)


def first_line(ask: Callable[[], str]) -> str:
    """What `ask` returns; or, if something does not fit, why."""
    try:
        return ask()
    except DoesNotFitError as error:
        return f"No: {str(error).splitlines()[0]}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14_336)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--budget", default="80GiB")
    parser.add_argument("--hardware", default="h100")
    return parser.parse_args()


if __name__ == "__main__":
    main()
