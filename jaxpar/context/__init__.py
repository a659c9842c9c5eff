"""Attention over rows that are split over the mesh axis `context`: which exchange, and the exchange itself."""

from __future__ import annotations

from jaxpar.context.exchange import attend
from jaxpar.context.tiles import Scores
from jaxpar.context_plan import ContextPlan, choose, stream_order

__all__ = ["ContextPlan", "Scores", "attend", "choose", "stream_order"]
