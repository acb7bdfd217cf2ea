"""The third phase: what a real ``optimizer.step`` allocates and frees, recorded on meta shards."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard._torch.trees import tree_flatten_with_path
from fxshard.codegen import muon, several
from fxshard.codegen.full_matrices import MatrixPlace, place_of, put_place
from fxshard.codegen.given_optimizer import make_optimizer
from fxshard.errors import ConfigError
from fxshard.host import collector
from fxshard.ir import tags, transfers
from fxshard.ir.program import Program
from fxshard.memory.exchange import NOWHERE, Mixing, RecordedExchange
from fxshard.memory.optimizer_step import OptimizerStep, OptimizerStorage, Parts, Sent
from fxshard.memory.recording import Kernels, OperatorEvent, Recorder

T = TypeVar("T")

Runs = dict[tuple[str, ...], Callable[[], Any]]
Tensors = Mapping[str, Tensor]  # by FQN


@collector.paused()
def trace_step(
    program: Program,
    optimizer: Any,
    *,
    for_cuda: bool = False,
    unused: bool = False,
    without: frozenset[str] = frozenset(),
    rank: int = 0,
) -> OptimizerStep | None:
    """Run the real ``step`` of an optimizer twice on meta tensors of a rank's shard shapes.

    Args:
        program: says which parameters have gradients.
        optimizer: a callable ``params -> torch.optim.Optimizer``, or an instance that its class and
            default options describe; None for no optimizer phase.
        for_cuda: record the implementation that is the default on CUDA.
        unused: parameters that no gradient arrives at have one too, if they require it.
        without: FQNs of parameters whose gradient no loss reaches (`gradients.unreached`).
        rank: of the shard group. Reports are of rank 0, which never needs less than another.

    Raises:
        ConfigError: it is neither; its step needs what a plan does not have (data, a closure,
            sparse gradients); or torch cannot run it on sharded parameters.
    """
    if optimizer is None:
        return None
    trained = _trained(program) - without

    def record(device: str, mode: AbstractContextManager[Any]) -> tuple[OptimizerStep, str]:
        size, where = program.world_size, torch.device(device)
        mixing, exchange = Mixing(), RecordedExchange(size, where, rank)

        def step(made: torch.optim.Optimizer, params: Tensors, grads: Tensors) -> Runs:
            for fqn, grad in grads.items():
                params[fqn].grad = grad
            for fqn in program.params:
                put_place(params[fqn], MatrixPlace(fqn, program.layouts[fqn], exchange))
            return {(): functools.partial(_step, made, mixing)}

        def prepared(params: list[nn.Parameter], names: list[str]) -> Any:
            with mixing:
                return make_optimizer(optimizer, params, names)

        graded = {
            fqn
            for fqn, param in (program.params | program.ignored).items()
            if fqn in trained or (unused and param.requires_grad)
        }
        exchange.mixing = mixing
        exchange.extended = frozenset(
            fqn
            for fqn, param in program.params.items()
            if param.extension is not None or param.placed is not None
        )
        exchange.several = bool(program.meshes)
        found = record_steps(
            program, prepared, step, graded, device, mode, exchange=exchange, for_cuda=for_cuda
        )
        return dataclasses.replace(found, without=without, parts=None), mixing.found

    recorded, mixing = without_data(optimizer, record)
    if recorded.sent.flops and program.offloaded and for_cuda:
        raise ConfigError(
            f"optimizer {recorded.name} with offload: its updates need all rows of a matrix, which "
            f"ranks send each other on the GPU, and offloaded shards are on the CPU. Leave offload "
            f"out, or choose an optimizer that steps each element on its own."
        )
    alone = all(program.grid(fqn).shards == 1 for fqn in program.params)
    if not mixing or (alone and mixing not in NOWHERE):
        return recorded
    raise ConfigError(
        f"optimizer {recorded.name}: its step calls {mixing} on sharded parameters. There "
        f"DTensor communicates between ranks, or refuses; a plan knows this rank's rows alone. "
        f"Choose other options (fused, foreach) or another optimizer, or strategy='no_shard'."
    )


def _trained(program: Program) -> set[str]:
    """FQNs of the parameters that a gradient arrives at."""
    made = {result.name for result in program.results if result.kind == "grad"}
    return made | program.accumulated | transfers.stepped(program).keys()


def unused(program: Program) -> bool:
    """True if a parameter requires a gradient and none arrives at it."""
    trained = _trained(program)
    every = (*program.params.items(), *program.ignored.items())
    return any(param.requires_grad and fqn not in trained for fqn, param in every)


def refusal(optimizer: Any, error: Exception) -> ConfigError:
    """Why a step cannot be recorded, in words."""
    named = getattr(optimizer, "func", optimizer)
    name = getattr(named, "__name__", type(named).__name__)
    cause = _first_line(error)
    if "closure" in cause:
        return ConfigError(
            f"optimizer {name}: its step needs a closure that runs the model again (as LBFGS "
            f"does). A step of fxshard is forward, backward, optimizer.step(): choose an "
            f"optimizer whose step() takes no argument."
        )
    if "dense gradients" in cause:
        return ConfigError(
            f"optimizer {name}: it takes sparse gradients only, and those of sharded parameters "
            f"are dense. Choose its dense form, for example Adam."
        )
    if "item()" in cause or "_local_scalar_dense" in cause or "cannot be called on meta" in cause:
        return ConfigError(
            f"optimizer {name}: its step reads the value of a tensor that depends on parameters or "
            f"gradients ({cause}), and a plan has no values. Keep it a tensor in the step, or plan "
            f"with another optimizer."
        )
    if "leaf Variable" in cause:
        return ConfigError(
            f"optimizer {name}: differentiable=True lets autograd record the step, which cannot "
            f"be done on the parameters themselves ({cause}). Leave it False."
        )
    return ConfigError(f"optimizer {name}: its step cannot be analysed without data: {cause}")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _step(optimizer: torch.optim.Optimizer, mixing: Mixing) -> None:
    """Step rows of parameters that have a `MatrixPlace`."""
    for each in optimizer.members if isinstance(optimizer, several.Several) else [optimizer]:
        if type(each) is torch.optim.Muon:
            muon.run(muon.InPlaceOf(each, _has_place, _step_matrices))
        else:
            with mixing:
                each.step()


def _has_place(param: Tensor) -> bool:
    return place_of(param) is not None


def _step_matrices(optimizer: torch.optim.Optimizer, held: Sequence[muon.Held]) -> None:
    every, exchanges = [], []
    for param, group in held:
        place, grad = place_of(param), param.grad
        assert place is not None and grad is not None
        momentum = muon.momentum_of(optimizer, param, functools.partial(torch.zeros_like, grad))
        every.append(muon.Stepped(place.fqn, place.layout, param, grad, momentum, group))
        exchanges.append(place.exchange)
    if every:
        muon.step(every, exchanges[0])  # one program, one exchange


_META = torch.device("meta")


class RealScalars(TorchFunctionMode):
    """Scalars that a step makes of numbers have values, beside meta shards: it may count with them.

    ASGD keeps its learning rate so, on the device of its parameter.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if "device" not in kwargs or kwargs["device"] != _META or not isinstance(made, Tensor):
            return made
        if made.dim() or any(t.is_meta for t in tags.tensors(args)):
            return made
        del made
        self._recorder.stands_in = True
        try:
            return func(*args, **kwargs | {"device": torch.device("cpu")})
        finally:
            self._recorder.stands_in = False


