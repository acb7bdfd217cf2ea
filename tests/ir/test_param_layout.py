"""Where rows are: every element in one place, as DTensor has it; no other file computes it."""

import ast
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from fxshard._torch import process_groups
from fxshard.ir import layout
from fxshard.ir.layout import ParamLayout
from fxshard.ir.units import Param, Unit

ROOT = Path(__file__).parents[2]

SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
CUT = SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), st.integers(0, len(shape) - 1)))
RANKS = st.integers(1, 12)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@st.composite
def models(draw: st.DrawFn) -> list[Unit]:
    """Units of parameters of any shapes and dtypes; some are ignored, and may be scalars."""
    units = []
    for index in range(draw(st.integers(1, 3))):
        cut = draw(st.lists(CUT, max_size=4))
        params = [
            param(f"{index}.{i}", s, draw(DTYPES), index, dim) for i, (s, dim) in enumerate(cut)
        ]
        whole = draw(st.lists(SHAPES | st.just(()), max_size=2))
        ignored = [param(f"{index}.w{i}", s, draw(DTYPES), index) for i, s in enumerate(whole)]
        units.append(Unit(index, str(index), "Linear", tuple(params), tuple(ignored)))
    return units


def param(fqn: str, shape: tuple[int, ...], dtype: torch.dtype, unit: int, dim: int = 0) -> Param:
    return Param(
        *(fqn, (fqn,), shape, dtype), requires_grad=True, unit=unit, position=0, shard_dim=dim
    )


def sharded(units: list[Unit], ranks: int) -> dict[str, ParamLayout]:
    every = layout.layouts(units, ranks)
    return {param.fqn: every[param.fqn] for unit in units for param in unit.params}


def of(shape: tuple[int, ...], ranks: int, dim: int = 0, replicas: int = 1) -> ParamLayout:
    placements = tuple(layout.placements(dim).values())
    return ParamLayout(shape, torch.float32, unit=0, mesh=(replicas, ranks), placements=placements)


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


# -- rows ------------------------------------------------------------------------------------------


@given(CUT, RANKS)
def test_every_row_is_on_one_rank_as_torch_chunk_cuts(
    cut: tuple[tuple[int, ...], int], ranks: int
) -> None:
    shape, dim = cut
    found, whole = of(shape, ranks, dim), numbered(shape)
    pieces = [*whole.chunk(ranks, dim)] if shape[dim] else []
    pieces += [whole.narrow(dim, 0, 0)] * (ranks - len(pieces))
    rows = [found.rows(rank) for rank in range(ranks)]
    most = pieces[0].shape[dim]
    if ranks > 1:
        assert found.dim == dim
        assert [row for each in rows for row in each] == list(range(shape[dim]))
        assert found.padding == ranks * most - shape[dim] == layout.padding(shape[dim], ranks)
    for rank, piece in enumerate(pieces):
        assert torch.equal(found.rows_of(whole, rank), piece)
        assert found.local_shape(rank) == tuple(piece.shape)
        assert len(rows[rank]) <= found.shard_shape[found.dim]
    assert found.shard_shape == tuple(pieces[0].shape)
    assert found.shard_bytes == 4 * pieces[0].numel() == found.local_bytes
    assert found.padded_bytes == ranks * found.shard_bytes


