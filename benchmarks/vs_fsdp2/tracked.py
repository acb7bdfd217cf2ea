"""FSDP2's side: FSDPMemTracker on `fully_shard`, storage by storage."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from benchmarks.vs_fsdp2.models import CASES, WORLD, Case, LossOutside, training
from benchmarks.vs_fsdp2.things import Row, Rows, Thing, unit_of
from fxshard._torch import process_groups
from fxshard.memory.category import CATEGORIES

CPU = torch.device("cpu")


class Watched(FSDPMemTracker):
    """FSDPMemTracker that lists, in each of its snapshots, the storages the figures are made of.

    What a storage is for it reads from FSDP2's own objects; all figures stay the tracker's.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.units = {
            fqn: group
            for fqn, module in model.named_modules()
            if isinstance(module, FSDPModule)
            and (group := module._get_fsdp_state()._fsdp_param_group)
        }
        self.numbers: Any = WeakIdKeyDictionary()  # storage -> number
        self.modules: dict[int, str] = {}  # number -> FQN of the module in which it was made
        self.sent: dict[int, str] = {}  # number -> unit
        self.flats: dict[int, str] = {}
        self.gradients: dict[int, str] = {}
        self.saved: set[int] = set()
        self.unit = ""  # whose post-backward runs, or ran last
        self.reducing = False
        self.op = ""

    def _number(self, storage: Any) -> int:
        if storage not in self.numbers:
            self.numbers[storage] = len(self.modules)
            self.modules[self.numbers[storage]] = self._module()
        number: int = self.numbers[storage]
        return number

    def _module(self) -> str:
        """FQN of the innermost module that runs."""
        inside = [parent for parent in self._mod_tracker.parents if parent != "Global"]
        return max(inside, key=len, default="").partition(".")[2]

    def pack(self, tensor: Tensor) -> Tensor:
        """For `saved_tensors_hooks`."""
        self.saved.add(self._number(tensor.untyped_storage()))
        with _disable_current_modes():
            return tensor.detach()

    def _fsdp_param_group_post_backward(self, fsdp_mod: Any, original: Any) -> Any:
        (fqn,) = (fqn for fqn, group in self.units.items() if fsdp_mod in group.modules)

        @functools.wraps(original)
        def marked(*args: Any, **kwargs: Any) -> None:
            self.unit, self.reducing = fqn, True
            original(*args, **kwargs)
            self.reducing = False

        return super()._fsdp_param_group_post_backward(fsdp_mod, marked)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.op = str(func).removesuffix(".default")
        if str(func).startswith("c10d._reduce_scatter_base_"):
            self.sent[self._number(args[1].untyped_storage())] = self.unit
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _track(self, reftype: Any, t: Tensor) -> None:
        if not isinstance(t, DTensor):
            self._number(t.untyped_storage())
        super()._track(reftype, t)

    def _listed(self) -> tuple[Thing, ...]:
        """What is alive now."""
        kinds: dict[int, tuple[str, str]] = {}
        for fqn, group in self.units.items():
            if group._all_gather_result is not None:
                flat = self._number(group._all_gather_result.all_gather_output.untyped_storage())
                self.flats[flat] = fqn
                kinds[flat] = ("flat", fqn)
            for param in group.fsdp_params:
                shard, grad = param._sharded_param_data, param.sharded_param.grad
                kinds[self._number(shard.untyped_storage())] = ("shard", fqn)
                for copy in param.all_gather_outputs:
                    kinds[self._number(copy.untyped_storage())] = ("copy", fqn)
                if grad is not None:
                    kinds[self._number(grad._local_tensor.untyped_storage())] = ("reduced", fqn)
                whole = getattr(param, "_unsharded_param", None)
                if whole is not None and whole.grad is not None:
                    gradient = self._number(whole.grad.untyped_storage())
                    self.gradients[gradient] = fqn
                    kinds[gradient] = ("gradient", fqn)
        held = None if self.reducing else _loop_variable()
        holds = None if held is None else self._number(held.untyped_storage())
        found = []
        for storage, (info, _) in self._WINFO.items():
            if not info.mem_consumed:
                continue
            number = self._number(storage)
            category = info.reftype.value
            kind, unit = kinds.get(number, ("", ""))
            if not kind and number in self.flats:
                kind, unit = "kept flat", self.flats[number]
            elif not kind and number in self.sent:
                kind, unit = "sent", self.sent[number]
            elif not kind and number == holds:
                kind, unit = "held", self.gradients[number]
            elif not kind and category in ("Activation", "Temp", "Unsharded Grad"):
                kind, unit = "values", unit_of(self.modules[number], self.units)
            elif not kind:
                kind = category
            found.append(Thing(kind, unit, info.mem_consumed, category, number))
        return tuple(found)

    def get_tracker_snapshot(self, type: str = "current") -> Any:
        if type == "current" and CPU in self._curr_mem_snap:
            self._list()
        return super().get_tracker_snapshot(type)

    def _update_peak_stats(self, peak_state: Any) -> None:
        self._list()
        super()._update_peak_stats(peak_state)

    def _list(self) -> None:
        self._curr_mem_snap[CPU]["things"] = self._listed()
        self._curr_mem_snap[CPU]["at"] = (self.op, unit_of(self._module(), self.units))

    def rows(self) -> Rows:
        """Every state of every unit; where a unit has been in it more than once, the last."""
        found: Rows = {}
        for stats in self.memory_tracking.values():
            for state, snapshots in stats.snapshots.items():
                snap = {
                    getattr(key, "value", key): value for key, value in snapshots[-1][CPU].items()
                }
                things = tuple(self._finished(thing) for thing in snap["things"])
                row = Row(things, at=snap["at"])
                for category in CATEGORIES:
                    listed = row.figures().get(category.value, 0)
                    assert listed == snap.get(category.value, 0), (
                        stats.mod_fqn,
                        state,
                        category,
                        listed,
                        snap.get(category.value, 0),
                    )
                found[stats.mod_fqn.partition(".")[2], state.value] = row
        return found

    def _finished(self, thing: Thing) -> Thing:
        """A gradient is one from its birth on, not from when it has arrived at its parameter."""
        if thing.kind == "values" and thing.number in self.gradients:
            thing = dataclasses.replace(thing, kind="gradient", unit=self.gradients[thing.number])
        return dataclasses.replace(thing, saved=thing.number in self.saved)


