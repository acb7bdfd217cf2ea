"""Text of programs: read back it is an equal program; what is none is refused clearly."""

import dataclasses
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Shard

import fxshard
from fxshard import pipeline, verify
from fxshard._torch.process_groups import fake_process_group
from fxshard.codegen.emit import emit
from fxshard.config.checked import Config
from fxshard.errors import FxshardError, TextError
from fxshard.ir import dump, ops, tags, text
from fxshard.ir.domain import LAYOUT
from fxshard.ir.program import Program
from fxshard.ir.splitting import configured_units
from fxshard.ir.tensor_parallel import Placed
from tests import captures, graphs, texts
from tests.passes.passes_cases import marked
from tests.verify.settings import HALF, SETTINGS, traced
from tests.verify.verify_cases import fresh
from tests.zoo import MODELS, deep

BUILDS: dict[str, Callable[[], Program]] = {
    "layered": graphs.layered,
    "chain": graphs.chain,
    "chain_bf16": functools.partial(graphs.chain, precision=graphs.BF16),
    "accumulated": functools.partial(
        graphs.layered, sync=False, accumulated=frozenset({"embed.weight"})
    ),
}
ALL = [
    (name, setting)
    for name in MODELS
    for setting in ("full_shard", *SETTINGS)
    if name == "tied" or (name == "convnet" and "every" in setting) or setting == "full_shard"
]


def start(name: str, setting: str) -> tuple[Program, Config]:
    """A program of the zoo that no pass has touched, and its options."""
    options, attributes = SETTINGS.get(setting, ({}, {}))
    case = MODELS[name]
    config = Config(units=case.units, **options)
    program = traced(name, config.mixed_precision is not None)
    units = configured_units(case.build(), config)
    program = fresh(program, attributes.get("world_size", 2))
    offloaded = config.offload is not None
    return dataclasses.replace(program, units=units, offloaded=offloaded, **attributes), config


@pytest.mark.parametrize(("name", "setting"), ALL)
@pytest.mark.sample(4)
def test_a_program_is_read_as_it_was_written(name: str, setting: str) -> None:
    program, config = start(name, setting)
    read = texts.again(program)
    passes = pipeline.default_passes(config)
    if name == "tied":
        for step in passes:  # each on text of the one before
            pipeline.run(program, [step])
            read = texts.again(read)
            pipeline.run(read, [step])
            assert text.write(read) == text.write(program), step.name
    else:
        pipeline.run(program, passes)
        pipeline.run(read, passes)
        assert text.write(read) == text.write(program)
    read = texts.again(program)
    verify.verify(read)
    assert emit(read) == emit(program)


@pytest.mark.parametrize("name", BUILDS)
def test_a_program_that_is_read_computes_the_same(name: str) -> None:
    start = BUILDS[name]()
    values = graphs.random_values(start)
    read = texts.again(start)
    for program in (start, read):
        pipeline.run(program, pipeline.default_passes(Config()))
    wanted = graphs.run(start, values)
    for each in (read, texts.again(start)):
        graphs.assert_same(graphs.run(each, values), wanted, exact=True)


@pytest.mark.parametrize("name", ["tied", "convnet"])
def test_a_plan_is_read_with_the_same_bytes(name: str) -> None:
    case = MODELS[name]
    torch.manual_seed(0)
    args, kwargs = case.batch(0, 0)
    with captures.sharing(True):
        plan = fxshard.plan(case.build(), args, kwargs, world_size=2, units=case.units)
    wanted = plan.memory.to_dict()
    plan.programs = tuple(map(texts.again, plan.programs))
    del plan.__dict__["memory"]
    assert plan.memory.to_dict() == wanted


class Pair(NamedTuple):
    first: Tensor
    second: Any


@dataclasses.dataclass
class Record:
    hidden: Tensor
    flag: str = 'it\'s "so"\n'


