"""ShardedModule: the user's module tree with sharded parameters, run by compiled programs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard import compat, dump, meta, pipeline, state
from fxshard.config import Config
from fxshard.errors import ConfigError, StepError
from fxshard.executor import Executor
from fxshard.memory.report import MemoryReport
from fxshard.plans import Plan
from fxshard.program import Program
from fxshard.sharding import as_gradient, shard_parameters
from fxshard.trace import PLAIN
from fxshard.units import Param, Unit, buffer_dtypes, check_reshard
from fxshard.world.c10d import C10dWorld
from fxshard.world.in_process import InProcessWorld

log = logging.getLogger("fxshard")

# The same dicts in the user's model and in the ShardedModule around it, not copies: what the user
# adds to or loads into either is seen in the other.
_SHARED = (
    "_modules",
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
aten = torch.ops.aten

MakeExecutor = Callable[[Program, Any], Executor]


@dataclasses.dataclass
class Variant:
    """One program of the module, for one kind of call."""

    plan: Plan
    executor: Executor

    @property
    def program(self) -> Program:
        """What the executor runs."""
        return self.plan.program

    @functools.cached_property
    def written(self) -> frozenset[tuple[str, str | None]]:
        """Role and name of the buffers and inputs that forward writes into."""
        return frozenset(
            (meta.get(node).role, meta.get(node).fqn)
            for node in self.program.graph.find_nodes(op="placeholder")
            if any(user.target is aten.copy_.default for user in node.users)
        )

    @functools.cached_property
    def read_again(self) -> list[fx.Node]:
        """Placeholders of backward that are the caller's tensors: they must stay as they are."""
        nodes = self.executor.backward_inputs
        return [node for node in nodes if meta.get(node).role in meta.HELD]


