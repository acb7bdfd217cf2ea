"""Models whose experts are spread over ranks, trained by FSDP2 and by fxshard on real ranks."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import fxshard
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
    """Each token goes to the experts that a linear layer scores highest."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        scores, chosen = self.router(flat).sigmoid().topk(CHOSEN)
        order = chosen.flatten().argsort(stable=True)
        counts = F.one_hot(chosen.flatten(), EXPERTS).sum(0)
        rows = self.experts(flat[order // CHOSEN], counts)
        back = torch.zeros(chosen.numel(), WIDTH, dtype=rows.dtype)
        back[order] = rows
        back = back.view(*scores.shape, WIDTH)
        return (back * scores.unsqueeze(-1)).sum(1).view(x.shape)


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
    """

    model: str = "titan"
    how: str = "fully_shard"
    shape: tuple[int, ...] = (1, 2)
    dtype: torch.dtype = torch.float32
    starved: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    steps: int = 5

    def built(self) -> Any:
        """All of it, on this rank."""
        torch.manual_seed(0)
        model: Any = Net() if self.model == "titan" else OfTransformers(self.model)
        if self.starved:
            for name, param in model.named_parameters():
                if "layers.1." in name and ("router" in name or "gate.weight" in name):
                    torch.nn.init.zeros_(param)  # equal scores: the first experts are chosen
        return model.to(self.dtype)

    @property
    def mesh(self) -> DeviceMesh:
        """Of the experts."""
        names = ("copies", "mod_ep", "ep")[-len(self.shape) :]
        return init_device_mesh("cpu", self.shape, mesh_dim_names=names)

    @property
    def dense(self) -> DeviceMesh:
        """Of everything else: one dimension more, of one rank."""
        *copies, shared, spread = self.shape
        shape, names = (*copies, shared * spread, 1), ("copies", "all", "tp")[-len(self.shape) :]
        return init_device_mesh("cpu", shape, mesh_dim_names=names)

    def spread(self) -> tuple[Any, list[Any]]:
        """The model whose experts are where they belong, and the modules of experts."""
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        model, ep = self.built(), self.mesh["ep"]
        if self.model == "titan":
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
        hybrid = len(self.shape) == 3
        if self.how == "compile":
            more = {"strategy": "hybrid_shard"} if hybrid else {}
            return fxshard.compile(model, mesh=self.mesh, **more, **self.options)
        mesh, dense = self.mesh, self.dense
        own = mesh["copies", "mod_ep"] if hybrid else mesh["mod_ep"]
        rest = dense["copies", "all"] if hybrid else dense["all"]
        for each in experts:
            shard(each, mesh=own, **self.given)
            each.set_gradient_divide_factor(float(mesh.size()))
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
    model = job.sharded() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: dict[str, Any] = {}
    for step in range(job.steps):
        each = range(ranks) if ranks else [rank]
        losses = [model(batch(r, step)) for r in each]
        torch.stack(losses).mean().backward()
        found[f"{step} loss"] = losses[rank if ranks else 0].detach()
        for name, param in model.named_parameters():
            found[f"{step} gradient of {name}"] = full(param.grad)
        optimizer.step()
        optimizer.zero_grad()
    for name, param in model.named_parameters():
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
    plain = replace(job, how="fsdp2", options={})
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
