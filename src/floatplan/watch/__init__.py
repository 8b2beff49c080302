"""WHAT HAPPENED: which operators ran in which precision and why, and where a NaN was born."""

from floatplan.watch.diagnosis import diagnose
from floatplan.watch.forward import explain

__all__ = ["diagnose", "explain"]
