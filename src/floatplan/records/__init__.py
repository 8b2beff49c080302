"""Frozen records that rooms hand each other. Needs no torch."""

from floatplan.records.explanation import ExplainedGroup, ExplainedOperator, Explanation, module_label
from floatplan.records.run import (
    EpochRecord,
    ExplanationRecord,
    FailureRecord,
    ResultRecord,
    RunHeader,
    RunRecord,
    StepRecord,
)
from floatplan.records.step import KnownStep, StepEvidence, StepFacts, StepResult

__all__ = [
    "EpochRecord",
    "ExplainedGroup",
    "ExplainedOperator",
    "Explanation",
    "ExplanationRecord",
    "FailureRecord",
    "KnownStep",
    "ResultRecord",
    "RunHeader",
    "RunRecord",
    "StepEvidence",
    "StepFacts",
    "StepRecord",
    "StepResult",
    "module_label",
]
