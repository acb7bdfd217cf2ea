"""Prefetch: where a gather is launched, how much may be unsharded, what grows with depth."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.fsdp import BackwardPrefetch
from torch.utils._python_dispatch import TorchDispatchMode

import fxshard
from fxshard import pipeline, verify
from fxshard.config.checked import Config
from fxshard.errors import ConfigError, VerifyError
from fxshard.ir import ops, tags, transfers
from fxshard.ir.program import Program
from fxshard.memory.category import CATEGORIES, Category
from tests import fsdp2, graphs
from tests.distributed.test_counts import live_peak
from tests.zoo import MODELS

MODES: list[Any] = [0, 1, 2, "pre", "post"]
Options = dict[str, Any]
Ahead = dict[str, tuple[str, ...]]
ROOT_KEPT: Options = {"reshard_after_forward": {"": False}}  # as FSDP2 does by default


def both(mode: Any) -> Options:
    return {"forward_prefetch": mode, "backward_prefetch": mode}


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "means"),
    [
        (BackwardPrefetch.BACKWARD_PRE, "pre"),
        (BackwardPrefetch.BACKWARD_POST, "post"),
        (None, 0),
        (3, 3),
        ("post", "post"),
    ],
)
def test_fsdp1s_modes(given: Any, means: Any) -> None:
    assert Config(backward_prefetch=given).backward_prefetch == means


@pytest.mark.parametrize(("given", "means"), [(True, 1), (False, 0), (None, 0), ("pre", "pre")])
def test_forward_modes(given: Any, means: Any) -> None:
    assert Config(forward_prefetch=given).forward_prefetch == means


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"forward_prefetch": "early"}, r"forward_prefetch='early': .*, 'pre' or 'post'"),
        ({"backward_prefetch": -1}, r"backward_prefetch=-1: expected an integer >= 0"),
        ({"max_inflight": 0}, r"max_inflight=0: expected None or an integer >= 1"),
        ({"max_inflight": True}, r"max_inflight=True: expected None or an integer >= 1"),
    ],
)
def test_what_makes_no_sense_is_refused(options: Options, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Config(**options)


# -- order ----------------------------------------------------------------------------------------


def rewritten(program: Program, **options: Any) -> Program:
    pipeline.run(program, pipeline.default_passes(Config(**options)), check_each=True)
    return program


def backward(kept: Sequence[str] = (), ahead: Ahead | None = None, **options: Any) -> str:
    """Backward of three layers and their root in words: g2 launches the gather of layer 2, w2 waits
    for it, c2 computes, f2 frees, r2 reduces, d2 is done with that. The root is h; ch is left out
    unless it is `kept`.

    Gradients are made in the order of the text: of a layer that of its input first.

    Args:
        kept: FQNs of the units that stay unsharded after forward.
        ahead: FQN of a unit -> those that it gathers ahead in backward.
        options: of the passes.
    """
    program = graphs.layered(3, reshard=dict.fromkeys(kept, False))
    units = [
        dataclasses.replace(unit, backward_ahead=(ahead or {}).get(unit.fqn, ()))
        for unit in program.units
    ]
    return in_words(dataclasses.replace(program, units=tuple(units)), "" in kept, **options)


def in_words(program: Program, root: bool = False, **options: Any) -> str:
    """`backward` of a program that no pass has touched; with `root`, where that computes too."""
    passes = pipeline.default_passes(Config(**options))
    passes = [step for step in passes if step.name != "order-gradients"]
    pipeline.run(program, passes, check_each=True)
    words: list[str] = []
    names = {ops.all_gather: "g", ops.free: "f", ops.reduce_scatter: "r"}
    unshards = {tags.get(n).pair for n in program.graph.nodes if n.target is ops.all_gather}
    for node in program.phase("backward"):
        tag = tags.get(node)
        of = "h" if not tag.unit else str(tag.unit - 1)
        gathers = tag.pair in unshards
        if node.target is ops.wait:
            words.append(("w" if gathers else "d") + of)
        elif node.target in names and (node.target is not ops.free or gathers):
            words.append(names[node.target] + of)
        elif tag.role == "compute" and (tag.unit or root) and words[-1:] != ["c" + of]:
            words.append("c" + of)
    return " ".join(words)


def test_order_by_hand() -> None:
    none = "gh wh fh g2 w2 c2 f2 c2 r2 g1 w1 c1 f1 c1 d2 r1 g0 w0 c0 f0 c0 d1 r0 d0 rh dh"
    one = "gh wh g2 fh w2 g1 c2 f2 c2 r2 w1 g0 c1 f1 c1 d2 r1 w0 c0 f0 c0 d1 r0 d0 rh dh"
    two = "gh wh g2 g1 fh w2 g0 c2 f2 c2 r2 w1 c1 f1 c1 d2 r1 w0 c0 f0 c0 d1 r0 d0 rh dh"
    # After all compute of the unit before, before its reduction, and of the wait for another.
    post = "gh wh fh g2 w2 c2 f2 c2 g1 r2 w1 c1 f1 c1 g0 d2 r1 w0 c0 f0 c0 d1 r0 d0 rh dh"
    assert backward(**both(0)) == none
    assert backward(**both(1)) == backward(**both("pre")) == one
    assert backward(**both(2)) == two
    assert backward(**both("post")) == post


def test_a_unit_that_stayed_unsharded_is_a_place_to_launch() -> None:
    """The last layer is gathered while the root computes, which nothing is gathered for."""
    root = ("",)
    none = "ch fh g2 w2 c2 f2 c2 r2 g1 w1 c1 f1 c1 d2 r1 g0 w0 c0 f0 c0 d1 r0 ch d0 rh dh"
    one = "g2 ch fh w2 g1 c2 f2 c2 r2 w1 g0 c1 f1 c1 d2 r1 w0 c0 f0 c0 d1 r0 ch d0 rh dh"
    two = "g2 g1 ch fh w2 g0 c2 f2 c2 r2 w1 c1 f1 c1 d2 r1 w0 c0 f0 c0 d1 r0 ch d0 rh dh"
    assert backward(root, **both(0)) == none
    assert backward(root, **both(1)) == backward(root, **both("pre")) == one
    assert backward(root, **both(2)) == two


def test_a_layer_that_stayed_unsharded_is_a_place_to_launch() -> None:
    middle = ("layers.1",)
    one = "gh wh g2 fh w2 c2 f2 c2 r2 g0 c1 f1 c1 d2 r1 w0 c0 f0 c0 d1 r0 d0 rh dh"
    two = "gh wh g2 fh w2 g0 c2 f2 c2 r2 c1 f1 c1 d2 r1 w0 c0 f0 c0 d1 r0 d0 rh dh"
    assert backward(middle, **both(1)) == one
    assert backward(middle, **both(2)) == two
    assert backward(("", "layers.2"), **both(1)).startswith("ch fh g1 c2 f2 c2 r2 w1 g0 c1")


def test_a_unit_that_stayed_unsharded_says_what_is_gathered_ahead() -> None:
    words = backward(("",), {"": ("layers.1", "layers.2"), "layers.2": ("layers.0",)})
    assert words.startswith("g1 g2 ch fh w2 g0 c2 f2 c2 r2 w1 c1")


def test_what_ranks_agree_on_is_not_launched_where_one_of_them_computes() -> None:
    """The first operator of a unit may stand elsewhere on other ranks."""
    program = graphs.layered(3, reshard={"": False})
    alone = rewritten(graphs.layered(3, reshard={"": False}), ranks_may_differ=True)
    program.common = alone.needs
    assert in_words(program, root=True, ranks_may_differ=True).startswith("ch fh c2 g2 w2 g1 c2")


def test_a_bucket_of_layers_that_stayed_unsharded_is_one_place() -> None:
    """Two layers in one bucket begin, in backward, where the later one of them does."""
    program = graphs.chain(4, reshard={"layers.2": False, "layers.3": False})
    rewritten(program, min_bucket_bytes=2 * 64)
    _, launch = (n for n in program.phase("backward") if transfers.is_unshard(n))
    begins = next(n for n in program.phase("backward") if tags.get(n).module == "layers.3")
    assert program.units[tags.get(launch).unit or 0].fqn == "layers.1"
    assert launch < begins < waits_of(program, launch)


class Issued(TorchDispatchMode):
    """Matrix products and all-gathers, in the order in which the thread issues them."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if "allgather" in name:
            self.words.append("gather")
        elif name in ("aten::mm", "aten::addmm", "aten::mm.out", "aten::addmm.out"):
            self.words.append("product")
        return func(*args, **kwargs or {})


