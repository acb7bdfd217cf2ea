"""Who is alive: what processes can tell about each other after a collective failed.

The rank that died closes its connections, but only its neighbours notice: the others wait for
these neighbours, and cannot sign any list. So each process tells at the start who it is, and one
that failed looks up those of its own machine in the process table.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path


def identity() -> str:
    """This process, so that others on this machine can find it: machine, PID, start time."""
    return f"{_machine()} {os.getpid()} {_state_and_start(os.getpid())[1]}"


def is_dead(who: str) -> bool | None:
    """Whether the process that called itself `who` is gone; None if this machine cannot tell."""
    machine, pid, start = (who or "? 0 ?").split(" ")
    if machine != _machine() or start == "?":
        return None
    state, now = _state_and_start(int(pid))
    return now != start or state in "ZX"


def _machine() -> str:
    """Names the process table that PIDs are looked up in: containers have their own."""
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