class Odd(nn.Module):
    """Constants, conditions on the batch's keywords, trees, infinity, a slice, a written buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table = torch.arange(4.0)
        self.row = self.table[1:3]
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor, *, mode: str, scale: float, extra: Any = None) -> Any:
        self.count.add_(1)
        hidden = self.linear(x + self.table).masked_fill(x > 0, float("-inf"))[:, ::2]
        more = {"a": hidden * self.row, 2: (hidden.bfloat16(), None)}
        return Pair(Record(F.gelu(hidden)), [more, extra, x[..., None]])


def odd(**options: Any) -> Any:
    torch.manual_seed(0)
    call = {"mode": "it's", "scale": float("nan"), "extra": 3}
    return fxshard.plan(Odd(), (torch.randn(3, 4),), call, world_size=2, **options)


def test_trees_constants_and_odd_literals() -> None:
    program = odd().program
    written = text.write(program)
    read = text.parse(written)
    assert text.write(read) == written and dump.text(read) == dump.text(program)
    assert read.signature.out_spec == program.signature.out_spec
    assert program.constants, "the model holds tensors outside of buffers"
    filled = text.parse(written, program.constants)
    for name, value in program.constants.items():
        assert filled.constants[name] is value
        assert read.constants[name].shape == value.shape
    with pytest.raises(TextError, match="is another tensor"):
        text.parse(written, {name: torch.zeros(7) for name in program.constants})


def test_open_sizes() -> None:
    plan = fxshard.plan(
        deep.Net(depth=2), (deep.x(),), world_size=2, units=["layers.*"], dynamic=deep.OPEN
    )
    assert plan.program.domain is not None
    read = texts.again(plan.program)
    assert read.domain is not None and read.domain.text == plan.program.domain.text


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint": "selective"},
        {"checkpoint": "full", "mixed_precision": HALF},
        {"optimizer_in_backward": True, "optimizer": torch.optim.SGD},
        {"max_bucket_bytes": "1KiB", "max_inflight": 2},
        {"strategy": "hybrid_shard", "world_size": (2, 2)},
        {"offload_activations": "1GiB"},
    ],
    ids=["selective", "full", "in_backward", "buckets", "hybrid", "activations"],
)
@pytest.mark.sample(2)
def test_options(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    kwargs = {"world_size": 2, "units": ["layers.*"]} | options
    texts.again(fxshard.plan(deep.Net(depth=2), (deep.x(),), **kwargs).program)


def test_evaluation() -> None:
    with torch.no_grad():
        plan = fxshard.plan(deep.Net().eval(), (deep.x(),), world_size=2)
    assert not plan.program.signature.training
    texts.again(plan.program)


# -- what has no text -----------------------------------------------------------------------------


def never(*args: Any) -> Any:
    raise AssertionError("it ran")


def of_a_function(program: Program) -> None:
    node = next(n for n in program.graph.nodes if n.target is torch.ops.aten.tanh.default)
    node.target = never


def of_higher_order(program: Program) -> None:
    node = next(n for n in program.graph.nodes if n.target is torch.ops.aten.tanh.default)
    node.target = torch.ops.higher_order.cond


def with_data(program: Program) -> None:
    node = next(n for n in program.graph.nodes if n.target is torch.ops.aten.tanh.default)
    node.meta["val"] = torch.zeros(2)


def with_an_object(program: Program) -> None:
    node = next(n for n in program.graph.nodes if n.target is torch.ops.aten.tanh.default)
    node.kwargs = {"generator": torch.Generator()}


def with_a_policy(program: Program) -> None:
    program.checkpoints = {"layers.0": lambda *args: None}


def with_a_policy_of_others(program: Program) -> None:
    program.checkpoints = {"layers.0": functools.partial(never, 1)}


def with_a_mode(program: Program) -> None:
    class Mode(type(program.fake_mode)):  # type: ignore[misc]
        pass

    program.fake_mode = Mode()


def with_two_of_a_name(program: Program) -> None:
    sizes = [sympy.Symbol("s0"), sympy.Symbol("s0", positive=True)]
    for node, size in zip(program.graph.nodes, sizes, strict=False):
        node.meta[LAYOUT] = (((size,), (1,), 0),)


def with_aliases_of_no_node(program: Program) -> None:
    node = next(n for n in program.graph.nodes if n.target is torch.ops.aten.tanh.default)
    with program.fake_mode:
        other = torch.empty(3)
    node.kwargs = {"some": other, "more": other[1:]}


def with_a_local_class(program: Program) -> None:
    class Local:
        pass

    program.signature = dataclasses.replace(program.signature, inputs=(Local,))


def with_another_schedule(program: Program) -> None:
    pipeline.run(program, pipeline.default_passes(Config()))
    assert program.schedule is not None
    row = next(n for n in program.schedule.forward.nodes if n.target is ops.wait)
    program.schedule.forward.erase_node(row)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (of_a_function, r"%tanh\w* .*holds an operator that is no operator of torch's registry"),
        (of_higher_order, r"%tanh\w* .*no operator of torch's registry: cond"),
        (with_data, r"%tanh\w* .*holds a tensor with data"),
        (with_an_object, r"%tanh\w* .*holds a torch\._C\.Generator"),
        (with_a_policy, r"checkpoints holds .*lambda.*, a function that is not found again"),
        (with_a_policy_of_others, r"checkpoints holds a functools.partial"),
        (with_a_mode, r"mode holds .*Mode.*not found again"),
        (with_two_of_a_name, r"holds two symbols of the name s0"),
        (with_aliases_of_no_node, r"%tanh\w* .*aliases one of no node"),
        (with_a_local_class, r"signature holds .*Local.*not found again"),
        (with_another_schedule, r"its schedule is not the one of its graph"),
    ],
)
def test_what_has_no_text_is_refused(spoil: Callable[[Program], None], said: str) -> None:
    program = graphs.layered()
    spoil(program)
    with pytest.raises(TextError, match=said):
        text.write(program)


def test_a_policy_of_a_module_is_a_name() -> None:
    """Nothing calls it when it is read; it must be a function, of a module that is imported."""
    program = graphs.layered()
    program.checkpoints = {"layers.0": never, "layers.1": "full"}
    written = text.write(program)
    assert " checkpoints={'layers.0': function('tests.ir.test_text:never'), " in written
    assert texts.again(program).checkpoints == program.checkpoints
    for name, said in (
        ("tests.ir.test_text:nowhere", "is no function"),
        ("tests.ir.test_text:Odd", "is no function"),
        ("os:system", "is no function"),
        ("nowhere.a:b", "has not imported nowhere.a"),
    ):
        with pytest.raises(TextError, match=said):
            text.parse(written.replace("tests.ir.test_text:never", name))


def test_parameters_of_tensor_parallelism_are_read_where_no_group_is() -> None:
    """As a rank has them: the mesh is equal to that rank's, and has no process groups."""
    with fake_process_group(3, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
        placed = Placed.on(mesh, (Shard(0),), (8, 4), (4, 1))
        program = graphs.chain(depth=1)
        root, unit = program.units
        (param,) = unit.params
        param = dataclasses.replace(param, placed=placed)
        program.units = (root, dataclasses.replace(unit, params=(param,)))
        where = ((0, dataclasses.replace(placed, placements=(Partial("avg"),))),)
        program.signature = dataclasses.replace(program.signature, placed=where)
        written = text.write(program)
        assert texts.again(program).units == program.units
    assert (
        "placed=Placed(mesh=Mesh(device='cpu', axes=(((2,), (1,)),), ranks=(0, 1, 2, 3), "
        "names=('tp',), groups=('"
    ) in written
    read = text.parse(written)
    assert text.write(read) == written
    (again,) = read.parallel.values()
    assert (again.group, again.rank, again.local_shape) == ("tp", 1, (4, 4))
    assert again.mesh.get_rank() == 3 and again.mesh.mesh.tolist() == [2, 3]
    with pytest.raises(TextError, match="no program has this"):
        text.parse(written.replace("axes=(((2,), (1,)),)", "axes=(((2,), (7,)),)"))


@pytest.mark.slow
def test_code_of_inductor_is_refused() -> None:
    plan = fxshard.plan(deep.Net(), (deep.x(),), world_size=2, backend="inductor")
    with pytest.raises(TextError, match=r"region_\d holds code that Inductor"):
        text.write(plan.program)


# -- what is no program ---------------------------------------------------------------------------


@functools.cache
def finished() -> str:
    program = graphs.layered(depth=1)
    pipeline.run(program, pipeline.default_passes(Config()))
    return text.write(program)


def numbered(said: str) -> str:
    """The number of the first line of `finished` that has some text."""
    return next(str(i + 1) for i, line in enumerate(finished().split("\n")) if said in line)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("program v2 ", "program v1 ", r"line 1: the text is of version 'v1', .*reads v2"),
        ("program v2 ", "prose v2 ", r"line 1: this is no program"),
        ("world_size=2", "world_size='2'", r"line 1: world_size='2' is no <class 'int'>"),
        ("world_size=2", "world_size=0", r"line 1: a program has at least one rank"),
        ("world_size=2", "worlds=2", r"line 1: world_size= is not there"),
        ("world_size=2", "world_size=2 mode=class('nowhere.a:B')", "has not imported nowhere"),
        ("world_size=2", "world_size=2 mode=evil('a')", "'evil' is no word of programs"),
        ("world_size=2", "world_size=2 mode=class('builtins:int')", "is no mode of fake tensors"),
        ("\nend\n", "", r"the text is cut off"),
        ("\nend\n", "\nend\nunit", r"there is more after the end"),
        ("facts WELL_FORMED", "facts WELL_KNOWN", "WELL_KNOWN is no fact"),
        ("\nbegun\n", "\nbegun units=3\n", "units= has no place here"),
        ("signature (", "signature open(", "'open' is no word of programs"),
        ("signature (", "signature 3(", "3 is no tree|'->' should be"),
        (") -> (", ") (", "where '->' should be"),
        ("param embed.weight f32[5,4]", "param embed.weight", "too early|is no tensor"),
        ("param embed.weight f32[5,4]", "param embed.weight f32[5,4]@%x", "no type of a parameter"),
        ("aten.addmm(", "aten.addmmm(", "no operator 'aten.addmmm'"),
        ("aten.addmm(", "os.system(", "no operator 'os.system'"),
        ("aten.addmm(%", "aten.addmm(%no_", "is no node before this line"),
        ("\nforward:", "\nsideways:", "line .*'sideways' is no node"),
        (" | unit=0", " | unit=0 phase='sideways'", "phase='sideways' is no"),
        (" = input ", " = output ", "'output' is no role of a placeholder"),
        ("unit=1", "unit=77", "there is no unit 77"),
        (" : f32[", " : f33[", "f33 is no dtype"),
        ("f32[4,4]{1,4}", "f32[4,4]{1,4}@%no", "in no storage of a value before it"),
        ("f32[4,4]{1,4}", "f32[4,4]{1,4}:8", "lies in a storage that has a size already"),
        ("f32[4,4]{1,4}", "f32[4,4]{1}", "has 2 sizes and 1 strides"),
        ("f32[4,4]{1,4}", "f32[4,4]{what=4}", "is nothing that a tensor has"),
        ("  return output '0' ", "  return output 0 ", "'0' is no name"),
    ],
)
def test_what_is_no_program_is_refused(before: str, after: str, said: str) -> None:
    whole = finished()
    assert before in whole, whole[:500]
    with pytest.raises(TextError, match=said):
        text.parse(whole.replace(before, after, 1))


