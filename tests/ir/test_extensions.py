"""Tensor subclasses that take part in their all-gather: what is refused, and what is checked."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.fsdp import CPUOffloadPolicy

import fxshard
from fxshard.errors import ConfigError, StepError, TextError, UnitError, VerifyError
from fxshard.ir import ops, tags, text
from fxshard.ir.program import Program
from fxshard.verify import verify
from tests.subclasses import Float8, Int8, Narrow, Wrapped, wrapped

X = torch.ones(2, 4)


def model(kind: Callable[[Tensor], Any], rows: int = 4) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, rows, bias=False))
    return wrapped(net, kind)


def planned(kind: Callable[[Tensor], Any] = Narrow, rows: int = 4, **options: Any) -> fxshard.Plan:
    return fxshard.plan(
        model(kind, rows), (X,), **{"world_size": 2, "units": ["0", "1"], **options}
    )


# -- classes ---------------------------------------------------------------------------------------


class Alone(Wrapped):
    """It says what is sent, and not what is made of it."""

    fsdp_pre_all_gather = Narrow.fsdp_pre_all_gather


class Pair(Narrow):
    """Around two tensors."""

    def __init__(self, inner: Tensor) -> None:
        super().__init__(inner)
        self.more = torch.ones(inner.shape[0])

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_inside", "more"], None


class Whole(Tensor):
    """It has its data in itself."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})

    def fsdp_pre_all_gather(self, mesh: Any) -> Any: ...

    def fsdp_post_all_gather(self, *args: Any, **kwargs: Any) -> Any: ...


def sending(function: Callable[[Tensor, Any], Any]) -> type[Narrow]:
    """A class whose ``fsdp_pre_all_gather`` is `function` of its tensor and of the mesh."""

    class Sending(Narrow):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:
            return function(self.data_inside, mesh)

    return Sending


def receiving(function: Callable[[Tensor], Any]) -> type[Narrow]:
    """A class whose ``fsdp_post_all_gather`` is `function` of what was gathered."""

    class Receiving(Narrow):
        def fsdp_post_all_gather(self, sent: Any, *args: Any, **kwargs: Any) -> Any:
            return function(sent[0])

    return Receiving


class Three(Narrow):
    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any) -> Any:  # type: ignore[override]
        return (self.data_inside,), None


