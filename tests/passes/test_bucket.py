"""Buckets: what is split, merged and packed, by hand; bytes once; numbers as FSDP2's."""

import collections
import dataclasses
import functools
import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fxshard
from fxshard import pipeline
from fxshard._torch import process_groups
from fxshard.config.checked import Config
from fxshard.errors import ConfigError
from fxshard.ir import ops, tags
from fxshard.ir.program import Program
from fxshard.memory.category import Category
from fxshard.passes.bucket import LARGE, Bucket
from fxshard.verify import certificate
from tests import graphs
from tests.end_to_end.training_cases import Net, batch, loss_of
from tests.oracles import Collective, count_collectives, profiler_peak_bytes
from tests.passes.bucket_cases import APART, MERGED, PACKED, SPLIT, Options

aten = torch.ops.aten


# -- which parameters move together ----------------------------------------------------------------


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
        ({"min_bytes": 10**6}, [EMBED, LAYER]),  # the head reads the embedding after the layer
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


# -- what the process group gets -------------------------------------------------------------------


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
@pytest.mark.sample(3)
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


# -- bytes -----------------------------------------------------------------------------------------


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
        [tags.get(item).fqn for item in node.users if item.target is operator.getitem]
        for node in program.graph.nodes
        if node.target is ops.reduce_scatter
    ]
    assert "head.weight" in reduced[0] and reduced[-1] == ["embed.weight"]


def test_bytes_of_a_split_root_are_measured() -> None:
    model, args = Ends(ROWS), (torch.zeros(1, 2, dtype=torch.long),)
    seen = fxshard.validate(model, args, world_size=2, units=["layers.*"], steps=1)
    assert seen.max_abs_difference == 0
