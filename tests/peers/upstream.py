"""Runs PyTorch's own FSDP2 tests, as they are, with `fully_shard` replaced by fxshard's.

    python -m tests.peers.upstream CHECKOUT --out tests/peers/fsdp2/upstream.csv

`CHECKOUT` is a folder with PyTorch's ``test/distributed/_composable/fsdp`` of the release that is
installed; nothing of it is part of this repository. torch's test suite is written for accelerators:
here its ranks are processes with gloo, on the CPU, and each method runs twice, first with torch's
own `fully_shard`. What fails so needs something that this machine lacks, and says nothing of
fxshard. `python -m tests.peers` writes into docs/peer-tests.md and its CSV what came of it.

torch's testing package needs ``pip install expecttest``.
"""

import argparse
import ast
import contextlib
import csv
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FOLDER = "test/distributed/_composable/fsdp"
SIDES = ("torch", "fxshard")
RANKS = 4  # at most, where torch's tests ask for 8 of the CPU's
NEEDS_MORE = {"TestFullyShardHSDP3DTraining": 8}  # a mesh of 2 x 2 x 2
SECONDS = 240  # that one method may take

# Of what older files say of CUDA; newer ones ask torch which device there is.
ON_CPU = (
    (r"\.cuda\(\)", ".cpu()"),
    (r"torch\.cuda\.device_count\(\)", "torch.cpu.device_count()"),
    (r"torch\.accelerator\.current_accelerator\(\)", 'torch.device("cpu")'),
    (r'"cuda"', '"cpu"'),
    (
        r"torch\.device\(\s*device_type\.type,\s*torch\.get_device_module\(device_type\)"
        r"\.current_device\(\)\s*\)",
        'torch.device("cpu")',
    ),
    (r"not TEST_CUDA\b", "False"),
    (r"device_ids=\[self\.rank\]", "device_ids=None"),  # of DDP
)
# Some tests count collectives by their operators, and fxshard reduces with others.
OURS = (
    (r"\b_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
    (r"\ballreduce_\b", "allreduce_coalesced_"),
)
# Names of FSDP2's inside: what it keeps of a module, and functions of torch's tests that patch it.
INTERNAL = re.compile(
    r"_get_fsdp_state|_fsdp_param_groups?|_lazy_init|_state_ctx|_comm_ctx|_is_root"
    r"|_modules_to_run_forward|_set_unshard_async_op|_training_state|_all_gather_result"
    r"|_get_managed_\w+|_get_param_module_infos"
    r"|patch_(unshard|reshard|post_backward|foreach_\w+|register_post_backward_hook_backward)"
)
# What fxshard does otherwise on purpose, where no error says so.
OTHERWISE = {
    "TestFullyShardState.test_fully_shard_cls": "the class is FxshardMLP, not FSDPMLP",
    "TestFullyShardRegisteredParams.test_param_registration_after_forward": (
        "parameters are DTensors at all times, also where a program keeps them unsharded"
    ),
    "TestFullyShardGradientAccumulation.test_gradient_accumulation": (
        "it counts all-gathers, 24, and there are 21: backward gathers nothing here that it does "
        "not read, such as the first linear, whose input needs no gradient"
    ),
    "TestFullyShardMixedPrecisionCasts.test_float16_on_one_submodule": (
        "its forward writes into a dict of the model; programs do not, and a warning says so"
    ),
    "TestFullyShardMixedPrecisionCasts.test_submodules_with_external_inputs": (
        "its forward writes into a dict of the model; programs do not, and a warning says so"
    ),
}
LATE = "terminated or timed out after"
INSIDE = "torch.distributed.fsdp._fully_shard"  # where FSDP2's own modules are


OUTCOMES = {
    "passes": "as it is, with fxshard's `fully_shard`",
    "refused": "with an error of fxshard's, which `why` quotes",
    "works here": "it asserts an error of FSDP2's, and fxshard does what is asked",
    "internals": "it reads FSDP2's inside, by the names in `why`",
    "otherwise": "fxshard does something else on purpose",
    "not on a CPU": "it fails with torch's own `fully_shard` on this machine too",
    "timed out": "it did not end in time, here or with torch's own; no comparison had failed",
    "fails": "a fault of fxshard's",
}


@dataclass(frozen=True)
class Outcome:
    """What came of one method with one `fully_shard`."""

    file: str
    method: str  # "TestFullyShardAutograd.test_unused_forward_output"
    result: str  # "passed", "failed", "skipped"
    error: str = ""  # the first line of the error, or why it was skipped


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    file: str
    method: str
    outcome: str  # one of OUTCOMES
    why: str = ""
    commit: str = ""  # of PyTorch's, that the file is of


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.peers.upstream", description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--out", type=Path, help="a CSV file; without it, the rows are printed")
    parser.add_argument("--only", default="", help="a regular expression: file::Class.method")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="that a method may take")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # of one process
    given = parser.parse_args(arguments)
    if given.side:
        for outcome in run_file(given.checkout, given.side, given.only, given.seconds):
            print(json.dumps(asdict(outcome)), file=sys.__stdout__, flush=True)
        return
    folder = given.checkout / FOLDER
    rows = []
    for path in sorted(folder.glob("test_fully_shard_*.py")):
        rows += rows_of(path, given.only, given.seconds)
    rows = [dataclasses.replace(row, commit=_commit(given.checkout)) for row in rows]
    if given.out:
        with given.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    for row in () if given.out else rows:
        print(row.file, row.method, row.outcome, row.why, sep=" | ")


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def rows_of(path: Path, only: str, seconds: int) -> list[Row]:
    """Run the methods of one file with torch's `fully_shard`, and what passes with fxshard's."""
    control = _outcomes(path, "torch", only, seconds)
    passed = [of.method for of in control if of.result == "passed"]
    ours = {}
    if passed:
        again = "^(" + "|".join(re.escape(f"{path.name}::{method}") for method in passed) + ")$"
        ours = {of.method: of for of in _outcomes(path, "fxshard", again, seconds)}
    uses = internals(path.read_text())
    return [row_of(of, ours.get(of.method), uses.get(of.method, set())) for of in control]