def test_an_error_names_its_line() -> None:
    with pytest.raises(TextError, match=f"^line {numbered('aten.addmm(')}: ") as caught:
        text.parse(finished().replace("aten.addmm(", "aten.addmmm(", 1))
    assert str(caught.value.line) == numbered("aten.addmm(")


def test_a_tensor_lies_in_its_storage() -> None:
    line = next(n for n in finished().split("\n") if "aten.mul.Tensor" in n)
    assert ": f32[4,4] |" in line
    other = line.replace("f32[4,4]", "f32[4,4]:8")
    with pytest.raises(TextError, match="does not lie in its storage of 8 bytes"):
        text.parse(finished().replace(line, other, 1))


def test_storages_are_called_after_their_nodes() -> None:
    """A view lies in its base; what does not lie where its operator puts it says so."""
    program = graphs.chain(depth=1)
    by_name = {node.name: node for node in program.graph.nodes}
    assert "%t_0 = aten.t(%w_0) : f32[4,4]{1,4} | layers.0\n" in text.write(program)
    with program.fake_mode:
        by_name["t_0"].meta["val"] = torch.empty(4, 4)
        by_name["mm_0"].meta["val"] = torch.empty(20)[4:12].view(2, 4)
        by_name["x_1"].meta["val"] = by_name["mm_0"].meta["val"][:, :3]
        by_name["y"].meta["val"] = [by_name["xt"].meta["val"], torch.empty(3)]
        by_name["dhead"].meta["val"] = by_name["y"].meta["val"][1][1:]
    written = text.write(program)
    for line in (
        "%t_0 = aten.t(%w_0) : f32[4,4]@new | layers.0\n",
        "%mm_0 = aten.mm(%x_0, %t_0) : f32[2,4]{offset=4}:80 | layers.0\n",
        "%x_1 = aten.tanh(%mm_0) : f32[2,3]{4,1 offset=4}@%mm_0\n",
        "%y = aten.mm(%x_1, %head) : [f32[4,2]{1,4}, f32[3]]\n",
        "%xt = aten.t(%x_1) : f32[4,2]{1,4}@%y\n",
        "%dhead = aten.mm(%xt, %dy) : f32[2]{offset=1}@%y.1\n",
    ):
        assert line in written, line
    texts.assert_equal_graphs(text.parse(written).graph, program.graph)
    assert text.write(text.parse(written)) == written


