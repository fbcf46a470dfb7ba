"""Licences are what the source says, and nothing else."""

from pathlib import Path

import pytest

from qserve.artifacts import Licence
from qserve.prep.gguf import GgufHeader
from qserve.prep.licence import hub_id_of_gguf, licence_of_folder, licence_of_gguf, licence_of_metadata

MIT = "MIT License\n\nCopyright (c) 2024 me\n\nPermission is hereby granted, free of charge, to any person"


@pytest.mark.parametrize(
    ("files", "licence"),
    [
        ({"README.md": "---\nlicense: Apache-2.0\n---\n# x"}, "apache-2.0"),
        ({"README.md": "---\ntags: [a]\n---\n", "LICENSE": MIT}, "mit"),
        ({"LICENSE.txt": "\n      Apache License\n   Version 2.0, January 2004\n"}, "apache-2.0"),
        ({"LICENSE": "Do as you like."}, None),
        ({"LICENSE": "Like the MIT License, but not quite"}, None),
        ({"README.md": "---\nlicense: [\n---\n"}, None),
        ({"README.md": "---\nlicense: unknown\n---\n"}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_of_a_folder(tmp_path: Path, files: dict[str, str], licence: str | None) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert licence_of_folder(tmp_path) == (Licence(id=licence) if licence else None)


def test_other_needs_a_name_and_a_link() -> None:
    fields = {"license": "other", "license_name": "qwen", "license_link": "https://example.com/LICENSE"}
    assert licence_of_metadata(fields) == Licence(id="other", name="qwen", link="https://example.com/LICENSE")
    assert licence_of_metadata({"license": "other", "license_name": "qwen"}) is None


@pytest.mark.parametrize(
    ("fields", "licence", "repo"),
    [
        ({"general.license": "apache-2.0"}, "apache-2.0", None),
        ({"general.source.huggingface.repository": "a/b"}, None, "a/b"),
        ({"general.repo_url": "https://huggingface.co/a/b"}, None, "a/b"),
        ({"general.repo_url": "https://github.com/a/b"}, None, None),
        ({"general.base_model.0.repo_url": "https://huggingface.co/the/parent"}, None, None),
    ],
)
def test_of_a_gguf_header(fields: dict[str, object], licence: str | None, repo: str | None) -> None:
    header = GgufHeader(fields, "Q4_1", 1, True, ())
    assert licence_of_gguf(header) == (Licence(id=licence) if licence else None)
    assert hub_id_of_gguf(header) == repo
