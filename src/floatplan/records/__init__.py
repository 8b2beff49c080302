"""Frozen records that rooms hand each other. Needs no torch."""

from floatplan.records.choice import Choice, ModuleChoice
from floatplan.records.diagnosis import Diagnosis
from floatplan.records.explanation import ExplainedGroup, ExplainedOperator, Explanation, module_label
from floatplan.records.run import (
    ChoiceRecord,
    DriftRecord,
    EpochRecord,
    ExplanationRecord,
    FailureRecord,
    ResultRecord,
    RunHeader,
    RunRecord,
    StepRecord,
    WeightsRecord,
)
from floatplan.records.step import KnownStep, StepEvidence, StepFacts, StepResult

__all__ = [
    "Choice",
    "ChoiceRecord",
    "Diagnosis",
    "DriftRecord",
    "EpochRecord",
    "ExplainedGroup",
    "ExplainedOperator",
    "Explanation",
    "ExplanationRecord",
    "FailureRecord",
    "KnownStep",
    "ModuleChoice",
    "ResultRecord",
    "RunHeader",
    "RunRecord",
    "StepEvidence",
    "StepFacts",
    "StepRecord",
    "StepResult",
    "WeightsRecord",
    "module_label",
]
