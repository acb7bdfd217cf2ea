"""The class of a case: right, refused, wrong, crash or bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import fxshard
from fxshard.config.checked import Config
from fxshard.errors import FxshardError, PassError, UnknownSizeError, VerifyError
from fxshard.ir.whole import Whole
from fxshard.plans.plan import make_plan
from fxshard.plans.workload import Workload
from fxshard.runtime.whole_step import step_config
from fxshard.validation.rehearsal import bytes_beside
from tests import captures, texts
from tests.fuzz.case import Case
from tests.fuzz.reference import MORE, Reference, apart, largest, reference
from tests.fuzz.train import Seen, initial, train
from tests.ranks import RankError, Ranks

CLASSES = ("right", "refused", "wrong", "crash", "bytes")
LIMIT_S = 300  # of one case; more is a hang


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Attributes:
    kind: one of `CLASSES`.
    reason: one line; equal reasons are likely equal causes.
    detail: everything that was said.
    unknown: the bytes of a right case depend on its data, and are not compared.
    """

    kind: str
    reason: str = ""
    detail: str = ""
    unknown: bool = False


class Late(BaseException):
    """The case takes too long."""


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    def ring(number: int, frame: Any) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def of_error(error: BaseException) -> Verdict:
    """What an exception makes of a case."""
    text = "".join(traceback.format_exception(error))
    said = str(error).strip().split("\n")
    if isinstance(error, Late):
        return Verdict("crash", "hang", text)
    name = type(error).__name__
    ours = isinstance(error, (VerifyError, PassError))  # no user can cause or mend those
    if isinstance(error, FxshardError) and not ours:
        return Verdict("refused", f"{name}: {said[0]}", text)
    where = [f for f in traceback.extract_tb(error.__traceback__) if "fxshard" in f.filename]
    place = f" at {where[-1].filename.split('/')[-1]} {where[-1].name}" if where else ""
    return Verdict("crash", f"{name}: {said[0]}{place}", text)


def differences(seen: Seen, wanted: Seen, tolerances: dict[str, float]) -> list[str]:
    """What is not as in eager, one line each."""
    found = []
    for key in dict.fromkeys([*wanted, *seen]):
        if key.startswith("gradient") and key not in seen:
            continue  # optimizer_in_backward leaves none
        ours, theirs = seen.get(key), wanted.get(key)
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
            if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
                found.append(f"{key}: {brief(ours)} for {brief(theirs)}")
            elif apart(ours, theirs) > tolerances[key]:
                found.append(
                    f"{key}: off by {apart(ours, theirs):.1e}, allowed {tolerances[key]:.1e} of "
                    f"{largest(theirs):.1e}"
                )
        elif isinstance(ours, Tensor) or isinstance(theirs, Tensor) or ours != theirs:
            found.append(f"{key}: {brief(ours)} for {brief(theirs)}")
    return found


def brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} up to {largest(value):.1e}"
    return str(value)


def compared(observed: Sequence[Seen], case: Case) -> Verdict:
    """Right or wrong, over all ranks; the second look is at what eager makes of more roundings."""
    verdict = beside(observed, reference(case))
    return verdict if verdict.kind == "right" else beside(observed, reference(case, 1 + MORE))


def beside(observed: Sequence[Seen], wanted: Reference) -> Verdict:
    lines = [
        f"rank {rank}: {line}"
        for rank, (seen, theirs, allowed) in enumerate(
            zip(observed, wanted.seen, wanted.tolerances, strict=True)
        )
        for line in differences(seen, theirs, allowed)
    ]
    if not lines:
        return Verdict("right")
    first = re.sub(r"^rank \d+: ", "", lines[0])
    kind = re.sub(r"[\d.]+e[-+]\d+|\d+", "#", first)
    return Verdict("wrong", kind, "\n".join(lines))


def bytes_of(case: Case) -> Verdict:
    """Static bytes beside the tracker's."""
    space = case.program.space()
    options = case.evaluated(space) | {"optimizer": eval(case.optimizer, space)}
    if case.whole:
        made = options.pop("optimizer")
        config = step_config(Config.from_options(options), made)
        call, whole = ((), space["batch"](0, 0)), Whole(space["loss_of"], math.inf)
        work = Workload(initial(space), call, case.world, config, whole=whole)
        return of_bytes(bytes_beside(work, make_plan(work).memory, 3))
    found = fxshard.validate(
        initial(space),
        kwargs=space["batch"](0, 0),
        world_size=case.world,
        loss=space["loss_of"],
        micro_batches=case.micro_batches,
        no_sync=case.no_sync,
        **options,
    )
    return of_bytes(found)