def test_names_that_are_no_words_are_quoted() -> None:
    program = graphs.chain(depth=1)
    names = ["a-b", "it's", "inf", "nan.x", "None", "a.0", "0", "_", "torch.float32", "none", ""]
    nodes = [node for node in program.graph.nodes if node.op != "output"]
    for node, name in zip(nodes, names, strict=False):
        tags.update(node, module=name)
    tags.update(nodes[0], fqn="it's")
    tags.update(nodes[1], fqn="")
    del nodes[-1].meta["fxshard"]
    read = texts.again(program)
    assert [tags.get(n).module for n in list(read.graph.nodes)[: len(names)]] == names


def test_comments() -> None:
    """A file may hold what comes of a program after it: the text ends at its end."""
    whole = finished()
    assert text.write(text.parse(f"# before\n{whole}\n# after\nanything")) == whole
    with pytest.raises(TextError, match="there is more after the end"):
        text.parse(f"{whole}\nanything\n# after")
    with pytest.raises(TextError, match="cut off"):
        text.parse("# before\n# after")


def test_reading_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for code in (
        f"__import__('os').system('touch {mark}')",
        f"class('os:system')('touch {mark}')",
        "class('tests.ir.test_text:never')",
        "tree(class('tests.ir.test_text:Odd'), None, [])",
        "device(class('tests.ir.test_text:Odd'))",
    ):
        with pytest.raises(TextError):
            text.parse(finished().replace("world_size=2", f"world_size={code}", 1))
    assert not mark.exists()