def issued(rank: int, world_size: int) -> list[str]:
    """By backward of a head and three layers, of which the first needs no weight."""
    model = fxshard.compile(Deep(3), units=["layers.*"], **ROOT_KEPT)
    for _ in range(2):
        loss = model(torch.ones(4, 8)).sum()
        with Issued() as seen:
            loss.backward()
    return seen.words


def test_ranks_gather_the_last_layer_before_the_head_is_differentiated(ranks: Any) -> None:
    gather, layer = "gather", ["product", "product"]
    words = [gather, *layer, gather, *layer, *layer, "product"]
    assert ranks(2).run(issued) == [words] * 2


# -- how much is unsharded ------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "ahead"), [(2, 2), ("pre", 1), ("post", 0)])
def test_buffers_of_real_gathers(mode: Any, ahead: int) -> None:
    """Watched at the process group: the root, the layer that computes, and those ahead."""
    peak, layer, root = live_peak(4, mode, **graphs.APART)
    assert peak == (ahead + 1) * layer + root


@pytest.mark.parametrize("limit", [2, 4])
def test_max_inflight_holds_at_the_process_group(limit: int) -> None:
    """Without it all layers would be unsharded; the root is always one of them."""
    peak, layer, root = live_peak(6, 9, max_inflight=limit, **graphs.APART)
    assert peak == (limit - 1) * layer + root


