"""`workbench reproduce`: executes the notebooks that test a paper's claims, and records the results."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.cli.notebook import add_run_options, given_parameters
from workbench.cli.submit import JobCommand, add_job_options, submit_command, workbench_command
from workbench.errors import ConfigError
from workbench.logs import LOG

if TYPE_CHECKING:
    from workbench.papers.claims import Size

EXAMPLES = """
  workbench reproduce li2018pipesgd                     # its notebooks at the smallest size
  workbench reproduce headlines --size ci               # the papers' main results on real ranks
  workbench reproduce all --size ci                     # the same command continues where it stopped
  workbench reproduce all --size ci --update            # in a checkout: write records, figures and pages into papers/
  workbench reproduce all --size full --site lab-8-gpus -f data.yaml
  workbench reproduce all --size full -f data.yaml --submit slurm --partition gpu --time 12:00:00 --nodes 2 --gpus-per-rank 1

The output folder holds the executed notebooks, their pages and records, and index.html, which shows all of them. Its folder
`runs` holds the runs of the notebooks: WORKBENCH_RUNS=FOLDER/runs workbench runs.
"""


def add_reproduce_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `workbench reproduce`, and set its function."""
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("name", help="key of a paper, such as chen2016revisiting, a notebook, headlines, or all")
    add(
        "--claim", metavar="ID", help="only the notebook that tests this claim, such as li2018pipesgd/width-two-is-best"
    )
    add(
        "--size",
        default="smoke",
        help="smoke (the default: does it run?), ci (the committed records) or full (the papers' scale)",
    )
    add(
        "--again",
        action="store_true",
        help="also execute notebooks whose record is of the same code, parameters and machine",
    )
    add(
        "--add-session",
        action="store_true",
        help="execute notebooks again with other seeds, and add the values to their records as another session",
    )
    add(
        "--jobs",
        "-j",
        type=int,
        metavar="N",
        help="how many simulating notebooks run at a time; the number of cores by default. Others run alone",
    )
    add("--output", "-o", type=Path, metavar="FOLDER", help="folder to write to; under the run store by default")
    add("--site", help="name of this machine in records; $WORKBENCH_SITE, the Slurm cluster, or N-cores by default")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--records", type=Path, metavar="FOLDER", help="folder for records; the output folder's `papers` by default"
    )
    where.add_argument(
        "--update", action="store_true", help="in a checkout: write records, figures and pages into papers/"
    )
    add_run_options(parser)
    job = parser.add_argument_group(
        "in a job", "ranks are the job's tasks; the same command continues after a job's end"
    )
    job.add_argument("--submit", choices=["slurm"], help="run it in a batch job, with the following options")
    add_job_options(job, short=False)
    parser.set_defaults(command=_reproduce)


def _reproduce(options: argparse.Namespace) -> int:
    from workbench.clusters.supervision.sigterm import terminated_as_exit

    with terminated_as_exit():  # also during the search for notebooks and the writing of pages
        return _execute(options)


def _execute(options: argparse.Namespace) -> int:
    from workbench import resources
    from workbench.machine import environment, num_cores
    from workbench.papers.pictures import draw_pictures
    from workbench.papers.plan import plan
    from workbench.papers.reproduction import Reproduction
    from workbench.papers.reproduction_page import write_page
    from workbench.papers.site import busy_machine, site_name
    from workbench.papers.sizes import check_size, parse_ranks

    size, site, parameters = check_size(options.size), site_name(options.site), given_parameters(options)
    if options.update and parameters:
        raise ConfigError("--update needs the parameters of the size: leave -p and -f out, or use --records FOLDER")
    jobs = plan(options.name, size, claim=options.claim, parameters=parameters)
    if options.submit:
        return _submit(options, max([1, *(parse_ranks(key)[0] for job in jobs for key in job.ranks)]))
    if options.jobs is not None and options.jobs < 1:
        raise ConfigError(f"--jobs {options.jobs}: give the number of notebooks at a time, 1 or more")
    output = _output(options.output, size, site)
    records = resources.shared("papers") if options.update else (options.records or output / "papers").resolve()
    how = Reproduction(
        size=size,
        site=site,
        output=output,
        records=records,
        options=_reproducing_options(options, size, parameters),
        again=options.again,
        add_session=options.add_session,
        jobs=options.jobs or num_cores(),
        timeout_s=options.timeout,
        report=LOG.info,
    )
    runs = output / "runs"
    busy = busy_machine()
    if busy:
        LOG.warning("%s", busy)
    with environment({"WORKBENCH_RUNS": str(runs)}):  # apart from the user's own runs
        outcomes = how.run(jobs)
    for message in draw_pictures(outcomes, records, size, site):
        LOG.info(message)
    if options.update:
        from workbench.papers.table import update_pages

        update_pages()
    page = write_page(outcomes, output / "index.html", records, size, site, busy=busy)
    print(f"page:    {page}\nrecords: {records}\nruns:    {runs}")
    return 1 if any(outcome.status == "failed" for outcome in outcomes) else 0


def _submit(options: argparse.Namespace, num_ranks: int) -> int:
    """Run the same command in a job. The default of --site is set there, from Slurm's variables."""
    argv = ["reproduce", options.name, "--size", options.size]
    for name in ("claim", "site", "timeout", "jobs"):
        argv += [f"--{name}", str(getattr(options, name))] if getattr(options, name) is not None else []
    for name in ("output", "records"):
        argv += [f"--{name}", str(getattr(options, name).resolve())] if getattr(options, name) is not None else []
    argv += [f"--{name}" for name in ("again", "update") if getattr(options, name)]
    argv += ["--add-session"] if options.add_session else []
    argv += [word for path in options.file for word in ("--file", str(Path(path).resolve()))]
    argv += [word for pair in options.parameter for word in ("--parameter", pair)]
    work = JobCommand(name="reproduce", command=workbench_command(argv), num_ranks=num_ranks, on_warning="interrupt")
    return submit_command(options, work)


def _output(given: Path | None, size: str, site: str) -> Path:
    from workbench.trace.store import runs_root

    return (given or runs_root() / "reproduce" / f"{site}-{size}").resolve()


def _reproducing_options(options: argparse.Namespace, size: Size, parameters: dict[str, Any]) -> str:
    """Return the options that make the same record again, without paths."""
    from workbench.papers.site import without_paths

    words = ["--size", size, *(["--site", options.site] if options.site else [])]
    words += [word for name, value in without_paths(parameters).items() for word in ("-p", f"{name}={value}")]
    return shlex.join(words)
