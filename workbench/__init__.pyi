"""Public names, in reading order."""

# what is trained
from .problems.base import Problem as Problem
from . import problems as problems

# how
from .algorithms import (
    SynchronousSGD as SynchronousSGD,
    LayerwiseSGD as LayerwiseSGD,
    DeAR as DeAR,
    SignSGD as SignSGD,
    AdasumSGD as AdasumSGD,
    DeMo as DeMo,
    PipeSGD as PipeSGD,
    DelayedSGD as DelayedSGD,
    AdaptiveDelaySGD as AdaptiveDelaySGD,
    PartialAllReduce as PartialAllReduce,
    ParameterServerSGD as ParameterServerSGD,
    BackupSGD as BackupSGD,
    OnlineBackupSGD as OnlineBackupSGD,
    AsyncSGD as AsyncSGD,
    StaleSynchronousSGD as StaleSynchronousSGD,
    SoftsyncSGD as SoftsyncSGD,
    DelayCompensatedSGD as DelayCompensatedSGD,
    LocalSGD as LocalSGD,
    DiLoCo as DiLoCo,
    StreamingDiLoCo as StreamingDiLoCo,
    EagerDiLoCo as EagerDiLoCo,
    SlowMo as SlowMo,
    BMUF as BMUF,
    FedAvg as FedAvg,
    FedProx as FedProx,
    SPARTA as SPARTA,
    DPSGD as DPSGD,
    GradientTracking as GradientTracking,
    StochasticGradientPush as StochasticGradientPush,
    ChocoSGD as ChocoSGD,
    ADPSGD as ADPSGD,
    NoLoCo as NoLoCo,
    StaleSGD as StaleSGD,
    NoCommunication as NoCommunication,
    SerialSGD as SerialSGD,
    ApplyOrder as ApplyOrder,
)
from . import algorithms as algorithms, collectives as collectives, codecs as codecs, schedules as schedules
from . import callbacks as callbacks, optimizers as optimizers, topologies as topologies
from .settings import Settings as Settings

# where
from .clusters import Cluster as Cluster, attach as attach
from .runtimes.simulator.simulate import simulate as simulate
from . import costs as costs
from .runtimes.simulator.replay import replay as replay
from .runtimes.user_loop.trainer import Trainer as Trainer, serve as serve
from .runtimes.user_loop.stop_request import stop_requested as stop_requested
from .runtimes.user_loop.ddp_hook import ddp_hook as ddp_hook
from .runtimes.user_loop.record import record as record
from .dashboard import Dashboard as Dashboard

from .what_if.run_study import study as study

# results
from .trace.run import Run as Run
from .trace import open_run as open_run
from .trace.store import list_runs as list_runs
from . import trace as trace
from .analysis import compare as compare, summary as summary, runs_table as runs_table
from . import plots as plots, experiments as experiments, papers as papers

# to write an algorithm
from .program import Algorithm as Algorithm, Context as Context
from . import ops as ops, units as units

__version__: str
