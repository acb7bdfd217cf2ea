"""The functions of this package that `fxshard.plans.plan.Plan` calls."""

from fxshard.planner.budget import fitting
from fxshard.planner.limits import largest, solve
from fxshard.planner.what_ifs import what_ifs

__all__ = ["fitting", "largest", "solve", "what_ifs"]
