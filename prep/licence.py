"""The terms that a source comes under, as the source itself names them. None: it does not say; nothing is guessed."""

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from qserve.artifacts import Licence
from qserve.prep.gguf import GgufHeader

NAMES = ("LICENSE*", "LICENCE*")
# what the text of a licence file begins with or holds -> id; only texts that no other licence shares
TEXTS = (
    (r"^\s*Apache License\s+Version 2\.0", "apache-2.0"),
    (r"^\s*(The )?MIT License\b.*Permission is hereby granted, free of charge", "mit"),
)
SOURCE_KEYS = ("general.source.huggingface.repository", "general.source.repo_url", "general.repo_url")


def licence_of_metadata(fields: Mapping[str, object]) -> Licence | None:
    """From a model card's metadata. `other` without a name and a link says nothing."""
    found = {key: text.strip() for key, text in fields.items() if isinstance(text, str) and text.strip()}
    name, link = found.get("license_name"), found.get("license_link")
    licence = Licence(id=found.get("license", "").lower(), name=name, link=link)
    if not licence.id or licence.id == "unknown" or (licence.id == "other" and not (licence.name and licence.link)):
        return None
    return licence


def licence_of_folder(folder: Path) -> Licence | None:
    """From the metadata of a README.md, else from a licence file whose text is well known."""
    readme = folder / "README.md"
    match = re.match(r"---\n(.*?)\n---", readme.read_text("utf-8", "replace"), re.S) if readme.is_file() else None
    try:
        fields = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        fields = None
    named = licence_of_metadata(fields) if isinstance(fields, dict) else None
    return named or _licence_of_text(folder)


def _licence_of_text(folder: Path) -> Licence | None:
    for path in (path for name in NAMES for path in sorted(folder.glob(name)) if path.is_file()):
        text = path.read_text("utf-8", "replace")
        for pattern, licence_id in TEXTS:
            if re.search(pattern, text, re.S):
                return Licence(id=licence_id)
    return None


def licence_of_gguf(header: GgufHeader) -> Licence | None:
    """general.license and its companions."""
    keys = {
        "license": "general.license",
        "license_name": "general.license.name",
        "license_link": "general.license.link",
    }
    return licence_of_metadata({name: header.fields.get(key) for name, key in keys.items()})


def hub_id_of_gguf(header: GgufHeader) -> str | None:
    """The repository that the file was converted from. `general.base_model` is not it: that is the model's parent."""
    for key in SOURCE_KEYS:
        text = re.sub(r"^https?://(huggingface\.co|hf\.co)/", "", str(header.fields.get(key, ""))).strip("/")
        if re.fullmatch(r"[\w.-]+/[\w.-]+", text):
            return text
    return None