def without_data(optimizer: Any, record: Callable[[str, AbstractContextManager[Any]], T]) -> T:
    """What `record` gives on meta tensors, or on fake ones of the CPU.

    Raises:
        ConfigError: neither can be stepped.
    """
    try:
        # Scalars such as Adam's step are real beside meta shards: a step may read them.
        return record("meta", contextlib.nullcontext())
    except ConfigError:
        raise
    except Exception as on_meta:
        try:
            # fused kernels refuse meta tensors; fake CPU ones pass, if no scalar is read.
            return record("cpu", FakeTensorMode())
        except Exception as error:
            raise refusal(optimizer, on_meta) from error


def record_steps(
    program: Program,
    make: Callable[[list[nn.Parameter], list[str]], Any],
    runs_of: Callable[[Any, Tensors, Tensors], Runs],
    graded: Container[str],
    device: str,
    mode: AbstractContextManager[Any],
    *,
    exchange: RecordedExchange | None = None,
    for_cuda: bool,
) -> OptimizerStep:
    """Two steps of an optimizer over this rank's rows, with what each part of them allocates.

    Args:
        program: whose parameters they are.
        make: from parameters and their FQNs to the optimizer.
        runs_of: from it, and parameters and gradients by FQN, to the parts of a step.
        graded: FQNs of the parameters that have a gradient.
        device, mode: of the tensors.
        exchange: sends matrices to their owners.
        for_cuda: record the implementation that is the default on CUDA.
    """
    params: dict[str, nn.Parameter] = {}
    grads: dict[str, Tensor] = {}
    recorder = Recorder(run=Kernels().run)
    exchange = exchange or RecordedExchange(program.world_size, torch.device(device))
    exchange.numbers = recorder.numbers
    steps: list[Parts] = []
    states: list[dict[int, OptimizerStorage]] = []
    with mode:
        everything = [*program.params.items(), *program.ignored.items()]
        for fqn, param in sorted(everything, key=lambda item: item[1].position):
            shape = program.layouts[fqn].local_shape(exchange.rank)
            data = torch.empty(shape, dtype=param.dtype, device=device)
            params[fqn] = shard = nn.Parameter(data, param.requires_grad)
            recorder.know(shard.untyped_storage())
            if fqn in graded:
                grads[fqn] = torch.empty_like(shard)
                recorder.know(grads[fqn].untyped_storage())
        theirs = set(recorder.numbers.values())
        names = {id(param): fqn for fqn, param in params.items()}

        def state() -> dict[int, OptimizerStorage]:
            found = state_of(made, recorder, names)
            return {number: each for number, each in found.items() if number not in theirs}

        with RealScalars(recorder), recorder:
            made = make(list(params.values()), list(params))
        if for_cuda and not program.offloaded:
            choose_foreach(made)
        initial = list(state())
        runs = runs_of(made, params, grads)
        for _ in range(2):
            steps.append({})
            exchange.sent = Sent(names=exchange.sent.names)
            for fqns, run in runs.items():
                recorder.events = [OperatorEvent("start", [], [])]
                with RealScalars(recorder), recorder:
                    run()
                steps[-1][fqns] = recorder.events
            # What dies with the recording is no step's.
            recorder.events = [OperatorEvent("end", [], [])]
            states.append(state())
    first, second = ([event for events in step.values() for event in events] for step in steps)
    return OptimizerStep(
        several.name_of(made),
        first,
        second,
        state=states[0] | states[1],
        held=list(states[0]),
        initial=initial,
        has_state=bool(made.state),
        parts=(steps[0], steps[1]),
        on_host=frozenset(recorder.on_cpu if for_cuda else ()),
        sent=exchange.sent,
    )


