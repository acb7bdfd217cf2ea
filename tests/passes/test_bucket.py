"""Buckets: what is split, merged and packed, by hand; bytes once; numbers as FSDP2's."""

import collections
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import fxshard
from fxshard import pipeline, verify
from fxshard._torch import process_groups
from fxshard.config import Config
from fxshard.errors import ConfigError, VerifyError
from fxshard.ir import ops, tags
from fxshard.ir.program import Fact, ParamBucket, Program
from fxshard.memory.category import Category
from fxshard.passes.bucket import LARGE, Bucket
from fxshard.verify import certificate
from fxshard.verify.gradients import hook_rows
from tests import fsdp2, graphs
from tests.distributed.test_strategies import grid
from tests.end_to_end.test_accumulation import train as train_accumulating
from tests.end_to_end.test_training import Net, assert_same, batch, loss_of
from tests.fsdp2 import Result
from tests.oracles import Collective, count_collectives, profiler_peak_bytes
from tests.zoo import MODELS

aten = torch.ops.aten
Options = dict[str, Any]
APART: Options = {"pack_bytes": 0}
SPLIT: Options = {"max_bucket_bytes": 144} | APART
MERGED: Options = {"min_bucket_bytes": 1000} | APART
PACKED: Options = {"pack_bytes": 100}
ALL: Options = {"max_bucket_bytes": 300, "min_bucket_bytes": 200, "pack_bytes": 100}

# -- which parameters move together ---------------------------------------------------------------


def buckets_of(program: Program, **options: Any) -> list[tuple[str, ...]]:
    pipeline.run(program, pipeline.default_passes(Config())[:2])
    pipeline.run(program, [Bucket(**options)], check_each=True)
    return [bucket.fqns for bucket in program.buckets]


# Bytes on 2 ranks: embed 6 x 4 (5 rows, padded), a weight and a shift 4 x 4, a bias 4, of 4 each.
EMBED, LAYER = ("embed.weight",), ("layers.0.weight", "layers.0.bias", "layers.0.shift")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, [EMBED, LAYER]),
        ({"max_bytes": 144}, [EMBED, (LAYER[2], LAYER[0], LAYER[1])]),  # in order of first use
        ({"max_bytes": 143}, [EMBED, (LAYER[2], LAYER[0]), (LAYER[1],)]),
        ({"max_bytes": 80}, [EMBED, (LAYER[2],), (LAYER[0], LAYER[1])]),
        ({"max_bytes": 1}, [EMBED, (LAYER[2],), (LAYER[0],), (LAYER[1],)]),
        ({"min_bytes": 10**6}, [EMBED, LAYER]),  # the head reads the embedding behind the layer
        ({"max_bytes": 80, "min_bytes": 80}, [EMBED, (LAYER[2],), (LAYER[0], LAYER[1])]),
    ],
)
def test_buckets_by_hand(options: Options, found: list[tuple[str, ...]]) -> None:
    assert buckets_of(graphs.layered(1), **options) == found


@pytest.mark.parametrize(
    ("options", "found"),
    [  # 64 bytes a layer; the head has 48
        ({"min_bytes": 64}, [["0"], ["1"], ["2"], ["3"], ["head"]]),
        ({"min_bytes": 65}, [["0", "1"], ["2", "3"], ["head"]]),
        ({"min_bytes": 129}, [["0", "1", "2"], ["3", "head"]]),
        ({"min_bytes": 10**6}, [["0", "1", "2", "3", "head"]]),
        ({"min_bytes": 200, "max_bytes": 200}, [["0", "1", "2"], ["3", "head"]]),
    ],
)
def test_merged_by_hand(options: Options, found: list[list[str]]) -> None:
    names = [
        [fqn.removeprefix("layers.").removesuffix(".weight") for fqn in bucket]
        for bucket in buckets_of(graphs.chain(4), **options)
    ]
    assert names == found


