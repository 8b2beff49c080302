"""WHAT precision: the operator table and the `Policy` value. Needs no torch."""

from floatplan.policy.classes import Kind, OpClass
from floatplan.policy.operators import OPERATORS, Operator, packet
from floatplan.policy.policy import TORCH_TABLES, Policy

__all__ = ["OPERATORS", "TORCH_TABLES", "Kind", "OpClass", "Operator", "Policy", "packet"]
