"""Build the front end into `workbench/lab/static/`, and write the digest of its sources there. Needs Node: `make lab-extension`.

It also writes plotly.js, of the version in `package.json`, into the extension of the live figures.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
BUNDLE = FOLDER.parent / "workbench" / "lab" / "static"
DIGEST_NAME = "sources.sha256"
PLOTLY = FOLDER / "node_modules" / "plotly.js-basic-dist-min" / "plotly-basic.min.js"
FIGURES = FOLDER.parent / "workbench" / "plots" / "labextension" / "static"
# The library as the default of a module; it does not replace another copy on the page
GLOBAL = "window.Plotly = Plotly;"
HEAD = "const module = { exports: {} }, exports = module.exports, define = undefined;\n"
FOOT = "\nexport default module.exports;\n"


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
    library = PLOTLY.read_text()
    assert library.count(GLOBAL) == 1
    (FIGURES / "plotly-basic.js").write_text(f"{HEAD}{library.replace(GLOBAL, '')}{FOOT}")


if __name__ == "__main__":
    main()
