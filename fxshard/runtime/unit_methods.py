"""The methods of FSDP2's `FSDPModule` that act on units: of the model, and of each part of it.

Settings are fields of `fxshard.ir.units.Unit`. They act from the next forward on, whose program is
another one; that of the settings before is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fxshard.arguments import check_count, check_flag
from fxshard.capture.swapped import STATE, UNIT
from fxshard.errors import ConfigError
from fxshard.ir.units import Unit
from fxshard.runtime.reduce_hooks import register_after
from fxshard.runtime.runtime import Runtime

# What FSDP2 has, and is nothing to set here: what to do instead.
_REFUSED = {
    "set_custom_all_gather": "it says where copies in and out lie, and here are none: leave it out",
    "set_custom_reduce_scatter": "use register_comm_hook(state, hook) of the model",
    "set_allocate_memory_from_process_group_for_comm": "it changes no number: leave it out",
    "set_symm_mem_for_comm": "it changes no number: leave it out",
    # Since torch 2.15, and the last four after it:
    "set_keep_unsharded_storage": "it is for CUDA graphs, and none are captured: leave it out",
    "set_manual_backward_finalization": "each backward ends its own reductions: leave it out, and "
    "finalize_backward too; to reduce after several backwards, run all but the last forward and "
    "backward inside of no_sync(), or after set_requires_gradient_sync(False)",
    "finalize_backward": "each backward ends its own reductions: leave it out",
    "synchronize_gradients": "run the last forward and backward outside of no_sync(), or after "
    "set_requires_gradient_sync(True): it reduces the sums of the ones before",
    "get_pending_gradients": "what no_sync() accumulates is no attribute of the parameters; the "
    "first backward outside of it adds and reduces it, into .grad",
    "set_all_gather_layout": "where copies out of it lie is the program's: leave it out",
    "set_reduce_scatter_input_fn": "where copies into it lie is the program's: leave it out",
    "set_separate_reduce_scatter_group": "call it on the model: it is for all units at once",
    "reset_iter_state": "call it on the model",
}


class UnitMethods(nn.Module):
    """FSDP2's methods, of a module whose parameters are a unit of a sharded model."""

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, recurse: bool = True
    ) -> None:
        """Whether gradients are reduced, for the calls from now on.

        Args:
            requires_gradient_sync: False: they are accumulated, unsharded, on each rank; the first
                backward of a call with True adds and reduces the sums.
            recurse: also of the units inside of this module.

        Raises:
            ConfigError: not a bool.
        """
        check_flag("requires_gradient_sync", requires_gradient_sync)
        runtime, chosen = _units(self, recurse)
        if runtime.stage is None:  # else the schedule ends with a reduction
            runtime.set_units(chosen, reduce="all" if requires_gradient_sync else "none")

    def set_requires_all_reduce(self, requires_all_reduce: bool, recurse: bool = True) -> None:
        """Whether replicas of a hybrid strategy all-reduce gradients, for the calls from now on.

        Without replicas it has no effect.

        Args:
            requires_all_reduce: False: gradients are reduce-scattered inside of each replica, and
                the sharded partial sums are accumulated; the first backward of a call with True
                adds them and all-reduces the sum.
            recurse: also of the units inside of this module.

        Raises:
            ConfigError: not a bool; or False with the option ``optimizer_in_backward``.
        """
        check_flag("requires_all_reduce", requires_all_reduce)
        runtime, chosen = _units(self, recurse)
        if runtime.stage is not None and not requires_all_reduce:
            raise ConfigError(
                "set_requires_all_reduce(False) of a pipeline's stage: the schedule ends with all "
                "reductions. Leave it out; to accumulate over schedules, run all but the last one "
                "inside of no_sync() of the stage."
            )
        synced = [i for i in chosen if runtime.units[i].reduce != "none"]
        grids = runtime.world.grids
        copied = any(grids[mesh].replicas > 1 for mesh in runtime.meshes_of(synced))
        partial = not requires_all_reduce and copied
        if partial and runtime.config.optimizer_in_backward:
            raise ConfigError(
                "set_requires_all_reduce(False) with optimizer_in_backward=True: a backward that "
                "leaves partial sums has nothing to step with. Leave one of the two out."
            )
        runtime.set_units(synced, reduce="shards" if partial else "all")

    def set_reshard_after_forward(
        self, reshard_after_forward: bool, recurse: bool = True, *, fqns: Sequence[str] = ()
    ) -> None:
        """What units are between forward and backward, for the calls from now on.

        Args:
            reshard_after_forward: True: sharded; False: unsharded.
            recurse: also the units inside of this module.
            fqns: only the units of these names.

        Raises:
            ConfigError: not a bool; True with ``no_shard``; or `fqns` names something else than a
                unit.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ConfigError(f"reshard_after_forward={reshard_after_forward!r}: expected a bool.")
        runtime, chosen = _units(self, recurse)
        if fqns:
            index = {fqn: unit.index for unit in runtime.units for fqn in unit.fqns}
            if unknown := [fqn for fqn in fqns if fqn not in index]:
                raise ConfigError(
                    f"set_reshard_after_forward: {unknown[0]!r} is no unit. Units are: "
                    f"{', '.join(unit.name for unit in runtime.units[:8])}."
                )
            chosen = [index[fqn] for fqn in fqns]
        runtime.set_units(chosen, reshard=reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """What units are after backward, for the calls from now on.

        Args:
            reshard_after_backward: True: sharded. False: unsharded, so that the next forward
                gathers nothing of them, unless a shard has changed since: after a step of the
                optimizer it gathers. `reshard` frees them before that.
            recurse: also the units inside of this module.

        Raises:
            ConfigError: not a bool; or False with what leaves nothing to keep.
        """
        check_flag("reshard_after_backward", reshard_after_backward)
        runtime, chosen = _units(self, recurse)
        if runtime.stage is not None:
            return  # what forward leaves unsharded stays until the schedule is over
        if not reshard_after_backward:
            for i in chosen:
                _require_keepable(runtime, runtime.units[i])
        runtime.set_units(chosen, stays=not reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Units whose all-gathers forward launches when the one of this module is unsharded.

        Args:
            modules: given to `fully_shard` too, in the order of the launches. None: as many units
                ahead as the option ``forward_prefetch`` says, in the order of use.

        Raises:
            ConfigError: a module is no unit of the same model.
        """
        runtime, (own,) = _units(self, recurse=False)
        runtime.set_units([own], forward_ahead=_fqns(runtime, modules))

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Units whose all-gathers backward launches when the one of this module is unsharded.

        Args:
            modules: as of `set_modules_to_forward_prefetch`.

        Raises:
            ConfigError: a module is no unit of the same model.
        """
        runtime, (own,) = _units(self, recurse=False)
        runtime.set_units([own], backward_ahead=_fqns(runtime, modules))

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Divide gradients by `factor` in the calls from now on.

        Of a model that `compile` returned, all of them; else those of this module's unit, as in
        FSDP2.

        Args:
            factor: a number > 0; None: the number of ranks.

        Raises:
            ConfigError: a hook or the option ``passes`` decides how gradients are reduced.
        """
        runtime, (own,) = _units(self, recurse=False)
        if runtime.comm_hook or runtime.config.passes is not None:
            what = "register_comm_hook" if runtime.comm_hook else "the option passes"
            raise ConfigError(
                f"set_gradient_divide_factor has no effect with {what}, which decides how "
                f"gradients are reduced. Divide there."
            )
        config = runtime.config.changed({"gradient_divide_factor": factor})  # which checks it
        if runtime.unit_calls:
            runtime.set_units([own], divide_factor=config.gradient_divide_factor)
        else:
            runtime.config = config

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor`.

        Args:
            factor: a number > 0.
        """
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Reduce gradients by sums, and divide afterwards.

        Args:
            enable: False: as the backend likes best.

        Raises:
            ConfigError: its parameters are on meshes of different numbers of ranks.
        """
        check_flag("enable", enable)
        runtime, (own,) = _units(self, recurse=False)
        grids = [runtime.world.grids[mesh] for mesh in runtime.meshes_of([own])]
        ranks, *others = {grid.ranks for grid in grids} or {1}
        if enable and others:
            raise ConfigError(
                f"set_force_sum_reduction_for_comms: parameters of {runtime.units[own].name} are "
                f"on meshes of {ranks} and {others[0]} ranks, and a unit divides by one number. "
                f"Leave the call out."
            )
        now = runtime.units[own].divide_factor
        if now is None or now == ranks:
            runtime.set_units([own], divide_factor=float(ranks) if enable else None)

    def set_all_reduce_hook(
        self, hook: Callable[[Tensor], Any], *, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Let `hook` get the gradients of this unit after each reduce-scatter, in place.

        For an all-reduce over ranks that are not in the mesh, say. All units need the same one; of
        a model that `compile` returned, all get it.

        Args:
            hook: called once per unit and dtype with this rank's part of the gradients, flat.
            stream: it runs on that of the reductions; another one is refused.

        Raises:
            ConfigError: a stream; the strategy is hybrid or shards nothing; or something else says
                how gradients are reduced.
        """
        if not callable(hook):
            raise ConfigError(f"set_all_reduce_hook: {hook!r} cannot be called.")
        if stream is not None:
            raise ConfigError(
                "set_all_reduce_hook: stream cannot be set: the hook runs on the stream of the "
                "reductions, after them. Leave stream out."
            )
        runtime, chosen = _units(self, recurse=False)
        if not runtime.unit_calls:
            chosen = [unit.index for unit in runtime.units]
        register_after(runtime, chosen, hook)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Nothing: backward gathers what it reads, and nothing else.

        Args:
            unshard_in_backward: False: FSDP2 gathers nothing of this unit.
        """
        check_flag("unshard_in_backward", unshard_in_backward)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Nothing: each backward ends its own reductions.

        Args:
            is_last_backward: False: FSDP2 leaves them in flight.
        """
        check_flag("is_last_backward", is_last_backward)

    def set_post_optim_event(self, event: Any) -> None:
        """Nothing: the first all-gather waits for all that the compute stream holds by then.

        Args:
            event: FSDP2 waits for it alone.
        """

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Nothing: one reduction is in flight.

        Args:
            max_input_buffers: how many are, in FSDP2.
            recurse: as in FSDP2.
        """
        check_count("max_input_buffers", max_input_buffers)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether parameters that only some ranks use are reduced, which they never are.

        Args:
            reduce_scatter_unused_params: False.
            recurse: as in FSDP2.

        Raises:
            ConfigError: True.
        """
        check_flag("reduce_scatter_unused_params", reduce_scatter_unused_params)
        if reduce_scatter_unused_params:
            raise ConfigError(
                "set_reduce_scatter_unused_params(True): give fully_shard (or fxshard.compile) "
                "ranks_may_differ=True instead: ranks that skip a module take part in what the "
                "others gather and reduce, and a parameter that no rank uses has no gradient."
            )

    def unshard(self, async_op: bool = False) -> Any:
        """Unshard the parameters of this module's unit now, until `reshard` or the next call.

        Collective. In the model's own forward, which runs as a program, it does nothing: the
        program gathers them, as the options for prefetch say.

        Args:
            async_op: taken for FSDP2's sake: parameters are unsharded when this returns.

        Returns:
            A handle: ``wait()`` does nothing more, and ``with`` on it reshards at the end.
        """
        runtime, (own,) = _units(self, recurse=False)
        if runtime.inside.running:
            pass  # it is traced, or all parameters are unsharded
        elif runtime.stage is not None and async_op:  # of a schedule
            runtime.stage.gather(runtime)
        else:
            runtime.unshard_unit(own)
        return UnshardHandle(self)

    def reshard(self) -> None:
        """End `unshard`: changes are written back, and parameters are sharded again; collective.

        Also frees what a backward has kept (`set_reshard_after_backward`), and what a forward has
        left unsharded for its backward (``reshard_after_forward=False``), which gathers it again.
        In the model's own forward it does nothing, as `unshard`.
        """
        runtime, (own,) = _units(self, recurse=False)
        if not runtime.inside.running:
            runtime.reshard_unit(own)
            runtime.free_unsharded([own])

    def _get_fsdp_state(self) -> NoReturn:
        """What methods of torch's FSDP2 that are not here ask for first."""
        raise ConfigError(
            f"{type(self).__name__} was sharded by fxshard, and has no state of torch's FSDP2. See "
            f"'Methods of FSDPModule' in docs/coming-from-fsdp.md."
        )


class UnshardHandle:
    """The handle that `unshard` returns; leaving its with block reshards."""

    def __init__(self, module: UnitMethods) -> None:
        self._module = module

    def wait(self) -> None:
        """Nothing is left to wait for."""

    def __enter__(self) -> UnshardHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self._module.reshard()


def refusal(name: str, instead: str) -> Callable[..., NoReturn]:
    """A method of FSDP2's that raises ConfigError and says what to do."""

    def refuse(self: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(f"{name} is not in fxshard: {instead}.")

    refuse.__name__, refuse.__doc__ = name, f"Not in fxshard: {instead}."
    return refuse


REFUSALS = {name: refusal(name, instead) for name, instead in _REFUSED.items()}


def place_of(module: nn.Module) -> tuple[Runtime, str] | None:
    """The runtime of the sharded model that `module` is a unit of, and its FQN there."""
    if STATE in module.__dict__:
        return module.__dict__[STATE], ""
    found: tuple[Runtime, str] | None = module.__dict__.get(UNIT)
    return found


def _units(module: nn.Module, recurse: bool) -> tuple[Runtime, list[int]]:
    """The runtime, and the indices of the unit of `module` and of those inside of it.

    Raises:
        ConfigError: it is a copy of a unit, without the rest of the model.
    """
    place = place_of(module)
    if place is None:
        raise ConfigError(
            f"this {type(module).__name__} is no unit of a sharded model any more: it was copied, "
            f"or pickled, without the model around it."
        )
    runtime, fqn = place
    return runtime, runtime.units_at(fqn, recurse)


def _require_keepable(runtime: Runtime, unit: Unit) -> None:
    """Raise ConfigError if a unit cannot stay unsharded after backward."""
    what = ""
    if runtime.config.optimizer_in_backward:
        what = "optimizer_in_backward=True: each backward steps the shards, so that what it kept "
        what += "would be old"
    elif runtime.config.max_inflight is not None:
        what = "max_inflight: what stays unsharded would count in it"
    elif runtime.config.ranks_may_differ:
        what = "ranks_may_differ=True: ranks would keep what each of them has used"
    elif not isinstance(unit.reshard, bool):
        what = f"reshard_after_forward={unit.reshard}, a smaller group: give True or False"
    elif any(param.extension is not None for param in unit.params):
        what = "a parameter of a tensor subclass, of which fsdp_post_all_gather makes copies"
    if what:
        raise ConfigError(
            f"set_reshard_after_backward(False) of unit {unit.name!r} does not go together with "
            f"{what}. Leave one of the two out."
        )


def _fqns(runtime: Runtime, modules: Sequence[nn.Module]) -> tuple[str, ...]:
    found = []
    for module in modules:
        place = place_of(module) if isinstance(module, nn.Module) else None
        if place is None or place[0] is not runtime:
            raise ConfigError(
                f"a {type(module).__name__} to prefetch is no unit of the same model. Give modules "
                f"that fully_shard was called on, and call fully_shard on the model first."
            )
        (index,) = runtime.units_at(place[1], recurse=False)
        found.append(runtime.units[index].fqn)
    return tuple(found)
