"""Frozen records that rooms hand each other. Needs no torch."""

from floatplan.records.choice import Choice, ModuleChoice
from floatplan.records.diagnosis import Diagnosis
from floatplan.records.explanation import ExplainedGroup, ExplainedOperator, Explanation, module_label
from floatplan.records.numbers import Numbers
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
from floatplan.records.training import (
    CastsRecord,
    FindingRecord,
    LostUpdates,
    NumbersKind,
    NumbersRecord,
    ScaleEvent,
    TrainedStep,
    TrainingHeader,
    TrainingRecord,
    scale_history,
)

__all__ = [
    "CastsRecord",
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
    "FindingRecord",
    "KnownStep",
    "LostUpdates",
    "ModuleChoice",
    "Numbers",
    "NumbersKind",
    "NumbersRecord",
    "ResultRecord",
    "RunHeader",
    "RunRecord",
    "ScaleEvent",
    "StepEvidence",
    "StepFacts",
    "StepRecord",
    "StepResult",
    "TrainedStep",
    "TrainingHeader",
    "TrainingRecord",
    "WeightsRecord",
    "module_label",
    "scale_history",
]
