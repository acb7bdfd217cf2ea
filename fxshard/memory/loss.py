"""The user's loss outside of the model: what it allocates and frees, recorded on fake outputs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from fxshard._torch import autograd, collectives, export, fake_tensors, fully_sharded, trees
from fxshard._torch import sizes as torch_sizes
from fxshard.capture import fakes, refusals, shapes
from fxshard.capture.cuda import operators as cuda_operators
from fxshard.errors import ConfigError
from fxshard.ir import tags
from fxshard.ir.program import Program
from fxshard.memory import symbolic
from fxshard.memory.recording import OperatorEvent, Recorder


@dataclasses.dataclass
class LossStep:
    """A recording of ``loss(outputs)`` and of its backward, up to where the model's begins.

    Attributes:
        forward, backward: events in order. What they leave alive lives until backward returns.
        held: storages of tensors that the loss holds itself, such as labels.
        tangents: output (flat index, as text) -> storage of its gradient, where that arrives in the
            strides that the model's backward reads; of others it makes copies.
        taken: those of them that only the autograd engine holds: they die after their last reader.
        formulas: the bytes of each storage as an expression of the open sizes, where it depends on
            them; empty if not asked for (see `with_formulas`).
        conditions: what the loss takes for granted of the open sizes, and where.
        arrived: outputs (flat indices) that the loss reaches.
        dropped: storage of each output that the program computes, where the loop drops them when
            it has the loss: they die when the loss has read them last. Else empty.
        value: storage of the loss itself; None if no operator made it.
    """

    forward: list[OperatorEvent]
    backward: list[OperatorEvent]
    held: list[torch.UntypedStorage]
    tangents: dict[str, int]
    taken: set[int]
    formulas: dict[int, sympy.Expr] = dataclasses.field(default_factory=dict)
    conditions: list[tuple[sympy.Basic, str]] = dataclasses.field(default_factory=list)
    arrived: frozenset[int] = frozenset()
    dropped: tuple[int | None, ...] = ()
    value: int | None = None


UNSEEN = -1  # storage that no operator made: a constant that the loss's own backward gave


class _Model(torch.autograd.Function):
    """Stands for the model: hands out its outputs, and notes what comes back."""

    boxed_grads_call = True  # as fxshard.step.Step has it

    @staticmethod
    def forward(ctx: Any, arrived: Any, trigger: torch.Tensor, *outputs: torch.Tensor) -> Any:
        ctx.arrived = arrived
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[torch.Tensor | None, ...]:
        grads = autograd.boxed(given)
        made: torch.Tensor = ctx.arrived(grads)
        return (None, made, *(None for _ in grads))


def with_formulas(
    program: Program,
    loss: Callable[[Any], torch.Tensor],
    step: LossStep,
    *,
    keep_outputs: bool = True,
) -> LossStep:
    """`step`, with what its storages hold for other sizes: the loss is traced on open sizes too.

    Raises:
        ConfigError: the loss does something else there.
    """
    domain = program.domain
    if domain is None:
        return step
    sizes = shapes.Trace(domain.places, domain.example)
    other = trace_loss(program, loss, sizes, keep_outputs=keep_outputs)
    assert other is not None
    both = (step.forward + step.backward, other.forward + other.backward)
    if len({tuple((e.op, len(e.allocated), tuple(e.freed)) for e in each) for each in both}) > 1:
        raise ConfigError(
            f"loss={loss!r} runs other operators where the sizes of the batch are open, so that "
            f"there is no formula for it. Let the model compute the loss."
        )
    seen = sizes.domain()
    names = {found: symbolic.symbol(name) for name, found in seen.symbols.items()}
    made = {
        number: torch_sizes.in_sympy(
            sizes.env.simplify(torch_sizes.expression(size)).xreplace(names)
        )
        for event in both[1]
        for number, size in event.allocated
        if not isinstance(size, int)
    }
    return dataclasses.replace(step, formulas=made, conditions=symbolic.conditions(seen))


def trace_loss(
    program: Program,
    loss: Callable[[Any], torch.Tensor] | None,
    sizes: shapes.Trace | None = None,
    *,
    keep_outputs: bool = True,
) -> LossStep | None:
    """Run the user's loss and its backward on fake outputs.

    Args:
        program: says what the outputs are, and which of them get a gradient.
        loss: from the model's return value to a scalar tensor.
        sizes: the outputs have these symbols for sizes; so have the events.
        keep_outputs: the loop refers to the outputs until backward is over; else until it has the
            loss.

    Raises:
        ConfigError: it fails, returns no scalar, or reaches none of the outputs that the model's
            backward starts from.
    """
    if loss is None or not program.signature.training:
        return None
    signature = program.signature
    computed = [
        n for n, r in zip(program.values, program.results, strict=True) if r.kind == "output"
    ]
    flat: list[Any] = [constant[0] if constant else None for constant in signature.outputs]
    values: dict[int, Any] = {}
    same = dict(signature.repeats)  # of a tensor returned twice, the last place stands for it
    of_first = {same.get(position, position): position for position in signature.computed_outputs}
    for position, node in zip(signature.computed_outputs, computed, strict=True):
        if isinstance(node.meta["val"], torch.Tensor):
            if of_first[same.get(position, position)] == position:
                values[position] = node.meta["val"]
        else:
            flat[position] = node.meta["val"]  # a size
    mode = program.fake_mode
    if sizes is not None:
        mode = type(mode)(allow_non_fake_inputs=True, shape_env=sizes.env)
        values = {
            position: _open(program, node, sizes, mode)
            for position, node in zip(signature.computed_outputs, computed, strict=True)
            if position in values
        }
    places = program.graph.find_nodes(op="placeholder")
    found = {n: tags.get(n) for n in places if tags.get(n).role == "tangent"}
    lies = {int(tag.fqn or 0): node for node, tag in found.items()}
    read = {
        position: shapes.stride_like(lies[position].meta["val"], values[position].shape)
        for position in lies.keys() & values.keys()
    }

    device = next((value.device for value in values.values()), torch.device("meta"))

    def beside(tensor: torch.Tensor) -> torch.Tensor:
        """Labels and what else the loss holds may be on the meta device: their sizes count."""
        if fake_tensors.is_fake(tensor) or tensor.device.type != "meta" or device.type == "meta":
            return tensor
        with mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """With results as their kernels make them, on the CPU or on CUDA."""
        args, kwargs = trees.tree_map_tensors(beside, (args, kwargs))
        return fakes.as_made(func, args, func(*args, **kwargs), mode)

    recorder = Recorder(mode, run)
    on_cuda = isinstance(program.fake_mode, cuda_operators.CudaFakeMode)
    parts: list[list[OperatorEvent]] = []
    reached: set[int] = set()
    tangents: dict[str, int] = {}
    copied: set[int] = set()
    taken: set[int] = set()

    def arrived(grads: list[torch.Tensor | None]) -> torch.Tensor:
        for position, grad in zip(values, grads, strict=True):
            if grad is None:
                continue
            reached.add(position)
            number = recorder.numbers.get(id(grad.untyped_storage()), UNSEEN)
            if position not in read or shapes.lies_as(grad, read[position]):
                tangents[str(position)] = number
            else:
                copied.add(number)
        parts.append(recorder.events)
        recorder.events = [OperatorEvent("model's backward", [], [])]
        return torch.empty_like(trigger)

    def is_over(_: torch.Tensor) -> None:
        gone = {number for event in recorder.events for number in event.freed}
        if autograd.BOXED_GRADS:
            taken.update(gone & set(tangents.values()) - copied)
        recorder.events = [OperatorEvent("rest of backward", [], [])]

    with mode:
        trigger = torch.empty((), requires_grad=True)
    with mode, torch.enable_grad():
        outputs = [_like(value) for value in values.values()]
        trigger.register_post_accumulate_grad_hook(is_over)
        made = list(_Model.apply(arrived, trigger, *outputs))
        numbers = [recorder.know(each.untyped_storage()) for each in (*outputs, trigger)]
        for position, tensor in zip(values, made, strict=True):
            keeps = position in signature.differentiable
            flat[position] = tensor if keeps else tensor.detach()
        for position in same.keys() | same.values():
            flat[position] = flat[of_first[same.get(position, position)]]
        for position, placed in signature.placed:
            flat[position] = placed.around(flat[position])
        del made, tensor
        out = trees.tree_unflatten(flat, signature.out_spec)
        try:
            with contextlib.ExitStack() as stack:
                if on_cuda:
                    stack.enter_context(cuda_operators.substituted())
                if signature.placed:
                    stack.enter_context(collectives.called_eagerly(mode))
                    stack.enter_context(fully_sharded.propagation_unseen())
                stack.enter_context(recorder)
                value = loss(out)
                if not isinstance(value, torch.Tensor) or value.numel() != 1:
                    raise ConfigError("loss=...: expected a scalar tensor to come back.")
                if not keep_outputs:
                    del out
                    flat.clear()
                    outputs.clear()
                parts.append(recorder.events)
                recorder.events = [OperatorEvent("start", [], [])]
                number = recorder.numbers.get(id(value.untyped_storage()))
                value.backward()
            if len(parts) < 2:
                raise ConfigError("loss=... sends no gradient back to what the model returned.")
        except ConfigError:
            raise
        except Exception as error:
            text = (
                f"loss={loss!r} cannot be analysed ({type(error).__name__}: {error})"
                f"{refusals.line_of(error)}\nIt is called with what the model returns, with "
                f"tensors that hold no data."
            )
            if isinstance(error, export.DATA_DEPENDENT_ERRORS):
                text += f" {refusals.remedy(error)}"
            raise ConfigError(text) from error
    stands_for = dict(zip(values, numbers, strict=False))
    return LossStep(
        parts[0],
        parts[1],
        list(recorder.outside.values()),
        tangents,
        taken,
        arrived=frozenset(reached),
        value=number,
        dropped=()
        if keep_outputs
        else tuple(
            stands_for.get(of_first[same.get(position, position)])
            for position in signature.computed_outputs
        ),
    )


def _open(
    program: Program, node: fx.Node, sizes: shapes.Trace, mode: fake_tensors.FakeTensorMode
) -> torch.Tensor:
    """An output with symbols for sizes.

    Raises:
        ConfigError: it is not contiguous.
    """
    val: torch.Tensor = node.meta["val"]
    _, opened = shapes.open_tensors(node)[0]
    if not val.is_contiguous():
        raise ConfigError(
            f"the output {node.name} of the model is not contiguous, so that there is no formula "
            f"for what loss=... makes of it. Let the model compute the loss."
        )
    shape: Any = val.shape
    if opened is not None:
        assert program.domain is not None
        given = {program.domain.symbols[name].name: sizes.size(name) for name in sizes.places}
        shape = [symbolic.evaluate(torch_sizes.in_sympy(size), given) for size in opened.size]
    with mode:
        return torch.empty(shape, dtype=val.dtype, device=val.device)


def _like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
