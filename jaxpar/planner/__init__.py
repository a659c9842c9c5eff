"""Planner: which layout trains this model fastest on these GPUs."""

from jaxpar.planner.plan import Plan, PlannedLayout, best_config, plan

__all__ = ["Plan", "PlannedLayout", "best_config", "plan"]
