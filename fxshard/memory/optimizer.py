"""The third phase: what a real ``optimizer.step`` allocates and frees, recorded on meta shards."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

import sympy
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard._torch.modes import TorchDispatchMode
from fxshard._torch.trees import tree_flatten_with_path
from fxshard.codegen import muon, several
from fxshard.codegen.full_matrices import Matrix, Place, Rounds, most_flops, place_of, put_place
from fxshard.codegen.full_matrices import table as owners_table
from fxshard.cost.timeline import OptimizerState
from fxshard.errors import ConfigError
from fxshard.host import collector
from fxshard.ir import tags, transfers
from fxshard.ir.layout import gathered
from fxshard.ir.program import Program
from fxshard.memory import symbolic
from fxshard.memory.category import Category
from fxshard.memory.ledger import OPTIMIZER, LiveRange, owner_of
from fxshard.memory.recording import Event, Kernels, Recorder, name_of

T = TypeVar("T")


class State(NamedTuple):
    """A storage that an optimizer keeps: its `key` in the state of the parameter `fqn`."""

    bytes: int
    key: str
    fqn: str
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """``exp_avg of layers.0.weight``."""
        return f"{self.key} of {self.fqn}"


Parts = dict[tuple[str, ...], list[Event]]  # by what is stepped together
Runs = dict[tuple[str, ...], Callable[[], Any]]
Tensors = Mapping[str, Tensor]  # by FQN


@dataclasses.dataclass
class Sent:
    """What is sent for updates of full matrices.

    Attributes:
        names: of the buffers, by storage.
        exchanges: bytes of each all-to-all, of the larger of its two buffers.
        flops: of the matrices that one rank owns, at most; in bf16 for Muon.
        schedules: who owns which, in which round; a table for each optimizer.
    """

    names: dict[int, str] = dataclasses.field(default_factory=dict)
    exchanges: list[int] = dataclasses.field(default_factory=list)
    flops: int = 0
    schedules: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class OptimizerStep:
    """A recording of the first and the second step.

    Attributes:
        name: class of the optimizer.
        first, second: events in order; the second step is the steady state.
        state: storages that are optimizer state after the first or the second step.
        held: those that are state between the two.
        parts: with the optimizer in backward, the events of the first and of the second step by
            what is stepped together (FQNs, in the order of the program's operator).
        initial: those that the optimizer makes when it is made (Adagrad), before the first step.
        has_state: the optimizer's ``state`` is not empty after the first step.
        formulas: the bytes of each storage as an expression of the number of ranks, where it
            depends on it; empty if not asked for (see `with_formulas`).
        without: FQNs of parameters without a gradient, as no loss reaches them.
        sent: what is sent for updates of full matrices, in a step.
    """

    name: str
    first: list[Event]
    second: list[Event]
    state: dict[int, State]
    held: list[int]
    initial: list[int] = dataclasses.field(default_factory=list)
    has_state: bool = True
    parts: tuple[Parts, Parts] | None = None
    formulas: dict[int, sympy.Expr] = dataclasses.field(default_factory=dict)
    without: frozenset[str] = frozenset()
    sent: Sent = dataclasses.field(default_factory=Sent)

    def between_steps(self) -> OptimizerState:
        """What it keeps between two steps, and sends in one, for an estimate of its time."""
        found: dict[str, int] = defaultdict(int)
        for number in self.held:
            found[self.state[number].fqn] += self.state[number].bytes
        return OptimizerState(self.name, dict(found), tuple(self.sent.exchanges), self.sent.flops)

    def range_of(self, op: str, number: int, size: int, *, host: bool) -> LiveRange:
        """The live range of a storage that `op` made: state, or a temporary."""
        name, owner, category = f"temporary of {op}", OPTIMIZER, Category.TEMP
        name = self.sent.names.get(number, name)
        if number in self.state:
            state = self.state[number]
            name, owner, category = state.name, owner_of(state.fqn), Category.OPT_STATE
        formula = self.formulas.get(number)
        return LiveRange(0, name, op, owner, category, size, host, formula=formula)


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
        mixing, exchange = _Mixing(), RecordedExchange(size, where, rank)

        def step(made: torch.optim.Optimizer, params: Tensors, grads: Tensors) -> Runs:
            for fqn, grad in grads.items():
                params[fqn].grad = grad
            for fqn in program.params:
                put_place(params[fqn], Place(fqn, program.layouts[fqn], exchange))
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
    if not mixing or (alone and mixing not in _NOWHERE):
        return recorded
    raise ConfigError(
        f"optimizer {recorded.name}: its step calls {mixing} on sharded parameters. There "
        f"DTensor communicates between ranks, or refuses; a plan knows this rank's rows alone. "
        f"Choose other options (fused, foreach) or another optimizer, or strategy='no_shard'."
    )


def with_formulas(
    program: Program, step: OptimizerStep, record: Callable[[Program], OptimizerStep | None]
) -> OptimizerStep:
    """`step`, with the bytes of its storages for other numbers of ranks.

    The step is recorded twice more, with as many rows per parameter as tell parameters apart: what
    it makes for one has a multiple of that one's elements, in all three recordings.

    Args:
        program: what was recorded.
        step: the recording.
        record: makes another, of a program with other parameters.

    Raises:
        ConfigError: a storage has no such size.
    """
    if step.sent.flops:
        raise ConfigError(
            f"optimizer {step.name}: which matrices rank 0 owns differs from one number of ranks "
            f"to the next, so that there is no formula for it. Plan once for each: "
            f"plan.at(world=...)."
        )
    params = sorted(program.params.values(), key=lambda param: param.position)
    many = 3 * (len(params) + 1)
    rows = [{p.fqn: len(params) + 1 + i for i, p in enumerate(params, 1)}]
    rows += [{p.fqn: many - i for i, p in enumerate(params, 1)}]
    found = [step, *(record(_with_rows(program, each)) for each in rows)]
    made = [_made(each) for each in found if each is not None]
    if len({tuple(each) for each in made}) > 1:
        raise ConfigError(
            f"optimizer {step.name}: its step runs other operators for other sizes of parameters, "
            f"so that there is no formula for it."
        )
    ratios = {
        Fraction(rows[0][p.fqn], rows[1][p.fqn]): (p, rows[0][p.fqn] * math.prod(p.shape[1:]))
        for p in params
    }
    formulas: dict[int, sympy.Expr] = {}
    for number, size in made[0].items():
        one, other = made[1][number], made[2][number]
        if one == other == size:
            continue
        param, elements = ratios.get(Fraction(one, other), (None, 1))
        each = Fraction(one, elements)
        layout = None if param is None else program.layouts[param.fqn]
        if layout is None or each * layout.shard_numel != size:
            raise ConfigError(
                f"optimizer {step.name}: its step makes something of {size} bytes that belongs to "
                f"no single parameter, so that there is no formula for it."
            )
        formulas[number] = sympy.Rational(each) * layout.shard_numel_over(symbolic.WORLD)
    return dataclasses.replace(step, formulas=formulas)


def _with_rows(program: Program, rows: dict[str, int]) -> Program:
    """The program as if its shards had so many rows."""
    world = program.world_size
    units = tuple(
        dataclasses.replace(
            unit,
            params=tuple(
                dataclasses.replace(
                    p, shape=gathered((rows[p.fqn], *p.shape[1:]), world), shard_dim=0
                )
                for p in unit.params
            ),
        )
        for unit in program.units
    )
    return dataclasses.replace(program, units=units)


def _made(step: OptimizerStep) -> dict[int, int]:
    """Bytes of each storage that a recording makes or holds, in order."""
    parts = [events for each in step.parts or () for events in each.values()]
    events = [event for part in (step.first, step.second, *parts) for event in part]
    made = dict(pair for event in events for pair in event.allocated)
    return made | {number: state.bytes for number, state in step.state.items()}


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


# What DTensor has no rule for (torch/distributed/tensor/_ops), not even for full parameters.
_NOWHERE = ("aten._fused_sgd_", "aten._fused_adagrad_", "aten._foreach_copy_")
# What it runs on each rank's rows alone, besides operators tagged pointwise.
_ALONE = re.compile(
    r"aten\.(empty|zeros|ones|full|new_|rand|arange|scalar_tensor|normal_|uniform_|bernoulli"
    r"|clone|_to_copy|copy_|detach|alias|fill|zero_|view|unsqueeze|squeeze|expand|permute|transpose"
    r"|t\.|is_same_size|_local_scalar_dense|lift_fresh|_fused_adamw?_|_foreach_(?!norm|max\.|copy_))"
)


class _Mixing(TorchDispatchMode):
    """Notes the first operator that mixes rows: DTensor communicates for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.paused = "", False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        mixes = not self.paused and not _runs_alone(func)
        if mixes and any(t.dim() for t in tags.tensors((args, kwargs))):
            self.found = self.found or name_of(func).removesuffix(".default")
        return func(*args, **(kwargs or {}))


@functools.cache
def _runs_alone(func: Any) -> bool:
    name = name_of(func)
    pointwise = torch.Tag.pointwise in func.tags
    return pointwise or bool(_ALONE.match(name)) or name.startswith("prim.")


class RecordedExchange:
    """Sends nothing: of all-to-alls a recording has the buffers.

    Attributes:
        size, rank: as which rank of how many it is recorded.
        device: of the buffers.
        sent: what would be sent in the step that is recorded.
        numbers: of the recorder, by storage.
        mixing: does not look at what owners compute.
        extended: FQNs of parameters of tensor subclasses, and of DTensors.
        several: parameters are on several meshes.
    """

    def __init__(self, size: int, device: torch.device, rank: int = 0) -> None:
        self.size, self.rank, self.device = size, rank, device
        self.sent = Sent()
        self.numbers: dict[int, int] = {}
        self.mixing = _Mixing()
        self.extended = frozenset[str]()
        self.several = False

    @contextlib.contextmanager
    def stepping(self, matrices: Sequence[Matrix], schedule: Rounds) -> Iterator[None]:
        """See `fxshard.codegen.full_matrices.Exchange`.

        Raises:
            ConfigError: a matrix is of a tensor subclass, or parameters are on several meshes.
        """
        if self.several:
            raise ConfigError(several_meshes(matrices[0].fqn))
        for matrix in matrices:
            if matrix.fqn in self.extended:
                raise ConfigError(
                    f"parameter {matrix.fqn!r}, of a tensor subclass or a DTensor of tensor "
                    f"parallelism, has an update that needs all of its rows (Muon): those of plain "
                    f"tensors are sent. Give it to an optimizer that steps each element on its own."
                )
        self.sent.flops += most_flops(matrices, schedule)
        self.sent.schedules.append(owners_table(matrices, schedule))
        self.mixing.paused = True
        yield
        self.mixing.paused = False

    def all_to_all(
        self, into: Tensor, sent: Tensor, received: Sequence[int], given: Sequence[int]
    ) -> None:
        """See `fxshard.codegen.full_matrices.Exchange`."""
        self.sent.exchanges.append(max(into.nbytes, sent.nbytes))
        for buffer, name in ((sent, "rows for the owners"), (into, "matrices of this owner")):
            self.sent.names.setdefault(self.numbers[id(buffer.untyped_storage())], name)


def several_meshes(fqn: str) -> str:
    """What to say of an update of full matrices where parameters are on several meshes."""
    return (
        f"parameter {fqn!r} has an update that needs all of its rows (Muon), and parameters of the "
        f"model are on several meshes: matrices are sent to owners among the ranks of one. Give "
        f"all units one mesh and strategy, or choose an optimizer that steps each element on its "
        f"own."
    )


def _step(optimizer: torch.optim.Optimizer, mixing: _Mixing) -> None:
    """Step rows of parameters that have a `Place`."""
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
        return func(*args, **kwargs | {"device": torch.device("cpu")})


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
    states: list[dict[int, State]] = []
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

        def state() -> dict[int, State]:
            found = state_of(made, recorder, names)
            return {number: each for number, each in found.items() if number not in theirs}

        with RealScalars(), recorder:
            made = make(list(params.values()), list(params))
        if for_cuda:
            choose_foreach(made)
        initial = list(state())
        runs = runs_of(made, params, grads)
        for _ in range(2):
            steps.append({})
            exchange.sent = Sent(names=exchange.sent.names)
            for fqns, run in runs.items():
                recorder.events = [Event("start", [], [])]
                with RealScalars(), recorder:
                    run()
                steps[-1][fqns] = recorder.events
            recorder.events = [Event("end", [], [])]  # what dies with the recording is no step's
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
        sent=exchange.sent,
    )


