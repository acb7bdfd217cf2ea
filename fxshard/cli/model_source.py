"""The model, the batch and the options that a command line names."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from fxshard.bytesize import is_size
from fxshard.config.checked import Config
from fxshard.config.checkpoints import CHECKPOINTS
from fxshard.config.options import BACKENDS, STRATEGIES
from fxshard.errors import ConfigError
from fxshard.hardware import PRESETS as GPUS


def muon(named_parameters: Iterable[tuple[str, Any]]) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of numbered modules (blocks), AdamW for all else."""
    matrices: list[Any] = []
    rest: list[Any] = []
    for name, param in named_parameters:
        is_inside = param.dim() == 2 and any(part.isdigit() for part in name.split("."))
        (matrices if is_inside else rest).append(param)
    made: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices)] if matrices else []
    return [*made, torch.optim.AdamW(rest, lr=1e-3)] if rest else made


OPTIMIZERS: dict[str, Any] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-3),
    "sgd": functools.partial(torch.optim.SGD, lr=1e-3),
    "muon": muon,
    "none": None,
}

# What transformers' LlamaConfig takes, for --hf-config by name.
_LLAMA3 = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny-llama": {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "llama3-8b": {
        **_LLAMA3,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama3-70b": {
        **_LLAMA3,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}

SIZES = ("--batch", "--seq")
Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]  # a model, and the call of it to trace


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model and the size of its batch: what `load` reads, by whoever it is named.

    Attributes:
        model: ``pkg.mod:fn``; or None.
        hf_config: a file or a preset of transformers; or None, with a `model`.
        batch, seq: sequences of one rank, and tokens of each; None: `default_sizes`.
        gradient_checkpointing: of the transformers model.
        chunk_loss: whether a loss in chunks of rows is asked for; the transformers model then
            returns no logits.
        default_sizes: batch and seq where they are not given.
    """

    model: str | None
    hf_config: str | None
    batch: int | None
    seq: int | None
    gradient_checkpointing: bool
    chunk_loss: bool
    default_sizes: tuple[int, int] = (1, 128)

    @classmethod
    def of(cls, args: argparse.Namespace) -> ModelSource:
        """The one that the arguments of `add_arguments` name."""
        return cls(
            args.model,
            args.hf_config,
            args.batch,
            args.seq,
            args.gradient_checkpointing,
            bool(args.chunk_loss),
            args.sizes,
        )


def add_arguments(parser: argparse.ArgumentParser, sizes: tuple[int, int] = (1, 128)) -> None:
    """Add the arguments that name a model, a batch and the options of a plan.

    Args:
        parser: the parser of a command.
        sizes: defaults of --batch and --seq.
    """
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--model", metavar="pkg.mod:fn", help="fn() returns a module, or (module, args, kwargs)"
    )
    source.add_argument(
        "--hf-config",
        metavar="FILE",
        help=f"config.json of a transformers causal language model, or {', '.join(PRESETS)}",
    )
    parser.add_argument("--batch", type=whole_number, help=f"sequences per rank ({sizes[0]})")
    parser.add_argument("--seq", type=whole_number, help=f"tokens per sequence ({sizes[1]})")
    parser.set_defaults(sizes=sizes)
    parser.add_argument(
        "--world-size", type=_ranks, default=8, metavar="N", help="ranks (8); hybrid: 2x8"
    )
    parser.add_argument("--strategy", choices=STRATEGIES, help="full_shard is the default")
    parser.add_argument(
        "--reshard-after-forward", type=_reshard, metavar="yes|no|N", help="N: over N neighbours"
    )
    parser.add_argument("--bf16", action="store_true", help="bf16 parameters, fp32 reduction")
    parser.add_argument("--offload", action="store_true", help="shards live on the CPU")
    parser.add_argument(
        "--checkpoint",
        metavar="|".join((*CHECKPOINTS, "2GiB")),
        help="activation checkpointing of each unit; a size: what may be saved in all",
    )
    parser.add_argument(
        "--memory-budget", metavar="80GiB", help="choose a schedule and checkpoints that fit"
    )
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help=f"GPU by whose times these choose, and whose times are shown: {', '.join(GPUS)} "
        f"({Config.hardware})",
    )
    parser.add_argument(
        "--data-sizes",
        action="append",
        type=data_size,
        metavar="512|layers.*.moe=512",
        help="at most, what a module finds in its data (rows of a mask); may be repeated",
    )
    parser.add_argument(
        "--chunk-loss",
        nargs="?",
        type=whole_number,
        const=True,
        metavar="ROWS",
        help="the head and the loss of so many tokens at a time; of --hf-config without the logits",
    )
    parser.add_argument(
        "--offload-activations",
        nargs="?",
        action="append",
        const=True,
        metavar="8GiB|GLOB",
        help="saved activations are on the CPU from forward to backward: what is copied while "
        "others compute; at most so many bytes; or of these modules, which may be repeated",
    )
    parser.add_argument("--backend", choices=BACKENDS, default="eager", help="of compute regions")
    parser.add_argument(
        "--gradient-checkpointing", action="store_true", help="of the transformers model"
    )
    parser.add_argument(
        "--units", action="append", metavar="GLOB", help="FQNs of units; may be repeated"
    )
    parser.add_argument(
        "--optimizer",
        default="adamw",
        metavar="NAME",
        help=f"{', '.join(OPTIMIZERS)} or pkg.mod:fn (adamw); fn(params) returns one",
    )


def options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `fxshard.plan`."""
    known = OPTIMIZERS.get(args.optimizer)
    if args.optimizer not in OPTIMIZERS:
        known = imported(args.optimizer, "--optimizer")
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    given = {
        "units": args.units,
        "optimizer": known,
        "strategy": args.strategy,
        "reshard_after_forward": args.reshard_after_forward,
        "mixed_precision": bf16 if args.bf16 else None,
        "offload": CPUOffloadPolicy() if args.offload else None,
        "checkpoint": args.checkpoint,
        "data_sizes": once(args.data_sizes, "--data-sizes") or None,
        "chunk_loss": args.chunk_loss,
        "offload_activations": _activations(args.offload_activations),
        "backend": args.backend,
        "memory_budget": args.memory_budget,
        "hardware": args.hardware,
    }
    return {name: value for name, value in given.items() if value is not None}