def row_of(control: Outcome, ours: Outcome | None, internal: set[str]) -> Row:
    """What came of a method: `control` with torch's `fully_shard`, `ours` if that passed."""
    if control.result != "passed":
        kind = "timed out" if LATE in control.error else "not on a CPU"
        return Row(control.file, control.method, kind, control.error or control.result)
    if ours is None:
        return Row(control.file, control.method, "fails", "the process died")
    outcome, why = "fails", ours.error
    if ours.result == "passed":
        outcome = "passes"
    elif LATE in ours.error:
        outcome = "timed out"
    elif control.method in OTHERWISE:
        outcome, why = "otherwise", OTHERWISE[control.method]
    elif internal:
        outcome, why = "internals", ", ".join(sorted(internal))
    elif re.match(r"AssertionError: \w+ not raised", ours.error):
        outcome, why = "works here", ours.error.removeprefix("AssertionError: ")
    elif re.match(r"fxshard\.errors\.(Config|Unit|Step|Capture)Error: ", ours.error):
        outcome, why = "refused", ours.error.removeprefix("fxshard.errors.")
    elif re.search(r"failed: '\w+( is not in fxshard|: stream cannot be set)", ours.error):
        # The text of the error is compared with that of FSDP2's.
        outcome, why = "refused", ours.error
    return Row(control.file, control.method, outcome, why)