def mutated(whole: str, draw: random.Random) -> str:
    """The text with a piece cut, doubled, moved or altered."""
    lines = whole.split("\n")
    at, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    kind = draw.randrange(7)
    if kind == 0:
        return whole[: draw.randrange(len(whole))]
    if kind == 1:
        del lines[at]
    elif kind == 2:
        lines.insert(other, lines[at])
    elif kind == 3:
        lines[at], lines[other] = lines[other], lines[at]
    else:
        place = draw.randrange(len(whole))
        piece = draw.choice(["", "(", "]", "%x", "9", "-1", "'", "None", "1e999", "{", "inf", " "])
        width = draw.randrange(4)
        return whole[:place] + piece + whole[place + width :]
    return "\n".join(lines)


@pytest.mark.parametrize("seed", range(4))
def test_any_text_is_read_or_refused(seed: int) -> None:
    draw, refused = random.Random(seed), 0
    for _ in range(60):
        changed = mutated(finished(), draw)
        try:
            text.parse(changed)
        except TextError as error:
            refused += 1
            assert str(error)
        except FxshardError as error:
            pytest.fail(f"{type(error)} for {changed}")
    assert refused > 20


@pytest.mark.parametrize("nested", ["[" * 5000, "(" * 80 + ")" * 80, "tree(" * 3000])
def test_deep_nesting_is_refused(nested: str) -> None:
    with pytest.raises(TextError, match=r"nested|early"):
        text.parse(finished().replace("world_size=2", f"world_size={nested}", 1))


def test_marked_checkpoints_and_calls_are_kept() -> None:
    program = marked()
    read = texts.again(program)
    assert [tags.get(n) for n in read.graph.nodes] == [tags.get(n) for n in program.graph.nodes]