def _activations(told: list[Any] | None) -> Any:
    """True, a size, or globs: as `offload_activations` has them."""
    if told is None or len(told) > 1:
        return told
    return told[0] if told[0] is True or is_size(told[0]) else told


def load(source: ModelSource, device: str) -> Call:
    """The model that is named, and its batch; `device` is where one of transformers is built."""
    torch.manual_seed(0)
    if source.hf_config is not None:
        model = _from_config(source.hf_config, device)
        if source.gradient_checkpointing:
            name = "activation_checkpointing_enable"  # transformers before 5.x has the other name
            try:
                getattr(model.train(), name, model.gradient_checkpointing_enable)()
            except ValueError as error:  # an architecture that has none
                raise ConfigError(f"--gradient-checkpointing: {error}.") from error
        if source.chunk_loss:
            from fxshard.integrations.transformers import without_logits

            model = without_logits(model)
        return _with_tokens(model, source)
    refuse_beside(
        source,
        "--model",
        "only a transformers model has it: use --checkpoint",
        "--gradient-checkpointing",
    )
    made = called(source.model or "", "--model")
    if isinstance(made, nn.Module):
        return _with_tokens(made, source)
    if isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module):
        own = f"--model {source.model}, which returns a batch of its own"
        refuse_beside(source, own, "let it return the module alone, or another batch", *SIZES)
        return made
    raise ConfigError(
        f"--model {source.model} returned {type(made).__name__}: expected an nn.Module, or a tuple "
        f"(module, args, kwargs)."
    )


def refuse_beside(
    args: argparse.Namespace | ModelSource, what: str, why: str, *options: str
) -> None:
    """Refuse options that have no effect together with another one.

    Raises:
        ConfigError: one of `options`, whose default is None or False, is given.
    """
    for option in options:
        if getattr(args, option[2:].replace("-", "_")) not in (None, False):
            raise ConfigError(f"{option} with {what}: {why}.")


def called(spec: str, option: str) -> Any:
    """What the function that an option names as ``pkg.mod:fn`` returns."""
    make = imported(spec, option)
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ConfigError(
            f"{option} {spec}: it is called as {make.__name__}(): {error}."
        ) from error
    except ValueError:  # some builtins have no signature
        pass
    return make()


