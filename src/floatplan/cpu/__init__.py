"""Holds `floatplan.cpu.amp`, the names of ``torch.cpu.amp``."""

from floatplan.cpu import amp

__all__ = ["amp"]
