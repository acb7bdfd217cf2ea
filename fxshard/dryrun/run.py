"""DryRun: the user's own steps on tensors without data, and the memory that they take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fxshard._torch import fully_sharded, remembered_device
from fxshard._torch.process_groups import fake_process_group
from fxshard.capture.cuda import operators
from fxshard.capture.cuda.operators import CudaFakeMode
from fxshard.capture.strides import KernelFakeMode
from fxshard.dryrun import accelerator
from fxshard.dryrun.accelerator import Placement
from fxshard.dryrun.streams import Streams
from fxshard.dryrun.position import Position, followed
from fxshard.dryrun.recorder import Recorder
from fxshard.dryrun.tape import Tape
from fxshard.host import collector
from fxshard.memory.category import Category


class DryRun:
    def __init__(self, world_size: int, device: str, rank: int) -> None:
        self.world_size, self.device, self.rank = world_size, device, rank
        self.tape = Tape()
        self.position = Position(self.tape)
        self.on_gpu = device != "cpu"
        self.fakes = (CudaFakeMode if self.on_gpu else KernelFakeMode)(allow_non_fake_inputs=True)
        self.streams = Streams(self.position)
        self.placement = Placement()
        self.recorder = Recorder(
            self.tape,
            self.position,
            *([self.placement.placed] if self.on_gpu else []),
            fakes=self.fakes,
        )
        self.placement.recorder = self.recorder

    def step(self) -> None:
        self._find_gradients()
        self.tape.end_step()
        self.position.end_step()

    # -- what a storage is held for ------------------------------------------------------------------

    def began(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The outermost module is called."""
        params = [fully_sharded.local_of(p) for p in module.parameters()]
        self.recorder.mark(params, Category.SHARDED_PARAM)
        self.recorder.mark(list(module.buffers()), Category.BUFFER)
        self.recorder.mark((args, kwargs), Category.INPUTS)

    def _find_gradients(self) -> None:
        for root in self.position.roots:
            self._mark_gradients(root.parameters())

    def _mark_gradients(self, params: Any) -> None:
        grads = [fully_sharded.local_of(p.grad) for p in params if p.grad is not None]
        self.recorder.mark(grads, Category.SHARDED_GRAD)

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            self._mark_gradients(group["params"])

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        state = [
            fully_sharded.local_of(leaf)
            for entries in optimizer.state.values()
            for leaf in entries.values()
            if isinstance(leaf, Tensor)
        ]
        self.recorder.mark(state, Category.OPT_STATE)

    # -- what FSDP2 does -------------------------------------------------------------------------

    def gathering(self, module: nn.Module) -> Any:
        return self.position.communicating(Category.ALL_GATHER, self.position.name_of(module))

    def copying_out(self, module: nn.Module) -> Any:
        return self.position.communicating(Category.UNSHARDED_PARAM, self.position.name_of(module))

    def reducing(self, module: nn.Module, grads: list[Tensor]) -> Any:
        self.recorder.mark(grads, Category.UNSHARDED_GRAD)
        return self.position.communicating(Category.REDUCE_SCATTER, self.position.name_of(module))

    def unsharded(self, module: nn.Module) -> None:
        self.recorder.note("fxshard.wait", self.position.name_of(module))

    def resharded(self, module: nn.Module) -> None:
        self.recorder.note("fxshard.free", self.position.name_of(module))


@contextlib.contextmanager
def dry_run(*, world_size: int, device: str = "cpu", rank: int = 0) -> Iterator[DryRun]:
    run = DryRun(world_size, device, rank)
    with contextlib.ExitStack() as stack:
        stack.enter_context(collector.paused())
        stack.enter_context(fake_process_group(rank, world_size))
        stack.enter_context(fully_sharded.meshes_are_real())
        stack.enter_context(resizes_seen(run.recorder))
        stack.enter_context(fully_sharded.watched(run))
        stack.enter_context(followed(run.position, run.began, run.stepping, run.stepped))
        if run.on_gpu:
            stack.enter_context(fully_sharded.device_handle(run.streams))
            stack.enter_context(operators.substituted())
            stack.enter_context(remembered_device.remembered(run.placement.is_there))
            stack.enter_context(
                accelerator.present(
                    run.placement, run.streams, capability=(9, 0), name="NVIDIA H100 80GB HBM3",
                    memory=80 << 30, count=8, allocated=lambda: 0, peak=lambda: 0,
                )
            )
        stack.enter_context(run.fakes)
        stack.enter_context(run.recorder)
        if run.on_gpu:
            stack.enter_context(remembered_device.in_backward_too(run.placement))
            stack.enter_context(run.placement)
        yield run


@contextlib.contextmanager
def resizes_seen(recorder: Recorder) -> Iterator[None]:
    """Storages that are resized without an operator, as FSDP does to free what it has gathered."""
    plain = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        done = plain(storage, size)
        recorder.resized(storage)
        return done

    with fully_sharded.replaced([(torch.UntypedStorage, "resize_", resize)]):
        yield
