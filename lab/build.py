"""Build the front end into `workbench/lab/static/`, and write the digest of its sources there. Needs Node: `make lab-extension`."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
BUNDLE = FOLDER.parent / "workbench" / "lab" / "static"
DIGEST_NAME = "sources.sha256"


def digest() -> str:
    """Return the SHA-256 of all sources, with their names."""
    found = hashlib.sha256()
    names = ("package.json", "package-lock.json", "tsconfig.json", "src/**/*.ts*", "style/**/*")
    for path in sorted({path for name in names for path in FOLDER.glob(name)}):
        if path.is_file():
            found.update(f"{path.relative_to(FOLDER).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


def main() -> None:
    """Install the compilers if they are missing, then build."""
    npm, builder = shutil.which("npm"), Path(sys.executable).with_name("jupyter-builder")
    if npm is None:
        sys.exit(
            "lab/build.py needs Node.js 20.19 or newer, with npm. Users of the package do not: the bundle is committed"
        )
    if not (FOLDER / "node_modules").is_dir():
        subprocess.run([npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=FOLDER, check=True)
    shutil.rmtree(FOLDER / "lib", ignore_errors=True)
    subprocess.run([npm, "exec", "--", "tsc"], cwd=FOLDER, check=True)
    shutil.rmtree(BUNDLE, ignore_errors=True)  # else old files, whose names hold their digest, would stay
    subprocess.run([builder, "build", "."], cwd=FOLDER, check=True)
    (BUNDLE / DIGEST_NAME).write_text(digest() + "\n")


if __name__ == "__main__":
    main()
