"""WHAT precision: the operator table, the `Policy` value and the `Plan`. Needs no torch."""

from floatplan.policy.classes import Kind, OpClass
from floatplan.policy.operators import OPERATORS, Operator, packet
from floatplan.policy.plan import Decision, ModuleRule, Plan
from floatplan.policy.policy import TORCH_TABLES, Policy

__all__ = [
    "OPERATORS",
    "TORCH_TABLES",
    "Decision",
    "Kind",
    "ModuleRule",
    "OpClass",
    "Operator",
    "Plan",
    "Policy",
    "packet",
]
