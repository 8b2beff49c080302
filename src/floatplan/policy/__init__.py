"""WHAT precision: the operator table, the `Policy` value and the `Plan`. Needs no torch."""

from floatplan.policy.classes import Kind, OpClass
from floatplan.policy.operators import LOOK_UPS, OPERATORS, Operator, packet
from floatplan.policy.plan import Decision, ModuleRule, Plan
from floatplan.policy.policy import TORCH_TABLES, Policy

__all__ = [
    "LOOK_UPS",
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