def unsharded_at_most(program: Program) -> int:
    """Units between their launch and their free, at any point, by a count of its own."""
    alive: set[int | None] = set()
    most = 0
    gathers = {tags.get(n).pair for n in program.graph.nodes if n.target is ops.all_gather}
    for node in program.graph.nodes:
        pair = tags.get(node).pair if node.op == "call_function" else None
        if node.target is ops.all_gather:
            alive.add(pair)
        elif node.target is ops.free and pair in gathers and "sent" not in node.name:
            alive.discard(pair)
        most = max(most, len(alive))
    return most


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.sample(6)
def test_max_inflight_holds_in_the_program(mode: Any, limit: int) -> None:
    """The head of a chain is a unit's like another: nothing is in use beside it."""
    free = unsharded_at_most(rewritten(graphs.chain(6), **both(mode)))
    held = unsharded_at_most(rewritten(graphs.chain(6), **both(mode), max_inflight=limit))
    assert held == min(free, limit)


def test_a_limit_that_holds_anyhow_changes_nothing() -> None:
    for mode in (1, 2):
        loose = rewritten(graphs.chain(6), **both(mode), max_inflight=mode + 1)
        assert str(loose.graph) == str(rewritten(graphs.chain(6), **both(mode)).graph)


def test_numbers_with_a_limit() -> None:
    for limit in (2, 3):
        program = graphs.layered(3)
        values = graphs.random_values(program)
        numbers = graphs.run(program, values)
        rewritten(program, **both(4), max_inflight=limit)
        graphs.assert_same(graphs.run(program, values), numbers, exact=True)


@pytest.mark.parametrize("kept", [("",), ("layers.1",), ("", "layers.2"), ("layers.1", "layers.2")])
@pytest.mark.parametrize("more", [{}, {"max_inflight": 4}, {"backward_prefetch": "post"}], ids=str)
def test_numbers_where_units_stay_unsharded(kept: tuple[str, ...], more: Options) -> None:
    program = graphs.layered(3, reshard=dict.fromkeys(kept, False))
    values = graphs.random_values(program)
    numbers = graphs.run(program, values)
    rewritten(program, **both(2) | more)
    graphs.assert_same(graphs.run(program, values), numbers, exact=True)


def test_too_low_a_limit_names_the_units_that_compute() -> None:
    """The embedding is tied to the head: the root is in use from first to last."""
    said = (
        r"max_inflight=1 cannot be held: at %wait_1 in forward, 2 units are unsharded because they "
        r"compute: \(root\), layers\.0\. Give at least 2, or split the largest"
    )
    with pytest.raises(ConfigError, match=said):
        rewritten(graphs.layered(2), max_inflight=1)
    with pytest.raises(
        ConfigError, match=r"3 units .*: \(root\), layers\.0, layers\.1\. Those with"
    ):
        rewritten(graphs.layered(2, reshard=False), max_inflight=2)


