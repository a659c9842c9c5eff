"""Flax modules; they know logical axis names, never a mesh."""
