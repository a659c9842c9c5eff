"""Attention over rows that are split over the mesh axis `context`: which exchange, and the exchange itself."""

from __future__ import annotations

from jaxpar.context.exchange import attend
from jaxpar.context.plan import ContextPlan, choose, stream_order
from jaxpar.context.tiles import Scores

__all__ = ["ContextPlan", "Scores", "attend", "choose", "stream_order"]
