"""Dry runs: the user's own steps on tensors without data, and the memory that they take."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxshard._torch import collectives, data_parallel, export, fully_sharded, remembered_device
from fxshard._torch.dynamo import left_where_compiled
from fxshard._torch.fake_tensors import swaps_of_fakes
from fxshard._torch.gpu_inductor import Gpu
from fxshard._torch.process_groups import fake_process_group
from fxshard.arguments import check_count
from fxshard.bytesize import parse_budget
from fxshard.capture import refusals
from fxshard.capture.cuda import operators
from fxshard.capture.cuda.operators import CudaFakeMode
from fxshard.capture.strides import KernelFakeMode
from fxshard.dryrun import accelerator, compiled, device, kernels, surroundings
from fxshard.dryrun.accelerator import Placement
from fxshard.dryrun.addresses import Addresses
from fxshard.dryrun.gpus import DEFAULT, GPUS_PER_NODE, GpuModel, gpu
from fxshard.dryrun.position import Position, followed
from fxshard.dryrun.recorder import TapeRecorder, resizes_seen
from fxshard.dryrun.steps import Enough, Steps
from fxshard.dryrun.streams import Streams
from fxshard.dryrun.tape import Tape
from fxshard.dryrun.values import Values, functions_of_unknown
from fxshard.errors import CaptureError, ConfigError
from fxshard.host import collector
from fxshard.ir.units import Unit
from fxshard.memory import states
from fxshard.memory.category import Category
from fxshard.memory.cuda.reserved import DeviceMemory
from fxshard.memory.cuda.settings import AllocatorSettings
from fxshard.memory.kernels import KernelTemporary
from fxshard.memory.report import Beside, MemoryReport

OF_FXSHARD = (
    "a dry run follows torch's own code. What programs of fxshard take is known without a run: "
    "call fxshard.plan(model, batch, world_size=..., device='cuda').memory outside of the block, "
    "or use fxshard report."
)
PARAMETERS = (Category.SHARDED_PARAM, Category.SHARDED_GRAD)


@dataclasses.dataclass(frozen=True)
class _Taken:
    """Memory that a kernel takes for itself, or None if that is not known."""

    point: int
    bytes: int | None
    why: str


class DryRun:
    """What `dry_run` gives: marks of steps, and what the steps took.

    Attributes:
        world_size, rank: of the process group that the run believes to be in.
        device: "cpu" or "cuda".
    """

    def __init__(
        self, world_size: int, model: GpuModel | None, rank: int, steps: int | None
    ) -> None:
        self.world_size: int = world_size
        self.rank: int = rank
        self.device = "cpu" if model is None else "cuda"
        self._gpu = model
        self._tape = Tape()
        self._position = Position(self._tape)
        self._streams = Streams(self._position)
        self._placement = Placement()
        self._taken: list[_Taken] = []
        kind = KernelFakeMode if model is None else CudaFakeMode
        self._fakes = kind(allow_non_fake_inputs=True)
        self._recorder = TapeRecorder(
            self._tape,
            self._position,
            self._fakes,
            None if model is None else self._placement.placed,
        )
        if model is not None:
            self._recorder.inside = self._inside
        self._placement.recorder = self._recorder
        self._marks = None if steps is None else Steps(self.step, steps)

    # -- for the user ------------------------------------------------------------------------------

    def step(self) -> None:
        """A step is over: call it after the optimizer's step and zero_grad.

        Before the first forward it says that the step begins now; without that, the first step
        begins with the first forward.
        """
        for root in self._position.roots:
            self._mark_gradients(root.parameters())
        self._position.end_step()
        if self._marks is not None and self._recorder.position.tape.steps():
            self._marks.marked()

    @property
    def steps(self) -> int:
        """How many steps are over."""
        return len(self._tape.steps())

    @property
    def memory(self) -> MemoryReport:
        """The bytes of the first and of the last step that is over, as `Plan.memory`.

        Raises:
            ConfigError: no step is over.
        """
        if not self.steps:
            raise ConfigError(
                "no step of this dry run is over: call step() after each optimizer step, inside of "
                "the block. Where no module with parameters is called, call it before, too."
            )
        tape = self._tape
        first, steady = tape.ledger(0), tape.ledger(-1)
        calls = [tuple(map(tuple, each)) for each in (tape.calls[1], tape.calls[self.steps])]
        optimizers = self._position.optimizers
        temporaries = tuple(self._temporaries(self.steps - 1))
        device_memory = None if self._gpu is None else self.device_memory()
        return MemoryReport(
            first,
            steady,
            calls[1],
            tuple(self._units()),
            self.world_size,
            any("backward" in phase.name for phase in steady.phases),
            any(each.host and each.category in PARAMETERS for each in steady.ranges),
            type(optimizers[0]).__name__ if optimizers else None,
            self.device,
            beside=Beside(temporaries, (), device_memory, self._replayed),
            first_calls=calls[0],
        )

    def device_memory(
        self,
        settings: AllocatorSettings | str | None = None,
        *,
        capacity: int | str | None = None,
    ) -> DeviceMemory:
        """What CUDA's caching allocator makes of the run, from its first tensor on.

        Args:
            settings: of the allocator, or text such as "expandable_segments:True"; None: those of
                the environment's PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF.
            capacity: of the device without what is outside of the allocator, bytes or text such as
                "79GiB"; None: no limit.

        Returns:
            `requested`, `allocated`, `active` and `reserved` peaks in bytes; by phase and stream.
            If the run calls ``record_stream``, as FSDP1 does, all but `allocated` depend on how far
            the host is ahead of the GPU: they are the most, and `keeping_up` has the least.

        Raises:
            ConfigError: the run is for the CPU, or settings that torch would refuse.
        """
        if self._gpu is None:
            raise ConfigError("this dry run is for the CPU, where no allocator keeps memory.")
        if isinstance(settings, str):
            settings = AllocatorSettings.from_text(settings)
        return device.device_memory(
            self._tape,
            capability=self._gpu.target.capability,
            settings=settings,
            capacity=None if capacity is None else parse_budget(capacity),
            unknown=tuple(row for row in self._temporaries(-1) if row.bytes is None),
        )

    def _replayed(self, settings: AllocatorSettings | None, capacity: int | None) -> DeviceMemory:
        return self.device_memory(settings, capacity=capacity)

    def _units(self) -> Iterator[Unit]:
        for root in self._position.roots[:1]:
            for i, (module, reshard) in enumerate(fully_sharded.units_of(root)):
                name = self._position.name_of(module)
                yield Unit(i, name, type(module).__name__, (), reshard=reshard)

    def _temporaries(self, step: int) -> Iterator[KernelTemporary]:
        """What kernels took in a step, or -1: in the last one."""
        steps = self._tape.steps()
        if not steps:
            return
        first, last = steps[step]
        places: dict[int, tuple[str, int]] = {}
        for mark, stop in self._tape.phases(first, last):
            places |= {p: (mark.phase, p - mark.point) for p in range(mark.point, stop)}
        for each in self._taken:
            if each.point in places:
                moment = self._tape.moments[each.point]
                where = places[each.point]
                yield KernelTemporary(
                    *where, moment.op, moment.module, each.bytes, each.why, "cuda"
                )

    # -- what a storage is held for ----------------------------------------------------------------

    def _began(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The outermost module is called."""
        mark, local = self._recorder.mark, fully_sharded.local_of
        mark([local(p) for p in module.parameters()], Category.SHARDED_PARAM)
        mark([local(b) for b in module.buffers()], Category.BUFFER)
        mark((args, kwargs), Category.INPUTS)
        for name, param in module.named_parameters():
            self._recorder.owned(local(param), self._position.fqn(module, name))

    def _mark_gradients(self, params: Iterable[Tensor]) -> None:
        grads = [fully_sharded.local_of(p.grad) for p in params if p.grad is not None]
        self._recorder.mark(grads, Category.SHARDED_GRAD)

    def _stepping(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            self._mark_gradients(group["params"])

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        state = [
            fully_sharded.local_of(leaf)
            for entries in optimizer.state.values()
            for leaf in entries.values()
            if isinstance(leaf, Tensor)
        ]
        self._recorder.mark(state, Category.OPT_STATE)
        if self._marks is not None:
            self._marks.stepped(optimizer)

    def _inside(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """Bytes that a kernel takes while it runs."""
        size, why = kernels.taken(func, args, kwargs, result)
        if size != 0:
            self._taken.append(_Taken(self._tape.last, size, why))
        return size or 0

    @contextlib.contextmanager
    def _in_reducer(self) -> Iterator[None]:
        """DDP's reducer makes its buckets, or asks what the other ranks have."""
        self._recorder.reducing = self._placement.reducing = True
        try:
            with self._position.communicating(Category.REDUCE_SCATTER, "(buckets)"):
                yield
        finally:
            self._recorder.reducing = self._placement.reducing = False

    # -- everything that has to be in place --------------------------------------------------------

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(collector.off())
            stack.enter_context(surroundings.addresses_unremarked())
            stack.enter_context(fake_process_group(self.rank, self.world_size))
            stack.enter_context(surroundings.group_taken_for_the_users())
            stack.enter_context(surroundings.loaders_in_this_process())
            stack.enter_context(refusals.nothing_captured(OF_FXSHARD))
            swap = (torch.utils, "swap_tensors", swaps_of_fakes())
            stack.enter_context(fully_sharded.replaced([swap]))
            stack.enter_context(remembered_device.foreach_takes_fakes())
            stack.enter_context(fully_sharded.meshes_with_values())
            stack.enter_context(fully_sharded.propagation_unseen())
            stack.enter_context(collectives.called_eagerly(self._fakes))
            stack.enter_context(resizes_seen(self._recorder))
            stack.enter_context(fully_sharded.watched(_Units(self._position, self._recorder)))
            stack.enter_context(data_parallel.reducers_watched(self._in_reducer))
            hooks = followed(self._position, self._began, self._stepping, self._stepped)
            stack.enter_context(hooks)
            if self._gpu is None:
                stack.enter_context(surroundings.compile_refused())
            else:
                self._with_gpu(stack, self._gpu)
            stack.enter_context(self._fakes)
            stack.enter_context(self._recorder)
            if self._gpu is not None:
                stack.enter_context(remembered_device.in_backward_too(self._placement))
                stack.enter_context(self._placement)
            addresses = stack.enter_context(Addresses(self._recorder.knows))
            stack.enter_context(addresses.of_storages())
            stack.enter_context(Values(self._recorder.has_values))
            stack.enter_context(functions_of_unknown())
            if self._marks is None:
                yield
                return
            stack.enter_context(self._marks.optimizers_seen())
            self._position.before_forward = self._marks.forward
            with contextlib.suppress(Enough):
                yield
                self._marks.end()

    def _with_gpu(self, stack: contextlib.ExitStack, model: GpuModel) -> None:
        target = model.target
        gpu = Gpu(target.capability, target.multiprocessors, model.memory)
        compilations = stack.enter_context(compiled.compiled_as_on_gpu(gpu, compiled.CUDA))
        self._position.compiled_line = compilations.line
        stack.enter_context(left_where_compiled(Placement, Addresses, Values))
        stack.enter_context(fully_sharded.device_handle(self._streams))
        stack.enter_context(operators.substituted(target))
        stack.enter_context(export.aten_kernels(dict(accelerator.KERNELS)))
        stack.enter_context(remembered_device.remembered(self._placement.is_there))
        stack.enter_context(
            accelerator.present(
                self._placement,
                self._streams,
                capability=target.capability,
                name=model.name,
                memory=model.memory,
                count=min(self.world_size, GPUS_PER_NODE),
                allocated=self._recorder.bytes_on_device,
            )
        )


class _Units:
    """Notes what FSDP2's units do (`fully_sharded.Listener`)."""

    def __init__(self, position: Position, recorder: TapeRecorder) -> None:
        self._position, self._recorder = position, recorder

    def gathering(self, module: nn.Module) -> AbstractContextManager[None]:
        return self._position.communicating(Category.ALL_GATHER, module)

    def copying_out(self, module: nn.Module) -> AbstractContextManager[None]:
        return self._position.communicating(Category.UNSHARDED_PARAM, module)

    def reducing(self, module: nn.Module, grads: list[Tensor]) -> AbstractContextManager[None]:
        self._recorder.mark(list(grads), Category.UNSHARDED_GRAD)
        return self._position.communicating(Category.REDUCE_SCATTER, module)

    def unsharded(self, module: nn.Module) -> None:
        self._recorder.note(states.WAIT, self._position.name_of(module))

    def resharded(self, module: nn.Module) -> None:
        self._recorder.note(states.FREE, self._position.name_of(module))


@contextlib.contextmanager
def dry_run(
    *, world_size: int, device: str = DEFAULT, rank: int = 0, steps: int | None = None
) -> Iterator[DryRun]:
    """Run the block's own training code on tensors without data, and record the memory of one rank.

    Inside of the block a process group of `world_size` ranks is there, and a GPU. Build the model
    (on the meta device, on the CPU or on the GPU), shard it with torch's `fully_shard`, or not at
    all, and train it as always; call `DryRun.step` after each optimizer step. Nothing is computed:
    tensors have no values, save for integers and constants of up to 16 MiB that are made of
    nothing or of each other. What was on the GPU would be gone with the block.

    Args:
        world_size: ranks of the process group.
        device: "a100", "h100", "h200" or "b200"; "cuda" for "h100"; "cpu": operators of the CPU.
        rank: which of the ranks the block is.
        steps: for loops that do not call `DryRun.step`, such as a Trainer's: a step is over where
            a forward begins after every optimizer has stepped, and after so many the block is left
            there; None: the block is run to its end, and marks its steps.

    Returns:
        In ``with ... as run``: `DryRun`, whose `memory` and `device_memory` may be asked for
        inside of the block and after it.

    Raises:
        ConfigError: no such device or rank, or a process group is initialised already.
        CaptureError: in the block, where something depends on values, or an operator says nothing
            about the tensors that it makes; names the line.
    """
    check_count("world_size", world_size)
    if steps is not None:
        check_count("steps", steps)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank!r}: expected a rank below world_size={world_size}.")
    model = gpu(device)
    if dist.is_available() and dist.is_initialized():
        raise ConfigError(
            "dry_run has a process group of its own, but one is initialised in this process: call "
            "init_process_group inside of the block, where it changes nothing, or leave it out."
        )
    run = DryRun(world_size, model, rank, steps)
    _active.append(run)
    try:
        with run._running():
            yield run
    except RuntimeError as error:
        if _NO_CUDA not in str(error):
            raise
        raise CaptureError(
            f"compiled code makes a tensor on the GPU that a dry run cannot follow, as tensor "
            f"parallelism in torch.compile does (DTensor.from_local){refusals.line_of(error)}\n"
            f"Leave torch.compile out of this dry run, or tensor parallelism."
        ) from error
    finally:
        _active.remove(run)


_NO_CUDA = "PyTorch is not linked with support for cuda"  # torch's words
_active: list[DryRun] = []


def is_dry_run() -> bool:
    """Whether a `dry_run` is active, in which nothing is computed and tensors have no values.

    Returns:
        True inside of its block.
    """
    return bool(_active)
