"""What a published variant consists of: the manifest's files, the model card as README.md, and qserve.json.

Every file is hashed before it counts. Hashes are those that the Hub lists: sha256 of a large file, git's of a small
one.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from qserve.artifacts import MANIFEST_NAME, Manifest
from qserve.errors import DamagedFile, PublishError, UsageError
from qserve.prep.checkpoint import Prepared, link
from qserve.workspace import complete_or_absent, sha256_file

CARD = "README.md"
LEFT_BY_THE_HUB = (".gitattributes",)


@dataclass(frozen=True)
class Upload:
    """One file to be published."""

    name: str  # path in the repository
    content: Path | bytes
    size_bytes: int
    sha256: str

    def git_hash(self) -> str:
        """sha1 of the git blob. Reads the file: ask for small ones only."""
        data = self.content if isinstance(self.content, bytes) else self.content.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass(frozen=True)
class RemoteFile:
    """One file as the Hub lists it. `sha256`: of a large file; `git_hash`: of a small one."""

    name: str
    size_bytes: int
    sha256: str | None
    git_hash: str

    def holds(self, upload: Upload) -> bool:
        if self.size_bytes != upload.size_bytes:
            return False
        return self.sha256 == upload.sha256 if self.sha256 else self.git_hash == upload.git_hash()


@dataclass(frozen=True)
class Changes:
    """What a repository lacks, and what in it is left of an earlier checkpoint of the same variant."""

    send: tuple[Upload, ...]
    remove: tuple[str, ...]


def hashed_files(prepared: Prepared) -> tuple[Upload, ...]:
    """The manifest's files and the manifest, each read and hashed. A README.md of the source gives way to the card.

    Raises:
        UsageError: a file is missing or not what was written.
    """
    again = f"remove the folder {prepared.folder} and run `qserve prep` again"
    found = []
    for entry in prepared.manifest.files:
        path = prepared.folder / entry.name
        if not path.is_file():
            raise UsageError(f"{path} is missing; {again}")
        if (path.stat().st_size, sha256_file(path)) != (entry.size_bytes, entry.sha256):
            raise UsageError(f"{path} is not the file that was written: its hash is another one; {again}")
        found.append(Upload(entry.name, path, entry.size_bytes, entry.sha256))
    return (*(upload for upload in found if upload.name != CARD), _of_bytes(MANIFEST_NAME, _manifest_bytes(prepared)))


def _manifest_bytes(prepared: Prepared) -> bytes:
    return (prepared.folder / MANIFEST_NAME).read_bytes()


def card_file(text: str) -> Upload:
    return _of_bytes(CARD, text.encode())


def _of_bytes(name: str, data: bytes) -> Upload:
    return Upload(name, data, len(data), hashlib.sha256(data).hexdigest())


def strangers(prepared: Prepared) -> tuple[str, ...]:
    """Files in the checkpoint's folder that its manifest does not know."""
    known = {MANIFEST_NAME, *(entry.name for entry in prepared.manifest.files)}
    there = (p.relative_to(prepared.folder).as_posix() for p in prepared.folder.rglob("*") if not p.is_dir())
    return tuple(sorted(set(there) - known))


def changes(uploads: Iterable[Upload], remote: Mapping[str, RemoteFile], earlier: Manifest | None) -> Changes:
    """`earlier`: the manifest in the repository. What it names and nobody needs any more goes; nothing else does."""
    wanted = {upload.name: upload for upload in uploads}
    send = tuple(u for u in wanted.values() if u.name not in remote or not remote[u.name].holds(u))
    old = {entry.name for entry in earlier.files} if earlier else set()
    return Changes(send, tuple(sorted((old & set(remote)) - set(wanted))))


def same_variant(one: Manifest, other: Manifest) -> bool:
    """Whether one may take the place of the other: same source, same variant; perhaps made again, with other data."""
    return (one.variant, one.source_sha256) == (other.variant, other.source_sha256)


def write_folder(uploads: tuple[Upload, ...], folder: Path) -> None:
    """Exactly what would be uploaded, complete or absent, in a folder that `check_folder` allows. Weights are hard
    links where that is possible.

    Raises:
        UsageError: the folder takes no files.
    """
    try:
        with complete_or_absent(folder.absolute()) as partial:
            for upload in uploads:
                _write(upload, partial / upload.name)
    except OSError as error:
        raise UsageError(f"cannot write into {folder}: {error.strerror or error}; give another folder") from error


def _write(upload: Upload, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(upload.content, bytes):
        target.write_bytes(upload.content)
    elif upload.name.endswith((".safetensors", ".gguf")):
        link(upload.content, target)
    else:
        shutil.copyfile(upload.content, target)


def check_folder(folder: Path, manifest: Manifest) -> None:
    """Raises UsageError if the folder holds something else than an earlier writing of this variant, or cannot be."""
    parent = next(path for path in folder.absolute().parents if path.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise UsageError(f"cannot write into {folder}: {parent} takes no files; give another folder")
    if not os.path.exists(folder):
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder; give a new one, or an empty one")
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    if not there:
        return
    earlier = read_manifest(folder / MANIFEST_NAME)
    known = {MANIFEST_NAME, CARD, *(entry.name for entry in earlier.files)} if earlier else set()
    if earlier is None or not same_variant(earlier, manifest) or there - known:
        raise UsageError(f"{folder} holds other files; give a new folder, or an empty one")


def read_manifest(path: Path) -> Manifest | None:
    """The manifest, or None if there is none that can be read."""
    try:
        return Manifest.read(path)
    except DamagedFile:
        return None


def check_arrived(uploads: Iterable[Upload], remote: Mapping[str, RemoteFile], repo: str) -> None:
    """Raises PublishError if the repository does not hold every file, in its size and with its hash."""
    lost = changes(uploads, remote, None).send
    if lost:
        names = ", ".join(upload.name for upload in lost)
        raise PublishError(f"{repo} does not hold what was sent: {names}; run the same command again")