def test_units_that_differ_are_not_merged() -> None:
    program = graphs.chain(4)
    program.units = tuple(
        dataclasses.replace(unit, reshard=unit.index != 2) for unit in program.units
    )
    assert [len(bucket) for bucket in buckets_of(program, min_bytes=10**6)] == [1, 1, 3]


def test_bytes_are_those_of_the_gather() -> None:
    """In bf16 half as many."""
    assert len(buckets_of(graphs.chain(4, precision=graphs.BF16), min_bytes=33)) == 3
    assert len(buckets_of(graphs.chain(4, precision=graphs.BF16), min_bytes=32)) == 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_bucket_bytes": 0}, r"max_bucket_bytes=0: expected bytes > 0, .* None is no limit"),
        ({"max_bucket_bytes": "many"}, r"max_bucket_bytes='many': expected bytes > 0"),
        ({"min_bucket_bytes": True}, r"min_bucket_bytes=True: expected bytes > 0"),
        ({"pack_bytes": -1}, r"pack_bytes=-1: expected bytes > 0, .* 0 packs nothing"),
        ({"pack_bytes": None}, r"pack_bytes=None: expected bytes"),
        (
            {"min_bucket_bytes": "2KiB", "max_bucket_bytes": 2047},
            r"min_bucket_bytes=2048 is more than max_bucket_bytes=2047: no bucket is both",
        ),
    ],
)
def test_sizes_that_make_no_sense_are_refused(options: Options, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Config(**options)


def test_sizes_may_be_text() -> None:
    config = Config(max_bucket_bytes="25MiB", min_bucket_bytes="1 MiB", pack_bytes="4KiB")
    sizes = (config.max_bucket_bytes, config.min_bucket_bytes, config.pack_bytes)
    assert sizes == (25 * 2**20, 2**20, 4096)


# -- what the process group gets ------------------------------------------------------------------


def one_step(options: Options) -> tuple[list[Collective], list[Collective]]:
    """Collectives of forward and of backward, of rank 0 of 2."""
    with process_groups.fake_process_group(0, 2):
        torch.manual_seed(0)
        model = fxshard.compile(Net(), units=["blocks.*"], **options)
        model._fxshard.variant((batch(0),), {})
        with count_collectives() as forward:
            loss = loss_of(model(batch(0)))
        with count_collectives() as backward:
            loss.backward()
    return forward.calls, backward.calls


def moved(calls: list[Collective], kind: str) -> list[tuple[int, int]]:
    """Bytes and tensors of each call, sorted."""
    return sorted((call.nbytes, call.tensors) for call in calls if call.kind == kind)


# Net on 2 ranks. A block: norm.weight, norm.bias, linear.bias of 24 bytes, linear.weight of 144.
# The root: inlet.weight 120, inlet.bias 24, head.weight 96 (3 rows, padded to 4), head.bias 16.
# Backward reads of a block all but linear.bias, of the root head.weight.
@pytest.mark.parametrize(
    ("options", "forward", "backward", "reduced"),
    [
        ({}, [(216, 1)] * 3 + [(256, 1)], [(96, 1)] + [(192, 1)] * 3, [(216, 1)] * 3 + [(256, 1)]),
        (
            APART,
            [(216, 4)] * 3 + [(256, 4)],
            [(96, 1)] + [(192, 3)] * 3,
            [(216, 4)] * 3 + [(256, 4)],
        ),
        (
            SPLIT,  # inlet | head; norm | linear.weight | linear.bias
            [(24, 1)] * 3 + [(48, 2)] * 3 + [(112, 2)] + [(144, 1)] * 3 + [(144, 2)],
            [(48, 2)] * 3 + [(96, 1)] + [(144, 1)] * 3,
            [(24, 1)] * 3 + [(48, 2)] * 3 + [(112, 2)] + [(144, 1)] * 3 + [(144, 2)],
        ),
        (MERGED, [(256, 4), (648, 12)], [(96, 1), (576, 9)], [(256, 4), (648, 12)]),
        (
            {"min_bucket_bytes": 300} | APART,
            [(216, 4), (256, 4), (432, 8)],
            [(96, 1), (192, 3), (384, 6)],
            [(216, 4), (256, 4), (432, 8)],
        ),
        (
            PACKED,
            [(216, 2)] * 3 + [(256, 2)],
            [(96, 1)] + [(192, 2)] * 3,
            [(216, 2)] * 3 + [(256, 2)],
        ),
        (MERGED | PACKED, [(256, 2), (648, 4)], [(96, 1), (576, 4)], [(256, 2), (648, 4)]),
    ],
)  # fmt: skip
def test_collectives_by_hand(
    options: Options,
    forward: list[tuple[int, int]],
    backward: list[tuple[int, int]],
    reduced: list[tuple[int, int]],
) -> None:
    first, second = one_step(options)
    assert moved(first, "all_gather") == sorted(forward)
    assert moved(second, "all_gather") == sorted(backward)
    assert moved(second, "reduce_scatter") == sorted(reduced)
    assert len(first) + len(second) == len(forward) + len(backward) + len(reduced)


# -- bytes ----------------------------------------------------------------------------------------


def test_an_unsharded_unit_is_held_once_and_by_fsdp2_twice() -> None:
    """Peak of a forward by torch.profiler. 1 MiB of parameters, 2 KiB of activations a row."""
    peaks = []
    with process_groups.fake_process_group(0, 4), torch.no_grad():
        x = torch.ones(1, 512)
        theirs, ours = (nn.Sequential(nn.Linear(512, 512, bias=False)) for _ in range(2))
        fully_shard(theirs, reshard_after_forward=True)
        for model in (theirs, fxshard.compile(ours, args=(x,))):
            model(x)
            peaks.append(profiler_peak_bytes(functools.partial(model, x)))
    assert 2 * 2**20 <= peaks[0] <= 2 * 2**20 + 8192
    assert 1 * 2**20 <= peaks[1] <= 1 * 2**20 + 8192


class Ends(nn.Module):
    """An embedding, layers, and a head: its root unit is used first and last."""

    def __init__(self, vocab: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))
        self.norm = nn.LayerNorm(32, elementwise_affine=vocab != 64)
        self.head = nn.Linear(32, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(self.norm(x))


def planned_ends(vocab: int = 64, **options: Any) -> fxshard.Plan:
    with torch.device("meta"):
        model, args = Ends(vocab), (torch.zeros(1, 2, dtype=torch.long),)
    return fxshard.plan(model, args, world_size=2, units=["layers.*"], **options)


def most_unsharded(vocab: int = 64, **options: Any) -> int:
    """Most bytes of gathered and unsharded parameters at any moment of a step; by default
    nothing is packed."""
    plan = planned_ends(vocab, **(APART | options))
    both = [list(Category).index(c) for c in (Category.ALL_GATHER, Category.UNSHARDED_PARAM)]
    return max(int(phase.during[:, both].sum(1).max()) for phase in plan.memory.phases())


def test_a_split_root_holds_its_embedding_or_its_head() -> None:
    embed = head = 4 * 64 * 32
    layer = 4 * 32 * 32
    assert most_unsharded() == embed + head + 2 * layer
    assert most_unsharded(max_bucket_bytes=embed) == embed + layer
    assert most_unsharded(max_bucket_bytes=embed, max_inflight=1) == head
    # Two of two layers each, one of them in flight.
    merged = most_unsharded(max_bucket_bytes=embed, min_bucket_bytes=layer + 1)
    assert merged == embed + 2 * layer
    # The buffer of both, and the copies out of it.
    assert most_unsharded(pack_bytes="1MiB") == 2 * (embed + head)


ROWS = LARGE // (4 * 32)  # so many rows of 32 fp32 numbers are a part that is gathered alone


def test_a_root_whose_ends_are_large_is_split_between_them() -> None:
    end, norm, layer = LARGE, 2 * 4 * 32, 4 * 32 * 32
    ends = [("embed.weight",), ("norm.weight", "norm.bias", "head.weight")]
    found = planned_ends(ROWS).program.buckets
    assert [bucket.fqns for bucket in found[:2]] == ends and len(found) == 2 + 4
    assert most_unsharded(ROWS) == end + norm + layer  # the last layer, and the head ahead
    below = planned_ends(ROWS - 2).program
    assert len(below.buckets) == 1 + 4
    assert most_unsharded(ROWS - 2) == 2 * (end - 2 * 4 * 32) + norm + 2 * layer
    lines = [line.split()[1:3] for line in certificate.collectives(planned_ends(ROWS).program)]
    counts = collections.Counter(map(tuple, lines))
    # The embedding is not read in backward; both ends are reduced apart.
    assert counts["forward", "fxshard.all_gather"] == 2 + 4
    assert counts["backward", "fxshard.all_gather"] == 1 + 4
    assert counts["backward", "fxshard.reduce_scatter"] == 2 + 4


def test_a_head_that_is_split_off_is_reduced_while_layers_run_backward() -> None:
    program = planned_ends(ROWS).program
    reduced = [
        [tags.get(pick).fqn for pick in node.users if pick.target is operator.getitem]
        for node in program.graph.nodes
        if node.target is ops.reduce_scatter
    ]
    assert "head.weight" in reduced[0] and reduced[-1] == ["embed.weight"]


def test_bytes_of_a_split_root_are_measured() -> None:
    model, args = Ends(ROWS), (torch.zeros(1, 2, dtype=torch.long),)
    seen = fxshard.validate(model, args, world_size=2, units=["layers.*"], steps=1)
    assert seen.max_abs_difference == 0


# -- numbers --------------------------------------------------------------------------------------

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
HOST = CPUOffloadPolicy(pin_memory=False)
# name: ours, FSDP2's
WAYS: dict[str, tuple[Options, Options]] = {
    "split": (SPLIT, {}),
    "merged": (MERGED, {}),
    "packed": (PACKED, {}),
    "all": (ALL, {}),
    "all, bf16": (ALL | {"mixed_precision": BF16}, {"mp_policy": BF16}),
    "all, offload": (ALL | {"offload": HOST}, {"offload_policy": HOST}),
    "all, kept": (ALL | {"strategy": "shard_grad_op"}, {"reshard_after_forward": False}),
    "packed, no prefetch": (PACKED | {"forward_prefetch": 0, "backward_prefetch": 0}, {}),
    "all, far ahead": (
        ALL | {"forward_prefetch": 9, "backward_prefetch": 9, "max_inflight": 4},
        {},
    ),
    "all, post": (ALL | {"backward_prefetch": "post"}, {}),
}
HYBRID = {"strategy": "hybrid_shard"}


def trained(name: str, options: Options) -> Result:
    case = MODELS[name]
    torch.manual_seed(0)
    model = fxshard.compile(case.build(), units=case.units, **options)
    return fsdp2.run_steps(model, case, 3)


def like_fsdp2(rank: int, world_size: int, name: str, way: str) -> None:
    mine, other = WAYS[way]
    fsdp2.assert_bitwise(trained(name, mine), fsdp2.train(MODELS[name], 3, **other))


@pytest.mark.parametrize("way", WAYS)
def test_bitwise_with_fsdp2(ranks: Any, way: str) -> None:
    ranks(2).run(like_fsdp2, "mlp13", way)


# Eager's batch norm takes no bf16 weights beside its fp32 statistics on the CPU.
CASES = [
    (way, name)
    for way in WAYS
    for name in ("transformer", "llama", "tied", "convnet")
    if (way, name) != ("all, bf16", "convnet")
]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "name"), CASES)
def test_bitwise_with_fsdp2_on_more_models(ranks: Any, way: str, name: str) -> None:
    ranks(2).run(like_fsdp2, name, way)


