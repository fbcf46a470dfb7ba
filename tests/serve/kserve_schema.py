"""KServe's own schema, out of its Python SDK: which fields a resource has, of what type, and which it must have.

The SDK's models (kserve/models/*.py) are generated from the CRDs. They are read, not imported: the SDK pins packages
that do not go with qserve's. What is plain Kubernetes in them is left to kubernetes-validate.
"""

import ast
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

VERSION = "0.21.0"


def download(folder: Path) -> zipfile.ZipFile:
    """The wheel, through pip and its configured index. Raises CalledProcessError if there is none."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), f"kserve=={VERSION}"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("kserve-*.whl")
    return zipfile.ZipFile(wheel)


def problems(sdk: zipfile.ZipFile, kind: str, value: object, at: str = "") -> Iterator[str]:
    """What is wrong with `value` as a `kind`: an SDK class (V1beta1InferenceService), list[...], dict(...), str, ..."""
    if match := re.fullmatch(r"list\[(.+)\]", kind):
        if not isinstance(value, list):
            yield f"{at} is no list"
            return
        for n, item in enumerate(value):
            yield from problems(sdk, match[1], item, f"{at}[{n}]")
    elif kind in ("str", "int", "bool"):
        if type(value).__name__ != kind:
            yield f"{at} is {value!r}, not {kind}"
    elif (source := _source(sdk, kind)) is not None:
        yield from _object(sdk, source, value, at)


def _object(sdk: zipfile.ZipFile, source: str, value: object, at: str) -> Iterator[str]:
    types, names = (_table(source, table) for table in ("openapi_types", "attribute_map"))
    kinds = {names[attribute]: kind for attribute, kind in types.items()}
    if not isinstance(value, dict):
        yield f"{at} is no mapping"
        return
    for key, item in value.items():
        if key not in kinds:
            yield f"{at}.{key} is no field"
        else:
            yield from problems(sdk, kinds[key], item, f"{at}.{key}")
    needed = re.findall(r"Invalid value for `(\w+)`, must not be `None`", source)
    yield from (f"{at}.{names[a]} is missing" for a in needed if names[a] not in value)


def _source(sdk: zipfile.ZipFile, kind: str) -> str | None:
    """The model's module; None for what is no model of the SDK (a Kubernetes type, a quantity)."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=\d)(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", kind).lower()
    path = f"kserve/models/{name}.py"
    return sdk.read(path).decode() if path in sdk.namelist() else None


def _table(source: str, name: str) -> dict[str, str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and [getattr(t, "id", "") for t in node.targets] == [name]:
            return dict(ast.literal_eval(node.value))
    raise AssertionError(f"no {name} in the SDK's model")
