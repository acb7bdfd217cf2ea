"""A call of the user's model on flat tensors: what is traced, and what is noted of each run."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import fx, nn

from fxshard._torch import graphs, trees
from fxshard._torch import sizes as torch_sizes
from fxshard._torch.storages import storage_id
from fxshard.capture import (
    attributes,
    batch_norm,
    bytecode,
    hf,
    modules,
    placed,
    precision,
    provenance,
    rng,
    shapes,
)
from fxshard.capture.alike import Alike
from fxshard.capture.data_sizes import Told
from fxshard.capture.held import give_attributes, own_attributes
from fxshard.errors import CaptureError
from fxshard.ir.domain import Symbols
from fxshard.ir.extensions import Extension
from fxshard.ir.program import input_name, path_name
from fxshard.ir.tensor_parallel import Placed
from fxshard.ir.units import Param, Unit
from fxshard.ir.whole import Whole

T = TypeVar("T")

aten: Any = torch.ops.aten

# What may stand in a call or a result beside tensors: a constant of the program.
PLAIN = (
    *(bool, int, float, complex, str, bytes, types.NoneType, enum.Enum, type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(types.FunctionType, types.BuiltinFunctionType),
)


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be captured: see `fxshard.capture.trace.capture`."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    units: tuple[Unit, ...]
    world_size: int
    training: bool
    device: torch.device | None
    computes_on: torch.device
    for_cuda: bool
    symbols: Symbols
    every_tangent: bool
    tangents: tuple[int, ...] | None = None
    data_sizes: Told = None
    whole: Whole | None = None

    @functools.cached_property
    def _paths(self) -> tuple[list[tuple[Any, Any]], trees.TreeSpec]:
        return trees.tree_flatten_with_path((self.args, self.kwargs))

    @property
    def in_spec(self) -> trees.TreeSpec:
        """Tree of ``(args, kwargs)``."""
        return self._paths[1]

    @functools.cached_property
    def leaves(self) -> list[Any]:
        """``(args, kwargs)``, flat."""
        return [leaf for _, leaf in self._paths[0]]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Of the leaves."""
        return tuple(input_name(path) for path, _ in self._paths[0])

    @functools.cached_property
    def positions(self) -> tuple[int, ...]:
        """The leaves that are tensors."""
        return tuple(i for i, v in enumerate(self.leaves) if isinstance(v, torch.Tensor))

    @functools.cached_property
    def extended(self) -> dict[int, Extension]:
        """By identity, parameters whose unsharded form is a tensor subclass."""
        said = self._of_params(lambda param: param.extension)
        return {number: extension for number, extension in said.items() if extension.form.inner}

    @functools.cached_property
    def placed(self) -> dict[int, Placed]:
        """By identity, parameters that are DTensors of tensor parallelism."""
        return self._of_params(lambda param: param.placed)

    def _of_params(self, said: Callable[[Param], T | None]) -> dict[int, T]:
        """By identity of the parameter, what is said of it."""
        named = dict(self.model.named_parameters(remove_duplicate=False))
        params = (param for unit in self.units for param in unit.params)
        return {id(named[param.fqn]): what for param in params if (what := said(param)) is not None}

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Where the trace sees a tensor: what is on the meta device is to be where it computes."""
        return self.computes_on if tensor.device.type == "meta" else tensor.device

    @property
    def emulates_cuda(self) -> bool:
        """CPU tensors take the place of CUDA's."""
        return self.for_cuda and self.computes_on.type != "cuda"


@dataclasses.dataclass(frozen=True)
class Returned:
    """What the model returned, but for the tensors themselves.

    Attributes:
        spec: tree of it.
        names: of its leaves.
        constants: per leaf, the value of what is not computed, as a tuple; else None.
        differentiable: leaves that need a gradient.
        tangents: leaves that backward starts from.
        repeats: leaves that are another one, and which.
        replaced: buffers that forward has replaced, and if their new values need a gradient.
        placed: leaves that are DTensors, and where they are.
    """

    spec: trees.TreeSpec
    names: tuple[str, ...]
    constants: tuple[tuple[Any] | None, ...]
    differentiable: tuple[int, ...]
    tangents: tuple[int, ...]
    repeats: tuple[tuple[int, int], ...]
    replaced: dict[str, bool]
    placed: tuple[tuple[int, Placed], ...] = ()