def _loop_variable() -> Tensor | None:
    """The gradient that the tracker's own post-backward hook still has a name for, if it runs.

    (torch/distributed/_tools/fsdp2_mem_tracker.py, ``_fsdp_param_group_post_backward``: its loop
    variable ``unsharded_grad``; it lives until the hook returns, after the last snapshot.)
    """
    frame = inspect.currentframe()
    while frame is not None and "unsharded_grad" not in frame.f_code.co_varnames:
        frame = frame.f_back
    grad = None if frame is None else frame.f_locals.get("unsharded_grad")
    return grad if isinstance(grad, Tensor) else None


def fully_sharded(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """The case under FSDP2, with its optimizer and a training step; in a process group."""
    model, tokens = case.model()
    options: dict[str, Any] = {"mp_policy": case.policy} if case.policy else {}
    for layer in model.get_submodule(case.units.rpartition(".")[0]).children():
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model, *training(model, tokens)


def fsdp2_rows(case: Case) -> tuple[Rows, int]:
    """The tracker's table of the second step, and its peak in bytes.

    The step runs twice: what autograd saves is seen by `saved_tensors_hooks` in a run of its own,
    which leaves the figures alone. Storages have the same numbers in both.
    """
    with process_groups.fake_process_group(0, WORLD):
        first = _tracked(case, hooked=True)
    with process_groups.fake_process_group(0, WORLD):
        tracker = _tracked(case, hooked=False)
        assert tracker.modules == first.modules
        tracker.saved = first.saved
        peak: int = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
        return tracker.rows(), peak


def _tracked(case: Case, *, hooked: bool) -> Watched:
    model, optimizer, step = fully_sharded(case)
    step()
    tracker = Watched(model, optimizer)
    tracker.track_inputs((step.tokens,))  # type: ignore[attr-defined]
    hooks = torch.autograd.graph.saved_tensors_hooks(tracker.pack, lambda tensor: tensor)
    with tracker, hooks if hooked else contextlib.nullcontext():
        step()
    return tracker


def faults() -> dict[str, int | bool]:
    """The tracker's known faults, each shown by a run of its own."""
    case = CASES["dense"]
    found: dict[str, int | bool] = {}
    with process_groups.fake_process_group(0, WORLD):
        model, optimizer, step = fully_sharded(case)
        with FSDPMemTracker(model, optimizer) as tracker:
            step()
            found["modules in its table"] = len(tracker.memory_tracking)
            try:
                step()
                found["a second step raises"] = False
            except NotImplementedError:
                found["a second step raises"] = True
    with process_groups.fake_process_group(0, WORLD):
        outside = dataclasses.replace(case, build=functools.partial(LossOutside, vocab=4096))
        model, tokens = outside.model()
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        with FSDPMemTracker(model) as tracker:
            logits = model(tokens).flatten(0, 1)
            (F.cross_entropy(logits, tokens.flatten()) + logits.softmax(-1).exp().mean()).backward()
        snapshots = [s for m in tracker.memory_tracking.values() for s in m.snapshots.values()]
        found["peak with the loss outside"] = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
        found["largest figure in its table"] = max(
            s[CPU]["Total"] for each in snapshots for s in each
        )
    return found