def state_of(
    optimizer: torch.optim.Optimizer, recorder: Recorder, fqns: dict[int, str]
) -> dict[int, OptimizerStorage]:
    """What the state holds, by storage."""
    found: dict[int, OptimizerStorage] = {}
    for param, entries in optimizer.state.items():
        fqn = fqns.get(id(param), "")
        for key, leaf in _leaves(entries):
            if isinstance(leaf, torch.Tensor) and id(leaf.untyped_storage()) in recorder.numbers:
                storage = leaf.untyped_storage()
                state = OptimizerStorage(storage.nbytes(), key, fqn, tuple(leaf.shape))
                found[recorder.numbers[id(storage)]] = state
    return found


def _leaves(state: Any) -> Iterator[tuple[str, Any]]:
    """What the state of a parameter holds, each with the name that it has there."""
    plain = (Tensor, int, float)
    if type(state) is dict and all(isinstance(leaf, plain) for leaf in state.values()):
        yield from ((str(key), leaf) for key, leaf in state.items())
        return
    for path, leaf in tree_flatten_with_path(state)[0]:
        yield "".join(str(part).strip("[]'") for part in path[:1]), leaf


def choose_foreach(optimizer: torch.optim.Optimizer) -> None:
    """What is the default for parameters on CUDA, wherever the user chose nothing.

    Source: torch/optim/optimizer.py, ``_default_to_fused_or_foreach``: foreach where parameters are
    on CUDA (DTensors too), never fused, not for a differentiable step; adam.py: not for a learning
    rate that is a tensor, unless the step is capturable.
    """
    for group in optimizer.param_groups:
        chosen = group.get("fused") or group.get("differentiable")
        chosen = chosen or (isinstance(group.get("lr"), Tensor) and not group.get("capturable"))
        if "foreach" in group and group["foreach"] is None and not chosen:
            group["foreach"] = True
