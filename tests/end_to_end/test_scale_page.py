"""docs/scale.md, and the page of meshes: its figures by hand, on models small enough to count."""

import csv
import dataclasses
import json
import math
import re
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from benchmarks import mesh_page, published, scale_cells, scale_constants, scale_page, scale_tables
from benchmarks.scale_cells import BF16, Cell
from benchmarks.shapes import LLAMA3_8B, LLAMA3_70B, LLAMA3_405B, Shape, call
from fxshard.hardware import PRESETS, Hardware, Link
from fxshard.ir import tags
from fxshard.memory.cuda.settings import AllocatorSettings

aten = torch.ops.aten

# A ring of n takes 1 s for each of its n - 1 steps, and moves 100 bytes a second.
TOY = Hardware(
    name="toy",
    flops={torch.float32: 1.0},
    achievable=1.0,
    memory_bandwidth=1.0,
    memory_bytes=1,
    launch_overhead=0.0,
    link=Link(1.0, 100.0),
    network=Link(1.0, 100.0),
    host=Link(0.0, 1.0),
    ranks_per_node=4,
)


class Rows(nn.Module):
    """Three blocks of a matrix of 6 x 8 and one of 8 x 6, in front of a head of 4 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 8, bias=False))
            for _ in range(3)
        )
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()


def rows(world: Any, **options: Any) -> fxshard.Plan:
    with torch.device("meta"):
        model, x = Rows(), torch.zeros(2, 8, requires_grad=True)
    options = {"mixed_precision": BF16, "optimizer": torch.optim.AdamW, "device": "cuda"} | options
    return fxshard.plan(model, (x,), world_size=world, **options)


def padded(world: int) -> int:
    """Elements of all parameters, each cut along its rows and padded to the same for each rank."""
    block = math.ceil(6 / world) * world * 8 + math.ceil(8 / world) * world * 6
    return 3 * block + math.ceil(4 / world) * world * 8


WHOLE = 3 * (6 * 8 + 8 * 6) + 4 * 8


# -- bytes and collectives -------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4, 8, 16])
def test_full_shard_gathers_twice_and_reduces_once(world: int) -> None:
    """Two all-gathers in bf16, a reduce-scatter in fp32, each (W - 1) / W of the padded bytes.

    Of W ranks in nodes of 8, one byte in as many as share a node leaves it.
    """
    plan = rows(world, reshard_after_forward=True)
    found = scale_cells.cell(plan, {"h100": PRESETS["h100"]})
    assert found["padding"] == pytest.approx(padded(world) / WHOLE)
    ring = (world - 1) / world
    near = min(world, 8)
    crossing = 1 / near if world > 8 else 0
    for kind, moved in (
        ("unshard", 2 * 2 * padded(world) * ring),
        ("reduce", 4 * padded(world) * ring),
    ):
        sent = found["traffic"][kind]
        assert sent["link_bytes"] == pytest.approx(moved * (1 - crossing))
        assert sent["network_bytes"] == pytest.approx(moved * crossing)
    assert "all-reduce" not in found["traffic"]


def test_hybrid_reduces_its_shards_over_the_network() -> None:
    """Two copies of 8 ranks: gathers stay in the node, 2 * (2 - 1) / 2 of a fp32 shard crosses."""
    plan = rows((2, 8), strategy="hybrid_shard", reshard_after_forward=True)
    traffic = scale_cells.cell(plan, {"h100": PRESETS["h100"]})["traffic"]
    assert traffic["unshard"]["link_bytes"] == pytest.approx(2 * 2 * padded(8) * 7 / 8)
    assert traffic["unshard"]["network_bytes"] == traffic["reduce"]["network_bytes"] == 0
    assert traffic["all-reduce"]["network_bytes"] == pytest.approx(4 * padded(8) / 8)
    assert traffic["all-reduce"]["link_bytes"] == 0
    assert traffic["all-reduce"]["collectives"] == traffic["reduce"]["collectives"]


def test_a_cell_is_what_the_plan_says() -> None:
    plan = rows(4)
    found = json.loads(json.dumps(scale_cells.cell(plan, {"h100": PRESETS["h100"]})))
    assert found["peak_bytes"] == plan.memory.peak_bytes == sum(found["categories"].values())
    pages = AllocatorSettings(expandable_segments=True)
    outside = 1024 * 2**20 + 32 * 2 * 12 * 2**20  # of docs/cuda.md: context, and NCCL's rings
    reserved = plan.memory.device_memory(settings=pages).reserved
    assert found["device_bytes"] == reserved + outside > found["peak_bytes"] + outside
    took, estimate = found["times"]["h100"], plan.estimate("h100")
    assert took["step_seconds"] == estimate.step_seconds
    assert took["exposed_seconds"] == estimate.exposed_communication_seconds
    assert took["compute_seconds"] + took["exposed_seconds"] == pytest.approx(took["step_seconds"])
    assert took["mfu"] == estimate.mfu


@pytest.mark.parametrize(
    ("shape", "layer", "parameters"),
    [  # the totals are those of the models' pages: 8.03, 70.6 and 406 billion
        (LLAMA3_8B, 218_112_000, 8_030_261_248),
        (LLAMA3_70B, 855_654_400, 70_553_706_496),
        (LLAMA3_405B, 3_187_703_808, 405_853_388_800),
    ],
)
def test_published_shapes(shape: Shape, layer: int, parameters: int) -> None:
    assert shape.layer_parameters == layer
    assert shape.parameters == parameters


def test_a_shape_counts_what_its_model_has() -> None:
    small = Shape("small", 3, 64, 96, 4, 2, 100)
    model = small.model()
    assert sum(p.numel() for p in model.parameters()) == small.parameters
    layer = model.get_submodule("model.layers.1")
    assert sum(p.numel() for p in layer.parameters()) == small.layer_parameters
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert [t.shape for t in call(2, 8).values()] == [(2, 8), (2, 8)]


# -- the knee --------------------------------------------------------------------------------------


def test_the_knee_by_hand() -> None:
    """4 ranks: 3 s of latency, and 3 messages of a rank, at 100 bytes a second."""
    assert scale_cells.knee(TOY, 4) == pytest.approx(100)
    assert scale_cells.efficiency(100, TOY, 4) == pytest.approx(0.5)
    assert scale_cells.efficiency(400, TOY, 4) == pytest.approx(0.8)
    assert scale_cells.efficiency(0, TOY, 4) == 0
    late = dataclasses.replace(TOY, collective_overhead=6.0)
    assert scale_cells.knee(late, 4) == pytest.approx(300)


def test_how_many_ranks_a_unit_is_large_enough_for() -> None:
    """The knee is 100 bytes a rank whatever the ranks: 1,600 bytes are enough for 16 at half."""
    worlds = (4, 8, 16, 32)
    assert scale_cells.most_ranks(1600, TOY, 0.5, worlds) == 16
    assert scale_cells.most_ranks(1599, TOY, 0.5, worlds) == 8
    assert scale_cells.most_ranks(1600, TOY, 0.8, worlds) == 4
    assert scale_cells.most_ranks(100, TOY, 0.5, worlds) is None


def test_up_to_how_many_ranks_simple_is_faster() -> None:
    """A ring's step takes 1.3125 + 1.25 us more, all of a gather 5.6 us less and 8% of its bytes.

    436 MB: 0.92 of 370.8 GB/s take 102 us more than all of it: enough for 42 ranks. 32 are less.
    """
    assert scale_cells.simple_is_faster_to(2 * LLAMA3_8B.layer_parameters) == 32
    assert scale_cells.simple_is_faster_to(2 * LLAMA3_405B.layer_parameters) == 512


# -- the crossover ---------------------------------------------------------------------------------


def cell_of(world: int, group: int | None, step: float, needed: int = 1) -> Cell:
    times = {"h100": {"step_seconds": step}}
    return {"world": world, "group": group, "device_bytes": needed, "times": times}


def test_crossover() -> None:
    cells = [
        cell_of(8, None, 9.0),
        cell_of(16, None, 2.0),
        cell_of(16, 8, 1.0),  # faster, but not from here on
        cell_of(32, None, 2.0),
        cell_of(32, 8, 3.0),
        cell_of(64, None, 4.0),
        cell_of(64, 8, 5.0),
        cell_of(64, 16, 3.5),  # the faster group counts
        cell_of(128, None, 4.0),
        cell_of(128, 8, 3.0),
    ]
    assert scale_cells.crossover(cells, "h100") == 64
    assert scale_cells.crossover(cells, "h100", by=0.15) == 128  # 4.0 is not 1.15 times 3.5
    assert scale_cells.crossover(cells[:5], "h100") is None
    assert scale_cells.crossover(cells[:1], "h100") is None
    full, hybrid = scale_cells.best(cells, "h100")[64]
    assert full == cells[5] and hybrid == cells[7]


def test_what_does_not_fit_is_not_faster() -> None:
    much = PRESETS["h100"].memory_bytes
    cells = [cell_of(16, None, 4.0), cell_of(16, 8, 1.0, much + 1), cell_of(16, 4, 5.0)]
    assert scale_cells.best(cells, "h100") == {16: (cells[0], cells[2])}
    assert scale_cells.crossover(cells, "h100") is None
    assert not scale_cells.fits(cells[1], "h100")
    assert scale_cells.fits(cell_of(16, 8, 1.0, much), "h100")
    worlds = [cell_of(8, None, 1.0, much + 1), cell_of(16, 8, 1.0), cell_of(32, None, 1.0, much)]
    assert scale_cells.fits_from(worlds, "h100") == 32
    assert scale_cells.fits_from(worlds[:2], "h100") is None


# -- the page --------------------------------------------------------------------------------------


def shown() -> str:
    return scale_page.PAGE.read_text()


def written(name: str) -> list[dict[str, str]]:
    """The rows of a file of docs/scale/."""
    with (scale_page.TABLES / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("constant", "h100", "h200", "source"),
    [
        ("flops, bf16", "989.4 TFLOP/s", "989.4 TFLOP/s", "[H100]"),
        ("memory_bandwidth", "3.35 TB/s", "4.8 TB/s", "[H100], [H200]"),
        ("memory_bytes", "80 GB", "141 GB", "[H100], [H200]"),
        ("launch_overhead", "2 µs", "2 µs", "[guess]"),
        ("tree.network_alpha", "8.5 µs", "8.5 µs", "[NCCL]"),
    ],
)
def test_constants_have_their_sources(constant: str, h100: str, h200: str, source: str) -> None:
    (row,) = (each for each in scale_constants.constant_rows() if each["constant"] == constant)
    assert row == {"constant": constant, "h100": h100, "h200": h200, "source": source}


def test_the_page_has_the_constants_of_today() -> None:
    rows = written("constants")
    assert rows == scale_constants.constant_rows()
    assert scale_constants.sources_list() in shown()
    for (_, get, _), row in zip(scale_constants.CONSTANTS, rows, strict=True):
        number = float(row["h100"].split()[0].replace(",", ""))
        assert number == pytest.approx(get(PRESETS["h100"]), rel=1e-5)
    fields = {field.name for field in dataclasses.fields(Hardware)} - {"name", "host"}
    assert fields == {re.split(r"[.,]", name)[0] for name, *_ in scale_constants.CONSTANTS}
    used = {tag for tags in scale_constants.source_tags().values() for tag in tags}
    explained = set(
        re.findall(r"^- \*\*\[(\w+)\]\*\*", scale_constants.sources_list(), re.MULTILINE)
    )
    assert used == explained


def test_a_constant_without_a_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_constants, "_LINES", {"host": ("host=_PCIE5",)})
    with pytest.raises(ValueError, match="host: no line 'host=_PCIE5' with the tag of a source"):
        scale_constants.source_tags()


def test_the_page_is_made_of_the_last_results() -> None:
    result = json.loads(scale_cells.RECORD.read_text())
    assert scale_page.page(result) == shown()
    for name, table in scale_page.tables(result).items():
        assert written(name) == [{key: str(value) for key, value in row.items()} for row in table]
    for name, cells in result["models"].items():
        assert [c["world"] for c in cells if c["group"] is None] == list(scale_cells.WORLDS)
        assert {c["group"] for c in cells} == {None, *scale_cells.MODELS[name].groups}
    assert len(result["published"]) == len(published.MEASURED)


def test_the_page_of_meshes_is_made_of_the_last_results() -> None:
    result = json.loads(mesh_page.RECORD.read_text())
    assert mesh_page.page(result) == mesh_page.PAGE.read_text()
    assert written("meshes") == mesh_page.meshes(result)
    rows = mesh_page.published(result)
    assert written("meshes-published") == [{k: str(v) for k, v in row.items()} for row in rows]


def test_what_stands_on_the_page_follows_from_its_shapes() -> None:
    """Between two steps a parameter takes 12 bytes; on 8 ranks one eighth of them lies on each."""
    result = json.loads(scale_cells.RECORD.read_text())
    for name, cells in result["models"].items():
        shape = scale_cells.MODELS[name].shape
        held = cells[0]["categories"]
        assert held["Sharded Param"] == pytest.approx(4 * shape.parameters / 8, rel=1e-5)
        assert held["OptState"] == pytest.approx(8 * shape.parameters / 8, rel=1e-5)
        gathered = cells[0]["traffic"]["unshard"]["link_bytes"]
        assert gathered == pytest.approx(2 * 2 * shape.parameters * 7 / 8, rel=0.1)


def test_every_measurement_names_its_source() -> None:
    for each in published.MEASURED:
        assert each.source in published.SOURCES and each.gpu in published.GPUS
        assert each.checkpoint in (None, "full", published.TORCHTITAN)
        assert (each.reduce is torch.bfloat16) == (each.source == "ibm")
    assert {source for *_, source in published.OTHERS} == set(published.OTHER_SOURCES)
    # NVIDIA: 2 x 8,192 tokens of each GPU in 15.563 s on 128
    assert published.MEASURED[4].tokens == pytest.approx(134_752.43 / 128, rel=1e-3)


def test_torchtitans_policy_saves_every_second_product_of_a_layer() -> None:
    """Of the seven products of each layer the first, third, fifth and seventh, and attention."""
    layers, tokens = 2, 16
    shape = Shape("small", layers, 64, 96, 4, 2, 100)
    plan = scale_cells.planned(shape, 1, tokens, world_size=2)
    nothing, theirs = (
        plan.replan(checkpoint=scale_cells.policy(each)) for each in ("full", published.TORCHTITAN)
    )
    saved = {
        (tags.get(node).module, node.target)
        for node in theirs.program.phase("forward")
        if tags.get(node).save
    }
    names = ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj")
    products = {f"model.layers.{layer}.{name}" for layer in range(layers) for name in names}
    assert {module for module, op in saved if op is aten.mm.default} == products
    others = {op for _, op in saved if op is not aten.mm.default}
    assert len(others) == 1 and others <= set(scale_cells.ATTENTION)
    assert theirs.estimate("h100").compute_seconds < nothing.estimate("h100").compute_seconds


def test_ratios_are_ours_over_theirs() -> None:
    found = {"at": 0, "tokens": 2 * 5762.0, "exposed": 0.25, "mfu": 0.5}
    (row,) = scale_tables.published_rows([found])
    shown = ["5,762", "11,524", "2.00", "6,667", "1.73", "25.0%", "torchtitan-h100"]
    assert [*row.values()][5:12] == shown


def test_a_fall_is_from_the_fewest_to_the_most_ranks() -> None:
    cells = [
        {"at": 0, "reserved_bytes": 60 * 2**30, "peak_bytes": 50 * 2**30},
        {"at": 1, "reserved_bytes": 43 * 2**30, "peak_bytes": 40 * 2**30},
        {"at": 2},
    ]
    assert scale_tables.falls(cells) == {
        "measured_fall": pytest.approx(15.4),
        "our_fall": 10,
        "reserved_fall": 17,
    }
