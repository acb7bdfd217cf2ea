"""A case: a program, options of fxshard, a world and a training loop, drawn from a seed."""

from __future__ import annotations

import dataclasses
import linecache
import random
import re
import sys
import types
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz import options as options_module
from tests.fuzz.draft import Class, Draft, Line, Unfit
from tests.fuzz.operators import OPERATORS, WEIGHTS, operator, width

IMPORTS = """\
import copy, dataclasses
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
"""
NAMES = "BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64\n"
EXACT_NAMES = "BF16 = F16 = F32 = F64 = torch.float64\n"
LEAVES = """\
def leaves(out):
    if isinstance(out, Tensor):
        yield out
    elif dataclasses.is_dataclass(out):
        yield from leaves(list(vars(out).values()))
    elif isinstance(out, (dict, list, tuple)):
        for value in out.values() if isinstance(out, dict) else out:
            yield from leaves(value)


def smooth(t):
    return t.to(torch.promote_types(t.dtype, torch.float32)).square().log1p().sum() / 8


def loss_of(out):
    return sum(smooth(t) for t in list(leaves(out))[TAKEN] if t.requires_grad)
"""
# What lines may use besides; written out where they do.
HELPERS = {
    "Doubled": """\
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3
""",
    "Clipped": """\
class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 2)
""",
    "Product": """\
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.sigmoid()
        ctx.save_for_backward(x, y)
        ctx.factor = 0.5
        return x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * (y + x * y * (1 - y)) * ctx.factor
""",
    "Pair": """\
@dataclasses.dataclass
class Pair:
    first: object
    second: object = None
""",
}


@dataclasses.dataclass(frozen=True)
class Program:
    """Module classes, the root `Model` last, and what it is called with.

    Attributes:
        inputs: argument -> code of its value, drawn with the generator `g`; `n` rows.
        rows: code of `n`, of `rank` and `step`.
        taken: which output tensors the loss reads, such as ":1"; "" is all of them.
    """

    classes: tuple[Class, ...]
    inputs: tuple[tuple[str, str], ...]
    rows: str
    taken: str = ""

    @property
    def used(self) -> tuple[Class, ...]:
        """The classes that `Model` needs, in order."""
        found = [self.classes[-1]]
        for made in reversed(self.classes[:-1]):
            if any(re.search(rf"\b{made.name}\b", other.code()) for other in found):
                found.append(made)
        return tuple(reversed(found))

    def code(self, exact: bool = False) -> str:
        """Everything up to `batch(rank, step)` and `loss_of(out)`."""
        classes = "\n\n".join(made.code() for made in self.used)
        values = ", ".join(f"{name!r}: {value}" for name, value in self.inputs)
        batch = (
            "def batch(rank, step):\n    g = torch.Generator().manual_seed(1000 * step + rank)\n"
            f"    n = {self.rows}\n    return {{{values}}}\n"
        )
        helpers = [
            text for name, text in HELPERS.items() if re.search(rf"\b{name}\b", classes + batch)
        ]
        names = (EXACT_NAMES if exact else NAMES) if re.search(r"F\d\d\b", classes + batch) else ""
        cast = f"CAST = {not exact}\n" if "CAST" in classes else ""
        loss = LEAVES.replace("[TAKEN]", f"[{self.taken}]" if self.taken else "")
        head = "\n".join([IMPORTS, names + cast])
        return "\n\n".join(part for part in [head, *helpers, classes, batch, loss] if part)

    def space(self, exact: bool = False) -> dict[str, Any]:
        """What the code defines, a module; tracebacks and `inspect` see its lines."""
        text = self.code(exact)
        name = "fuzz_exact" if exact else "fuzz_case"
        path = f"<{name}>"
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(text, path, "exec"), module.__dict__)
        return module.__dict__


@dataclasses.dataclass(frozen=True)
class Case:
    """Attributes:
    options: name -> code.
    optimizer: code of ``params -> Optimizer``.
    units: FQNs of the modules that `options` makes units, where the reference must know.
    world: number of ranks, or replicas and shards.
    processes: real gloo ranks, each with its own batch; else all ranks in this process.
    micro_batches, no_sync: accumulation of gradients.
    evaluates: one call in eval mode without gradients at the end.
    whole: `fxshard.compile_step`, one program of each step.
    """

    seed: int
    program: Program
    options: tuple[tuple[str, str], ...] = ()
    optimizer: str = "lambda params: torch.optim.SGD(params, lr=0.1)"
    units: tuple[str, ...] = ()
    world: Any = 2
    processes: bool = False
    steps: int = 3
    micro_batches: int = 1
    no_sync: bool = False
    evaluates: bool = False
    whole: bool = False

    @property
    def ranks(self) -> int:
        return self.world if isinstance(self.world, int) else self.world[0] * self.world[1]

    def evaluated(self, space: dict[str, Any]) -> dict[str, Any]:
        """The options as values."""
        return {name: eval(code, options_module.SPACE | space) for name, code in self.options}

    @property
    def in_backward(self) -> bool:
        return dict(self.options).get("optimizer_in_backward") == "True"

    def operators(self) -> set[str]:
        """Names of the operators in it."""
        return {line.operator for made in self.program.used for line in made.lines}


