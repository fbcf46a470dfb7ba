"""Exported text: a head that says where the figures come from, then YAML of plain data, quoted by PyYAML."""

import textwrap

import yaml

from qserve.serve.deployment import Deployment

Plain = dict[str, object]  # what becomes YAML or JSON: strings, numbers, lists and further Plain


def comment(lines: tuple[str, ...]) -> str:
    """Each line a comment, wrapped at 110 characters, but for a command to paste, `$ ...`; no line can escape it."""
    parts = [part for line in lines for part in _parts(line)]
    return "".join(f"# {part}".rstrip() + "\n" for part in parts)


def _parts(line: str) -> list[str]:
    if line.startswith("$ "):
        return ["  " + " ".join(line[2:].splitlines())]
    clean = " ".join(line.split())
    return textwrap.wrap(clean, 108, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False) or [""]


def head(deployment: Deployment, what: str, *more: str) -> str:
    """What this file is, what was measured, what differs from it."""
    changes = ("Settings are as they were measured, but for:", *(f"- {change}" for change in deployment.changes))
    return comment((f"{what}, made by `qserve export`.", *deployment.measured, *changes, *more))


class _WrittenOut(yaml.SafeDumper):
    """Says everything in full: what stands twice is no &anchor and *alias."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def to_yaml(*documents: Plain) -> str:
    """One YAML stream. Strings that YAML would read as something else are quoted."""
    return str(yaml.dump_all(documents, Dumper=_WrittenOut, sort_keys=False, width=110, allow_unicode=True))
