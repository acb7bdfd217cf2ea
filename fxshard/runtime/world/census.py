"""Which processes are alive after a collective has failed.

When a rank dies, only its neighbours notice the closed connections; the other ranks wait for these
neighbours, and cannot report themselves. So each process publishes its identity at the start, and a
rank that failed looks up the processes of its own machine in the process table.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path


def identity() -> str:
    """The identity of this process, to be found on this machine: machine, PID, start time."""
    return f"{_machine()} {os.getpid()} {_state_and_start(os.getpid())[1]}"


def is_dead(who: str) -> bool | None:
    """True if the process of identity `who` has ended; None if it is not on this machine."""
    machine, pid, start = (who or "? 0 ?").split(" ")
    if machine != _machine() or start == "?":
        return None
    state, now = _state_and_start(int(pid))
    return now != start or state in "ZX"


def _machine() -> str:
    """A name of the process table in which PIDs are looked up: containers have their own."""
    try:
        return f"{socket.gethostname()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _state_and_start(pid: int) -> tuple[str, str]:
    """State letter and start time of a process; "X" and "?" if there is none (or no /proc)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", "?"
    return fields[0], fields[19]