@settings(max_examples=30)
@given(CUT, st.integers(1, 3), RANKS, st.data())
def test_rows_are_those_of_a_dtensor(
    cut: tuple[tuple[int, ...], int], replicas: int, ranks: int, data: st.DataObject
) -> None:
    """On a mesh of both dimensions, on any of its ranks."""
    shape, dim = cut
    found = of(shape, ranks, dim, replicas)
    me = data.draw(st.integers(0, replicas * ranks - 1))
    with process_groups.fake_process_group(me, replicas * ranks):
        mesh = init_device_mesh("cpu", found.mesh, mesh_dim_names=tuple(layout.placements()))
        rank = mesh.get_local_rank("shard")
        local = torch.empty(found.local_shape(rank))
        # DTensor's own rule: it infers nothing from the local tensor, and finds where that is.
        stride = torch.empty(shape, device="meta").stride()
        made = DTensor.from_local(
            local, mesh, found.placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
        (chunk,) = made.__create_chunk_list__()
    assert tuple(chunk.sizes) == found.local_shape(rank)
    start = found.rows(rank).start
    assert tuple(chunk.offsets) == tuple(start if d == found.dim else 0 for d in range(len(shape)))


@given(SHAPES | st.just(()), RANKS)
def test_an_ignored_parameter_is_whole_on_every_rank(shape: tuple[int, ...], ranks: int) -> None:
    unit = Unit(0, "", "Linear", (), (param("w", shape, torch.float32, 0),))
    found = layout.layouts([unit], ranks, replicas=2)["w"]
    assert found.placements == (Replicate(), Replicate())
    assert found.shape == found.shard_shape == found.padded_shape == shape and not found.padding
    assert {found.local_shape(rank) for rank in range(ranks)} == {shape}


# -- the flat storage ------------------------------------------------------------------------------


@given(models(), RANKS)
def test_shards_lie_in_flat_storage_without_gaps_or_overlaps(units: list[Unit], ranks: int) -> None:
    found = sharded(units, ranks)
    for storage, numel in layout.flat_numels(found.values()).items():
        members = [each for each in found.values() if each.storage == storage]
        taken = [place for each in members for place in range(each.offset, each.end)]
        assert taken == list(range(numel))  # each element in one place
        for each in members:
            assert (each.unit, each.dtype, each.mesh) == storage


@given(models(), RANKS)
def test_sharded_and_unsharded_again_it_is_the_parameter(units: list[Unit], ranks: int) -> None:
    """By way of every rank's flat storage, and of one in which all ranks' shards lie."""
    found = sharded(units, ranks)
    numels = layout.flat_numels(found.values())
    for held in (1, ranks):
        flats = [
            {key: torch.zeros(held * n, dtype=torch.int64) for key, n in numels.items()}
            for _ in range(ranks // held)
        ]
        wholes = {fqn: numbered(each.shape) + 1 for fqn, each in found.items()}
        for fqn, each in found.items():
            shards = [s for flat in flats for s in each.shards_in(flat[each.storage], held)]
            if held == ranks and each.dim:  # in one process the parameter itself lies there
                continue
            for rank, shard in enumerate(shards):
                mine = each.rows_of(wholes[fqn], rank)
                shard.view(-1)[: mine.numel()] = mine.flatten()
        for fqn, each in found.items():
            shards = [s for flat in flats for s in each.shards_in(flat[each.storage], held)]
            if held == ranks and each.dim:
                continue
            gathered = torch.cat(shards)
            full = layout.joined(gathered, each)
            assert torch.equal(full, wholes[fqn])
            assert gathered.sum() == full.sum()  # padding is no parameter's: it is zero
            assert full.data_ptr() == gathered.data_ptr() or each.dim or not full.numel()
            if held == ranks:  # the unsharded parameter is a view
                flat = flats[0][each.storage][held * each.offset :]
                assert torch.equal(flat[: math.prod(each.shape)].view(each.shape), wholes[fqn])


# -- other numbers of ranks ------------------------------------------------------------------------


@given(CUT, RANKS, RANKS)
def test_formulas_hold_over_ranks_that_pad_alike(
    cut: tuple[tuple[int, ...], int], ranks: int, other: int
) -> None:
    over = sympy.Symbol("world", integer=True, positive=True)
    shape, dim = cut
    here, there = of(shape, ranks, dim), of(shape, other, dim)
    if bool(here.padding) == bool(there.padding) and (ranks == 1) == (other == 1):
        assert here.shard_numel_over(over).subs(over, other) == there.shard_numel
        padded = here.padded_numel_over(over).subs(over, other)
        assert padded == math.prod(there.padded_shape)
        unsharded = here.unsharded_numel_over(over).subs(over, other)
        assert unsharded == math.prod(there.unsharded_shape)


@given(CUT, st.integers(1, 4), st.integers(1, 4))
def test_a_smaller_group_holds_as_many_rows_together(
    cut: tuple[tuple[int, ...], int], size: int, groups: int
) -> None:
    shape, dim = cut
    found = of(shape, size * groups, dim)
    chunk = found.chunk_shape(size)
    assert math.prod(layout.gathered(chunk, size)) == math.prod(found.padded_shape)
    whole, rows = numbered(shape), found.chunk_shape(size)[found.dim]
    chunks = [layout.chunk_of(whole, found.dim, rows, rank) for rank in range(size)]
    assert all(tuple(each.shape) == chunk for each in chunks)
    made = torch.full(shape, -1)
    stacked = torch.stack([each.flatten() for each in chunks])
    for sent, place in layout.both_places(stacked, made, chunk, found.dim):
        place.copy_(sent)
    assert torch.equal(made, whole)


@given(CUT, RANKS)
def test_gradients_are_sent_rank_by_rank(cut: tuple[tuple[int, ...], int], ranks: int) -> None:
    """What a rank gets of the sum is its rows, and then rows of padding."""
    shape, dim = cut
    found, whole = of(shape, ranks, dim), numbered(shape) + 1
    padded = torch.zeros(found.padded_shape, dtype=torch.int64)
    padded.narrow(found.dim, 0, shape[found.dim]).copy_(whole)
    sent = layout.as_sent(padded, found)
    assert tuple(sent.shape) == layout.gathered(found.shard_shape, ranks) and sent.is_contiguous()
    shards = [layout.part_of(sent, rank, ranks) for rank in range(ranks)]
    for rank, shard in enumerate(shards):
        rows = found.local_shape(rank)[found.dim]
        mine = layout.without_padding([shard], found, rows)
        assert torch.equal(mine, found.rows_of(whole, rank)) and mine.is_contiguous()
    together = layout.without_padding(shards, found, shape[found.dim])
    assert torch.equal(together, whole)


# -- parts and pieces of tensors -------------------------------------------------------------------


@given(SHAPES, RANKS)
def test_parts_of_gathered_rows_are_what_was_gathered(shape: tuple[int, ...], ranks: int) -> None:
    whole = numbered(layout.gathered(shape, ranks))
    parts = [layout.part_of(whole, rank, ranks) for rank in range(ranks)]
    assert torch.equal(torch.cat(parts), whole)
    assert all(tuple(part.shape) == shape == layout.part(whole.shape, ranks) for part in parts)


@given(st.lists(SHAPES, min_size=1, max_size=4), st.integers(1, 4))
def test_pieces_are_what_was_packed(shapes: list[tuple[int, ...]], ranks: int) -> None:
    sent = [[numbered(shape) + rank for shape in shapes] for rank in range(ranks)]
    flats = [torch.cat([tensor.reshape(-1) for tensor in each]) for each in sent]
    for each, flat in zip(sent, flats, strict=True):
        made = layout.pieces(flat, shapes)
        assert all(torch.equal(a, b) for a, b in zip(made, each, strict=True))
    by_rank = layout.pieces_by_rank(torch.cat(flats), ranks, shapes)
    for i, piece in enumerate(by_rank):
        assert torch.equal(piece, torch.stack([each[i].reshape(-1) for each in sent]))


@given(st.lists(CUT, min_size=1, max_size=4), st.integers(1, 4))
def test_parameters_are_unpacked_as_they_were_packed(
    cuts: list[tuple[tuple[int, ...], int]], ranks: int
) -> None:
    """Of any dimensions, some of them 0, out of one buffer."""
    cuts = [(shape, dim) for shape, dim in cuts if math.prod(shape)]
    if not cuts:
        return
    found = [of(shape, ranks, dim) for shape, dim in cuts]
    wholes = [numbered(shape) + 1 for shape, _ in cuts]
    sent = [
        layout.chunk_of(whole, each.dim, each.shard_shape[each.dim], rank).flatten()
        for rank in range(ranks)
        for each, whole in zip(found, wholes, strict=True)
    ]
    chunks, dims = [each.shard_shape for each in found], [each.dim for each in found]
    lengths = [each.unsharded_shape[each.dim] for each in found]
    shapes = layout.unpacked(ranks, chunks, dims, lengths)
    assert shapes == [each.unsharded_shape for each in found]
    made, places = layout.unpacked_places(torch.cat(sent), chunks, dims, lengths)
    assert [tuple(full.shape) for full in made] == shapes
    for full in made:
        full.fill_(-1)
    for piece, place in places:
        place.copy_(piece)
    for each, full, whole in zip(found, made, wholes, strict=True):
        assert torch.equal(full.narrow(each.dim, 0, each.shape[each.dim]), whole)


# -- no other file ---------------------------------------------------------------------------------

RANKS_NAMED = {"world", "world_size", "ranks", "size", "shards"}
CUTS = {"chunk", "tensor_split", "split"}  # methods of tensors


def rows_computed(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines that cut rows among ranks, or compute how many some ranks have.

    That is a product, a quotient or a rest of a number of rows (``x.shape[0]``, ``rows``) and a
    number of ranks; any quotient by a number of ranks that is rounded up or down, if it is none of
    two numbers of ranks; how many times the elements of chunks lie in a tensor; and a tensor that
    is cut by torch into as many chunks as there are ranks.
    """
    for node in ast.walk(tree):
        found = False
        if isinstance(node, ast.BinOp):
            both = [ast.unparse(node.left), ast.unparse(node.right)]
            of_rows = any(side.endswith(("shape[0]", "rows")) for side in both)
            rounded_up = both[0].startswith("-") and counts_ranks(node.right)
            scales = isinstance(node.op, (ast.Mult, ast.Div, ast.FloorDiv, ast.Mod))
            found = scales and (rounded_up or (of_rows and counts_ranks(node)))
            found |= isinstance(node.op, ast.FloorDiv) and shares(node, both)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found = node.func.attr in CUTS and any(map(counts_ranks, node.args))
        if found:
            yield node.lineno, ast.unparse(node)


def shares(quotient: ast.BinOp, both: list[str]) -> bool:
    """True for a length by a number of ranks, and for elements by those of chunks.

    Not for ranks by ranks, as of a mesh.
    """
    by_ranks = name(quotient.right).lower() in RANKS_NAMED and not counts_ranks(quotient.left)
    return by_ranks or (both[0].endswith("numel()") and "math.prod" in both[1])


def counts_ranks(node: ast.AST) -> bool:
    return any(name(each).lower() in RANKS_NAMED for each in ast.walk(node))


def name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def sources() -> list[Path]:
    """All that predicts and runs; validation measures, and must not share its arithmetic."""
    found = [*(ROOT / "fxshard").rglob("*.py"), *(ROOT / "passes").glob("*.py")]
    return [p for p in found if p.name != "layout.py" and "validation" not in p.parts]


@pytest.mark.parametrize(
    "line",
    [
        "(-(-self.shape[0] // world_size), *rest)",
        "world * rows",
        "-(-n // world.size)",
        "x.chunk(mesh.size(0), dim)",
        "buffer.chunk(size)[rank]",
        "g.new_empty((g.shape[0] // size, *g.shape[1:]))",
        "split(view, length // ranks, 1)",
        "packed.numel() // sum(map(math.prod, chunks))",
    ],
)
def test_arithmetic_on_rows_is_found(line: str) -> None:
    assert list(rows_computed(ast.parse(line)))


def test_no_other_file_computes_rows() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sources()
        for line, text in rows_computed(ast.parse(path.read_text()))
    ]
    assert not found, "\n".join(found)