def hybrid_like_fsdp2(rank: int, world_size: int) -> None:
    for way in ("packed", "all"):
        mine = WAYS[way][0] | HYBRID | {"mesh": grid(2, 2)}
        fsdp2.assert_bitwise(
            trained("mlp13", mine), fsdp2.train(MODELS["mlp13"], 3, mesh=grid(2, 2))
        )
    mine = ALL | {"reshard_after_forward": 2}
    reference = fsdp2.train(MODELS["mlp13"], 3, reshard_after_forward=2)
    fsdp2.assert_close(trained("mlp13", mine), reference, rtol=1e-6)


def test_bitwise_with_fsdp2_on_replicas(ranks: Any) -> None:
    ranks(4).run(hybrid_like_fsdp2)


def accumulating(rank: int, world_size: int, options: Options, other: Options) -> None:
    """Micro-batches: two under no_sync, one that reduces all."""
    torch.manual_seed(0)
    ours = fxshard.compile(Net(), units=["blocks.*"], **options)
    torch.manual_seed(0)
    theirs = Net()
    for block in theirs.blocks:
        fully_shard(block, **other)
    fully_shard(theirs, **other)
    flags = [False, False, True]
    both = zip(
        train_accumulating(ours, rank, flags), train_accumulating(theirs, rank, flags), strict=True
    )
    for (what, mine), (_, reference) in both:
        if what.startswith("grads") and not what.endswith("2"):
            continue  # FSDP2 shows unsharded gradients there
        assert_same(mine, reference, what)


