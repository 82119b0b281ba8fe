"""Install each library with only what it declares, and use it.

Builds wheels of a package and of the mcore packages that it asks for, unpacks them into an empty folder, links in the
third parties in the closure of their declared requirements and nothing else, then imports every module with a Python
that sees that folder alone. A module that reaches for a sibling above it, or for an undeclared library, fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
# Package to the siblings that it may ask for.
ALONE = {
    "mcore-parallel": [],
    "mcore-models": ["mcore-parallel"],
    "mcore-data": ["mcore-parallel"],
    "mcore-ckpt": ["mcore-parallel"],
}
IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    importlib.import_module(name)
from mcore_parallel.plugins import plugin_manager
manager = plugin_manager()
assert not manager.failures, manager.failures
print(f"{sys.argv[1]}: {len(names)} modules, plugins {[r.name for r in manager.records]}")
"""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(names: list[str]) -> set[str]:
    """Installed distributions that ``names`` need, directly or not, less mcore's own."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        for line in metadata.requires(todo.pop()) or []:
            requirement = Requirement(line)
            name = canonical(requirement.name)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted and name not in found:
                found.add(name)
                todo.append(name)
    return {name for name in found if not name.startswith("mcore-")}


def link_third_parties(names: set[str], into: Path) -> None:
    """Link the top-level entries of the installed distributions ``names`` into a folder."""
    for name in sorted(names):
        distribution = metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            target, link = Path(str(distribution.locate_file(top))), into / top
            if not link.exists() and target.exists():
                os.symlink(target, link)


def build_wheels(into: Path) -> None:
    folders = [str(ROOT / "packages" / name) for name in ALONE]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(into)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, *folders], check=True)


def install(names: list[str], wheels: Path, into: Path) -> None:
    files = [str(next(wheels.glob(f"{name.replace('-', '_')}-*.whl"))) for name in names]
    options = ["--no-deps", "--no-index", "--quiet", "--target", str(into)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *files], check=True)


def python(folder: Path, *arguments: str) -> None:
    """Run Python without its site-packages, seeing ``folder`` alone."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MCORE_")}
    environment["PYTHONPATH"] = str(folder)
    subprocess.run([sys.executable, "-S", *arguments], check=True, cwd=folder, env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="empty folder to work in; removed at the start")
    folder = parser.parse_args().folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "wheels").mkdir(parents=True)
    build_wheels(folder / "wheels")
    for name, siblings in ALONE.items():
        site = folder / name
        install([name, *siblings], folder / "wheels", site)
        link_third_parties(closure([name, *siblings]), site)
        python(site, "-c", IMPORT_ALL, name.replace("-", "_"))
    shutil.copy(ROOT / ".ci" / "ckpt_round_trip.py", folder / "mcore-ckpt")
    python(folder / "mcore-ckpt", "ckpt_round_trip.py")


if __name__ == "__main__":
    main()
