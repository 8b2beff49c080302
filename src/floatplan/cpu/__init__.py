"""Holds `floatplan.cpu.amp`, the names of ``torch.cpu.amp``."""