def of_bytes(found: fxshard.Validation) -> Verdict:
    if found.unknown:
        return Verdict("right", unknown=True)
    if found.max_abs_difference:
        table = found.table(only_different=True)
        points = [p for p in found.points if p[-1]]
        return Verdict("bytes", f"{found.max_abs_difference} bytes", f"{table}\n{points}")
    return Verdict("right")


def traced_once(case: Case) -> contextlib.AbstractContextManager[None]:
    """Most of the time goes into traces: what trains, is planned and measured has one in common.

    But in each eighth case, where the traces may differ.
    """
    return captures.sharing(bool(case.seed % 8), anew=True)


def judged_here(case: Case, sizes: bool = True) -> Verdict:
    """Run a case with all ranks in this process; each of its programs is also read as text."""
    with traced_once(case), texts.compared():
        try:
            with within(LIMIT_S), torch.random.fork_rng():
                observed = train(case, 0, case.world)
                verdict = compared([observed], case)
        except (Exception, Late) as error:
            return of_error(error)
        return sized(case, verdict) if sizes else verdict


def sized(case: Case, verdict: Verdict) -> Verdict:
    """The verdict, or that of the bytes if it was right so far."""
    if verdict.kind != "right":
        return verdict
    try:
        with within(LIMIT_S), torch.random.fork_rng():
            return bytes_of(case)
    except UnknownSizeError:
        return Verdict("right", unknown=True)
    except (Exception, Late) as error:
        found = of_error(error)
        return dataclasses.replace(found, reason=f"validate: {found.reason}")


# -- real ranks ------------------------------------------------------------------------------------


def on_rank(rank: int, world_size: int, cases: list[Case]) -> list[Seen | Verdict]:
    """What a rank sees of each case."""
    import gc

    import torch.distributed as dist

    gc.collect()
    gc.freeze()  # the collections below walk what the cases made, not all of torch
    found: list[Seen | Verdict] = []
    for case in cases:
        try:
            with torch.random.fork_rng():
                found.append(train(case, rank, case.world))
        except Exception as error:
            found.append(of_error(error))
        gc.collect()  # a collective of a forgotten world must not meet the next case's
        dist.barrier()
    gc.unfreeze()
    return found


def judged_on_ranks(
    cases: list[Case], pool: Ranks, sizes: bool = True, job: Callable[..., Any] = on_rank
) -> list[Verdict]:
    """Run cases, all of the pool's world size, on real ranks; one after the other if one fails."""
    answers = pool.run_expecting_errors(job, cases)
    if any(isinstance(answer, str) for answer in answers):
        if len(cases) > 1:
            return [judged_on_ranks([case], pool, sizes, job)[0] for case in cases]
        text = "\n".join(str(a) for a in answers if isinstance(a, str))
        died = "died" if "died" in text else "hung" if "hung" in text else "failed"
        return [Verdict("crash", f"a rank {died}", text)]
    verdicts = []
    for i, case in enumerate(cases):
        ours = [answer[i] for answer in answers]
        failed = [one for one in ours if isinstance(one, Verdict)]
        if failed:
            worst = next((v for v in failed if v.kind == "crash"), failed[0])
            if len(failed) < len(ours):
                worst = Verdict("crash", f"only some ranks: {worst.reason}", worst.detail)
            verdicts.append(worst)
            continue
        verdict = compared(ours, case)
        with traced_once(case):
            verdicts.append(sized(case, verdict) if sizes else verdict)
    return verdicts


def judged(case: Case, sizes: bool = True) -> Verdict:
    """Run one case wherever it says."""
    if not case.processes:
        return judged_here(case, sizes=sizes)
    pool = Ranks(case.ranks, timeout_s=LIMIT_S)
    try:
        return judged_on_ranks([case], pool, sizes=sizes)[0]
    except RankError as error:
        return Verdict("crash", "the pool failed", str(error))
    finally:
        pool.close()
