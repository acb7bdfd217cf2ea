"""What `fxshard.plans.plan.Plan` asks of this room."""

from fxshard.planner.budget import fitting
from fxshard.planner.limits import largest, solve
from fxshard.planner.what_ifs import what_ifs

__all__ = ["fitting", "largest", "solve", "what_ifs"]