@pytest.mark.parametrize(
    ("options", "other"),
    [(PACKED, {}), (ALL | {"mixed_precision": BF16}, {"mp_policy": BF16})],
)
def test_accumulation_bitwise_with_fsdp2(ranks: Any, options: Options, other: Options) -> None:
    ranks(2).run(accumulating, options, other)


# -- static = measured ----------------------------------------------------------------------------

SMALL: Options = {"max_bucket_bytes": 4000, "min_bucket_bytes": 3000, "pack_bytes": 600}
EXACT: dict[str, tuple[Any, Options]] = {
    "packed, bf16": (3, {"pack_bytes": 600, "mixed_precision": BF16}),
    "all, hybrid": ((2, 2), SMALL | HYBRID),
    "all, offload": (2, SMALL | {"offload": CPUOffloadPolicy()}),
    "packed, no_sync": (2, {"pack_bytes": 600, "micro_batches": 2, "no_sync": True}),
}
EXACT_SLOWLY: dict[str, tuple[Any, Options]] = {
    "split": (2, {"max_bucket_bytes": 1500} | APART),
    "merged": (2, {"min_bucket_bytes": 100000} | APART),
    "packed": (2, {"pack_bytes": 600}),
    "packed, resharded": (4, {"pack_bytes": 600, "reshard_after_forward": 2}),
    "packed, kept": (2, {"pack_bytes": 600, "strategy": "shard_grad_op"}),
    "packed, no_shard": (2, {"pack_bytes": 600, "strategy": "no_shard"}),
    "all, bf16, no_sync": (
        2,
        SMALL | {"mixed_precision": BF16, "micro_batches": 2, "no_sync": True},
    ),
    "far ahead": (2, SMALL | {"forward_prefetch": 4, "backward_prefetch": 4, "max_inflight": 4}),
}


