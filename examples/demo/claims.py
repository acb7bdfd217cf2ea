"""What the demo claims, each as a sentence and a condition on its summary."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Summary = dict[str, Any]

CLAIMS: tuple[tuple[str, Callable[[Summary], bool]], ...] = (
    (
        "the ranks ran the program that was planned: same certificate",
        lambda s: s["certificate"] == s["ranks_certificate"],
    ),
    (
        "the process group received {collectives_per_step} collectives per step, "
        "{all_gathers_per_step} all-gathers and {reduce_scatters_per_step} reduce-scatters: "
        "planned were {all_gathers_planned} and {reduce_scatters_planned}",
        lambda s: (
            s["all_gathers_per_step"] == s["all_gathers_planned"]
            and s["reduce_scatters_per_step"] == s["reduce_scatters_planned"]
            and s["collectives_per_step"] == s["all_gathers_planned"] + s["reduce_scatters_planned"]
        ),
    ),
    (
        "static and measured memory differ by {max_abs_difference_bytes} bytes anywhere; "
        "the peak is {static_peak_bytes:,} and {measured_peak_bytes:,} bytes",
        lambda s: (
            s["max_abs_difference_bytes"] == 0
            and s["static_peak_bytes"] == s["measured_peak_bytes"]
        ),
    ),
    (
        "losses, gradients and parameters differ from FSDP2's by {fsdp2_max_abs_difference} over "
        "{compared} steps",
        # With more than two ranks the order in which gloo adds depends on the size of a message.
        lambda s: s["fsdp2_max_abs_difference"] <= (0.0 if s["world_size"] <= 2 else 1e-6),
    ),
    (
        "losses differ from one plain process by {eager_max_relative_difference:.1e} (relative), "
        "at most 1e-5 for rounding",
        lambda s: s["eager_max_relative_difference"] <= 1e-5,
    ),
    (
        "the validation loss fell from {val_bits_per_byte_first:.3f} to "
        "{val_bits_per_byte_last:.3f} bits per byte, below {target}",
        lambda s: s["val_bits_per_byte_last"] < min(s["target"], s["val_bits_per_byte_first"]),
    ),
    (
        "the checkpoint, loaded in one process, has that loss: {val_bits_per_byte_reloaded:.7f} "
        "against {val_bits_per_byte_last:.7f}, within 1e-6",
        lambda s: math.isclose(
            s["val_bits_per_byte_reloaded"], s["val_bits_per_byte_last"], rel_tol=1e-6
        ),
    ),
)


def check(summary: Summary) -> list[tuple[str, bool]]:
    """Every claim with its figures, and whether it holds."""
    return [(sentence.format(**summary), bool(holds(summary))) for sentence, holds in CLAIMS]