KEPT = torch.ones(4)
REFUSED: dict[str, tuple[Any, str]] = {
    "one function": (Alone, "with fsdp_pre_all_gather alone.*Define both"),
    "two tensors": (Pair, r"Pair .* around data_inside .*, more .*: fxshard shards one plain"),
    "no inner tensor": (lambda t: t.as_subclass(Whole), "has its data in itself"),
    "three arguments": (Three, r"takes 3 arguments; FSDP2 gives it one \(mesh\) or five"),
    "no tuple": (sending(lambda x, _: x), "returns no .tuple of tensors, metadata"),
    "nothing": (sending(lambda x, _: ((), None)), "returns nothing to gather"),
    "a subclass": (sending(lambda x, _: ((Narrow(x),), None)), "is a Narrow, no plain dense"),
    "a branch on data": (
        sending(lambda x, _: ((x if x.max() > 0 else -x,), None)),
        "cannot be traced: DataDependentOutputException",
    ),
    "random": (sending(lambda x, _: ((torch.rand_like(x),), None)), "draws random numbers"),
    "a write": (sending(lambda x, _: ((x.mul_(2),), None)), "writes into what it was given"),
    "from elsewhere": (sending(lambda x, _: ((x * KEPT,), None)), "a tensor from elsewhere"),
    "a rank": (
        sending(lambda x, m: ((x * m.get_local_rank(),), None)),
        "RuntimeError: it asks for its rank",
    ),
    "other sizes": (receiving(lambda x: (x[1:], ())), r"makes a tensor \[3, 4\] of a parameter"),
    "strides": (receiving(lambda x: (x.t(), ())), "not contiguous"),
    "no tensor": (receiving(lambda x: None), r"without out= returns no \(tensor, inner tensors\)"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("verb", ["plan", "compile"])
def test_a_class_that_programs_cannot_repeat_is_refused(what: str, verb: str) -> None:
    kind, message = REFUSED[what]
    net = model(kind)
    before = list(net.parameters())
    with pytest.raises(UnitError, match=message) as caught:
        if verb == "plan":
            fxshard.plan(net, (X,), world_size=2)
        else:
            fxshard.compile(net, world_size=2)
    assert "parameter '0.weight'" in str(caught.value)
    assert all(one is other for one, other in zip(net.parameters(), before, strict=True))


def test_rows_that_ranks_do_not_divide_are_refused() -> None:
    message = r"'1\.weight' is a Narrow: its 3 rows are not a multiple of the 2 ranks"
    with pytest.raises(UnitError, match=message):
        planned(rows=3)
    with pytest.raises(UnitError, match=message):
        fxshard.compile(model(Narrow, 3), world_size=2)


OPTIONS: dict[str, tuple[type[Exception], dict[str, Any], str]] = {
    "offload": (
        UnitError,
        {"offload": CPUOffloadPolicy()},
        "offloaded to the CPU. Leave offload out",
    ),
    "smaller groups": (
        UnitError,
        {"reshard_after_forward": 2, "world_size": 4},
        "over a smaller group. Give a bool",
    ),
    "max_inflight": (ConfigError, {"max_inflight": 2}, "may outlive the gathered buffers"),
    "in backward": (
        UnitError,
        {"optimizer": torch.optim.SGD, "optimizer_in_backward": True},
        "Leave optimizer_in_backward out",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_cannot_be_had_are_refused(name: str) -> None:
    kind, options, message = OPTIONS[name]
    with pytest.raises(kind, match=message):
        planned(**options)


def test_what_happens_outside_of_programs_is_refused() -> None:
    compiled: Any = fxshard.compile(model(Narrow), world_size=2)
    compiled(X)
    with pytest.raises(StepError, match=r"'0\.weight', a Narrow, would be unsharded"):
        compiled.unshard()
    with pytest.raises(StepError, match=r"'0\.weight', a Narrow, cannot be converted or moved"):
        compiled.half()
    with pytest.raises(StepError, match=r"'0\.weight', a Narrow, cannot be pickled"):
        pickle.dumps(compiled)
    plain = {name: torch.ones(4, 4) for name in compiled.state_dict()}
    compiled.load_state_dict(plain)
    assert all(type(param) is Narrow for param in compiled.parameters())
    compiled.load_state_dict(plain, assign=True)
    with pytest.raises(StepError, match=r"'0\.weight', a Narrow, is a Parameter now"):
        compiled(X)


@pytest.mark.parametrize("kind", [Narrow, Int8])
def test_a_model_on_meta_is_filled_by_its_modules(kind: Any) -> None:
    def built() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))

    with torch.device("meta"):
        empty = wrapped(built(), kind)
    torch.manual_seed(0)
    compiled: Any = fxshard.compile(empty, world_size=2)
    for mine, expected in zip(compiled.parameters(), built().parameters(), strict=True):
        assert type(mine) is kind and torch.equal(mine.data_inside, expected)
    with torch.device("meta"):
        empty = wrapped(built(), kind)
    left = fxshard.compile(empty, world_size=2, param_init_fn=lambda module: None)
    with pytest.raises(StepError, match="on the meta device when the model was sharded"):
        left(X)


class Ruled(Narrow):
    """Its context, and what is inside of it, may change."""

    rule, more = 1, False

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_inside", *(["more"] if self.more else [])], self.rule


@pytest.mark.parametrize(
    "name, value, message",
    [("rule", 2, "the context 2 now, and had 1"), ("more", True, "holds data_inside and more now")],
)
def test_a_parameter_that_becomes_another_is_refused(name: str, value: Any, message: str) -> None:
    compiled: Any = fxshard.compile(model(Ruled), world_size=2)
    compiled(X)
    setattr(compiled[1].weight, name, value)
    with pytest.raises(StepError, match=f"'1.weight', a Ruled, (has|) ?{message}"):
        compiled(X)


def test_verbs_that_know_nothing_of_it_are_refused() -> None:
    for call in (
        lambda: fxshard.shard(model(Narrow), world_size=2),
        lambda: fxshard.validate(model(Narrow), (X,), world_size=2, numerics=True),
        lambda: fxshard.validate(model(Narrow), (X,), world_size=2, ranks="processes"),
    ):
        with pytest.raises(UnitError, match="knows nothing of the all-gather that parameter '0"):
            call()
    with pytest.raises(TextError, match=r"'0\.weight' is of a tensor subclass"):
        text.write(planned().program)
    with pytest.raises(ConfigError, match=r"formulas with parameter '0\.weight', of a tensor sub"):
        planned().memory.formula()


# -- the verifier ----------------------------------------------------------------------------------


def making(program: Program, role: tags.Role) -> list[fx.Node]:
    nodes = program.graph.find_nodes(op="placeholder")
    return [n for n in program.graph.nodes if n not in nodes and tags.get(n).role == role]


def gathers(program: Program) -> list[fx.Node]:
    return list(program.graph.find_nodes(op="call_function", target=ops.all_gather))


def another_operator(program: Program) -> None:
    node = next(n for n in making(program, "pre_gather") if n.target is torch.ops.aten.abs.default)
    node.target = torch.ops.aten.neg.default


def of_another_shard(program: Program) -> None:
    first = making(program, "pre_gather")[0]
    others = program.graph.find_nodes(op="placeholder")
    shard = next(n for n in others if tags.get(n).fqn == "1.weight")
    first.replace_input_with(tags.source(first), shard)


def another_argument(program: Program) -> None:
    node = next(n for n in making(program, "pre_gather") if n.target is torch.ops.aten.div.Tensor)
    node.args = (node.args[0], 126)


def scales_swapped(program: Program) -> None:
    one, other = (n for n in gathers(program)[:4] if n.args[0][0].meta["val"].shape[1] == 1)  # type: ignore
    one.args, other.args = (other.args[0], 2), (one.args[0], 2)


def saved(program: Program) -> None:
    """Backward reads what forward made, and recomputes it for nothing."""
    made = [n for n in making(program, "post_gather") if tags.get(n).fqn == "1.weight"]
    half = len(made) // 2
    made[-1].replace_all_uses_with(made[half - 1])


@pytest.mark.parametrize(
    "fault", [another_operator, of_another_shard, another_argument, scales_swapped, saved]
)
def test_the_verifier_finds(fault: Callable[[Program], None]) -> None:
    program = planned(Int8).program
    verify(program)
    fault(program)
    with pytest.raises(VerifyError):
        verify(program)


def another_reduction(program: Program) -> None:
    (node, *_) = program.graph.find_nodes(op="call_function", target=ops.reduce_now)
    node.args = (*node.args[:3], "min")


def test_the_verifier_finds_another_reduction() -> None:
    program = planned(Float8).program
    verify(program)
    another_reduction(program)
    with pytest.raises(VerifyError, match="where the class of the parameter asks for"):
        verify(program)
