"""torch's own FSDP2, without a line of fxshard: what `fxshard dryrun` is for (docs/will-it-fit.md).

    torchrun --standalone --nproc-per-node 8 examples/train_fsdp2.py
    fxshard dryrun examples/train_fsdp2.py --world-size 8 --device h100 --budget 79GiB

Llama 3 8B on random tokens; ``--layers 2 --width 64`` is one that a laptop trains.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    args = arguments()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")

    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config(args))
    if args.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    model.init_weights()
    model.train()

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(args.steps):
        tokens = torch.randint(model.config.vocab_size, (args.batch, args.seq), device=device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}, norm {norm.full_tensor().item():.3f}")
    dist.destroy_process_group()


def config(args: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128_256 if args.width == 4096 else 256,
        hidden_size=args.width,
        intermediate_size=args.width * 7 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--checkpoint", action="store_true", help="recompute layers in backward")
    return parser.parse_args()


if __name__ == "__main__":
    main()