class FlatCall(nn.Module):
    """Calls the user's model on flat tensors; returns flat tensors, then new values of buffers.

    A buffer that forward replaces by another tensor (``self.seen = self.seen + 1``) is an output
    too, so that it can be written back as one that is changed in place is.

    Each output passes an ``_unsafe_view`` of its own shape, so that AOTAutograd treats an output
    that is a view as an output and not as a base to rebuild; canonicalize removes it again.

    Args:
        request: what is captured.
        leaves: of the call; open sizes are symbols.
        sizes: these symbols, if there are any.

    Attributes:
        returned: by the last run.
        alike: compares the runs, if anything does.
        graph: runs in place of the model, if there is one.
    """

    returned: Returned

    def __init__(
        self, request: Request, leaves: list[Any], sizes: shapes.Trace | None = None
    ) -> None:
        super().__init__()
        self._sizes = sizes
        self.model: nn.Module = request.model
        self.request: Request = request
        self._given = leaves
        self.grad: bool = request.training
        self.emulates_cuda: bool = request.emulates_cuda
        self.autocast: torch.autocast = _autocast(request.computes_on.type, request.emulates_cuda)
        self.alike: Alike | None = None
        self.graph: bytecode.BytecodeGraph | None = None
        self._names: dict[int, list[tuple[dict[str, Any], str]]] = {}  # of each of its tensors
        self._own: list[tuple[dict[str, Any], str, dict[str, Any]]] = []
        for slots, key, tensor in modules.slots(request.model):
            self._names.setdefault(id(tensor), []).append((slots, key))
            if own := own_attributes(tensor):
                self._own.append((slots, key, own))
        self._around = placed.Around(request.model, request.placed)

    def inputs(self, tensors: Sequence[torch.Tensor]) -> Any:
        """``(args, kwargs)`` with these tensors."""
        flat = list(self._given)
        for i, tensor in zip(self.request.positions, tensors, strict=True):
            flat[i] = tensor
        return trees.tree_unflatten(flat, self.request.in_spec)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter once: autograd sums up all that its uses say, in its own order."""
        return super().named_parameters(remove_duplicate=True)

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Each buffer once: forward writes one tensor, whatever it calls it."""
        return super().named_buffers(remove_duplicate=True)

    @provenance.enters
    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        if self._sizes is not None:
            self._sizes.begin()
        for (first, key), *others in self._names.values():
            for slots, name in others:  # the trace puts its tensors under their first names alone
                slots[name] = first[key]
        for slots, key, own in self._own:
            give_attributes(slots[key], own)
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        with _same_data(self.model, buffers), self.autocast:
            alike = self.alike
            listener = None if alike is None else alike.begin(self._leaves(tensors))
            with provenance.LinesNoted(listener):
                out = self._called(*self.inputs(tensors))
        if self.alike is not None:
            self.alike.end()
        replaced = _replaced(buffers, dict(self.model.named_buffers(remove_duplicate=False)))
        return self._outputs(out, replaced)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model returns; of a whole step, the loss. The root's dtypes are the model's."""
        units, whole = self.request.units, self.request.whole
        args, target = (args, ()) if whole is None else whole.split(args)
        inputs = precision.root_inputs(units, (args, kwargs))
        out = precision.root_output(units, self._run(*inputs))
        if whole is None:
            return out
        if whole.loss is not None:
            with provenance.in_root(), rng.unseeded(provenance.user_line):
                out = whole.loss(out, *target)
        whole.require_scalar(out)
        return out

    def _leaves(self, inputs: Sequence[torch.Tensor]) -> dict[int, str]:
        """Identity -> name of each parameter, buffer and input of this run."""
        named = (*self.named_parameters(), *self.named_buffers())
        found = {id(tensor): name for name, tensor in named}
        return found | {id(tensor): str(i) for i, tensor in enumerate(inputs)}

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model returns."""
        if self.graph is not None:
            attributes.note_all(self.model)
            return self.graph.call(self.model, args, kwargs)
        if isinstance(self.model, fx.GraphModule):
            return _interpret(self.model, args, kwargs)
        with (
            rng.unseeded(provenance.user_line),
            arguments_kept(args, kwargs),
            attributes.watching(),
            batch_norm.counted_in_tensors(self.model),
            self._around.held(),
        ):
            return self.model(*args, **kwargs)

    def _outputs(self, out: Any, replaced: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """What the call returns, if the model returns `out` and has `replaced` buffers."""
        paths, spec = trees.tree_flatten_with_path(out)
        names = tuple(path_name(path) or "output" for path, _ in paths)
        values = [placed.local(value) for _, value in paths]
        where = [placed.returned(*each) for each in zip(names, (v for _, v in paths), strict=True)]
        refuse_opaque(names, values, "output")
        tensors = {i: v for i, v in enumerate(values) if isinstance(v, torch.Tensor)}
        wants = [i for i, tensor in tensors.items() if tensor.requires_grad and self.grad]
        scalars = [i for i in wants if tensors[i].dim() == 0]
        begins = wants if self.request.every_tangent else scalars or wants
        if self.request.tangents is not None:
            begins = [i for i in wants if i in self.request.tangents]
        first = {id(tensor): i for i, tensor in reversed(tensors.items())}
        computed = [isinstance(v, (torch.Tensor, *torch_sizes.SYMBOLIC)) for v in values]
        constants = [None if c else (v,) for v, c in zip(values, computed, strict=True)]
        self.returned = Returned(
            spec,
            names,
            tuple(constants),
            differentiable=tuple(wants),
            tangents=tuple({id(tensors[i]): i for i in begins}.values()),  # the last of the same
            repeats=tuple((i, first[id(v)]) for i, v in tensors.items() if first[id(v)] != i),
            replaced={name: self.grad and v.requires_grad for name, v in replaced.items()},
            placed=tuple((i, place) for i, place in enumerate(where) if place is not None),
        )
        tangents = self.returned.tangents
        outputs = [
            v.detach() if i in tensors and i not in tangents else v
            for i, v in enumerate(values)
            if computed[i]
        ]
        outputs += [value.detach() for value in replaced.values()]
        return [
            aten._unsafe_view(output, output.shape) if isinstance(output, torch.Tensor) else output
            for output in outputs
        ]


@contextlib.contextmanager
def arguments_kept(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Refuse a forward that changes a list, a dict or a dataclass that it was given.

    Raises:
        CaptureError: the caller's would stay as it was.
    """
    before, spec = trees.tree_flatten_with_path((args, kwargs))
    yield
    after, now = trees.tree_flatten_with_path((args, kwargs))
    held, found = dict(before), dict(after)
    changed = [p for p in {**held, **found} if held.get(p, _NOTHING) is not found.get(p, _NOTHING)]
    if changed or spec != now:
        where = input_name(changed[0]) if changed else "its arguments"
        raise CaptureError(
            f"forward changes a container that it was given ({where}), and a traced program leaves "
            f"the caller's as it was. Let forward change a copy (list(x), dict(x), "
            f"dataclasses.replace(x)) and return what is new."
        )


_NOTHING = object()


def _interpret(model: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a GraphModule node by node, so that new nodes inherit each node's module stack."""
    interpreter = fx.Interpreter(model)
    if graphs.takes_flat_inputs(model.graph):
        flat, _ = trees.tree_flatten((args, kwargs))
        out = interpreter.run(*flat, enable_io_processing=False)
        return model.graph.process_outputs(out)
    names = [node.target for node in model.graph.find_nodes(op="placeholder")]
    rest = [kwargs[name] for name in names[len(args) :] if name in kwargs]
    return interpreter.run(*args, *rest)


def _autocast(device: str, emulates_cuda: bool) -> torch.autocast:
    """The autocast that the call runs under. Its cache of casts is off: it would outlive fakes."""
    given = "cuda" if emulates_cuda and torch.is_autocast_enabled("cuda") else device
    return torch.autocast(
        device,
        dtype=torch.get_autocast_dtype(given),
        enabled=torch.is_autocast_enabled(given),
        cache_enabled=False,
    )


def _replaced(
    before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Buffers that are another tensor after forward than before it, each under its first name.

    Raises:
        CaptureError: one is new, gone, or of another shape, dtype or device, or another tensor
            under one of its names only.
    """
    for name in sorted(before.keys() ^ after.keys()):
        raise CaptureError(
            f"buffer {name!r} {'appears' if name in after else 'disappears'} during forward, which "
            f"a traced program cannot repeat. Register it with its shape in __init__."
        )
    replaced: dict[str, torch.Tensor] = {}
    first: dict[int, str] = {}
    for name, old in before.items():
        new, known = after[name], first.setdefault(id(old), name)
        if new is not after[known]:
            raise CaptureError(
                f"forward replaces one tensor under one of its names only: buffers {known!r} and "
                f"{name!r}, which a traced program cannot repeat. Replace it under both, or change "
                f"it in place (copy_)."
            )
        if new is old or known != name:
            continue
        if (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
            raise CaptureError(
                f"buffer {name!r} is replaced during forward by another kind of tensor: "
                f"{list(old.shape)} {old.dtype} becomes {list(new.shape)} {new.dtype}, which a "
                f"traced program cannot repeat. Give it its final shape in __init__."
            )
        replaced[name] = new
    return replaced


@contextlib.contextmanager
def _same_data(model: nn.Module, buffers: dict[str, torch.Tensor]) -> Iterator[None]:
    """Refuse a forward that lets a tensor lie in another storage: no operator says so.

    Raises:
        CaptureError: it is a parameter of `model`, or one of `buffers`.
    """
    named: list[tuple[str, str, torch.Tensor]]
    named = [("parameter", name, parameter) for name, parameter in model.named_parameters()]
    named += [("buffer", name, buffer) for name, buffer in buffers.items()]
    before = [tensor.untyped_storage() for _, _, tensor in named]
    yield
    for (kind, name, tensor), storage in zip(named, before, strict=True):
        if storage_id(tensor) != storage_id(storage):
            own = name.rpartition(".")[2]
            raise CaptureError(
                f"{kind} {name!r} is given other memory during forward (.data = ...), which "
                f"a traced program cannot repeat. "
                + (
                    f"Write self.{own}.copy_(...) or self.{own} = ..., which it can."
                    if kind == "buffer"
                    else "Change it between steps."
                )
            )


def refuse_opaque(names: tuple[str, ...], values: list[Any], what: str) -> None:
    """Raise CaptureError for an object that may hold tensors and cannot be looked into."""
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, (torch.Tensor, *torch_sizes.SYMBOLIC, *PLAIN)):
            raise CaptureError(
                f"{what} {name} is a {type(value).__name__}, which fxshard cannot look into for "
                f"tensors. Use tensors and plain values, and dicts, lists, tuples and dataclasses "
                f"of them.{hf.remedy(value)}"
            )
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise CaptureError(
                f"{what} {name} has the layout {value.layout}, of which fxshard counts no bytes. "
                f"Pass a dense tensor, or indices and values."
            )
