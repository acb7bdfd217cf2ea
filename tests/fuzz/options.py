"""Options of fxshard at random, as code."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

if TYPE_CHECKING:
    from tests.fuzz.case import Case

SPACE = {
    "torch": torch,
    "nn": nn,
    "MixedPrecisionPolicy": MixedPrecisionPolicy,
    "MixedPrecision": MixedPrecision,
    "CPUOffloadPolicy": CPUOffloadPolicy,
    "Shard": Shard,
}
OPTIMIZERS = (
    "lambda params: torch.optim.SGD(params, lr=0.1)",
    "lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)",
    "lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True)",
    "lambda params: torch.optim.AdamW(params, lr=0.02, eps=0.01)",
    "lambda params: torch.optim.Adagrad(params, lr=0.02, eps=0.1)",
)
# Not drawn: `device` plans only, `param_init_fn` needs a model on the meta device.
VALUES: dict[str, tuple[str, ...]] = {
    "reshard_after_forward": ("True", "False"),
    "forward_prefetch": ("0", "2", "'post'", "True"),
    "backward_prefetch": ("0", "2", "'post'", "'pre'"),
    "max_inflight": ("1", "2", "3"),
    "max_bucket_bytes": ("64", "200", "'1KiB'"),
    "min_bucket_bytes": ("100", "1000", "100000"),
    "pack_bytes": ("0", "0", "64", "200"),
    "checkpoint": ("'full'", "'selective'", "'1MiB'"),
    "offload": ("CPUOffloadPolicy()",),
    "gradient_predivide_factor": ("2", "3.0"),
    "gradient_divide_factor": ("1", "3.5"),
    "reduce_op": ("'sum'", "'max'", "'min'"),
    "sync_module_states": ("True",),
    "full_precision_in_eval": ("True",),
    "dynamic": ("False", "{'batch': [('x', 0)]}"),
    "backend": ("'inductor'",),
    "passes": ("lambda passes: list(passes)",),
    "mixed_precision": (
        "MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
        "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
        "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)",
        "MixedPrecisionPolicy(param_dtype=torch.float64, output_dtype=torch.float32)",
        "MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)",
    ),
}
PROBABILITIES = {
    "backend": 0.004,
    "passes": 0.02,
    "mixed_precision": 0.08,
    "dynamic": 0.04,
    "offload": 0.06,
    "reduce_op": 0.04,
    "gradient_divide_factor": 0.05,
    "full_precision_in_eval": 0.02,
    "sync_module_states": 0.03,
}
# Drawn after all else, so that a seed keeps its program and the options above.
LATER: dict[str, tuple[float, tuple[str, ...]]] = {
    "offload_activations": (0.1, ("True", "'1MiB'", "150", "['*']", "['**']")),
    "ranks_may_differ": (0.04, ("True",)),
    "hardware": (0.1, ("'a100'", "'b200'")),
}
# FSDP1's policy, drawn last; batch norms are not kept out of it, as its default would.
FSDP1 = (
    "param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16",
    "param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32",
    "param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16, cast_forward_inputs=True",
    "param_dtype=torch.bfloat16, cast_root_forward_inputs=False",
    "buffer_dtype=torch.bfloat16",
    "buffer_dtype=torch.float64",
    "param_dtype=torch.float64, buffer_dtype=torch.float64",
)
# Options that `fxshard.compile_step` refuses by name.
NOT_WHOLE = {"offload", "dynamic", "memory_budget", "ranks_may_differ", "ignored", "optimizer"}
PLACEMENTS = (
    "lambda param: Shard(param.ndim - 1) if param.ndim else None",
    "lambda param: Shard(1) if param.ndim == 2 else None",
    "lambda param: Shard(max(range(param.ndim), key=lambda dim: param.shape[dim]))"
    " if param.ndim else None",
)


def drawn(rng: random.Random, case: Case, processes: bool | None) -> Case:
    """`case` with options, world and loop."""
    model = case.program.space()["Model"]()
    names = [
        name for name, m in model.named_modules() if name and any(True for _ in m.parameters())
    ]
    found: dict[str, str] = {}
    strategy = rng.choices(
        ("", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"), (6, 2, 1, 1, 0.7)
    )[0]
    real = rng.random() < 0.25 if processes is None else processes
    if strategy:
        found["strategy"] = repr(strategy)
    if strategy.startswith("hybrid"):
        world: Any = (2, 2) if real else rng.choice(((2, 2), (1, 2), (2, 1), (2, 3)))
    else:
        world = rng.choices((2, 3, 4), (5, 2, 1))[0] if real else rng.choice((1, 2, 2, 2, 3, 4))
    for name, values in VALUES.items():
        if rng.random() < PROBABILITIES.get(name, 0.1):
            found[name] = rng.choice(values)
    if "reduce_op" in found or rng.random() < 0.5:
        found.pop("gradient_divide_factor", None)
        found.pop("gradient_predivide_factor", None)
    if strategy == "no_shard":
        found.pop("reshard_after_forward", None)
    elif world == 4 and rng.random() < 0.2:
        found["reshard_after_forward"] = "2"
    units: tuple[str, ...] = ()
    if names and ("mixed_precision" in found or rng.random() < 0.4):
        units = tuple(n for n in names if rng.random() < 0.5)
        kinds = sorted({type(model.get_submodule(n)).__name__ for n in names})
        choices = [repr(list(units)), repr(list(units)), f"lambda fqn, module: fqn in {units!r}"]
        if "mixed_precision" not in found:
            local = [k if not hasattr(nn, k) else f"nn.{k}" for k in kinds if k.startswith("Block")]
            choices += ["['*']", "['**']", "[]"] + ([f"[{local[0]}]"] if local else [])
        found["units"] = rng.choice(choices)
    if "mixed_precision" in found and "units" not in found:
        found["units"] = "[]"
    if not units or found.get("units", "") in ("[]", "['*']"):
        found.pop("checkpoint", None)  # each unit is checkpointed, and there is the root alone
    if "max_bucket_bytes" in found:
        found.pop("min_bucket_bytes", None)
    parameters = [n for n, _ in model.named_parameters()]
    if rng.random() < 0.05 and parameters and "mixed_precision" not in found:
        found["ignored"] = repr([rng.choice(parameters)])
    optimizer = rng.choice(OPTIMIZERS)
    if rng.random() < 0.1 and "ignored" not in found:  # nobody would step those
        found["optimizer_in_backward"] = "True"
        found["optimizer"] = optimizer
    micro = rng.choices((1, 2, 3), (8, 2, 1))[0]
    no_sync = micro > 1 and ("optimizer_in_backward" in found or rng.random() < 0.5)
    return dataclasses.replace(
        case,
        options=tuple(found.items()),
        optimizer=optimizer,
        units=units,
        world=world,
        processes=real,
        micro_batches=micro,
        no_sync=no_sync,
        evaluates=rng.random() < 0.1,
    )


def of_other_sizes(rng: random.Random, case: Case) -> Case:
    """At times `case` with batches that grow, or differ among real ranks; and what bounds that."""
    added = {"memory_budget": "'1MiB'", "max_variants": "3"}
    probabilities = {"memory_budget": 0.02, "max_variants": 0.05}
    named = dict(case.options)
    named |= {k: v for k, v in added.items() if rng.random() < probabilities[k]}
    rows, drawn = case.program.rows, rng.random()
    if drawn < 0.06:
        rows = f"{rows} + step"
    elif drawn < 0.12 and case.processes:
        rows = f"{rows} + rank % 2"
    program = dataclasses.replace(case.program, rows=rows)
    return dataclasses.replace(case, options=tuple(named.items()), program=program)


def placed(rng: random.Random, case: Case) -> Case:
    """At times `case` with parameters that are sharded along other dimensions than the first."""
    if rng.random() > 0.08 or "no_shard" in str(case.options):
        return case
    chosen = rng.choice(PLACEMENTS)
    return dataclasses.replace(case, options=(*case.options, ("shard_placement_fn", chosen)))


def later(rng: random.Random, case: Case) -> Case:
    """`case` with the options of `LATER` that are drawn."""
    added = [(name, rng.choice(values)) for name, (p, values) in LATER.items() if rng.random() < p]
    return dataclasses.replace(case, options=(*case.options, *added))


def in_fsdp1s_precision(rng: random.Random, case: Case) -> Case:
    """At times `case` with a policy of FSDP1's, where it has none."""
    named = dict(case.options)
    if rng.random() > 0.05 or "mixed_precision" in named or "ignored" in named:
        return case
    policy = f"MixedPrecision({rng.choice(FSDP1)}, _module_classes_to_ignore=())"
    named |= {"mixed_precision": policy, "units": repr(list(case.units))}
    return dataclasses.replace(case, options=tuple(named.items()))


def in_whole_steps(rng: random.Random, case: Case) -> Case:
    """At times `case` with one program of each step, where there may be one."""
    names = {name for name, _ in case.options}
    apart = case.micro_batches > 1 or any(
        "requires_grad" in code for _, code in case.program.inputs
    )
    if rng.random() > 0.08 or apart or names & NOT_WHOLE:
        return case
    return dataclasses.replace(case, whole=True)
