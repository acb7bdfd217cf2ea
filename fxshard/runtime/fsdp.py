"""What `FullyShardedDataParallel` and `fully_shard` offer besides forward, on a compiled model.

docs/coming-from-fsdp.md lists their names and what each does here. The work on parameters and
state dicts is done in `fxshard.runtime.store.unsharded` and `fxshard.runtime.state`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from fxshard.capture.modules import without_wrappers
from fxshard.errors import ConfigError, StepError
from fxshard.runtime import reduce_hooks, state
from fxshard.runtime.gathering import let_gather
from fxshard.runtime.runtime import Runtime
from fxshard.runtime.unit_methods import UnitMethods, UnshardHandle
from fxshard.runtime.world.c10d import C10dWorld


class FsdpMethods(UnitMethods):
    """Gradients, unsharded parameters and states of a compiled model."""

    _fxshard: Runtime  # a real name: transformers evaluates the annotations of subclasses

    # -- gradients --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Calls inside accumulate gradients without reducing them.

        The first backward of a call outside of the block adds what was accumulated and reduces the
        sum, once per unit. Until then the gradients are unsharded, on every rank, and not in
        ``.grad`` (as FSDP2's ``set_requires_gradient_sync(False)``).
        """
        runtime = self._fxshard
        before, runtime.sync = runtime.sync, False
        try:
            yield
        finally:
            runtime.sync = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `nn.Module.zero_grad`; also drops gradients accumulated under `no_sync`.

        Args:
            set_to_none: False: gradients become zeros.
        """
        self._fxshard.drop_sums()
        super().zero_grad(set_to_none)

    def reset_iter_state(self) -> None:
        """After an exception in a step: end `unshard`, and drop sums of gradients.

        Nothing else is kept between calls.
        """
        self._fxshard.reshard()
        self._fxshard.free_unsharded()
        self._fxshard.drop_sums()

    def register_comm_hook(self, state: Any, hook: Callable[..., None]) -> None:
        """Let `hook` reduce gradients, as ``FullyShardedDataParallel.register_comm_hook``.

        Args:
            state: what `hook` gets first, of any kind.
            hook: called once per unit and dtype: ``hook(state, flat, out)`` with all gradients of
                the unit in rank order, ``[ranks * n]``, and room for this rank's part, ``[n]``;
                with strategy ``no_shard`` ``hook(state, flat)``, in place. It averages itself.
                Those of torch.distributed.algorithms' default_hooks (fp16 and bf16 compression)
                fit.

        Raises:
            ConfigError: the strategy is hybrid, all ranks run in this process, an option says how
                to reduce, parameters are offloaded, or there is a hook already.
        """
        if not callable(hook):
            raise ConfigError(f"register_comm_hook: {hook!r} cannot be called.")
        reduce_hooks.register(self._fxshard, "register_comm_hook", functools.partial(hook, state))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the norm of all gradients of all ranks; call it on all ranks.

        Args:
            max_norm: gradients are scaled in place so that their norm is at most this.
            norm_type: p of the p-norm; ``float("inf")`` for the largest absolute value.

        Returns:
            The norm before, a plain scalar, the same on all ranks. Parameters that are not sharded
            (`Config.ignored`) count with the gradient that this rank has.

        Raises:
            StepError: the option ``optimizer_in_backward`` is given, or a parameter is on a mesh
                that does not have all ranks.
            RankMismatchError: some ranks do not call it, or have other gradients.
        """
        if self._fxshard.config.optimizer_in_backward:
            raise StepError(
                "clip_grad_norm_ with optimizer_in_backward=True: parameters are stepped before "
                "all gradients are there, and the norm of all is never known. Leave "
                "optimizer_in_backward out, and step after backward."
            )
        runtime = self._fxshard
        runtime.require_one_of_each("clip_grad_norm_")
        slots = runtime.slots.items()
        there = [f"a gradient of {fqn}" for fqn, slot in slots if slot.tensor.grad is not None]
        own = functools.partial(runtime.restore_sharded, runtime.slots.values())
        runtime.together("clip_grad_norm_", there, own)
        return state.clip_grad_norm_(self.parameters(), float(max_norm), float(norm_type))

    @contextlib.contextmanager
    def summon_full_params(
        self,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
        *,
        fqns: Sequence[str] = (),
    ) -> Iterator[None]:
        """Inside of the block each parameter is an unsharded plain `nn.Parameter`; collective.

        Then the sharded parameters are back, the very objects that optimizers hold.

        Args:
            recurse: False takes only the parameters of the root unit, or of those in `fqns`.
            writeback: at the end this rank's rows of the changed values go into its shards.
            rank0_only: only the first rank of the mesh sees unsharded parameters, the others see
                sharded ones.
            offload_to_cpu: the unsharded parameters are on the CPU.
            with_grads: gradients are unsharded too, and written back with the values.
            fqns: only the parameters in these submodules.

        Returns:
            A context manager.

        Raises:
            ConfigError: `writeback` with `rank0_only`; or `fqns` names no submodule.
            StepError: parameters are unsharded already; or one has another shape than when it was
                sharded, now or at the end.
            RankMismatchError: another rank refuses it.
        """
        with self._fxshard.summon_full_params(
            recurse,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
            fqns=fqns,
        ):
            yield

    def unshard(self, async_op: bool = False, **options: Any) -> UnshardHandle:
        """Unshard parameters now, until `reshard`, or the next forward or backward; collective.

        At the end changes are written back; an optimizer may step the shards meanwhile.

        Args:
            async_op: taken for FSDP2's sake: parameters are unsharded when this returns.
            **options: those of `summon_full_params`.

        Returns:
            A handle: ``wait()`` does nothing more, and ``with`` on it reshards at the end.

        Raises:
            StepError: at the end, see `summon_full_params`; also of what was written both
                unsharded and as a shard.
        """
        if self._fxshard.stage is not None and async_op:  # of a schedule
            self._fxshard.stage.gather(self._fxshard)
        else:
            self._fxshard.unshard(**options)
        return UnshardHandle(self)

    def reshard(self) -> None:
        """End `unshard`: changes are written back, and parameters are sharded again; collective.

        Also frees what a backward has kept (`set_reshard_after_backward`), and what a forward has
        left unsharded for its backward (``reshard_after_forward=False``), which gathers it again:
        of all units, and of a model of `fully_shard`, whose blocks have this method, of its own.
        """
        self._fxshard.reshard()
        self._fxshard.free_unsharded([0] if self._fxshard.unit_calls else None)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """As `nn.Module.apply`, with unsharded parameters; collective.

        Random numbers are those of this process: seed all ranks alike to get what one process gets.

        Args:
            fn: called with each module, the innermost first.

        Returns:
            This module.
        """
        with self._fxshard.summon_full_params():
            super().apply(fn)
        return self

    def full_state_dict(self, cpu_offload: bool = True, rank0_only: bool = True) -> dict[str, Any]:
        """The state dict of the unsharded model; collective.

        Args:
            cpu_offload: all tensors are on the CPU.
            rank0_only: other ranks than the first of the model's get ``{}``.

        Returns:
            FQN -> unsharded tensor, of the shapes and dtypes of the user's model: buffers that a
            ``buffer_dtype`` has cast are cast back.

        Raises:
            StepError: a parameter is on a mesh that does not have all ranks, or was exchanged for
                one of another shape.
        """
        runtime = self._fxshard

        def check() -> None:
            runtime.require_filled(memory=True)
            runtime.require_one_of_each("full_state_dict")
            runtime.restore_sharded(runtime.slots.values())

        runtime.together("full_state_dict", check=check)
        found = dict(get_model_state_dict(self))
        wanted = self._fxshard.stored_dtypes.items()
        cast = {id(found[name]): dtype for name, dtype in wanted if name in found}
        here = not rank0_only or runtime.world.is_first
        return state.full_state(found, runtime.all_rows, cpu_offload, here, cast=cast)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What ``.to()``, ``.half()`` and their kin call: converts shards, buffers and the rest."""
        if self._fxshard.convert(fn, lambda: super(FsdpMethods, self)._apply(fn, recurse)):
            self._fxshard.variants.clear()
            let_gather(self._fxshard)
        return self

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Run reduce-scatters in a process group of their own; call it on all ranks alike.

        One communicator of NCCL runs one collective at a time; with two, the reduction of a unit
        and the all-gather of the next can share the wire (FSDP2's method of this name).

        Args:
            enable: False: in the group of the all-gathers again.
            recurse: of all units; False is refused.

        Raises:
            ConfigError: nothing is reduce-scattered: no process group, or one rank per shard; or
                it is for the root's unit alone.
        """
        if not recurse:
            raise ConfigError(
                "set_separate_reduce_scatter_group(recurse=False): the group is for all units at "
                "once. Leave recurse out."
            )
        world, strategy = self._fxshard.world, self._fxshard.config.strategy
        alone = all(grid.shards == 1 for grid in world.grids.values())
        if not isinstance(world, C10dWorld) or alone:
            raise ConfigError(
                f"set_separate_reduce_scatter_group: strategy {strategy!r} on "
                f"{world.size} rank(s) per shard group, or without a process group, has no "
                f"reduce-scatter. Leave the call out."
            )
        self._fxshard.world.together("set_separate_reduce_scatter_group")
        if enable and not world.reductions:
            world.separate_reductions()
        elif not enable:
            world.reductions.clear()

    def optim_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of `optimizer` by parameter name; sharded tensors are DTensors.

        Args:
            optimizer: of this module's parameters.

        Returns:
            ``{"state": {FQN: {name: value}}, "param_groups": [...]}``; groups list FQNs.
        """
        return state.optim_state_dict(self, optimizer)

    def full_optim_state_dict(
        self, optimizer: torch.optim.Optimizer, cpu_offload: bool = True, rank0_only: bool = True
    ) -> dict[str, Any]:
        """The same with full tensors, as of the unsharded model; collective.

        Args:
            optimizer: of this module's parameters; groups may list them in another order per rank.
            cpu_offload: all tensors are on the CPU.
            rank0_only: other ranks than the first of the model's get ``{}``.

        Returns:
            As `optim_state_dict`; copies, which later steps do not change.

        Raises:
            RankMismatchError: ranks have states of other parameters, or some do not call it.
        """
        found = state.optim_state_dict(self, optimizer)
        # In the order of the model, where modules may have been wrapped since it was sharded.
        order = {without_wrappers(name): i for i, (name, _) in enumerate(self.named_parameters())}
        states = sorted(found["state"].items(), key=lambda of: order[without_wrappers(of[0])])
        found["state"] = dict(states)
        held = [f"a state of {name}" for name in found["state"]]
        runtime = self._fxshard
        own = functools.partial(runtime.restore_sharded, runtime.slots.values())
        runtime.together("full_optim_state_dict", held, own)
        here = not rank0_only or runtime.world.is_first
        return state.full_state(found, runtime.all_rows, cpu_offload, here, copies=True)

    def optim_state_dict_to_load(
        self,
        optimizer: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        load_directly: bool = False,
    ) -> dict[str, Any]:
        """What ``optimizer.load_state_dict`` takes, made of a state by parameter name.

        Args:
            optimizer: of this module's parameters.
            optim_state_dict: of `optim_state_dict`, `full_optim_state_dict` on every rank, or
                their namesakes of FSDP1. Of a full tensor each rank takes its own rows.
            load_directly: also load it.

        Returns:
            A state as ``optimizer.state_dict()`` gives it: by number of the parameter.

        Raises:
            CheckpointError: a parameter of `optimizer` is not in it.
        """
        made = state.optim_state_dict_to_load(self, optimizer, optim_state_dict)
        if load_directly:
            optimizer.load_state_dict(made)
        return made
