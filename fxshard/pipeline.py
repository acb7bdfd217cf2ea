"""Pass, Pipeline, and the default list of passes as data.

The runner does for every pass what no pass does for itself: it checks what the pass requires,
times it, dumps and compares by FXSHARD_DEBUG, and verifies what must hold of the program, which
does not depend on what passes say of themselves (`fxshard.verify`).
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import functools
import itertools
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias, Unpack

import torch
from torch import nn

from fxshard import verify
from fxshard._torch import modes, trees
from fxshard.bytesize import parse_bytes
from fxshard.capture import normalize, other_sizes, shapes, trace
from fxshard.capture.experts import require_split_tokens
from fxshard.config.checked import Config, is_pass
from fxshard.config.docs import with_options
from fxshard.config.environment import environment
from fxshard.config.options import Options
from fxshard.config.precision import Precision
from fxshard.errors import CaptureError, ConfigError, FxshardError, PassError, VerifyError
from fxshard.host import collector, files, progress
from fxshard.ir import dump, tags
from fxshard.ir.domain import Sizes, Symbols
from fxshard.ir.layout import Grid
from fxshard.ir.needs import Needs
from fxshard.ir.program import Fact, Program
from fxshard.ir.shardable import check_constants
from fxshard.ir.unit_options import checkpointed_modules, offloading
from fxshard.ir.units import Unit, check_reshard, with_precision
from fxshard.ir.whole import Whole
from fxshard.passes.annotate_streams import AnnotateStreams
from fxshard.passes.assign_checkpoints import AssignCheckpoints
from fxshard.passes.assign_units import AssignUnits
from fxshard.passes.async_tensor_parallel import AsyncTensorParallel
from fxshard.passes.begin_backward import BeginBackward
from fxshard.passes.bucket import Bucket
from fxshard.passes.canonicalize import Canonicalize
from fxshard.passes.checkpoint import Checkpoint
from fxshard.passes.chunk_loss import ChunkLoss
from fxshard.passes.clip_steps import ClipSteps
from fxshard.passes.compile_regions import CompileRegions
from fxshard.passes.cut_rows import CutRows
from fxshard.passes.insert_free import InsertFree
from fxshard.passes.insert_reduce import InsertReduce
from fxshard.passes.insert_step import InsertStep
from fxshard.passes.insert_unshard import InsertUnshard
from fxshard.passes.join_ranks import JoinRanks
from fxshard.passes.launch_collectives import LaunchCollectives
from fxshard.passes.offload_activations import OffloadActivations
from fxshard.passes.outline_regions import OutlineRegions
from fxshard.passes.prefetch import Prefetch
from fxshard.passes.reinplace import Reinplace

log: logging.Logger = logging.getLogger("fxshard")


class Pass(Protocol):
    """A rewrite of a Program. Implementations are frozen dataclasses; fields are options."""

    @property
    def name(self) -> str:
        """Of the pass, such as "insert-unshard"."""
        ...

    @property
    def requires(self) -> frozenset[Fact]:
        """Facts that earlier passes must have ensured."""
        ...

    @property
    def ensures(self) -> frozenset[Fact]:
        """Facts that hold after it."""
        ...

    def apply(self, program: Program) -> None:
        """Rewrite `program` in place.

        Args:
            program: of one call of the model on one rank.
        """


# The first passes: they decide what is computed and saved, whatever is sharded how.
_CHUNKS = ("cut-rows", "chunk-loss")  # of the option `chunk_loss`
STEM = ("canonicalize", *_CHUNKS, "assign-units", "assign-checkpoints", "checkpoint")

# The default pipeline in order; those in brackets depend on options, or may be left out.
ORDER = (
    *(f"({name})" if name in _CHUNKS else name for name in STEM),
    *("(join-ranks)", "(bucket)", "insert-unshard", "insert-reduce", "(prefetch)"),
    *("(begin-backward)", "(insert-step)", "(clip-steps)"),
    *("(async-tensor-parallel)", "(launch-collectives)"),
    *("(offload-activations)", "(reinplace)", "insert-free", "annotate-streams"),
    *("outline-regions", "(compile-regions)"),
)

Pipeline: TypeAlias = Sequence[Pass]  # in the order in which they run
Observer = Callable[[str, str, str], None]  # (pass name, text before, text after)


@with_options
def default_passes(config: Config | None = None, /, **options: Unpack[Options]) -> list[Pass]:
    """The default pipeline, as a list that may be edited and given as the option ``passes``.

    Args:
        config: what the options say, in one; None: `options`.
        **options: as for `fxshard.compile`, in place of `config`.

    Returns:
        New instances, in the order in which they run.

    Raises:
        ConfigError: an option or value that is not legal.
    """
    config = Config.from_options(options) if config is None else config.changed(options)
    offloads: Any = config.offload_activations
    chosen = config.chooses_offloads
    offloads = offloads if chosen is False else None  # those that assign-checkpoints marks
    leaving: list[Pass] = [OffloadActivations(offloads, hardware=config.hardware)]
    chunks: list[Pass] = [CutRows(), ChunkLoss(config.chunk_loss)] if config.chunk_loss else []
    return [
        Canonicalize(),
        *chunks,
        AssignUnits(),
        AssignCheckpoints(offload=chosen, hardware=config.hardware),
        Checkpoint(),
        *([JoinRanks()] if config.ranks_may_differ else []),
        Bucket(
            parse_bytes(config.max_bucket_bytes) if config.max_bucket_bytes is not None else None,
            parse_bytes(config.min_bucket_bytes) if config.min_bucket_bytes is not None else None,
            parse_bytes(config.pack_bytes),
        ),
        InsertUnshard(),
        InsertReduce(
            config.reduce_op, config.gradient_divide_factor, config.gradient_predivide_factor
        ),
        Prefetch(*config.prefetch, config.max_inflight),
        *([InsertStep()] if config.optimizer_in_backward else []),
        *([AsyncTensorParallel(config.hardware)] if config.async_tensor_parallel else []),
        LaunchCollectives(),
        *(leaving if offloads or chosen is not False else []),
        *([] if config.backend == "inductor" else [Reinplace()]),  # Inductor reuses by itself
        InsertFree(),
        AnnotateStreams(),
        OutlineRegions(),
        *([CompileRegions()] if config.backend == "inductor" and config.device is None else []),
    ]


def passes_of(config: Config) -> Pipeline:
    """The pipeline that `config` asks for.

    Raises:
        ConfigError: its function ``passes`` fails, or returns something else than passes.
    """
    if not callable(config.passes):
        return default_passes(config) if config.passes is None else config.passes
    try:
        made = config.passes(default_passes(config))
    except Exception as error:
        raise ConfigError(
            f"the function passes={config.passes!r} failed with {type(error).__name__}: {error}. "
            f"It is called with the default list of passes, and returns a list of passes."
        ) from error
    listed = isinstance(made, Sequence) and not isinstance(made, (str, bytes))
    if not listed or not made or not all(map(is_pass, made)):
        raise ConfigError(
            f"the function passes={config.passes!r} returned {made!r}: expected a list of passes. "
            f"Return one, such as passes=lambda default: [*default, Mine()]."
        )
    return made


@modes.outside_autocast()  # passes make values of their own
def run(
    program: Program,
    passes: Pipeline,
    *,
    check_each: bool = False,
    observe: Observer | None = None,
) -> None:
    """Apply `passes` in order, then verify every Fact that must hold of the program.

    Args:
        program: rewritten in place.
        passes: the pipeline.
        check_each: verify after every pass, not only at the end (FXSHARD_DEBUG=1 and above too).
        observe: called with the dump before and after each pass.

    Raises:
        ConfigError: a pass requires a Fact that no earlier pass ensures.
        PassError: a pass raised something that is no error of fxshard's.
        VerifyError: a Fact does not hold; names the pass, if checked after each.
    """
    env = environment()
    if program.gradients is None:
        program.gradients = frozenset(r.name for r in program.results if r.kind == "grad")
        given = {n.name: tags.get(n) for n in program.graph.find_nodes(op="placeholder")}
        program.given = {
            name: (tag.role, tag.fqn) for name, tag in given.items() if tag.role in tags.GIVEN
        }
    texts = observe is not None or env.debug >= 3 or env.dump_dir is not None
    names = [step.name for step in passes]
    for position, step in enumerate(passes):
        missing = step.requires - program.facts
        if missing:
            raise ConfigError(
                f"pass '{step.name}' requires that "
                f"{' and '.join(fact.value for fact in Fact if fact in missing)}; "
                f"no earlier pass in the pipeline ensures it. Put it after one that does. "
                f"{advice(names)}".rstrip()
            )
        before = dump.text(program) if texts else ""
        counts = _op_counts(program) if env.debug >= 2 else None
        progress.say(step.name)
        start = time.perf_counter()
        _apply(step, program, names)
        seconds = time.perf_counter() - start
        program.facts |= step.ensures
        after = dump.text(program) if texts else ""
        if observe is not None:
            observe(step.name, before, after)
        _report(position, step.name, seconds, counts, program, before, after)
        if check_each or env.debug >= 1:
            _verify(program, step.name, names)
    _verify(program, None, names)


def advice(names: Sequence[str]) -> str:
    """How a pipeline differs from the default one in what may matter, or ""."""
    order = [name.strip("()") for name in ORDER]
    mine = [name for name in names if name in order]
    found = [f"'{n}' is in it {mine.count(n)} times" for n in order if mine.count(n) > 1]
    if order[-2] in mine:  # else it is a part of a pipeline
        began = 0 if set(STEM) & set(mine) else len(STEM)
        found += [f"it has no '{n}'" for n in ORDER[began:] if n in order and n not in mine]
    for one, other in itertools.pairwise(mine):
        if order.index(one) > order.index(other):
            found.append(f"'{one}' comes before '{other}', not after it")
    return f"The pipeline differs from the default one: {'; '.join(found)}." if found else ""


def _apply(step: Pass, program: Program, names: Sequence[str]) -> None:
    """Run a pass; what it raises names it, and says what is unusual about the pipeline.

    Raises:
        FxshardError: what the pass refuses by itself.
        PassError: it raised something else.
    """
    try:
        step.apply(program)
    except (VerifyError, PassError):
        raise
    except FxshardError as error:  # of the user's model, it says; it may be the pipeline's order
        if unusual := advice(names):
            error.args = (f"{error} {unusual}", *error.args[1:])
        raise
    except Exception as error:
        raise PassError(
            f"pass '{step.name}' failed with {type(error).__name__}: {error}. Either it has a "
            f"fault, or the passes before it left a program that it is not made for. "
            f"{advice(names) or 'See the program around it with FXSHARD_DEBUG=4.'}",
            step.name,
        ) from error


@collector.paused(sweep=True)
def make_program(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    units: tuple[Unit, ...],
    world: int,
    config: Config,
    replicas: int = 1,
    meshes: tuple[Grid, ...] = (),
    sync: bool = True,
    accumulated: Iterable[str] = (),
    partial: Iterable[str] = (),
    kept: Iterable[str] = (),
    comm_hook: bool = False,
    device: torch.device | None = None,
    observe: Observer | None = None,
    captures: dict[Any, Program] | None = None,
    symbols: Symbols | None = None,
    every_tangent: bool = False,
    tangents: tuple[int, ...] | None = None,
    stems: dict[Any, Program] | None = None,
    common: Needs | None = None,
    whole: Whole | None = None,
) -> Program:
    """Capture one call and run the passes over it.

    Args:
        model, args, kwargs: the call.
        units: of the model.
        world: number of ranks that share a parameter.
        config: the options.
        replicas: number of such groups of ranks.
        meshes: the ranks of those parameters that have a mesh of their own.
        sync: False under ``no_sync``.
        accumulated: FQNs of parameters that have an accumulated gradient.
        partial: FQNs of parameters that have a partial sum of sharded gradients.
        kept: FQNs of parameters that an earlier call has left unsharded.
        comm_hook: the user's function reduces gradients.
        device: where unsharded parameters are; None: where they are now.
        observe: called with the dump before and after each pass.
        captures: earlier captures of this model: one that serves the call is reused, as is
            one that serves it with other sizes (see `fxshard.capture.other_sizes.at_sizes`).
        symbols: sizes that the program leaves open (see `fxshard.capture.trace.capture`).
        every_tangent, tangents: see `trace.capture`.
        stems: earlier programs of this model after `STEM`, which depend on no ranks and no
            sharding: one that serves is reused.
        common: what all ranks gather and reduce in this call; None: the same as this one.
        whole: what makes it a whole step, besides the option ``optimizer_in_backward``.
    """
    check_reshard(units, world, meshes)
    if config.full_precision_in_eval and not model.training:
        units = tuple(with_precision(unit, Precision()) for unit in units)
    leaves, in_spec = trees.tree_flatten((args, kwargs))
    wanted = [p.requires_grad for unit in units for p in (*unit.params, *unit.ignored)]
    wanted += [leaf.requires_grad for leaf in leaves if isinstance(leaf, torch.Tensor)]
    training = torch.is_grad_enabled() and any(wanted)
    if config.pipeline_stage and training:
        units, sync = tuple(for_schedule(unit, world) for unit in units), False
        kept = [param.fqn for unit in units if unit.stays for param in unit.params]
    captures = {} if captures is None else captures
    symbols = symbols or {}
    call = in_spec, shapes.alike(leaves, symbols)
    loss = None if whole is None else (id(whole.loss),)
    key = _capture_key(units, training, config), tuple(symbols.items()), call, tangents, loss
    ints = any(dim is None for places in symbols.values() for _, dim in places)
    sizes = shapes.of_call(leaves, ints=ints)
    if (key, sizes) not in captures:
        progress.say("capturing")
        made = _captured(
            functools.partial(
                trace.capture,
                *(model, args, kwargs),
                units=units,
                world_size=world,
                training=training,
                device=device,
                for_cuda=config.device is not None,
                every_tangent=every_tangent,
                tangents=tangents,
                data_sizes=config.data_sizes,
                whole=whole,
            ),
            symbols,
            sizes,
            [captured for (other, _), captured in captures.items() if other == key],
        )
        check_constants(model, units, made.constants)
        require_split_tokens(made)
        captures[key, sizes] = made
    captured, passes = captures[key, sizes], passes_of(offloading(model, config))
    if whole is not None:
        passes = as_whole_step(passes)
    checkpoints = checkpointed_modules(model, config, units)

    def start() -> Program:
        program = captured.copied(units, world)
        program.checkpoints, program.meshes = checkpoints, meshes
        return program

    first = stem_of(passes)
    if stems is not None and first:
        named = tuple((fqn, repr(policy)) for fqn, policy in checkpoints.items())
        stem = key, sizes, tuple(unit.fqns for unit in units), named, repr(first)
        if stem not in stems:  # kept now that no pass has refused it
            stems[stem] = rewritten(start, first, observe)
        captured, passes = stems[stem], passes[len(first) :]

    def sharded() -> Program:
        program = start()
        program.facts = set(captured.facts)
        program.reached = normalize.reached(captures[key, sizes])
        program.replicas, program.sync = replicas, sync
        program.accumulated, program.partial = frozenset(accumulated), frozenset(partial)
        if config.pipeline_stage and training:
            made = {result.name for result in program.results if result.kind == "grad"}
            program.accumulated = frozenset(made & program.params.keys())
        program.kept, program.comm_hook = frozenset(kept), comm_hook
        program.common = common
        program.offloaded = config.offload is not None
        program.optimizer_in_backward = config.optimizer_in_backward
        program.compiled = config.backend == "inductor"
        if whole is not None:
            program.whole, program.max_norm = True, whole.max_norm
        return program

    return rewritten(sharded, passes, observe)


def as_whole_step(passes: Pipeline) -> Pipeline:
    """`passes` with those that a whole step takes besides: around insert-step.

    Raises:
        ConfigError: they do not step.
    """
    names = [each.name for each in passes]
    if "insert-step" not in names:
        raise ConfigError(
            "passes=... without 'insert-step': the program of a whole step steps the parameters. "
            "Begin with the list that the function is called with: passes=lambda default: ..."
        )
    at = names.index("insert-step")
    return [*passes[:at], BeginBackward(), passes[at], ClipSteps(), *passes[at + 1 :]]


def stem_of(passes: Pipeline) -> Pipeline:
    """The first of `passes`, if they are `STEM`, with those of `chunk_loss` or without."""
    names = [step.name for step in passes]
    wanted = [name for name in STEM if name in names or name not in _CHUNKS]
    return passes[: len(wanted)] if names[: len(wanted)] == wanted else []


def for_schedule(unit: Unit, world: int) -> Unit:
    """A unit of a pipeline's stage, in a micro-batch: what forward would leave unsharded is there.

    The schedule has it gathered (`fxshard.runtime.stage`), if ranks share it. Parameters of tensor
    subclasses are gathered by programs alone.
    """
    plain = all(param.extension is None for param in unit.params)
    return dataclasses.replace(unit, stays=unit.reshard is False and world > 1 and plain)


def rewritten(
    start: Callable[[], Program], passes: Pipeline, observe: Observer | None = None
) -> Program:
    """A program after some passes.

    Args:
        start: makes the program before them. If the result is refused, the passes run a second
            time and each is verified, so that the error names the pass at fault.

    Raises:
        ConfigError, PassError, VerifyError: as for `run`.
    """
    program = start()
    try:
        run(program, passes, observe=observe)
    except VerifyError as error:
        if error.pass_name is None:
            run(start(), passes, check_each=True)
        raise
    return program


def _captured(
    capture: Callable[..., Program], symbols: Symbols, sizes: Sizes, before: Sequence[Program]
) -> Program:
    """One of the earlier captures with other sizes, where one serves, or a capture.

    Args:
        capture: traces the call.
        symbols: sizes to be left open.
        sizes: of the call.
        before: captures of calls that differ in the open sizes alone.
    """
    for program in before:
        made = other_sizes.at_sizes(program, sizes)
        if made is not None:
            return made
    if not symbols:
        return capture()
    closed = next((program.closed for program in before if program.domain is None), None)
    if closed is None:
        try:
            return capture(symbols=symbols)
        except CaptureError as error:
            closed = str(error).splitlines()[0]
            log.info("fxshard: %s cannot be left open: %s", ", ".join(symbols), closed)
    made = capture()
    made.closed = closed
    return made


def open_captures(captures: dict[Any, Program]) -> dict[Any, Program]:
    """Of some captures, those that serve calls of other sizes: the first of each kind."""
    found: dict[Any, tuple[Any, Program]] = {}
    for (key, sizes), program in captures.items():
        if program.domain is not None:
            found.setdefault(key, (sizes, program))
    return {(key, sizes): program for key, (sizes, program) in found.items()}


def _capture_key(units: tuple[Unit, ...], training: bool, config: Config) -> Any:
    """Equal for options under which the trace of a call is the same: it sees dtypes, no ranks."""
    traced = [
        dataclasses.replace(u.precision, reduce_dtype=None, keep_low_precision_grads=False)
        for u in units
    ]
    cast = tuple((u.fqn, p) for u, p in zip(units, traced, strict=True) if p != Precision())
    dtypes = tuple(
        sorted((p.fqn, str(p.compute_dtype), p.requires_grad) for u in units for p in u.params)
    )
    ignored = tuple(sorted(p.fqn for u in units for p in u.ignored))
    return cast, dtypes, ignored, training, config.device, repr(config.data_sizes)


def _verify(program: Program, pass_name: str | None, names: Sequence[str]) -> None:
    try:
        verify.verify(program)
    except VerifyError as error:
        error.pass_name, error.advice = pass_name, advice(names)
        raise


def _op_counts(program: Program) -> collections.Counter[str]:
    return collections.Counter(str(n.target) for n in program.graph.nodes if n.op != "output")


def _report(
    position: int,
    name: str,
    seconds: float,
    counts: collections.Counter[str] | None,
    program: Program,
    before: str,
    after: str,
) -> None:
    """Print what FXSHARD_DEBUG asks for (docs/env.md), to FXSHARD_DUMP_DIR or standard error."""
    env = environment()
    lines: list[str] = []
    if env.debug >= 1:
        lines.append(
            f"[fxshard] {position} {name}: {len(program.graph.nodes)} nodes, {seconds:.3f} s"
        )
    if counts is not None:
        now = _op_counts(program)
        changed = {op: now[op] - counts[op] for op in now | counts if now[op] != counts[op]}
        lines += [f"[fxshard]   {n:+d} {op}" for op, n in sorted(changed.items())]
    if env.debug == 3:
        diff = difflib.unified_diff(
            before.splitlines(), after.splitlines(), "before", "after", lineterm="", n=1
        )
        lines += list(diff)
    if env.debug >= 4:
        lines += [f"[fxshard] after {name}:", after]
    if lines:
        print("\n".join(lines), file=sys.stderr)
    if env.dump_dir is not None:
        env.dump_dir.mkdir(parents=True, exist_ok=True)
        stem = f"{position:02d}_{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}"  # a file in this folder
        files.write(env.dump_dir / f"{stem}.before.txt", before + "\n")
        files.write(env.dump_dir / f"{stem}.after.txt", after + "\n")
