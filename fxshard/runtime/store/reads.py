"""Parameters in eager code: gathered where they are read, their gradients reduced to shards."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxshard._torch import autograd, optimizers, transforms
from fxshard.bytesize import parse_bytes
from fxshard.capture import refusals
from fxshard.capture.swapped import users_class
from fxshard.config.checked import Config
from fxshard.errors import StepError
from fxshard.ir import layout
from fxshard.passes.insert_reduce import InsertReduce
from fxshard.pipeline import passes_of
from fxshard.runtime import eager
from fxshard.runtime.sharding import Sharding, Slot, as_gradient
from fxshard.runtime.store.parameters import ParameterStore
from fxshard.runtime.world.c10d import C10dWorld
from fxshard.runtime.world.in_process import InProcessWorld


class ReadableStore(ParameterStore):
    """A store that eager code reads, by the collectives of the world that programs run on."""

    def __init__(self, sharding: Sharding) -> None:
        super().__init__(sharding)
        self._reduction: tuple[Config, InsertReduce] | None = None

    def fresh(self) -> dict[str, Any]:
        return super().fresh() | {"_reduction": None}

    def computed(self, slot: Slot) -> Tensor:
        """A parameter for an eager forward: as `read`, in the compute dtype of its unit."""
        return self.read(slot, self.as_it_is(slot.param).compute_dtype)

    def read(self, slot: Slot, dtype: torch.dtype) -> Tensor:
        """A parameter, unsharded; its gradient is reduced to the shard. Collective.

        Raises:
            StepError: see `require_readable`.
        """
        self.require_readable(slot)
        return self.read_together([slot], dtype)[0]

    def read_together(
        self, slots: Sequence[Slot], dtype: torch.dtype, rows: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Parameters as `read` gives them: one all-gather, and one reduction. Collective.

        Args:
            slots: of one unit.
            dtype: in which they are gathered.
            rows: the unsharded parameters, if they are gathered already.
        """
        self.require_plain(slots, "is read by eager code")
        if isinstance(self.world, InProcessWorld) and (
            not any(map(_is_trained, slots)) or self._division(slots[0], dtype)[1] == "avg"
        ):
            return [slot.tensor.to(dtype) for slot in slots]  # unsharded, and so is its gradient
        tensors = [slot.tensor for slot in slots]
        for tensor in tensors:
            optimizers.step_in_backward(tensor)
        with transforms.outside():  # for a transform of inputs, parameters are constants
            return list(_Gather.apply(self, slots, dtype, rows, *tensors))

    def require_readable(self, slot: Slot) -> None:
        """Check a parameter before eager code gathers it.

        Raises:
            StepError: its gradient would not be reduced as in a program; or see
                `ParameterStore.restore`.
            CaptureError: see `refusals.check_runs`.
        """
        refusals.check_runs(self.model)
        if self.unfilled:
            self.require_filled(memory=True)
        self.require_plain([slot], "is read by eager code")
        if _is_trained(slot):
            op = self.reduction.op
            for option, clashes in {
                "optimizer_in_backward": self.config.optimizer_in_backward,
                "register_comm_hook": self.comm_hook,
                f"the reduction {op!r}": op in ("max", "min"),  # of each read, not of their sum
            }.items():
                if clashes:
                    raise _read_with_gradients(slot, option, eager=self.forwards.inside > 0)
        self.restore([slot])

    @torch.compiler.disable
    def gathered(self, slots: Sequence[Slot], dtype: torch.dtype) -> list[Tensor]:
        """All rows of parameters, each in a storage of its own; collective."""
        refusals.check_runs(self.model)
        self.require_plain(slots, "is read by eager code")
        if isinstance(self.world, InProcessWorld):
            return [slot.tensor.detach().to(dtype) for slot in slots]
        shards = [slot.shards[0].to(torch.device(self.device), dtype) for slot in slots]
        pack_bytes = parse_bytes(self.config.pack_bytes)
        found = []
        sent = eager.gathered(shards, self.world, pack_bytes, slots[0].param.mesh if slots else "")
        for slot, rows in zip(slots, sent, strict=True):
            full = layout.joined(rows, slot.layout)
            full = full.clone() if full.data_ptr() == slot.shards[0].data_ptr() else full
            again = functools.partial(self._gathered_again, slot, dtype)
            self.forwards.note(eager.Gathered(slot, again), full)
            found.append(full)
        return found

    def _gathered_again(self, slot: Slot, dtype: torch.dtype) -> Tensor:
        return self.gathered([slot], dtype)[0]

    @torch.compiler.disable
    def reduced(
        self, slots: Sequence[Slot], grads: Sequence[Tensor | None], *, fully: bool = True
    ) -> list[Tensor | None]:
        """The sharded gradients, from the unsharded ones of each rank; collective.

        What earlier backwards have accumulated is reduced with them.

        Args:
            slots: of one unit.
            grads: None: this rank's loss does not reach the parameter.
            fully: False: without the all-reduce; the results become partial sums.
        """
        wanted = [i for i, slot in enumerate(slots) if slot.tensor.requires_grad]
        sums = self.accumulated.keys() | self.partial.keys()
        used = [grads[i] is not None or slots[i].param.fqn in sums for i in wanted]
        flags = "".join("01"[flag] for flag in used)
        on_any_rank = self.world.any_rank(flags) if len(slots) > 1 else lambda: flags
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i in wanted:
            precision = self.units[slots[i].param.unit].precision
            like = next((g.dtype for g in grads if g is not None), slots[i].param.dtype)
            by_dtype.setdefault(precision.reduces_in(like), []).append(i)
        found: list[Tensor | None] = [None] * len(slots)
        for dtype, members in by_dtype.items():
            sent = [self._sent(slots[i], grads[i], dtype) for i in members]
            division = self._division(slots[members[0]], dtype)
            partial = [self.partial.pop(slots[i].param.fqn, []) for i in members]
            mesh = slots[0].param.mesh
            made = eager.reduced(sent, self.world, division, partial, fully=fully, mesh=mesh)
            for i, shard in zip(members, made, strict=True):
                found[i] = self._kept(slots[i], shard) if fully else shard
        for i, flag in zip(wanted, on_any_rank(), strict=True):
            fqn, made_of = slots[i].param.fqn, found[i]
            self.accumulated.pop(fqn, None)
            found[i] = made_of if flag == "1" and fully else None
            if flag == "1" and made_of is not None and not fully:
                self.partial[fqn] = [made_of]
                self.reach.accumulated(fqn)
        return found

    @torch.compiler.disable
    def reduced_sums(self, slots: Sequence[Slot], dtype: torch.dtype) -> list[Tensor]:
        """The sharded gradients of what was accumulated, which ends; one launch. Collective.

        Args:
            slots: of one unit.
            dtype: of their sums.
        """
        sent = []
        for slot in slots:
            total = self.accumulated[slot.param.fqn][0]
            padded = slot.layout.padding > 0
            sent.append(
                self._sent(slot, None, dtype) if padded else layout.as_sent(total, slot.layout)
            )
            del self.accumulated[slot.param.fqn], total
        world: Any = self.world
        made = eager.reduced(sent, world, self._division(slots[0], dtype))
        if world.size > 1:
            world.free(sent)  # the process group may hold on to the tensors
        return [self._kept(slot, shard) for slot, shard in zip(slots, made, strict=True)]

    def _sent(self, slot: Slot, grad: Tensor | None, dtype: torch.dtype) -> Tensor:
        """A gradient as it is sent, padded, with what was accumulated of it."""
        device = torch.device(self.device) if grad is None else grad.device
        padded = torch.zeros(slot.layout.padded_shape, dtype=dtype, device=device)
        rows = padded.narrow(slot.layout.dim, 0, slot.param.shape[slot.layout.dim])
        if grad is not None:
            rows.copy_(grad)
        for total in self.accumulated.get(slot.param.fqn, ()):
            rows.add_(total)
        # In one process all ranks have the same gradient, and all of it.
        return layout.as_sent(padded, slot.layout) if isinstance(self.world, C10dWorld) else padded

    def _kept(self, slot: Slot, shard: Tensor) -> Tensor:
        """A reduced gradient as the caller gets it."""
        if not self.units[slot.param.unit].precision.keep_low_precision_grads:
            shard = shard.to(slot.param.dtype)
        return as_gradient(slot, [shard.to(slot.local.device)], self.world)

    @torch.compiler.disable
    def accumulate(self, slot: Slot, grad: Tensor) -> None:
        """Add an unsharded gradient to the accumulated one, which is reduced after `no_sync`."""
        fqn, dtype = slot.param.fqn, grad.dtype
        if dtype.is_floating_point:
            precision = self.units[slot.param.unit].precision
            dtype = precision.reduces_in(self.as_it_is(slot.param).compute_dtype)
        if fqn in self.accumulated:
            self.accumulated[fqn][0].add_(grad)
        else:
            made = torch.empty(grad.shape, dtype=dtype, device=grad.device)
            self.accumulated[fqn] = [made.copy_(grad)]
        self.reach.accumulated(fqn)

    def _division(self, slot: Slot, dtype: torch.dtype) -> eager.Division:
        factor = self.units[slot.param.unit].divide_factor
        return self.reduction.division(dtype, self.world.grids[slot.param.mesh], factor)

    @property
    def reduction(self) -> InsertReduce:
        """The pass that reduces gradients, in the pipeline of the model's current options."""
        config = self.config  # set_gradient_divide_factor replaces it
        if self._reduction is None or self._reduction[0] is not config:
            found = next((p for p in passes_of(config) if isinstance(p, InsertReduce)), None)
            if found is None:
                raise StepError(
                    "the pipeline of option passes has no insert-reduce, so that the gradient of a "
                    "parameter which eager code reads cannot be reduced alike. Leave passes out of "
                    'fxshard.shard, and give it to torch.compile(model, backend="fxshard", '
                    "options=...)."
                )
            self._reduction = config, found
        return self._reduction[1]

    def all_rows(self, tensor: Tensor) -> Tensor:
        """All rows of a parameter, gradient or optimizer state; collective if it is sharded."""
        if not isinstance(tensor, DTensor) or isinstance(self.world, InProcessWorld):
            return tensor
        return eager.all_rows(tensor, self.world)