def assert_exact(name: str, world_size: Any, options: Options) -> None:
    case = MODELS[name]
    torch.manual_seed(0)
    args, kwargs = case.batch(0, 0)
    model, adamw = case.build(), functools.partial(torch.optim.AdamW, lr=1e-3)
    options = {"units": case.units, "optimizer": adamw} | options
    result = fxshard.validate(model, args, kwargs, world_size=world_size, **options)
    assert result.max_abs_difference == 0, result.table(only_different=True)
    assert result.static_peak_bytes == result.measured_peak_bytes > 0


@pytest.mark.parametrize("way", EXACT)
def test_static_equals_measured(way: str) -> None:
    assert_exact("transformer", *EXACT[way])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", "tied", "llama", "mlp13"])
@pytest.mark.parametrize("way", EXACT | EXACT_SLOWLY)
def test_static_equals_measured_in_every_way(way: str, name: str) -> None:
    assert_exact(name, *(EXACT | EXACT_SLOWLY)[way])


# -- faults ---------------------------------------------------------------------------------------

Fault = Callable[[Program], fx.Node]
FAULTS: list[tuple[Fact, Fault]] = []


def packed() -> Program:
    """`graphs.layered`, whose layers are packed whole, behind the whole pipeline."""
    program = graphs.layered(2)
    pipeline.run(program, pipeline.default_passes(Config(pack_bytes=65)))
    return program


