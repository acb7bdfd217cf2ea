"""Models whose experts are spread over ranks, trained by FSDP2 and by fxshard on real ranks."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import fxshard
from fxshard._torch.dtensors import forget_meshes
from tests.tiny import VOCABULARY, tokens

WIDTH, EXPERTS, CHOSEN, LENGTH = 8, 4, 2, 6


# -- a model of torchtitan's form ------------------------------------------------------------------


class Experts(nn.Module):
    """Rows in the order of their experts, and how many each has -> rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        parts = rows.split(counts.tolist())
        return torch.cat(
            [F.linear(F.silu(F.linear(part, up[i])), down[i]) for i, part in enumerate(parts)]
        )


class Routed(nn.Module):
    """Each token goes to the experts that a linear layer scores highest.

    Attributes:
        share: this rank's number among ranks that have the same tokens, and how many these are:
            each sends its part of them, and gives zeros for the others.
    """

    share = 0, 1

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        scores, chosen = self.router(flat).sigmoid().topk(CHOSEN)
        rank, ranks = self.share
        some = flat.shape[0] // ranks
        before, after = rank * some, (ranks - 1 - rank) * some
        if ranks > 1:
            mine = slice(before, before + some)
            flat, scores, chosen = flat[mine], scores[mine], chosen[mine]
        order = chosen.flatten().argsort(stable=True)
        counts = F.one_hot(chosen.flatten(), EXPERTS).sum(0)
        rows = self.experts(flat[order // CHOSEN], counts)
        back = torch.zeros(chosen.numel(), WIDTH, dtype=rows.dtype)
        back[order] = rows
        back = back.view(*scores.shape, WIDTH)
        made = (back * scores.unsqueeze(-1)).sum(1)
        return (made if ranks == 1 else F.pad(made, (0, 0, before, after))).view(x.shape)


class ToRanks(ParallelStyle):
    """Rows go to the ranks of their experts, and back; the style keeps how many, as torchtitan's.

    It takes what `Experts` takes, in the order of all experts.
    """

    def _cut(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, param in [*module.named_parameters(recurse=False)]:
            module.register_parameter(key, nn.Parameter(distribute_tensor(param, mesh, [Shard(0)])))

    def _exchanged(self, counts: Tensor, group: Any) -> Tensor:
        return collectives.wait_tensor(collectives.all_to_all_single(counts, None, None, group))

    def _send(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
        rows, counts = inputs
        ranks, group = mesh.size(), mesh.get_group()
        with torch.no_grad():
            arriving = self._exchanged(counts, group).view(ranks, -1)
            self.there = counts.view(ranks, -1).sum(1).tolist()
            self.here = arriving.sum(1).tolist()
        rows = collectives.all_to_all_single_autograd(rows, self.here, self.there, group)
        which = torch.arange(arriving.numel()) % arriving.shape[1]
        which = which.repeat_interleave(arriving.flatten(), output_size=sum(self.here))
        self.order = which.argsort(stable=True)
        return rows[self.order], arriving.sum(0)

    def _back(self, module: nn.Module, rows: Tensor, mesh: DeviceMesh) -> Tensor:
        rows = torch.empty_like(rows).index_copy(0, self.order, rows)
        return collectives.all_to_all_single_autograd(rows, self.there, self.here, mesh.get_group())

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._cut, self._send, self._back)  # type: ignore[arg-type]


class OfSequences(ParallelStyle):
    """Of what routes tokens: they are gathered, each rank sends a part, and results are added up.

    As torchtitan does it beside tensor parallelism, with a router that all ranks have.
    """

    def _cut(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        if isinstance(module, Routed):
            module.share = mesh.get_local_rank(), mesh.size()
        elif isinstance(module, nn.Linear):  # ranks have gradients of their own tokens
            weight = distribute_tensor(module.weight, mesh, [Replicate()])
            module.weight = nn.Parameter(weight, module.weight.requires_grad)
            module.forward = lambda x: F.linear(  # type: ignore[method-assign]
                x,
                module.weight.to_local(grad_placements=[Partial()]),  # type: ignore[operator]
            )

    def _gathered(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Tensor:
        x = DTensor.from_local(inputs[0], mesh, [Shard(1)]).redistribute(placements=[Replicate()])
        return x.to_local(grad_placements=[Partial()])

    def _added(self, module: nn.Module, out: Tensor, mesh: DeviceMesh) -> Tensor:
        made = DTensor.from_local(out, mesh, [Partial()]).redistribute(placements=[Shard(1)])
        return made.to_local()

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for name, each in module.named_modules():
            self._cut(name, each, mesh)
        module.register_forward_pre_hook(lambda m, inputs: self._gathered(m, inputs, mesh))
        module.register_forward_hook(lambda m, inputs, out: self._added(m, out, mesh))
        return module


def of_tensors(model: Any, mesh: DeviceMesh) -> None:
    """Tensor parallelism of all but experts, with sequences cut between layers."""
    whole, cut = Replicate(), Shard(1)
    outer = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=cut),
        "head": ColwiseParallel(input_layouts=cut, output_layouts=whole),
    }
    parallelize_module(model, mesh, outer)
    dense = ColwiseParallel(input_layouts=cut, output_layouts=cut)
    for layer in model.layers:
        parallelize_module(layer, mesh, {"dense": dense, "moe": OfSequences()})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.moe = nn.Linear(WIDTH, WIDTH), Routed()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dense(x).tanh()
        return x + self.moe(x)


class Net(nn.Module):
    """Tokens -> their loss as each other's neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(-1, 1).flatten())


# -- transformers' models --------------------------------------------------------------------------


class OfTransformers(nn.Module):
    """A model of transformers, called as the other is."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
        sizes |= {"num_hidden_layers": 2, "num_experts_per_tok": CHOSEN}
        self.model: Any
        if kind == "mixtral":
            config: Any = MixtralConfig(**sizes, num_local_experts=EXPERTS)
            self.model = MixtralForCausalLM(config)
        else:
            config = Qwen3MoeConfig(**sizes, num_experts=EXPERTS, moe_intermediate_size=2 * WIDTH)
            self.model = Qwen3MoeForCausalLM(config)

    @property
    def layers(self) -> Any:
        return self.model.model.layers

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss


# -- torch's activation checkpoints --------------------------------------------------------------

# What torchtitan saves of what the models here compute with.
SAVED = (
    torch.ops.aten.mm.default,
    torch.ops._c10d_functional.all_to_all_single.default,
)

WRAPPED = "_checkpoint_wrapped_module."  # in names


def saves(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    policy = CheckpointPolicy
    return policy.MUST_SAVE if operator in SAVED else policy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "wrapper": checkpoint_wrapper,
    "reentrant": functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    "composable": lambda layer: composable(layer),
    "selective": lambda layer: checkpoint_wrapper(
        layer, context_fn=lambda: create_selective_checkpoint_contexts(saves)
    ),
}


# -- jobs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What is trained how.

    Attributes:
        model: "titan", "qwen3_moe" or "mixtral".
        how: "compile" or "fully_shard"; or "fsdp2", the reference.
        shape: of the mesh: ranks that share experts (two dimensions: hybrid), then those that
            experts are spread over; () spreads nothing.
        dtype: of parameters.
        starved: at first the second layer's tokens all go to the first rank's experts.
        options: of `fxshard.compile`.
        given: to each call of `fully_shard`.
        steps: of AdamW.
        tensor: ranks of tensor parallelism, which have one batch: some of those that experts are
            spread over.
        checkpoint: how torch recomputes each layer, by its name in `CHECKPOINTS`; "": not at all.
    """

    model: str = "titan"
    how: str = "fully_shard"
    shape: tuple[int, ...] = (1, 2)
    dtype: torch.dtype = torch.float32
    starved: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    steps: int = 5
    tensor: int = 1
    checkpoint: str = ""

    def built(self) -> Any:
        """All of it, on this rank."""
        torch.manual_seed(0)
        model: Any = Net() if self.model == "titan" else OfTransformers(self.model)
        if self.starved:
            for name, param in model.named_parameters():
                if "layers.1." in name and ("router" in name or "gate.weight" in name):
                    torch.nn.init.zeros_(param)  # equal scores: the first experts are chosen
        if isinstance(model, OfTransformers) and self.dtype == torch.float64:
            model.model.set_experts_implementation("batched_mm")  # the default takes no float64
        return model.to(self.dtype)

    @property
    def mesh(self) -> DeviceMesh:
        """Of the experts."""
        names = ("copies", "mod_ep", "ep")[-len(self.shape) :]
        return init_device_mesh("cpu", self.shape, mesh_dim_names=names)

    @property
    def dense(self) -> DeviceMesh:
        """Of everything else: one dimension more, of tensor parallelism."""
        *copies, shared, spread = self.shape
        each, tensor = shared * spread // self.tensor, self.tensor
        shape, names = (*copies, each, tensor), ("copies", "all", "tp")[-len(self.shape) :]
        return init_device_mesh("cpu", shape, mesh_dim_names=names)

    def spread(self) -> tuple[Any, list[Any]]:
        """The model whose experts are where they belong, and the modules of experts."""
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        forget_meshes()  # of jobs before, whose dimensions may be equal, in other meshes
        model, ep = self.built(), self.mesh["ep"]
        if self.model == "titan":
            if self.tensor > 1:
                of_tensors(model, self.dense["tp"])
            for layer in model.layers:
                parallelize_module(layer, ep, {"moe.experts": ToRanks()})
            return model, [layer.moe.experts for layer in model.layers]
        inner = model.model
        plan = inner._expand_parallel_plan(inner.ep_plan)
        apply_expert_parallelism(inner, ep, self.dense["tp"], plan)
        return model, [layer.mlp.experts for layer in model.layers]

    def sharded(self) -> Any:
        shard: Any = fsdp2 if self.how == "fsdp2" else fxshard.fully_shard
        if not self.shape:
            model = self.built()
            if self.how == "compile":
                return fxshard.compile(model, **self.options)
            for layer in model.layers:
                shard(layer, **self.given)
            return shard(model, **self.given)
        model, experts = self.spread()
        if self.checkpoint:
            for name, layer in [*model.layers.named_children()]:
                model.layers.register_module(name, CHECKPOINTS[self.checkpoint](layer))
        hybrid = len(self.shape) == 3
        if self.how == "compile":
            more = {"strategy": "hybrid_shard"} if hybrid else {}
            given = self.mesh if self.tensor == 1 else self.dense
            return fxshard.compile(model, mesh=given, **more, **self.options)
        mesh, dense = self.mesh, self.dense
        own = mesh["copies", "mod_ep"] if hybrid else mesh["mod_ep"]
        rest = dense["copies", "all"] if hybrid else dense["all"]
        for each in experts:
            shard(each, mesh=own, **self.given)
            each.set_gradient_divide_factor(mesh.size() / self.tensor)
            if own.size() > 1:  # gloo has no multiplication in a reduction
                each.set_force_sum_reduction_for_comms(True)
        for layer in model.layers:
            shard(layer, mesh=rest, **self.given)
        return shard(model, mesh=rest, **self.given)


def batch(rank: int, number: int) -> Tensor:
    return tokens(1000 * number + rank, 2, LENGTH)


def full(tensor: Tensor) -> Tensor:
    """All of it, a copy."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def trained(job: Job, rank: int, model: Any = None, ranks: int = 0) -> dict[str, Any]:
    """Everything that `job` leaves, by name: full tensors, and placements.

    Args:
        model: None: that of the job.
        ranks: the loss is the mean of that many ranks' (0: this rank's).
    """
    rank, ranks = rank // job.tensor, ranks // job.tensor  # of data parallelism
    model = job.sharded() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: dict[str, Any] = {}
    params = {name.replace(WRAPPED, ""): param for name, param in model.named_parameters()}
    for step in range(job.steps):
        each = range(ranks) if ranks else [rank]
        losses = [model(batch(r, step)) for r in each]
        torch.stack(losses).mean().backward()
        found[f"{step} loss"] = losses[rank if ranks else 0].detach()
        for name, param in params.items():
            found[f"{step} gradient of {name}"] = full(param.grad)
        optimizer.step()
        optimizer.zero_grad()
    for name, param in params.items():
        found[name] = full(param)
        if isinstance(param, DTensor):
            found[f"places of {name}"] = param.placements, tuple(param.device_mesh.shape)
        for key, value in optimizer.state[param].items():
            found[f"{key} of {name}"] = full(value)
    model.eval()
    with torch.no_grad():
        found["evaluated"] = full(model(batch(rank, 0)))
    return found


def apart(
    ours: dict[str, Any], theirs: dict[str, Any], *, relative: bool = False
) -> dict[str, Any]:
    """By name, what differs and by how much; places that differ are infinitely far apart."""
    assert ours.keys() == theirs.keys()
    found = {}
    for name, value in ours.items():
        other = theirs[name]
        if isinstance(value, Tensor):
            far = (value.double() - other.double()).abs().max().item()
            far /= (other.double().abs().max().item() or 1.0) if relative else 1.0
        else:
            far = 0.0 if value == other else float("inf")
        if far:
            found[name] = far
    return found


def differing(rank: int, world_size: int, job: Job) -> tuple[dict[str, float], int]:
    """What differs from FSDP2 with the same experts, and how many programs there are."""
    recomputes = bool(job.checkpoint) or "checkpoint" in job.options
    # of its own "selective", FSDP2 on a mesh of one rank counts operators otherwise when it
    # recomputes, and torch's checkpoint stops; what is saved changes no number
    torchs = "wrapper" if recomputes else ""
    plain = replace(job, how="fsdp2", options={}, checkpoint=torchs)
    model = job.sharded()
    ours, theirs = trained(job, rank, model), trained(plain, rank)
    if job.how == "compile":  # its meshes have names and shapes of their own
        ours, theirs = (
            {k: v for k, v in each.items() if "places" not in k} for each in (ours, theirs)
        )
    return apart(ours, theirs), len(model._fxshard.variants)


def from_eager(rank: int, world_size: int, job: Job) -> float:
    """How far all is, relatively, from eager PyTorch on the batches of all ranks."""
    ours, alone = trained(job, rank), trained(job, rank, job.built(), world_size)
    ours = {name: value for name, value in ours.items() if "places" not in name}
    return max(apart(ours, alone, relative=True).values(), default=0.0)