def _with_tokens(model: nn.Module, source: ModelSource) -> Call:
    """A call with token ids, int64 [batch, seq]; a transformers model gets them as labels too.

    They are below the size of the smallest embedding; 0 if there is none.
    """
    batch, seq = source.batch or source.default_sizes[0], source.seq or source.default_sizes[1]
    device = next((p.device for p in model.parameters()), None)
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    most = min((table.num_embeddings for table in tables), default=1)
    tokens = torch.randint(most, (batch, seq), device=device)
    if type(model).__module__.startswith("transformers."):
        return model, (), {"input_ids": tokens, "labels": tokens.clone()}
    return model, (tokens,), {}


def _from_config(source: str, device: str) -> Any:
    values = PRESETS[source] if source in PRESETS else _read_config(source)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read at import: a config needs no network
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("--hf-config needs transformers: pip install 'fxshard[hf]'.") from error
    try:
        config = AutoConfig.for_model(**values)
        config.use_cache = False  # a cache is an output that training does not need
        with torch.device(device):
            # Code that a config.json names in "auto_map" is not run.
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # illegal values may raise anything
        reason = re.split(r"\.\s", str(error))[0]  # a list of all architectures may follow
        raise ConfigError(f"--hf-config {source}: no causal language model: {reason}.") from error


def _read_config(source: str) -> dict[str, Any]:
    try:
        return dict(json.loads(Path(source).read_text("utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"--hf-config {source}: neither a preset ({', '.join(PRESETS)}) nor a config.json "
            f"that can be read: {error}"
        ) from error


def imported(spec: str, option: str) -> Any:
    """The callable that ``pkg.mod:fn`` names; modules in the working directory are found too."""
    module, colon, name = spec.partition(":")
    if not (module and colon and name):
        raise ConfigError(f"{option} {spec}: expected pkg.mod:fn, the name of a callable.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{option} {spec}: {error}.") from error
    if not callable(found):
        raise ConfigError(f"{option} {spec}: {type(found).__name__} is not callable.")
    return found


def whole_number(text: str) -> int:
    """A number of at least 1."""
    return _at_least(text, 1)


def _at_least(text: str, least: int) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is less than {least}")
    return value


def once(pairs: Sequence[tuple[str, Any]] | None, option: str) -> dict[str, Any]:
    """The ``name=value`` pairs of an option that may be repeated.

    Raises:
        ConfigError: a name is given twice.
    """
    found: dict[str, Any] = {}
    for name, value in pairs or ():
        if name in found:
            raise ConfigError(f"{option} names {name} twice; give each name once.")
        found[name] = value
    return found


def named_size(text: str) -> tuple[str, int]:
    """``seq=8192``."""
    name, _, size = text.partition("=")
    return name, whole_number(size)


def data_size(text: str) -> tuple[str, int]:
    """``layers.*.moe=512``; or ``512``, of every module."""
    name, equals, size = text.rpartition("=")
    return name if equals else "**", _at_least(size, 0)


def named_dimensions(text: str) -> tuple[str, list[tuple[str, int]]]:
    """``batch=x:0,y:0``: a size, and which dimensions of which arguments have it."""
    name, _, places = text.partition("=")
    return name, [
        (place.partition(":")[0], int(place.partition(":")[2])) for place in places.split(",")
    ]


def open_sizes(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, list[tuple[str, int]]]:
    """Both sizes of a call that has only tensors ``[batch, seq]``.

    Raises:
        ConfigError: the call has other arguments.
    """
    parameters = inspect.signature(model.forward).parameters
    given = {**dict(zip(parameters, args, strict=False)), **kwargs}
    shapes = {t.shape if isinstance(t, torch.Tensor) else None for t in given.values()}
    if len(shapes) != 1 or len(next(iter(shapes)) or ()) != 2:
        raise ConfigError(
            "which sizes are open? This call is not of tensors [batch, seq] alone: give "
            "--dynamic batch=argument:0."
        )
    return {size: [(name, dim) for name in given] for dim, size in enumerate(("batch", "seq"))}


def _ranks(text: str) -> int | tuple[int, int]:
    replicas, by, shards = text.partition("x")
    return (whole_number(replicas), whole_number(shards)) if by else whole_number(text)


def _reshard(text: str) -> bool | int:
    return {"yes": True, "no": False}[text] if text in ("yes", "no") else whole_number(text)


_ranks.__name__ = "number of ranks"
named_size.__name__ = "size, such as seq=8192"
named_dimensions.__name__ = "name of a size, such as batch=x:0"
data_size.__name__ = "size, such as 512 or layers.*.moe=512"
_reshard.__name__ = "yes, no or whole number"
whole_number.__name__ = "whole number"  # argparse puts it into "invalid ... value"