def breaks(fact: Fact) -> Callable[[Fault], Fault]:
    def add(fault: Fault) -> Fault:
        FAULTS.append((fact, fault))
        return fault

    return add


def find(program: Program, name: str) -> fx.Node:
    (node,) = (node for node in program.graph.nodes if node.name == name)
    return node


def word(program: Program, target: Any, unit: int = 1, phase: str = "forward") -> fx.Node:
    return next(
        node
        for node in program.graph.find_nodes(op="call_function", target=target)
        if (tags.get(node).unit, tags.get(node).phase) == (unit, phase)
    )


def value_of(program: Program, fqn: str) -> fx.Node:
    both = zip(program.values, program.results, strict=True)
    return next(value for value, result in both if result.name == fqn)


@breaks(Fact.PARAMS_UNSHARDED)
def two_parameters_swapped_behind_unpack(program: Program) -> fx.Node:
    """A weight and a shift have one shape."""
    unpack = word(program, ops.unpack)
    weight, _, shift = unpack.users
    weight.args, shift.args = (unpack, 2), (unpack, 0)
    return unpack


@breaks(Fact.PARAMS_UNSHARDED)
def packed_in_another_order(program: Program) -> fx.Node:
    pack = word(program, ops.pack)
    weight, bias, shift = tags.operands(pack)
    pack.args = ([shift, bias, weight], *pack.args[1:])
    return word(program, ops.unpack)


@breaks(Fact.PARAMS_UNSHARDED)
def unpacked_for_another_number_of_ranks(program: Program) -> fx.Node:
    unpack = word(program, ops.unpack)
    unpack.args = (unpack.args[0], 4, *unpack.args[2:])
    return unpack


@breaks(Fact.PARAMS_UNSHARDED)
def packed_buffer_read_as_it_is(program: Program) -> fx.Node:
    unpack = word(program, ops.unpack)
    (flat,) = tags.operands(unpack)
    free = next(user for user in flat.users if user.target is ops.free)
    with program.graph.inserting_before(free):
        node = program.graph.call_function(aten.relu.default, (flat,))
    return tags.put(node, dataclasses.replace(tags.get(unpack), role="compute"), flat.meta["val"])


@breaks(Fact.TAGGED)
def buffer_packed_in_place_of_a_shard(program: Program) -> fx.Node:
    pack = word(program, ops.pack, unit=2)
    first, *rest = tags.operands(pack)
    other = find(program, "scale")
    tags.update(other, fqn=tags.get(first).fqn)
    other.meta["val"] = first.meta["val"]
    pack.args = ([other, *rest], *pack.args[1:])
    return other


@breaks(Fact.UNSHARD_PAIRED)
def unpacked_in_front_of_the_wait(program: Program) -> fx.Node:
    unpack = word(program, ops.unpack)
    (flat,) = tags.operands(unpack)
    flat.append(unpack)
    return unpack


@breaks(Fact.FREED)
def packed_buffer_never_freed(program: Program) -> fx.Node:
    unpack = word(program, ops.unpack)
    (flat,) = tags.operands(unpack)
    free = next(user for user in flat.users if user.target is ops.free)
    program.graph.erase_node(free)
    return find(program, "free_sent_1")


