"""A pool of gloo ranks on this machine that lives through many tests."""

import datetime
import faulthandler
import functools
import multiprocessing as mp
import os
import pickle
import re
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_context = mp.get_context("forkserver")
# Imported once in the server, so that a rank costs a fork. What cannot be imported is skipped.
_context.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "transformers.models.llama.modeling_llama",
        "fxshard.api",
    ]
)
# Each process group of gloo has three threads, one of which wakes a hundred times a second, and
# most tests leave theirs: what they made meshes of may be in DTensor's caches.
MOST_THREADS = 64
# A rank of 64 threads takes 2.6 % of a core while it waits, one of 19 0.8 %; a new one 0.05 s.
MOST_IDLE_THREADS = 16
START_TIMEOUT_S = 300  # a cold start imports torch and transformers, on a busy machine
LOG_CHARACTERS = 8_000  # of a dead rank's stderr in its failure; as many again from a fatal signal


class Failure(str):
    """In the place of a rank's result: the traceback it ended with, or how it died or hung."""


class RankError(RuntimeError):
    """Ranks failed. `failures`: rank -> text, the first to fail (so likely the cause) first."""

    def __init__(self, failures: dict[int, Failure]) -> None:
        self.failures = failures
        super().__init__("\n".join(f"--- rank {rank}\n{text}" for rank, text in failures.items()))


