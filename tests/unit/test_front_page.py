"""The package's public names."""

from __future__ import annotations

import ast
from pathlib import Path

import workbench


def test_public_names_are_these_and_all_are_there() -> None:
    expected = """
        Problem problems SynchronousSGD LayerwiseSGD DeAR SignSGD AdasumSGD DeMo PipeSGD DelayedSGD AdaptiveDelaySGD
        PartialAllReduce ParameterServerSGD BackupSGD OnlineBackupSGD AsyncSGD StaleSynchronousSGD SoftsyncSGD DelayCompensatedSGD
        LocalSGD DiLoCo StreamingDiLoCo EagerDiLoCo SlowMo BMUF FedAvg FedProx SPARTA
        DPSGD GradientTracking StochasticGradientPush ChocoSGD ADPSGD NoLoCo
        StaleSGD NoCommunication SerialSGD ApplyOrder algorithms collectives codecs
        schedules callbacks optimizers topologies
        Settings Cluster attach simulate costs replay Trainer serve stop_requested ddp_hook record Dashboard study
        Run open_run list_runs trace compare summary runs_table plots experiments papers
        Algorithm Context ops units
    """
    stub = Path(workbench.__file__).with_suffix(".pyi").read_text()
    listed = [
        alias.name for node in ast.walk(ast.parse(stub)) if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    assert listed == expected.split()
    assert workbench.__all__ == sorted(listed)
    for name in workbench.__all__:
        value = getattr(workbench, name)
        assert getattr(value, "__name__", name).rpartition(".")[2] == name
