"""Gloo ranks on this machine for one call: limited in time, and ended in any case.

The ranks are forked from a forkserver that has imported fxshard. They rendezvous through a file and
communicate over the loopback interface.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fxshard.errors import ConfigError, RankDiedError
from fxshard.host import progress

LIMIT_S = 600.0  # of a call; a collective waits for two thirds of it
LINES = 20  # of a rank's traceback in the error

Job = Callable[[int, Any], Any]


class _Failure(str):
    """Why a rank has no result; sent in place of it."""


class _UnpicklingFailure(_Failure):
    """The rank could not unpickle what it was sent."""


def run(job: Job, payload: bytes, world_size: int, limit_s: float | None = None) -> list[Any]:
    """``job(rank, pickle.loads(payload))`` in every rank of a gloo process group.

    Args:
        job: a function of a module; what it returns is pickled.
        payload: the same for all ranks.
        world_size: number of ranks; each runs kernels in as many threads as this process.
        limit_s: seconds until all of them are ended; None: `LIMIT_S`.

    Returns:
        The results by rank.

    Raises:
        RankDiedError: a rank died, failed, or did not answer in time; the text names the first.
        ConfigError: a rank cannot unpickle what it is sent.
    """
    limit = LIMIT_S if limit_s is None else limit_s
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["fxshard.api"])
    processes: list[BaseProcess] = []
    connections: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="fxshard-ranks-") as folder:
        try:
            for rank in range(world_size):
                ours, of_rank = context.Pipe()
                threads = torch.get_num_threads()
                started = context.Process(
                    target=_serve,
                    args=(rank, world_size, folder, limit, threads, of_rank),
                    daemon=True,
                )
                started.start()
                of_rank.close()
                processes.append(started)
                connections.append(ours)
            for ours in connections:
                with contextlib.suppress(OSError):  # the rank is dead: `_collected` raises
                    ours.send_bytes(pickle.dumps(job) + payload)
            return _collected(processes, connections, limit)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for ours in connections:
                ours.close()


def _collected(
    processes: list[BaseProcess], connections: list[Connection], limit: float
) -> list[Any]:
    """The results by rank; raises for the first rank that has none."""
    deadline = time.monotonic() + limit
    found: dict[int, Any] = {}
    while len(found) < len(connections):
        waiting = [c for rank, c in enumerate(connections) if rank not in found]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [rank for rank in range(len(connections)) if rank not in found]
            raise RankDiedError(
                f"rank {late[0]} has not answered in {limit:.0f} s"
                + (f", nor have {late[1:]}" if late[1:] else "")
                + ". All ranks are ended."
            )
        for each in ready:
            assert isinstance(each, Connection)
            rank = connections.index(each)
            try:
                answer = pickle.loads(each.recv_bytes())
            except (EOFError, OSError):
                raise RankDiedError(_death(rank, processes[rank])) from None
            if isinstance(answer, _UnpicklingFailure):
                raise ConfigError(
                    f"a rank cannot read what it is sent: {answer}. Define classes and functions "
                    f"in a module that can be imported; or give ranks='fake', which starts none."
                )
            if isinstance(answer, _Failure):
                dead = _dead(processes)  # a peer may notice a death first
                if dead is None:
                    raise RankDiedError(f"rank {rank} failed:\n{answer}")
                raise RankDiedError(f"{_death(dead, processes[dead])} Rank {rank}:\n{answer}")
            found[rank] = answer
    return [found[rank] for rank in range(len(connections))]


def _dead(processes: list[BaseProcess]) -> int | None:
    """A rank whose process has ended, if any: ranks live until they are killed."""
    ended = wait([process.sentinel for process in processes], 1.0)
    return next((rank for rank, each in enumerate(processes) if each.sentinel in ended), None)


def _death(rank: int, process: BaseProcess) -> str:
    process.join(1)
    return f"rank {rank} died, with exit code {process.exitcode}."


def _serve(
    rank: int, world_size: int, folder: str, limit: float, threads: int, connection: Connection
) -> None:
    """Run one job as a rank. Then wait to be ended: peers may still need its sockets."""
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(threads)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=2 / 3 * limit),
        )
        with progress.task("", shown=False):  # the process that started this one shows it
            answer = _answer(rank, connection.recv_bytes())
    except BaseException:
        answer = pickle.dumps(_Failure("".join(traceback.format_exc().splitlines(True)[-LINES:])))
    connection.send_bytes(answer)
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()
    os._exit(0)


def _answer(rank: int, sent: bytes) -> bytes:
    """What the rank sends back."""
    stream = io.BytesIO(sent)
    try:
        job, payload = pickle.load(stream), pickle.load(stream)
    except Exception as error:
        return pickle.dumps(_UnpicklingFailure(f"{type(error).__name__}: {error}"))
    return pickle.dumps(job(rank, payload))