class Ranks:
    """`world_size` processes in one gloo process group over loopback; started at first use.

    The pool survives a good run. After a failure its process group is in no known state, so all
    ranks are killed, and started afresh at next use; also when they have gathered too many threads.
    """

    def __init__(self, world_size: int, timeout_s: float = 300) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s  # of one run, pool start excluded; a collective waits 2/3 of it
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """`fn(rank, world_size, *args)` in every rank; the results by rank, or `RankError`.

        `fn` is a module-level function; it, `args` and the results are pickled.
        """
        answers = self._answers(fn, args)
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failure)}
        if failures:
            raise RankError(failures)
        return [answers[rank] for rank in range(self.world_size)]

    def run_expecting_errors(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Like `run`, but a rank that failed has a `Failure`, a string, for its result."""
        answers = self._answers(fn, args)
        return [answers[rank] for rank in range(self.world_size)]

    def kill(self, rank: int, delay_s: float = 0) -> None:
        """SIGKILL `rank` now, or `delay_s` seconds from now, to hit it in the next run."""
        self._start()
        process = self._processes[rank]
        if delay_s:
            threading.Timer(delay_s, process.kill).start()
        else:
            process.kill()
            process.join()

    def close(self) -> None:
        """Kill all ranks. The next use starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        if self._scratch:
            self._scratch.cleanup()
        self._processes, self._connections, self._scratch = [], [], None

    def close_if_it_wakes(self) -> None:
        """Close if its threads are many: before it waits long."""
        if self._processes and self._threads() > MOST_IDLE_THREADS:
            self.close()

    def _threads(self) -> int:
        """Of the first rank; 0 if that is not known."""
        tasks = Path("/proc", str(self._processes[0].pid), "task")
        return len(list(tasks.iterdir())) if tasks.exists() else 0

    def _start(self) -> None:
        """Start the ranks and wait until their process group is up."""
        if self._processes:
            if self._threads() <= MOST_THREADS:
                return
            self.close()
        self._scratch = tempfile.TemporaryDirectory(prefix="ranks-")
        for rank in range(self.world_size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_serve,
                args=(rank, self.world_size, self._scratch.name, 2 / 3 * self.timeout_s, theirs),
                name=f"rank-{rank}-of-{self.world_size}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        failures = {
            rank: answer
            for rank, answer in self._collect(START_TIMEOUT_S).items()
            if answer is not None
        }
        if failures:
            raise RankError(failures)

    def _answers(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> dict[int, Any]:
        """rank -> result or `Failure`, in order of arrival."""
        job = pickle.dumps((fn, args, _captures_are_shared()))
        self._start()
        for connection in self._connections:
            with suppress(OSError):  # it is dead; collecting says so
                connection.send_bytes(job)
        return self._collect(self.timeout_s)

    def _collect(self, timeout_s: float) -> dict[int, Any]:
        """One answer of every rank; ends the pool if one of them is a `Failure`."""
        deadline = time.monotonic() + timeout_s
        answers: dict[int, Any] = {}
        while len(answers) < self.world_size:
            waiting = [c for rank, c in enumerate(self._connections) if rank not in answers]
            ready = wait(waiting, max(0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = self._connections.index(connection)
                answers[rank] = self._receive(rank)
        for rank in range(self.world_size):
            if rank not in answers:
                answers[rank] = Failure(
                    f"rank {rank} hung: no answer in {timeout_s} s\n{self._stack(rank)}"
                )
        if any(isinstance(answer, Failure) for answer in answers.values()):
            self.close()
        return answers

    def _receive(self, rank: int) -> Any:
        try:
            return pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join(1)
            code = self._processes[rank].exitcode
            log = self._left_behind(rank)  # of a crash; a kill leaves none
            return Failure(f"rank {rank} died, exit code {code}" + (f"\n{log}" if log else ""))

    def _stack(self, rank: int) -> str:
        """Where a hung rank's Python threads are."""
        pid = self._processes[rank].pid
        assert self._scratch and pid
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.2)
        return self._left_behind(rank)

    def _left_behind(self, rank: int) -> str:
        """The end of a rank's stderr: its stack, when it was asked for it or when it crashed."""
        assert self._scratch
        path = Path(self._scratch.name, f"log{rank}")
        if not path.exists():
            return "(not up yet)"
        log = path.read_text()
        fatal = re.search(r".{,200}^SIG\w+\(\d+\), PID", log, re.DOTALL | re.MULTILINE)
        return (log[fatal.start() :][:LOG_CHARACTERS] if fatal else "") + log[-LOG_CHARACTERS:]


def _serve(
    rank: int, world_size: int, scratch: str, timeout_s: float, connection: Connection
) -> None:
    """A rank's life: answer jobs until the pool goes away or one fails.

    A rank that failed exits, which closes its sockets: peers that wait for it fail at once too,
    and not after `timeout_s`.
    """
    log = open(Path(scratch, f"log{rank}"), "w")  # noqa: SIM115, open for life
    os.dup2(log.fileno(), 2)  # what a C++ thread says before it aborts goes nowhere else
    faulthandler.register(signal.SIGUSR1, file=log)
    faulthandler.enable(file=log)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        import torch
        import torch.distributed as dist

        from fxshard._torch import process_groups

        torch.set_num_threads(1)
        # in front of Python's stacks: where each C++ thread is when one of them aborts
        torch._C._set_print_stack_traces_on_fatal_signal(True)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{scratch}/store",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        # torch's own gathers of references run before fxshard is asked for anything
        process_groups.gather_one_by_one()
        _make_each_mesh_once()
        connection.send_bytes(pickle.dumps(None))  # up
        while True:
            try:
                job = connection.recv_bytes()
            except EOFError:
                break
            fn, args, shares = pickle.loads(job)
            connection.send_bytes(pickle.dumps(_done(fn, (rank, world_size, *args), shares)))
    except BaseException:
        connection.send_bytes(pickle.dumps(Failure(traceback.format_exc())))
    os._exit(1)


def _make_each_mesh_once() -> None:
    """Equal calls of `init_device_mesh` give one mesh in this process, with one set of groups."""
    from torch.distributed import device_mesh, tensor

    import fxshard.runtime.world.mesh

    once = functools.cache(device_mesh.init_device_mesh)  # of one process group: the pool's
    for module in (device_mesh, tensor, fxshard.runtime.world.mesh):
        module.init_device_mesh = once  # type: ignore[attr-defined]


def _captures_are_shared() -> bool:
    from tests import captures  # imports torch, which a rank does when it is up

    return captures.are_shared()


def _done(fn: Callable[..., Any], args: tuple[Any, ...], shares: bool) -> Any:
    from tests import captures

    with captures.sharing(shares):
        return fn(*args)


def told(action: Callable[[], Any]) -> str:
    """The error that fxshard refuses `action` with in a rank, as ``Type: text``."""
    from fxshard.errors import FxshardError  # imports torch

    try:
        action()
    except FxshardError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
