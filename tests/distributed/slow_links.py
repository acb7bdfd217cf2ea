"""Hardware on which it pays to cut every collective into parts."""

import dataclasses

from fxshard.hardware import Link, hardware_of

# Nothing takes a time of its own.
SLOW_LINKS = dataclasses.replace(
    hardware_of("h100"),
    link=Link(alpha=0.0, beta=1e6),
    collective_overhead=0.0,
    launch_overhead=0.0,
    flops=dict.fromkeys(hardware_of("h100").flops, 1e9),
)
