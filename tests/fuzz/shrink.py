"""A smaller case of the same class: whatever can be left out is, until nothing can."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator

from tests.fuzz.case import Case, Program
from tests.fuzz.draft import Class, renamed
from tests.fuzz.reference import trainable


def shrunk(case: Case, fails: Callable[[Case], bool], most: int = 300) -> Case:
    """The smallest case found of which `fails` is true, after at most `most` trials of it."""
    trials = 0
    while True:
        for smaller in candidates(case):
            if trials >= most:
                return case
            try:
                if not trainable(smaller):
                    continue
            except Exception:
                continue
            trials += 1
            if fails(smaller):
                case = smaller
                break
        else:
            return case


def candidates(case: Case) -> Iterator[Case]:
    """Cases with something left out, the boldest first."""
    for program in programs(case.program):
        yield dataclasses.replace(case, program=program)
    if "+" in case.program.rows:
        program = dataclasses.replace(case.program, rows=case.program.rows.split()[0])
        yield dataclasses.replace(case, program=program)
    for i in range(len(case.options)):
        if case.options[i][0] != "units" or "mixed_precision" not in dict(case.options):
            yield dataclasses.replace(case, options=case.options[:i] + case.options[i + 1 :])
    if case.processes and case.options:
        yield dataclasses.replace(case, processes=False)
    if isinstance(case.world, tuple):
        options = tuple((n, v) for n, v in case.options if n != "strategy")
        yield dataclasses.replace(case, world=2, options=options)
    elif case.world != 2:
        yield dataclasses.replace(case, world=2)
    if case.steps > 1:
        yield dataclasses.replace(case, steps=1)
    if case.micro_batches > 1:
        yield dataclasses.replace(case, micro_batches=1, no_sync=False)
    if case.evaluates:
        yield dataclasses.replace(case, evaluates=False)
    plain = "lambda params: torch.optim.SGD(params, lr=0.1)"
    if case.optimizer != plain:
        yield dataclasses.replace(case, optimizer=plain)


def programs(program: Program) -> Iterator[Program]:
    """The program with a line, an attribute or an input left out."""
    used = program.used
    for i in reversed(range(len(used))):
        for smaller in classes(used[i]):
            yield dataclasses.replace(program, classes=(*used[:i], smaller, *used[i + 1 :]))
    root = used[-1]
    for i in range(1, len(program.inputs)):
        name = program.inputs[i][0]
        if not re.search(rf"\b{name}\b", "".join(line.text for line in root.lines) + root.result):
            left = program.inputs[:i] + program.inputs[i + 1 :]
            made = dataclasses.replace(root, args=tuple(name for name, _ in left))
            yield dataclasses.replace(program, classes=(*used[:-1], made), inputs=left)
    if program.taken:
        yield dataclasses.replace(program, taken="")


def classes(made: Class) -> Iterator[Class]:
    for i in reversed(range(len(made.lines))):
        line = made.lines[i]
        rest = made.lines[:i] + made.lines[i + 1 :]
        for instead in line.reads if line.out else ("",):
            swap = (lambda text, a=line.out, b=instead: renamed(text, a, b)) if line.out else str
            yield dataclasses.replace(
                made,
                lines=tuple(
                    dataclasses.replace(
                        other,
                        text=swap(other.text),
                        reads=tuple(swap(name) for name in other.reads),
                    )
                    for other in rest
                ),
                result=swap(made.result),
            )
    for i in reversed(range(len(made.inits))):
        yield dataclasses.replace(made, inits=made.inits[:i] + made.inits[i + 1 :])
    names = list(dict.fromkeys(re.findall(r"\bv\d+\b", made.result)))
    if made.result not in names:
        for name in names:
            yield dataclasses.replace(made, result=name)
    outs = [line.out for line in made.lines if line.out]
    if made.result in outs:  # only to earlier ones, or it would go back and forth
        for out in reversed(outs[: outs.index(made.result)]):
            yield dataclasses.replace(made, result=out)