def _outcomes(path: Path, side: str, only: str, seconds: int) -> list[Outcome]:
    """Of a process of its own: it replaces names of torch's."""
    command = [sys.executable, "-m", "tests.peers.upstream", str(path), "--side", side]
    command += ["--only", only, "--seconds", str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        found = []
        for line in process.stdout:
            if line.startswith(b"{"):
                found.append(Outcome(**json.loads(line)))
                print(f"{side:8}", *asdict(found[-1]).values(), file=sys.stderr, flush=True)
    return found


# In a process of its own.


def run_file(path: Path, side: str, only: str, seconds: int) -> Iterator[Outcome]:
    """Run the methods of a file of torch's tests."""
    torch.set_num_threads(1)  # ranks are forked: no threads in this process
    _prepare(seconds)
    if side == "fxshard":
        _replace()
    try:
        module = _loaded(path, ON_CPU + (OURS if side == "fxshard" else ()))
    except Exception as error:
        yield Outcome(path.name, "*", "failed", f"{type(error).__name__}: {error}")
        return
    for name, case in list(vars(module).items()):
        if isinstance(case, type) and issubclass(case, unittest.TestCase):
            _with_few_ranks(case)
            for method in unittest.defaultTestLoader.getTestCaseNames(case):
                if case.__module__ == module.__name__ and re.search(
                    only, f"{path.name}::{name}.{method}"
                ):
                    yield _run(path.name, case, name, method)


def _with_few_ranks(case: type[unittest.TestCase]) -> None:
    plain, most = vars(case).get("world_size"), NEEDS_MORE.get(case.__name__, RANKS)
    if isinstance(plain, property):
        case.world_size = property(lambda self: min(most, plain.__get__(self)))  # type: ignore[attr-defined]


def _run(file: str, case: type[unittest.TestCase], name: str, method: str) -> Outcome:
    result = unittest.TestResult()
    with _quiet():
        case(method).run(result)
    for _, why in result.skipped:
        return Outcome(file, f"{name}.{method}", "skipped", why)
    for _, text in result.errors + result.failures:
        return Outcome(file, f"{name}.{method}", "failed", error_of(text))
    return Outcome(file, f"{name}.{method}", "passed")


def error_of(text: str) -> str:
    """The error of the first rank that has one, in a line: its class and what it says first."""
    first = re.split(r"RuntimeError: Process \d+ exited with error code.*\n", text.strip())
    lines = first[1 if len(first) > 1 else 0].splitlines()
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return (named or lines[-1:])[-1].strip()[:300]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What ranks print goes nowhere."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _loaded(path: Path, changes: tuple[tuple[str, str], ...]) -> types.ModuleType:
    """The module of a file, with `changes` made to its text."""
    source = path.read_text()
    for pattern, instead in changes:
        source = re.sub(pattern, instead, source)
    spec = importlib.util.spec_from_loader(path.stem, loader=None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


def _prepare(seconds: int) -> None:
    """Let torch's test classes run on the CPU: ranks are forked processes, with gloo."""
    from torch.testing._internal import common_distributed, common_fsdp, common_utils

    def as_it_is(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda function: function

    class OnCpu(common_fsdp.FSDPTest):
        """Ranks of an `FSDPTest`."""

        def _spawn_processes(self) -> None:
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **_: Any) -> None:
            self = cls(test_name)
            self.rank, self.file_name = rank, file_name
            dist.init_process_group(
                "gloo",
                init_method=f"file://{file_name}",
                world_size=int(self.world_size),
                rank=rank,
            )
            common_utils.set_rng_seed()
            self.before()
            self.run_test(test_name, pipe)
            dist.barrier()
            dist.destroy_process_group()

        def before(self) -> None:
            """What a class does in each rank before a method."""

    class InsteadOfThreads(OnCpu):
        """An `FSDPTestMultiThread`, whose ranks are threads: processes, as programs have."""

        def perThreadSetUp(self) -> None:
            pass

        def perThreadTearDown(self) -> None:
            pass

        def before(self) -> None:
            self.perThreadSetUp()

    common_fsdp.DEVICE_COUNT = RANKS
    common_fsdp.FSDPTest = OnCpu
    common_fsdp.FSDPTestContinuous = OnCpu
    common_fsdp.FSDPTestMultiThread = InsteadOfThreads
    common_distributed.skip_if_lt_x_gpu = as_it_is
    common_distributed.requires_nccl_version = as_it_is
    common_distributed.get_timeout = lambda _: seconds
    common_utils.device_sleep = lambda *_: None
    common_utils.get_cycles_per_ms = lambda *_: 1.0
    torch.cpu.device_count = torch.accelerator.device_count = lambda: RANKS


def _replace() -> None:
    """Put fxshard's functions in the place of FSDP2's, wherever torch's tests find them."""
    import torch.distributed._composable.fsdp
    from torch.testing._internal import common_fsdp

    import fxshard

    for name in ("fully_shard", "register_fsdp_forward_method"):
        ours = getattr(fxshard, name)
        for module in (torch.distributed.fsdp, torch.distributed._composable.fsdp, common_fsdp):
            setattr(module, name, ours)


# What a method reads of FSDP2's inside.


def internals(source: str) -> dict[str, set[str]]:
    """Per method of a file of tests, the names of FSDP2's inside that it reads."""
    tree = ast.parse(source)
    private = {
        name.asname or name.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(INSIDE)
        for name in node.names
    } - {"FSDPModule", "ShardPlacementResult"}
    functions = {
        (of.name, node.name): node
        for of in tree.body
        if isinstance(of, ast.ClassDef)
        for node in of.body
        if isinstance(node, ast.FunctionDef)
    }
    return {
        f"{of}.{method}": _names(functions, of, method, private, set())
        for of, method in functions
        if method.startswith("test_")
    }


def _names(
    functions: dict[tuple[str, str], ast.FunctionDef],
    of: str,
    method: str,
    private: set[str],
    seen: set[str],
) -> set[str]:
    found = set()
    for node in ast.walk(functions[of, method]):
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        if (of, name) in functions and name not in seen:  # a method that this one calls
            found |= _names(functions, of, name, private, seen | {name})
        elif name in private or INTERNAL.fullmatch(name):
            found.add(name)
    return found


if __name__ == "__main__":
    main()
