"""The package's public names."""

from __future__ import annotations

import workbench


def test_public_names_are_these_and_all_are_there() -> None:
    expected = """
        __version__ Problem problems SynchronousSGD LayerwiseSGD DeAR PipeSGD DelayedSGD AdaptiveDelaySGD PartialAllReduce
        ParameterServerSGD BackupSGD AsyncSGD StaleSynchronousSGD SoftsyncSGD DelayCompensatedSGD LocalSGD DiLoCo
        StreamingDiLoCo EagerDiLoCo StaleSGD NoCommunication SerialSGD ApplyOrder algorithms collectives codecs
        schedules Settings Cluster attach simulate costs replay Trainer ddp_hook Dashboard
        Run open_run list_runs trace compare summary runs_table plots experiments papers
        Algorithm Context ops units
    """
    assert workbench.__all__ == expected.split()
    for name in workbench.__all__:
        value = getattr(workbench, name)
        assert getattr(value, "__name__", name).rpartition(".")[2] == name