@breaks(Fact.NO_USE_AFTER_FREE)
def packed_buffer_freed_in_front_of_its_unpack(program: Program) -> fx.Node:
    unpack = word(program, ops.unpack)
    (flat,) = tags.operands(unpack)
    free = next(user for user in flat.users if user.target is ops.free)
    unpack.prepend(free)
    return unpack


@breaks(Fact.REDUCED_ONCE)
def one_gradient_packed_twice(program: Program) -> fx.Node:
    launch = word(program, ops.reduce_scatter, phase="backward")
    weight, bias, _ = hook_rows(launch)
    (cat,) = (user for user in weight.users if user.target is aten.cat.default)
    cat.args = ([weight, bias, weight], 1)
    return next(iter(launch.users))


@breaks(Fact.REDUCED_ONCE)
def gradients_packed_in_another_order(program: Program) -> fx.Node:
    launch = word(program, ops.reduce_scatter, phase="backward")
    weight, bias, shift = hook_rows(launch)
    (cat,) = (user for user in weight.users if user.target is aten.cat.default)
    cat.args = ([shift, bias, weight], 1)
    return next(iter(launch.users))


@breaks(Fact.REDUCED_ONCE)
def gradient_cut_at_the_wrong_place(program: Program) -> fx.Node:
    piece = tags.source(value_of(program, "layers.0.shift"))
    start, end = piece.args[2:4]
    piece.args = (*piece.args[:2], start - 1, end - 1)  # type: ignore[operator]
    return tags.source(piece)


@breaks(Fact.BUCKETED)
def packed_though_it_is_not_to_be(program: Program) -> fx.Node:
    root, layer, *rest = program.buckets
    program.buckets = (root, ParamBucket(layer.fqns), *rest)
    return word(program, ops.all_gather)


@pytest.mark.parametrize(("fact", "fault"), FAULTS, ids=[fault.__name__ for _, fault in FAULTS])
def test_fault_is_found(fact: Fact, fault: Fault) -> None:
    program = packed()
    node = fault(program)
    with pytest.raises(VerifyError) as caught:
        verify.verify(program)
    assert (caught.value.fact, caught.value.node) == (fact.name.lower(), node.name), caught.value


def test_what_is_to_be_packed_is_not_sent_one_by_one() -> None:
    """As it would be with `bucket` behind insert-unshard."""
    program = graphs.layered(2)
    pipeline.run(program, pipeline.default_passes(Config(pack_bytes=0)))
    program.buckets = tuple(ParamBucket(b.fqns, frozenset(b.fqns)) for b in program.buckets)
    with pytest.raises(VerifyError, match="one by one, which are to be packed") as caught:
        verify.verify(program)
    assert caught.value.fact == "bucketed"


def programs() -> Iterator[Program]:
    added = {"accumulated": frozenset({"layers.0.bias"})}
    for settings in (
        {},
        {"replicas": 2, "offloaded": True},
        {"world_size": 4, "reshard": 2},
        {"reshard": False},
        {"world_size": 1, "replicas": 2},
        {"comm_hook": True},
        added,
        added | {"sync": False},
    ):
        yield graphs.layered(2, **settings)
    low: Options = {"precision": graphs.BF16}
    for settings in ({}, {"world_size": 4, "reshard": 2}, {"world_size": 1, "offloaded": True}):
        yield graphs.chain(3, **low, **settings)


@pytest.mark.parametrize(
    "options",
    [
        {"pack_bytes": 65},
        {"max_bucket_bytes": 80} | APART,
        {"min_bucket_bytes": 900, "pack_bytes": 65},
    ],
)
def test_no_false_alarm_and_the_numbers_of_the_trace(options: Options) -> None:
    """On a world that moves data as late, and destroys it as early, as the program allows."""
    for program in programs():
        values = graphs.random_values(program)
        numbers = graphs.run(program, values)
        pipeline.run(program, pipeline.default_passes(Config(**options)), check_each=True)
        ours = graphs.run(program, values)
        graphs.assert_same(ours, numbers, exact=True, dtypes=False)
