"""`workbench kernels`: lists and installs the package's Jupyter kernels."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from workbench.errors import ConfigError
from workbench.naming import unknown


def add_kernels_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `workbench kernels`, and set its functions."""
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="list the kernels and the folders where they are installed")
    listing.add_argument("--json", action="store_true", help="print a JSON array")
    listing.set_defaults(command=_list)
    install = actions.add_parser(
        "install", help="install kernels where Jupyter looks for them (a wheel does this for its own environment)"
    )
    install.add_argument("name", nargs="*", help="names of kernels; all by default")
    place = install.add_mutually_exclusive_group()
    place.add_argument(
        "--user", action="store_true", help="for this user: Jupyter of every environment of the user finds them"
    )
    place.add_argument("--sys-prefix", action="store_true", help="into this environment (the default)")
    place.add_argument("--prefix", type=Path, help="into another environment's folder")
    install.set_defaults(command=_install)


def _specs() -> dict[str, Path]:
    from workbench.resources import kernels

    return {folder.name: folder for folder in kernels()}


def _list(options: argparse.Namespace) -> int:
    from jupyter_client.kernelspec import KernelSpecManager

    found = KernelSpecManager().find_kernel_specs()
    rows = []
    for name, folder in _specs().items():
        spec = json.loads((folder / "kernel.json").read_text())
        rows.append({"name": name, "title": spec["display_name"], "installed": found.get(name)})
    if options.json:
        print(json.dumps(rows))
        return 0
    for row in rows:
        print(
            f"{row['name']:16} {row['title']:16} "
            f"{row['installed'] or 'not installed: workbench kernels install ' + row['name']}"
        )
    return 0


def _install(options: argparse.Namespace) -> int:
    specs = _specs()
    for name in options.name:
        if name not in specs:
            raise unknown("kernel", name, tuple(specs))
    target = _user_folder() if options.user else (options.prefix or Path(sys.prefix)) / "share" / "jupyter" / "kernels"
    for name in options.name or specs:
        spec = json.loads((specs[name] / "kernel.json").read_text())
        spec["argv"][0] = sys.executable  # otherwise Jupyter of another environment would use its own Python
        try:
            (target / name).mkdir(parents=True, exist_ok=True)
            for file in specs[name].iterdir():
                shutil.copyfile(file, target / name / file.name)
            (target / name / "kernel.json").write_text(json.dumps(spec, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(
                f"{target / name} cannot be written ({error.strerror}): choose --user, or --prefix FOLDER"
            ) from error
        print(f"{name}: {target / name}")
    return 0


def _user_folder() -> Path:
    from jupyter_core.paths import jupyter_data_dir

    return Path(jupyter_data_dir()) / "kernels"