def state_of(
    optimizer: torch.optim.Optimizer, recorder: Recorder, fqns: dict[int, str]
) -> dict[int, State]:
    """What the state holds, by storage."""
    found: dict[int, State] = {}
    for param, entries in optimizer.state.items():
        fqn = fqns.get(id(param), "")
        for key, leaf in _leaves(entries):
            if isinstance(leaf, torch.Tensor) and id(leaf.untyped_storage()) in recorder.numbers:
                storage = leaf.untyped_storage()
                state = State(storage.nbytes(), key, fqn, tuple(leaf.shape))
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


def make_optimizer(
    optimizer: Any, params: list[nn.Parameter], names: Sequence[str] = ()
) -> torch.optim.Optimizer:
    """An optimizer over `params` from the ``optimizer`` option (a callable, or an instance).

    `names`: of the parameters; a callable of ``named_parameters`` gets both. Several optimizers
    become one.

    Raises:
        ConfigError: it is neither; or the instance has more than its class and options say.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return _like(optimizer, params)
    try:
        given: Any = list(zip(names, params, strict=True)) if _takes_names(optimizer) else params
        made = optimizer(given) if callable(optimizer) else None
        if isinstance(made, (list, tuple)) and made:
            made = several.Several(made) if len(made) > 1 else made[0]
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"optimizer={optimizer!r}: it could not be made over the parameters of the model: "
            f"{error}"
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer={optimizer!r}: expected a callable params -> torch.optim.Optimizer, such "
            f"as lambda params: torch.optim.AdamW(params, lr=1e-3), or one that makes a list of "
            f"optimizers, such as lambda named_parameters: [Muon(...), AdamW(...)]."
        )
    return made


def _like(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """One of the class and the default options of `optimizer`, over `params`.

    Raises:
        ConfigError: that would leave out something of `optimizer`.
    """
    kind = type(optimizer)
    # Defaults may hold more than the constructor takes (AdamW adds decoupled_weight_decay).
    accepted = inspect.signature(kind).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    lost = _besides_defaults(optimizer, params)
    if not lost:
        made = kind(params, **options)
        if not (lost := _differing(made.defaults, optimizer.defaults)):
            return made
    raise ConfigError(
        f"optimizer=<{kind.__name__}>: of an instance over other tensors than this rank's shards, "
        f"the class and the default options are taken, but this one has {lost}, which would be "
        f"lost. Give a callable that makes it, of named parameters: optimizer=lambda "
        f"named_parameters: {kind.__name__}(...), or of the parameters alone: optimizer=lambda "
        f"params: {kind.__name__}(params, ...)."
    )


def _besides_defaults(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> str:
    """What an instance has besides its class and default options, in words."""
    groups = optimizer.param_groups
    if len(groups) != 1:
        return f"{len(groups)} parameter groups"
    options = {k: v for k, v in groups[0].items() if k not in ("params", "param_names")}
    if changed := _differing(options, optimizer.defaults):
        return changed
    counts = len(params), sum(param.requires_grad for param in params)
    if len(groups[0]["params"]) not in counts:
        return f"{len(groups[0]['params'])} parameters where the model has {counts[0]}"
    if any(_begun(state) for state in optimizer.state.values()):
        return "state of steps that it has made"
    hooks = [k for k, v in vars(optimizer).items() if k.endswith("_hooks") and v]
    return f"hooks ({hooks[0].strip('_')})" if hooks else ""


def _differing(options: dict[str, Any], defaults: dict[str, Any]) -> str:
    """The first option that is not the default, in words."""
    for name in (*options, *defaults):
        one, other = options.get(name, _NONE), defaults.get(name, _NONE)
        same = one is other
        if not same and isinstance(one, Tensor) and isinstance(other, Tensor):
            same = torch.equal(one, other)
        elif not same and not isinstance(one, Tensor) and not isinstance(other, Tensor):
            same = bool(one == other)
        if not same:
            values = f"{one!r} in place of {other!r}" if one is not _NONE else f"not {other!r}"
            values = f"{one!r}, which is no default" if other is _NONE else values
            return f"a changed option ({name}: {values})"
    return ""


_NONE = object()


def _begun(state: dict[str, Any]) -> bool:
    """True for what a step leaves; Adagrad has state before the first one, of step 0."""
    step = state.get("step")
    return bool(state) and not (
        step is not None and (getattr(step, "is_meta", False) or not bool(step))
    )


def _takes_names(optimizer: Any) -> bool:
    """True for a callable of ``named_parameters``."""
    try:
        first = next(iter(inspect.signature(optimizer).parameters), "")
    except (TypeError, ValueError):  # no callable, or one written in C
        return False
    return first == "named_parameters"
