"""WHAT HAPPENED: which operators ran in which precision, and why."""

from floatplan.watch.forward import explain

__all__ = ["explain"]