class _Gather(autograd.UncapturedFunction):
    """Sharded parameters -> unsharded ones; their gradients are reduced, or accumulated."""

    @staticmethod
    def forward(
        ctx: Any,
        store: ReadableStore,
        slots: Sequence[Slot],
        dtype: torch.dtype,
        rows: Sequence[Tensor],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.store, ctx.slots, ctx.reduces = store, slots, store.reduces(slots[0])
        ctx.set_materialize_grads(False)
        found = tuple(rows or store.gathered(slots, dtype))
        frozen = [x for x, of in zip(found, tensors, strict=True) if not of.requires_grad]
        ctx.mark_non_differentiable(*frozen)  # else all of a unit require what one does
        return found

    @staticmethod
    def refuse_capture(ctx: Any) -> NoReturn:
        refuse_captured_backward(users_class(ctx.store.model).__name__)

    @staticmethod
    @torch.compiler.disable  # it communicates
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        store, slots = ctx.store, ctx.slots
        if torch.is_grad_enabled() and any(g is not None and g.requires_grad for g in grads):
            raise StepError(
                f"the gradient of parameter {slots[0].param.fqn!r} is asked for with "
                f"create_graph=True by eager code: it is reduced over the ranks, and has no graph "
                f"of its own. Compute what is made of it inside of forward, and use "
                f"fxshard.compile."
            )
        accumulates = ctx.reduces == "none"
        if accumulates or any(slot.param.fqn in store.accumulated for slot in slots):
            leaves = [node for node, _ in ctx.next_functions if node is not None]
            require_all_wanted(leaves, "no_sync accumulates")
        found: list[Tensor | None] = [None] * len(slots)
        if not accumulates:
            found = store.reduced(slots, grads, fully=ctx.reduces == "all")
        for slot, grad in zip(slots, grads, strict=True):
            if accumulates and grad is not None:
                store.accumulate(slot, grad)
        return (None, None, None, None, *found)


# In what autograd says of a write into an unsharded parameter whose gradient it follows.
WRITTEN_COPY = f" of {_Gather.__name__} "


def refuse_captured_backward(name: str) -> NoReturn:
    """Compiled autograd would run a backward through the model of this name.

    Raises:
        StepError: always.
    """
    raise StepError(
        f"backward through {name} under compiled autograd "
        f"(torch._dynamo.config.compiled_autograd): it makes a graph of a backward, and this one "
        f"is a program already, or communicates. Call backward with compiled autograd off; nothing "
        f"has run of this one, which may be called again."
    )


def _is_trained(slot: Slot) -> bool:
    """True if autograd follows what is computed from the parameter now."""
    return torch.is_grad_enabled() and slot.tensor.requires_grad


def _read_with_gradients(slot: Slot, option: str, *, eager: bool) -> StepError:
    where = "by eager code" if eager else "outside of the model's forward"
    return StepError(
        f"parameter {slot.param.fqn!r} is read with gradients {where}, and with {option} its "
        f"gradient would not go the same way as those of the program. Read it under "
        f"torch.no_grad(), or make the reading code part of forward."
    )


def require_all_wanted(leaves: Sequence[Any], what: str) -> None:
    """Raise StepError if this backward drops gradients of parameters, autograd's `leaves`.

    ``torch.autograd.grad`` and ``backward(inputs=...)`` ask for the gradients of some tensors only,
    but a program accumulates or steps all of them.
    """
    if not all(map(autograd.will_accumulate, leaves)):
        raise StepError(
            f"torch.autograd.grad, or backward(inputs=...), leaves the gradients of parameters "
            f"alone, but {what} them in every backward of the model. Call loss.backward(), or do "
            f"this outside of no_sync and without optimizer_in_backward."
        )