class ShardedModule(nn.Module):
    """The module that `fxshard.compile` returns.

    It shares the module tree of the user's model: same FQNs, same submodules, same buffers. Under
    a process group each parameter is a DTensor with placement ``Shard(0)``; without one, each is
    whole and all ranks run inside this process.
    """

    def __init__(
        self,
        model: nn.Module,
        units: tuple[Unit, ...],
        world: C10dWorld | InProcessWorld,
        config: Config,
        make_executor: MakeExecutor = Executor,
    ) -> None:
        super().__init__()
        for name in _SHARED:
            object.__setattr__(self, name, getattr(model, name))
        object.__setattr__(self, "original", model)
        self.training = model.training
        self.units, self.world, self.config = units, world, config
        self._make_executor = make_executor
        self.slots = shard_parameters(model, units, world, config)
        owners = [module for slot in self.slots.values() for module, _ in slot.owners]
        state.take_whole_values(dict.fromkeys(owners))
        self.variants: dict[Any, Variant] = {}
        self.wholes = {p.fqn: p for unit in units for p in unit.ignored}
        self.accumulated: dict[str, list[Tensor]] = {}  # per rank that this process runs
        self._sync = True
        self._comm_hook = False
        self._cast_buffers()
        self._warned: set[int] = set()
        self._summoned = False
        self._unshards: contextlib.ExitStack | None = None
        self._agreed: set[tuple[str, ...]] = set()
        self._device = next((p.device.type for p in model.parameters()), "cpu")
        self._tree = list(model.modules())
        self._buffer_slots = {
            name: (module, key)
            for path, module in model.named_modules()
            for key in module._buffers
            for name in [f"{path}.{key}" if path else key]
        }

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = object.__getattribute__(self, "original")
            if name == "module" and not hasattr(original, name):
                return original  # FSDP1's name for it
            return getattr(original, name)

    def __getitem__(self, key: Any) -> Any:
        """Of the user's model, as FSDP1 forwards it: an `nn.Sequential` stays indexable."""
        return self.original[key]

    def train(self, mode: bool = True) -> ShardedModule:
        """As `nn.Module.train`, for the shared tree."""
        super().train(mode)
        self.original.training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one forward; the result is what the user's model returns."""
        self.reshard()  # of an `unshard` that nobody ended
        self.require_sharded("forward")
        for slot in self.slots.values():
            slot.settle()
        variant = self.variant(args, kwargs)
        signature = variant.program.signature
        flat, _ = compat.tree_flatten((args, kwargs))
        batch = [flat[i] for i in signature.tensor_inputs]
        if signature.training:
            params = [self._param(fqn) for fqn in _differentiated(variant.program)]
            outputs = list(_Step.apply(_Call(self, variant, len(params)), *params, *batch))
        else:
            with torch.no_grad(), self.as_traced():
                outputs, _ = variant.executor.forward(self.arguments(variant, batch))
        rest = iter(outputs)
        leaves = [next(rest) if constant is None else constant[0] for constant in signature.outputs]
        return compat.tree_unflatten(leaves, signature.out_spec)

    def variant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        """The program for this kind of call; captured and rewritten if it is new.

        Ranks compare what they made before the first collective of it, if it is not what they
        agreed on before: a rank may meet a new batch size alone.
        """
        key = self.key(args, kwargs)
        if key not in self.variants:
            if self.variants:
                log.info("fxshard: new kind of call (%d so far), tracing again", len(self.variants))
            program = self.rewritten(args, kwargs)
            lines = dump.agreement(program)
            if isinstance(self.world, C10dWorld) and tuple(lines) not in self._agreed:
                self.world.agree(lines, "the model or the batch structure")
            self.add(args, kwargs, program)
        return self.variants[key]

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any], program: Program) -> None:
        """Run this kind of call by `program`, which all ranks agree on."""
        self._warn_of_hooks()
        plan = Plan(program, self.config, self.original, (args, kwargs))
        executor = self._make_executor(program, self.world)
        self.variants[self.key(args, kwargs)] = Variant(plan, executor)
        self._agreed.add(tuple(dump.agreement(program)))

    @property
    def plan(self) -> Plan:
        """The plan of the training step traced last (of any call, if none trains).

        Raises:
            StepError: nothing is traced yet.
        """
        plans = [variant.plan for variant in self.variants.values()]
        if not plans:
            raise StepError(
                "nothing is traced yet: call the model once, or give fxshard.compile an example "
                "call with args=(...)."
            )
        return next((p for p in reversed(plans) if p.program.signature.training), plans[-1])

    @property
    def memory(self) -> MemoryReport:
        """The memory report of `plan`."""
        return self.plan.memory

    def rewritten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        """Capture the call `model(*args, **kwargs)` and run the passes."""
        units = tuple(
            dataclasses.replace(
                unit,
                params=tuple(map(self._as_it_is, unit.params)),
                ignored=tuple(map(self._as_it_is, unit.ignored)),
            )
            for unit in self.units
        )
        return pipeline.make_program(
            self.original,
            args,
            kwargs,
            units=units,
            world=self.world.size,
            replicas=self.world.replicas,
            config=self.config,
            sync=self._sync,
            accumulated=self._waiting(),
            comm_hook=self._comm_hook,
        )

    def _waiting(self) -> tuple[str, ...]:
        """Parameters with an accumulated gradient that a backward will add to or reduce."""
        return tuple(fqn for fqn in self.accumulated if self.slots[fqn].tensor.requires_grad)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Calls inside accumulate gradients without reducing them.

        The first backward of a call outside of the block adds what was accumulated and reduces the
        sum, once per unit. Until then the gradients are whole, on every rank, and not in ``.grad``
        (as FSDP2's ``set_requires_gradient_sync(False)``).
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """FSDP2's name for `no_sync`, for the calls from now on."""
        self._sync = requires_gradient_sync

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `nn.Module.zero_grad`; also drops gradients accumulated under `no_sync`."""
        self.accumulated.clear()
        super().zero_grad(set_to_none)

    def register_comm_hook(self, state: Any, hook: Callable[..., None]) -> None:
        """Let `hook` reduce gradients, as ``FullyShardedDataParallel.register_comm_hook``.

        It is called once per unit and dtype: ``hook(state, flat, out)`` with all gradients of the
        unit in rank order, ``[ranks * n]``, and room for this rank's part, ``[n]``; with strategy
        ``no_shard`` ``hook(state, flat)``, in place. It averages itself. Those of
        torch.distributed.algorithms' default_hooks (fp16 and bf16 compression) fit.

        Raises:
            ConfigError: the strategy is hybrid, all ranks run in this process, an option says how
                to reduce, parameters are offloaded, or there is a hook already.
        """
        if not isinstance(self.world, C10dWorld):
            raise ConfigError("register_comm_hook needs a process group: start with torchrun.")
        config = self.config
        for name, clashes in {
            f"strategy={config.strategy!r}": config.hybrid,
            f"reduce_op={config.reduce_op!r}": config.reduce_op != "avg",
            "gradient_divide_factor": config.gradient_divide_factor is not None,
            "gradient_predivide_factor": config.gradient_predivide_factor is not None,
            "offload": config.offload is not None,
            "another hook": self._comm_hook,
        }.items():
            if clashes:
                raise ConfigError(f"register_comm_hook does not go together with {name}.")
        if not callable(hook):
            raise ConfigError(f"register_comm_hook: {hook!r} cannot be called.")
        self.world.hook = functools.partial(hook, state)
        self._comm_hook = True
        self.variants.clear()

    def _cast_buffers(self) -> None:
        """Give buffers the dtype that the policy of their unit asks for, for good (as FSDP1)."""
        buffers = dict(self.original.named_buffers(remove_duplicate=False))
        cast: dict[int, Tensor] = {}
        for name, dtype in buffer_dtypes(self.units, buffers).items():
            module, key = self._owner(name)
            buffer = buffers[name]
            module._buffers[key] = cast.setdefault(id(buffer), buffer.to(dtype))

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        path, _, key = name.rpartition(".")
        return self.original.get_submodule(path), key

    def whole_parameters(self) -> list[nn.Parameter]:
        """The ignored parameters."""
        return [self._whole(fqn) for fqn in self.wholes]

    def _param(self, fqn: str) -> nn.Parameter:
        """The parameter that the user sees."""
        return self.slots[fqn].tensor if fqn in self.slots else self._whole(fqn)

    def _whole(self, fqn: str) -> nn.Parameter:
        """An ignored parameter."""
        return self.original.get_parameter(fqn)

    def _as_it_is(self, param: Param) -> Param:
        """`param` with the dtype and the flag that its tensor has now."""
        tensor = self._param(param.fqn)
        same = param.compute_dtype is param.dtype
        return dataclasses.replace(
            param,
            dtype=tensor.dtype,
            requires_grad=tensor.requires_grad,
            compute_dtype=tensor.dtype if same else param.compute_dtype,
        )

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a program was traced for: calls with equal keys run the same one."""
        flat, spec = compat.tree_flatten((args, kwargs))
        return (
            spec,
            tuple(map(_leaf_key, flat)),
            tuple(module.training for module in self._tree),
            tuple(slot.tensor.requires_grad for slot in self.slots.values()),
            tuple(self._whole(fqn).requires_grad for fqn in self.wholes),
            (self._sync, self._waiting()) if torch.is_grad_enabled() else None,
            compat.hook_numbers(self._tree),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(self._device) and torch.get_autocast_dtype(self._device),
        )

    def as_traced(self) -> torch.autocast:
        """The context that a program runs in: its casts are in it, autocast must add none."""
        return torch.autocast(self._device, enabled=False)

    def arguments(self, variant: Variant, batch: Sequence[Tensor]) -> list[list[Tensor]]:
        """Per rank that this process runs, the values of forward's placeholders."""
        rows = [
            [
                self._value(node, variant.program, batch, rank)
                for node in variant.executor.forward_inputs
            ]
            for rank in range(self.local_ranks)
        ]
        for i, node in enumerate(variant.executor.forward_inputs):
            if (meta.get(node).role, meta.get(node).fqn) in variant.written:
                for row in rows[1:]:  # each rank writes one of its own; the first one's is kept
                    row[i] = row[i].clone()
        return rows

    @property
    def local_ranks(self) -> int:
        """How many ranks this process runs: one, or the whole in-process world."""
        return self.world.ranks if isinstance(self.world, InProcessWorld) else 1

    def _value(self, node: fx.Node, program: Program, batch: Sequence[Tensor], rank: int) -> Tensor:
        tag = meta.get(node)
        name = tag.fqn or ""
        if tag.role == "shard":
            shards = self.slots[name].shards
            return shards[rank % len(shards)]  # replicas inside one process share theirs
        if tag.role == "whole":
            return self._whole(name)
        if tag.role == "accumulated":
            if name not in self.accumulated:  # dropped since forward, by zero_grad
                val = node.meta["val"]
                return torch.zeros(val.shape, dtype=val.dtype, device=self._device)
            return self.accumulated[name][rank]
        if tag.role == "input":
            return batch[program.signature.tensor_inputs.index(int(name))]
        if name in program.constants:
            return program.constants[name]
        module, key = self._buffer_slots[name]
        buffer = module._buffers[key]
        assert buffer is not None
        return buffer

    def require_accumulated(self, program: Program) -> None:
        """Raise StepError if there are gradients that a backward should reduce and does not."""
        if program.sync and set(self._waiting()) - program.accumulated:
            raise StepError(
                "gradients were accumulated under no_sync between a forward outside of it and its "
                "backward, which would not reduce them. Call backward behind each forward, "
                "micro-batch by micro-batch."
            )

    # -- state: what FSDP1 and FSDP2 offer besides forward (the work is done in fxshard.state) -----

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the norm of all gradients of all ranks; call it on all ranks.

        Args:
            max_norm: gradients are scaled in place so that their norm is at most this.
            norm_type: p of the p-norm; ``float("inf")`` for the largest absolute value.

        Returns:
            The norm before, a plain scalar, the same on all ranks. Parameters that are not sharded
            (`Config.ignored`) count with the gradient that this rank has.
        """
        return state.clip_grad_norm_(self.parameters(), float(max_norm), float(norm_type))

    @contextlib.contextmanager
    def summon_full_params(
        self,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """For the time of the block each parameter is a whole plain `nn.Parameter`; collective.

        Then the sharded parameters are back, the very objects that optimizers hold.

        Args:
            recurse: False takes only the parameters of the root unit.
            writeback: at the end this rank's rows of the changed values go into its shards.
            rank0_only: only the first rank sees whole parameters, the others their sharded ones.
            offload_to_cpu: the whole parameters lie on the CPU.
            with_grads: gradients are whole too, and written back with the values.

        Raises:
            ConfigError: `writeback` with `rank0_only`.
            StepError: parameters are whole already; or at the end one has changed its shape.
        """
        self.require_sharded("summon_full_params")
        slots = [slot for slot in self.slots.values() if recurse or slot.param.unit == 0]
        with state.whole_parameters(
            slots,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        ):
            self._summoned = True
            try:
                yield
            finally:
                self._summoned = False

    def unshard(self, async_op: bool = False, **options: Any) -> Unsharded:
        """Make parameters whole now, until `reshard`, the next call, or the end of a with block.

        Args:
            async_op: taken for FSDP2's sake: parameters are whole when this returns.
            **options: those of `summon_full_params`.

        Returns:
            A handle: ``wait()`` does nothing more, and ``with`` on it reshards at the end.
        """
        if self._unshards is None:
            unshards = contextlib.ExitStack()
            unshards.enter_context(self.summon_full_params(**options))
            self._unshards = unshards
        return Unsharded(self)

    def reshard(self) -> None:
        """End `unshard`: changes are written back, and parameters are sharded again; collective."""
        if self._unshards is not None:
            unshards, self._unshards = self._unshards, None
            unshards.close()

    def require_sharded(self, what: str) -> None:
        """Raise StepError inside of `summon_full_params`: its parameters are not the shards."""
        if self._summoned:
            raise StepError(
                f"{what} inside of summon_full_params: parameters are whole there, and programs "
                f"run on shards. Leave the block first."
            )

    def apply(self, fn: Callable[[nn.Module], None]) -> ShardedModule:
        """As `nn.Module.apply` on the user's model, with whole parameters; collective.

        Random numbers are those of this process: seed all ranks alike to get what one process gets.
        """
        with self.summon_full_params():
            self.original.apply(fn)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.state_dict` of the user's model; sharded parameters are DTensors."""
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.load_state_dict`; a tensor may be a DTensor or whole.

        Of a whole tensor each rank takes its own rows, without communication.
        """
        return self.original.load_state_dict(*args, **kwargs)

    def full_state_dict(self, cpu_offload: bool = True, rank0_only: bool = True) -> dict[str, Any]:
        """The state dict of the unsharded model; collective.

        Args:
            cpu_offload: all tensors are on the CPU.
            rank0_only: other ranks than 0 get ``{}``.
        """
        return state.full_state_dict(self, cpu_offload, rank0_only)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ShardedModule:
        """What ``.to()``, ``.half()`` and their kin call: converts shards, buffers and the rest.

        Raises:
            StepError: it moves shards to a device that the mesh is not made of.
        """
        self.require_sharded("a conversion (.to(), .half(), ...)")
        slots = list(self.slots.values())
        before = self._kinds()
        state.converted(slots, fn, self.world)
        with state.set_aside(slots):
            super()._apply(fn, recurse)
        for fqn, grads in self.accumulated.items():
            self.accumulated[fqn] = [fn(grad) for grad in grads]
        if self._kinds() != before:
            self.variants.clear()
            self._device = next((p.device.type for p in self.parameters()), "cpu")
        return self

    def _kinds(self) -> list[tuple[torch.dtype, torch.device]]:
        return [(t.dtype, t.device) for t in (*self.parameters(), *self.buffers())]

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModule:
        """An independent module in the same world; nothing is communicated or traced."""
        self.require_sharded("copy.deepcopy")
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        for kept in (self.world, self.config, self.units):
            memo[id(kept)] = kept
        slots = state.copied(self.slots, memo)
        fresh: dict[str, Any] = {"variants": {}, "accumulated": {}}  # torch copies no .grad either
        rest = {k: v for k, v in self.__dict__.items() if k not in ("slots", *fresh)}
        made.__dict__.update(copy.deepcopy(rest, memo), slots=slots, **fresh)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: without programs, which are traced again, and without the process group.

        Raises:
            StepError: an option cannot be pickled, or parameters are whole now.
        """
        self.require_sharded("pickling")
        for field in dataclasses.fields(self.config):
            state.check_picklable(field.name, getattr(self.config, field.name))
        slots = {fqn: state.without_data(slot) for fqn, slot in self.slots.items()}
        world = self.world.mesh if isinstance(self.world, C10dWorld) else self.world
        fresh: dict[str, Any] = {"variants": {}, "accumulated": {}, "_agreed": set()}
        return self.__dict__ | {"slots": slots, "world": world, **fresh}

    def __setstate__(self, found: dict[str, Any]) -> None:
        """Raises StepError if a process group was there when it was pickled, and none is now."""
        super().__setstate__(found)
        if isinstance(found["world"], DeviceMesh):
            if not dist.is_initialized():
                raise StepError(
                    "this ShardedModule was saved in a process group and none is initialised: call "
                    "torch.distributed.init_process_group first, with as many ranks. To load into "
                    "another number of ranks, save model.state_dict() with "
                    "torch.distributed.checkpoint."
                )
            self.world = world_over(found["world"], self.config, self.units)
        state.lay_out(list(self.slots.values()))

    def _warn_of_hooks(self) -> None:
        """Say once of each hook on the module tree that it runs while tracing only."""
        for number, what in state.traced_hooks(self.original).items():
            if number not in self._warned:
                self._warned.add(number)
                log.warning(
                    "fxshard: %s ran while tracing and does not run again: its tensor operations "
                    "are part of the program, its side effects are lost. Hooks on the module that "
                    "fxshard.compile returns run on every call.",
                    what,
                )

    # -- FSDP1's and FSDP2's setters and optimizer states (see docs/coming-from-fsdp.md) -----------

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Divide gradients by `factor` in the calls from now on, which are traced anew.

        None: by the number of ranks. (FSDP2's name for `Config.gradient_divide_factor`.)

        Raises:
            ConfigError: something else says how to reduce: an option, a hook, or a pipeline.
        """
        if self._comm_hook or self.config.passes is not None:
            what = "register_comm_hook" if self._comm_hook else "the option passes"
            raise ConfigError(
                f"set_gradient_divide_factor has no effect with {what}, which says how gradients "
                f"are reduced. Divide there."
            )
        self.config = dataclasses.replace(self.config, gradient_divide_factor=factor)
        self.variants.clear()

    def set_reshard_after_forward(
        self, reshard_after_forward: bool, recurse: bool = True, *, fqns: Sequence[str] = ()
    ) -> None:
        """Change `Config.reshard_after_forward` for the calls from now on, which are traced anew.

        Args:
            reshard_after_forward: False: units stay unsharded from forward to backward.
            recurse: False: only the root unit, as in FSDP2, where the root is the one called.
            fqns: only the units of these names, for FSDP2's call on a submodule.

        Raises:
            ConfigError: it is no bool; True with ``no_shard``; or `fqns` names what is no unit.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ConfigError(f"reshard_after_forward={reshard_after_forward!r}: expected a bool.")
        every = [unit.fqn for unit in self.units]
        if unknown := [fqn for fqn in fqns if fqn not in every]:
            raise ConfigError(
                f"set_reshard_after_forward: {unknown[0]!r} is no unit. Units are: "
                f"{', '.join(unit.name for unit in self.units[:8])}."
            )
        chosen = fqns or (every if recurse else [""])
        now = {u.fqn: reshard_after_forward if u.fqn in chosen else u.reshard for u in self.units}
        self.config = dataclasses.replace(self.config, reshard_after_forward=now)
        self.units = tuple(dataclasses.replace(u, reshard=now[u.fqn]) for u in self.units)
        self.variants.clear()

    def optim_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of `optimizer` by parameter name; sharded tensors are DTensors."""
        return state.optim_state_dict(self, optimizer)

    def full_optim_state_dict(
        self, optimizer: torch.optim.Optimizer, cpu_offload: bool = True, rank0_only: bool = True
    ) -> dict[str, Any]:
        """The same with whole tensors, as of the unsharded model; collective.

        Args:
            optimizer: of this module's parameters.
            cpu_offload: all tensors are on the CPU.
            rank0_only: other ranks than 0 get ``{}``.
        """
        return state.full_optim_state_dict(self, optimizer, cpu_offload, rank0_only)

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
                their namesakes of FSDP1. Of a whole tensor each rank takes its own rows.
            load_directly: also load it.

        Raises:
            CheckpointError: a parameter of `optimizer` is not in it.
        """
        made = state.optim_state_dict_to_load(self, optimizer, optim_state_dict)
        if load_directly:
            optimizer.load_state_dict(made)
        return made


class Unsharded:
    """What `ShardedModule.unshard` returns: to wait for, and to end by leaving a with block."""

    def __init__(self, module: ShardedModule) -> None:
        self._module = module

    def wait(self) -> None:
        """Nothing is left to wait for."""

    def __enter__(self) -> Unsharded:
        return self

    def __exit__(self, *exc: object) -> None:
        self._module.reshard()


def world_over(mesh: DeviceMesh, config: Config, units: tuple[Unit, ...]) -> C10dWorld:
    """The world of a mesh under a strategy; collective if units are resharded to smaller groups."""
    check_reshard(units, mesh.size(mesh.ndim - 1))
    sizes = [unit.reshard for unit in units if not isinstance(unit.reshard, bool)]
    return C10dWorld(mesh, sharded=config.strategy != "no_shard", reshard=sizes)


def _leaf_key(value: Any) -> Any:
    """Equal for leaves that one program serves; ``1``, ``1.0`` and ``True`` are not equal."""
    if isinstance(value, Tensor):
        kind = (value.dtype, value.device, value.requires_grad)
        return (tuple(value.shape), value.stride(), *kind)
    if isinstance(value, (float, complex)):
        return (type(value), repr(value))  # NaN equals itself, -0.0 is not 0.0
    return (type(value), value if isinstance(value, PLAIN) else id(value))


@dataclasses.dataclass
class _Call:
    """One call on its way through autograd."""

    module: ShardedModule
    variant: Variant
    params: int


class _Step(torch.autograd.Function):
    """One node in the user's autograd graph: the whole model.

    Saved values are a plain list on the context, handed over (and so dropped) by backward.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        batch = tensors[call.params :]
        with call.module.as_traced():
            outputs, saved = call.variant.executor.forward(
                call.module.arguments(call.variant, batch)
            )
        signature = call.variant.program.signature
        ctx.set_materialize_grads(False)
        where = signature.tensor_outputs
        plain = [k for k, i in enumerate(where) if i not in signature.differentiable]
        for k in plain:
            outputs[k] = outputs[k].detach()  # the same tensor may be a differentiable output too
        ctx.mark_non_differentiable(*(outputs[k] for k in plain))
        returned = {id(output) for output in outputs}
        # An output that is saved too must not keep its own autograd node alive.
        ctx.saved = [[t.detach() if id(t) in returned else t for t in rank] for rank in saved]
        ctx.call, ctx.batch = call, batch
        ctx.places = {position: k for k, position in enumerate(where)}
        ctx.versions = _versions(call, batch)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call: _Call = ctx.call
        call.module.require_sharded("backward")
        program = call.variant.program
        if ctx.saved is None:
            raise StepError(
                "backward was called twice on one forward: its saved activations are gone. Run "
                "forward again, or sum the losses and call backward once."
            )
        signature = program.signature
        for position, k in ctx.places.items():
            if grads[k] is not None and position not in signature.tangents:
                names = [signature.output_names[i] for i in signature.tangents]
                raise StepError(
                    f"a gradient arrived at output {signature.output_names[position]}, but the "
                    f"program was traced for a loss at {', '.join(names)} (the model's scalar "
                    f"outputs). Do not pass labels, so that the model returns no loss of its own, "
                    f"or call backward on its loss."
                )
        for (what, before), (_, now) in zip(ctx.versions, _versions(call, ctx.batch), strict=True):
            if before != now:
                raise StepError(
                    f"{what!r} was changed in place between a forward and its backward, which "
                    f"reads it. Call backward first (before optimizer.step()), or change a copy."
                )
        tangents = {
            meta.get(node).fqn: _laid_out(grads[ctx.places[int(meta.get(node).fqn or 0)]], node)
            for node in call.variant.executor.backward_inputs
            if meta.get(node).role == "tangent"
        }
        saved, ctx.saved = ctx.saved, None
        batch, ctx.batch = ctx.batch, None
        call.module.require_accumulated(program)
        args = _backward_arguments(call, batch, saved, tangents)
        if program.sync:
            for fqn in program.accumulated:  # reduced by this backward, which frees them
                call.module.accumulated.pop(fqn, None)
        with call.module.as_traced():
            results = call.variant.executor.backward(args)
        return (None, *_gradients(call, results, len(batch)))


def _versions(call: _Call, batch: Sequence[Tensor]) -> list[tuple[str, tuple[int, ...]]]:
    """How often each tensor of the caller's that backward reads has been changed in place."""
    program, found = call.variant.program, []
    for node in call.variant.read_again:
        role, name = meta.get(node).role, meta.get(node).fqn or ""
        tensors = [call.module._value(node, program, batch, 0)]
        if role == "shard":  # operators on a DTensor count on it, not on what it is made of
            tensors.append(call.module.slots[name].tensor)
        what = program.signature.input_names[int(name)] if role == "input" else name
        found.append((what, tuple(map(compat.version, tensors))))
    return found


def _laid_out(grad: Tensor | None, node: fx.Node) -> Tensor:
    """The gradient of an output in the strides that backward was traced for; None is zeros."""
    like = node.meta["val"]
    if grad is not None and grad.stride() == like.stride():
        return grad
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return made.zero_() if grad is None else made.copy_(grad)


def _backward_arguments(
    call: _Call,
    batch: Sequence[Tensor],
    saved: list[list[Tensor]],
    tangents: dict[str | None, Tensor],
) -> list[list[Tensor]]:
    args: list[list[Tensor]] = []
    for rank, values in enumerate(saved):
        rest = iter(values)
        row: list[Tensor] = []
        for node in call.variant.executor.backward_inputs:
            tag = meta.get(node)
            if tag.role == "tangent":
                row.append(tangents[tag.fqn])
            elif tag.role in (*meta.HELD, "accumulated"):
                row.append(call.module._value(node, call.variant.program, batch, rank))
            else:
                row.append(next(rest))
        values.clear()
        args.append(row)
    return args


def _gradients(call: _Call, results: list[list[Tensor]], inputs: int) -> list[Tensor | None]:
    """Gradients in the order of `_Step.forward`'s tensors."""
    program = call.variant.program
    names = [result.name for result in program.results if result.kind != "output"]
    per_rank = [dict(zip(names, grads, strict=True)) for grads in results]
    results.clear()
    for result in program.results:
        if result.kind == "accumulated":
            fresh = [grads.pop(result.name) for grads in per_rank]
            sums = call.module.accumulated.setdefault(result.name, fresh)
            if sums is not fresh:  # another forward was run in front of this backward
                for total, grad in zip(sums, fresh, strict=True):
                    total.add_(grad)
    out: list[Tensor | None] = []
    for fqn in _differentiated(program):
        shards = [grads.pop(fqn) for grads in per_rank if fqn in grads]
        if not shards:
            out.append(None)  # accumulated, not reduced
        elif fqn in call.module.wholes:
            out.append(shards[0])
        else:
            slot, world = call.module.slots[fqn], call.module.world
            out.append(as_gradient(slot, shards[: world.size], world))
    for k in range(inputs):
        position = program.signature.tensor_inputs[k]
        out.append(per_rank[0].pop(f"input[{position}]", None))
    return out


def _differentiated(program: Program) -> list[str]:
    """FQNs of the parameters that the program makes gradients of, reduced or accumulated."""
    known = program.params.keys() | program.wholes.keys()
    names = [r.name for r in program.results if r.kind != "output" and r.name in known]
    return list(dict.fromkeys([*names, *sorted(program.accumulated)]))
