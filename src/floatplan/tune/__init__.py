"""WHAT TO CHANGE: what this machine does fast, as numbers and as advice. Needs no torch until it measures."""

from floatplan.tune.machine import Device, FormatFacts, Machine, recommendation

__all__ = ["Device", "FormatFacts", "Machine", "recommendation"]