# -- operators that call other classes -------------------------------------------------------------


def drawn_class(d: Draft, least: int, most: int, **inputs: Tensor) -> tuple[Class, str]:
    """A class of its own, and the variable that it returns."""
    depth = d.space["depth"]
    if depth >= 3:
        raise Unfit
    d.space["depth"] += 1
    try:
        inner = Draft(d.rng, d.space, **inputs)
        fill(inner, d.rng.randint(least, most))
        name = inner.tensor()[0]
    finally:
        d.space["depth"] = depth
    made = inner.finish(f"Block{len(d.space['classes'])}", name)
    d.space["classes"].append(made)
    return made, name


def finished(d: Draft, made: Class, result: str) -> Class:
    """The class with another result."""
    made = dataclasses.replace(made, result=result)
    d.space["classes"][-1] = made
    exec(made.code(), d.space)
    return made


@operator(6)
def block(d: Draft) -> str:
    x, t = d.tensor(lambda t: width(t) and t.numel() > 0)
    made, _ = drawn_class(d, 1, 4, x=t.detach().clone().requires_grad_(t.requires_grad))
    m = d.attribute("m", f"{made.name}()")
    if d.chance(0.1):
        d.init(f"{m}.requires_grad_(False)")
    if d.chance(0.1):
        return f"{m}(x={x})"
    return call_of(d, m, x)


def call_of(d: Draft, m: str, x: str) -> str:
    """One of the ways to call a module."""
    return d.rng.choices(
        (
            f"{m}({x})",
            f"checkpoint({m}, {x}, use_reentrant=False)",
            f"checkpoint({m}, {x}, use_reentrant=True)",
            f"{m}({x}) + {m}({x} * 0.5)",
            f"with torch.autocast('cpu', torch.bfloat16, enabled=CAST):\n    @ = {m}({x})",
            f"with torch.no_grad():\n    @ = {m}({x})\n@ = @ + {x}.sum()",
            f"{m}({x}) if self.training else {m}({x}) * 2",
            f"checkpoint(lambda a: {m}(a).tanh(), {x}, use_reentrant=False)",
            f"{m}({x}) if {x}.dim() == 9 else {x} + 0",
        ),
        (8, 2, 0.5, 1, 1, 0.3, 0.5, 0.7, 0.3),
    )[0]


@operator(2)
def block_of_two(d: Draft) -> str:
    """Two arguments in, a tuple or a dict out."""
    x, t = d.tensor(lambda t: width(t) and t.numel() > 0)
    y, u = d.tensor(lambda t: t.numel() > 0)
    made, name = drawn_class(d, 2, 4, x=t.detach().clone(), y=u.detach().clone())
    key, result = d.one(
        ("[0]", f"({name}, x)"),
        ("['a']", f"{{'a': {name}, 'b': None}}"),
        ("[1][0]", f"(x, [{name}, 3])"),
        (".first", f"Pair({name}, 2)"),
        ("", name),
    )
    finished(d, made, result)
    m = d.attribute("m", f"{made.name}()")
    return d.one(f"{m}({x}, {y}){key}", f"{m}({x}, y={y}){key}")


@operator(3)
def layers(d: Draft) -> str:
    """Equal blocks in a loop."""
    x, t = d.tensor(lambda t: width(t) and t.numel() > 0 and t.is_floating_point())
    made, name = drawn_class(d, 1, 3, x=t.detach().clone().requires_grad_())
    finished(
        d, made, d.one(f"x + {name}", f"x + {name}.mean().to(x.dtype)", f"{name}.tanh() * 0.5 + x")
    )
    n = d.one(2, 3)
    m = d.attribute("m", f"nn.ModuleList({made.name}() for _ in range({n}))")
    call = d.one("layer(@)", "layer(@)", "checkpoint(layer, @, use_reentrant=False)")
    loop = d.one(
        f"for layer in {m}:",
        f"for layer in {m}:",
        f"for layer in {m}[:-1]:",
        f"for layer in [*{m}, {m}[0]]:",
    )
    return f"@ = {x}\n{loop}\n    @ = {call}"


@operator(1)
def block_again(d: Draft) -> str:
    """A block that was called before, or is registered under another name."""
    blocks = [i.split(" = ")[0] for i in d.inits if "= Block" in i]
    if not blocks:
        raise Unfit
    m = d.rng.choice(blocks)
    x, _ = d.tensor()
    if d.chance(0.4):
        m = d.attribute("m", m)
    return call_of(d, m, x)


def fill(d: Draft, lines: int) -> None:
    """Draw that many lines."""
    names, weights = list(OPERATORS), list(WEIGHTS.values())
    for _ in range(lines * 4):
        if len(d.lines) >= lines:
            return
        name = d.rng.choices(names, weights)[0]
        d.attempt(name, OPERATORS[name])


# -- programs --------------------------------------------------------------------------------------