def test_a_launch_before_the_limit_allows_is_a_fault() -> None:
    program = rewritten(graphs.chain(4), **both(2), max_inflight=2)
    launches = program.graph.find_nodes(op="call_function", target=ops.all_gather)
    node = launches[2]
    first = waits_of(program, launches[0])
    for moved in reversed([node, *node.users]):
        if moved.target not in (ops.wait, ops.free):
            first.append(moved)
    with pytest.raises(VerifyError, match=r"3 units are unsharded .*; the limit is 2") as caught:
        verify.verify(program)
    assert (caught.value.fact, caught.value.node) == ("bounded_inflight", launches[1].name)


def test_a_free_moved_back_is_a_fault() -> None:
    program = rewritten(graphs.chain(4), **both(2), max_inflight=2)
    launch = program.graph.find_nodes(op="call_function", target=ops.all_gather)[2]
    free = next(
        node
        for node in program.graph.find_nodes(op="call_function", target=ops.free)
        if tags.get(node).pair == 0
    )
    launch.append(free)
    with pytest.raises(VerifyError) as caught:
        verify.verify(program)
    assert (caught.value.fact, caught.value.node) == ("bounded_inflight", launch.name)


def waits_of(program: Program, launch: fx.Node) -> fx.Node:
    (wait,) = {user for item in launch.users for user in item.users if user.target is ops.wait}
    return wait


# -- depth ----------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Layers and a head."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


@functools.cache
def planned(depth: int) -> fxshard.Plan:
    return fxshard.plan(Deep(depth), (torch.randn(4, 8),), world_size=4, units=["layers.*"])


def most(plan: fxshard.Plan, *categories: Category) -> int:
    """Most bytes of some categories at any moment of a step."""
    columns = [CATEGORIES.index(category) for category in categories]
    return max(int(phase.during[:, columns].sum(1).max()) for phase in plan.memory.phases())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sample(2)
def test_nothing_but_activations_and_shards_grows_with_depth(mode: Any) -> None:
    """8 against 24 layers: what waits to be reduced, and what is unsharded, are O(1)."""
    shallow, deep = (planned(depth).replan(**both(mode)) for depth in (8, 24))
    for categories in (
        (Category.REDUCE_SCATTER, Category.UNSHARDED_GRAD),
        (Category.ALL_GATHER, Category.UNSHARDED_PARAM),
    ):
        assert most(shallow, *categories) == most(deep, *categories) > 0


def test_a_reduction_waits_for_one_unit_at_most() -> None:
    """Between a launch and its wait stands at most one other launch; and compute stands there."""
    program = planned(8).program
    nodes = program.phase("backward")
    order = {node: i for i, node in enumerate(nodes)}
    launches = [node for node in nodes if node.target is ops.reduce_scatter]
    assert len(launches) == 9
    for k, launch in enumerate(launches[:-1]):
        wait = order[waits_of(program, launch)]
        assert wait < order[launches[k + 1]]
        between = nodes[order[launch] : wait]
        assert any(tags.get(node).role == "compute" for node in between), launch.name


# -- numbers --------------------------------------------------------------------------------------


def like_fsdp2(rank: int, world_size: int, options: Options) -> None:
    case = MODELS["mlp13"]
    torch.manual_seed(0)
    ours = fxshard.compile(case.build(), units=case.units, **options)
    fsdp2.assert_bitwise(fsdp2.run_steps(ours, case, 3), fsdp2.train(case, 3))


@pytest.mark.parametrize(
    "options",
    [
        both("post"),
        {"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "max_inflight": 2},
        both(9) | {"max_inflight": 3},
        ROOT_KEPT,
        ROOT_KEPT | both(2) | {"max_inflight": 3},
    ],
)
def test_bitwise_with_fsdp2(ranks: Any, options: Options) -> None:
    ranks(2).run(like_fsdp2, options)


@pytest.mark.parametrize(
    "options", [both("post"), both(9) | {"max_inflight": 2}, ROOT_KEPT, ROOT_KEPT | both(2)]
)
def test_static_equals_measured(options: Options) -> None:
    case = MODELS["mlp13"]
    args, kwargs = case.batch(0, 0)
    result = fxshard.validate(
        case.build(), args, kwargs, world_size=2, optimizer=torch.optim.SGD, **options
    )
    assert result.max_abs_difference == 0
    assert result.static_peak_bytes == result.measured_peak_bytes > 0