def drawn_inputs(rng: random.Random) -> tuple[int, list[tuple[str, str]], list[str]]:
    """Rows, arguments of the model, and lines in front of forward that take them apart."""
    size = rng.choice((2, 3, 4, 4, 5))
    to = rng.choices(("", ".to(BF16)", ".to(F64)", ".to(F16)"), (8, 2, 1, 0.5))[0] or ".to(F32)"
    dims = ["n", rng.choice((3, 4, 5, 6))]
    if rng.random() < 0.6:
        dims.insert(1, rng.choice((2, 3, 4)))
    shape = ", ".join(map(str, dims))
    x = f"torch.randn({shape}, generator=g){to}"
    inputs, opening = [("x", x)], []
    if rng.random() < 0.15:
        inputs[0] = ("x", f"{x}.requires_grad_()")
    more = [
        ("i", f"torch.randint(0, 9, ({dims[0]}, {rng.choice((2, 3))}), generator=g)", ""),
        ("y", f"torch.randn({dims[0]}, {dims[-1]}, generator=g){to}", ""),
        ("scale", rng.choice(("2.5", "3", "None", "True")), "v = x * (scale or 1)"),
        ("extra", f"{{'a': {x}, 'b': None}}", "v = extra['a'] + x"),
        ("pair", f"(torch.randn({dims[-1]}, generator=g){to}, 2)", "v = x * pair[0] + pair[1]"),
        ("both", f"Pair({x}, 0.5)", "v = both.first * both.second"),
        ("items", f"[{x}, {x}]", "v = sum(items)"),
        ("mask", f"(torch.rand({shape}, generator=g) < 0.7)", "v = x.masked_fill(mask, 0.0)"),
    ]
    for name, code, line in rng.sample(more, rng.choices((0, 1, 2), (5, 3, 1))[0]):
        inputs.append((name, code))
        if line:
            opening.append(line)
    return size, inputs, opening


def drawn_result(d: Draft) -> str:
    """What the model returns."""
    names = [
        name
        for name, value in d.values.items()
        if isinstance(value, Tensor) and value.requires_grad and value.is_floating_point()
    ]
    if not names:
        raise Unfit
    a, b = names[-1], d.rng.choice(names)
    return d.rng.choices(
        (
            a,
            f"({a}, {b})",
            f"{{'a': {a}, 'n': 3, 'none': None, 'b': {b}}}",
            f"Pair({a}, {b})",
            f"[{a}, ({b}, None)]",
            f"({a}, {b}.detach())",
            f"({a}, {b}[:1])",
            f"{smooth_text(a)}",
            f"({smooth_text(a)}, {b}, 'text')",
        ),
        (6, 1, 1, 0.6, 0.5, 0.5, 0.5, 2, 0.5),
    )[0]


def smooth_text(name: str) -> str:
    return f"{name}.square().log1p().mean()"


def drawn_program(rng: random.Random) -> Program:
    """A program that eager runs forward.

    Raises:
        Unfit: this one does not.
    """
    rows, inputs, opening = drawn_inputs(rng)
    module = sys.modules["fuzz_draft"] = types.ModuleType("fuzz_draft")
    space = module.__dict__
    space |= {"depth": 0, "classes": []}
    exec(IMPORTS + NAMES + "CAST = True\n" + "\n".join(HELPERS.values()), space)
    g = torch.Generator().manual_seed(0)
    values = {name: eval(code, space | {"g": g, "n": rows}) for name, code in inputs}
    d = Draft(rng, space, **values)
    for line in opening:
        out = f"v{len(d.lines)}"
        text = line.replace("v = ", f"{out} = ")
        d._run(text, out)
        d.lines.append(Line("input", text, out, ("x",)))
    if not d.attempt("linear", OPERATORS["linear"]):
        raise Unfit
    fill(d, rng.randint(3, 10))
    result = drawn_result(d)
    model = d.finish("Model", result)
    # A model that returns a scalar returns its loss; others are refused to have gradients then.
    taken = ":1" if "mean()" in result and d.chance(0.97) else d.one(*[""] * 8, ":1")
    return Program((*space["classes"], model), tuple(inputs), str(rows), taken)


def drawn_case(seed: int, processes: bool | None = None) -> Case:
    """The case of a seed. Eager PyTorch trains its program with the loop of the case.

    Args:
        seed: of everything.
        processes: real ranks or not; None: as the seed says.
    """
    from tests.fuzz.reference import trainable  # it reads `Case`

    for attempt in range(100):
        rng = random.Random(f"{seed} {attempt}")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            try:
                program = drawn_program(rng)
                case = options_module.drawn(rng, Case(seed, program), processes)
            except Unfit:
                continue
            if trainable(case):
                other = options_module.of_other_sizes(rng, case)
                case = other if other == case or trainable(other) else case
                case = options_module.later(rng, options_module.placed(rng, case))
                other = options_module.in_fsdp1s_precision(rng, case)
                case = other if other == case or trainable(other) else case
                return options_module.in_whole_steps(rng, case)
    raise AssertionError(f"no program for seed {seed}")


def fqns(model: nn.Module) -> list[str]:
    """Modules with parameters of their own or below, but the root."""
    return [name for name, m in model.named_modules() if name and any(True for _ in m.parameters())]
