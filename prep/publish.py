"""Upload a variant to a repository on the Hub: look, send what is missing, look again.

Large files go ahead one by one into the Hub's store, where they stay if the rest fails; one commit then shows all
files at once, so that nobody ever sees half a checkpoint. Every step starts from what the Hub holds, so a second run
sends only what did not arrive.
"""

import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from logging import ERROR
from pathlib import Path
from typing import TypeVar

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    get_session,
    get_token,
    hf_hub_download,
    set_client_factory,
)
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import logging
from huggingface_hub.utils._http import hf_raise_for_status
from huggingface_hub.utils.tqdm import disable_progress_bars

from qserve.artifacts import MANIFEST_NAME, Licence, Manifest
from qserve.errors import PublishError
from qserve.prep.hub import licence_of
from qserve.prep.publish_client import patient_client
from qserve.prep.publish_errors import LOG_IN, Busy, told
from qserve.prep.publish_plan import (
    CARD,
    LEFT_BY_THE_HUB,
    Changes,
    RemoteFile,
    Upload,
    changes,
    check_arrived,
    read_manifest,
    same_variant,
)
from qserve.rounding import size
from qserve.uvrun import Say

WAITS_S = (1.0, 4.0)  # before a second and a third try
AHEAD_BYTES = 1_000_000  # files of this size go ahead of the commit, one by one
T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """Where to: `owner/name`, made if it is missing."""

    repo: str
    public: bool
    say: Say

    @property
    def url(self) -> str:
        return f"{constants.ENDPOINT}/{self.repo}"


@dataclass(frozen=True)
class Terms:
    """On which terms a model on the Hub may be had."""

    licence: Licence | None
    gated: bool


@dataclass(frozen=True)
class State:
    """What a repository holds. `head`: its newest commit, None if there is no repository."""

    head: str | None
    files: Mapping[str, RemoteFile]
    manifest: Manifest | None


# --- before any work ----------
def open_hub(say: Say) -> None:
    """Bound every wait of the Hub client, and let it say nothing of its own: its words hold signed addresses."""
    set_client_factory(lambda: patient_client(say))
    logging.set_verbosity(ERROR)
    if not sys.stderr.isatty():
        disable_progress_bars()


def check_access(targets: tuple[Target, ...]) -> None:
    """Whether the token may write there. The targets have one owner. Raises PublishError."""
    target = targets[0]
    token = get_token()
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        raise PublishError(f"the token holds characters that no token has: {LOG_IN}")
    answer = _persist(target, lambda: HfApi().whoami())
    owner = target.repo.partition("/")[0]
    may = {str(org.get("name")): org.get("roleInOrg") for org in answer.get("orgs", ())} | {answer["name"]: "admin"}
    if owner not in may:
        who = f"your token is of {answer['name']}, and {owner} is no organisation of yours"
        raise PublishError(f"{who}; choose another --to, or {LOG_IN}")
    access = answer.get("auth", {}).get("accessToken", {})
    if access.get("role") == "read" or may[owner] == "read":
        raise PublishError(f"your token may only read, not write to {owner}: {LOG_IN}")
    for repo in (target.repo for target in targets):
        if access.get("role") == "fineGrained" and not _may_write(access.get("fineGrained", {}), repo):
            raise PublishError(f"your fine-grained token may not write to {repo}: give it that right, or {LOG_IN}")


def ask_terms(repo: str, say: Say) -> Terms:
    """What the Hub says of a source: its licence, and whether access to it is gated. Raises PublishError."""
    info = _persist(Target(repo, False, say), lambda: HfApi().model_info(repo, timeout=20))
    return Terms(licence_of(info), bool(info.gated))


def _may_write(grants: Mapping[str, object], repo: str) -> bool:
    """Whether one of a token's scopes, on the owner or on the repository itself, holds `repo.write`."""
    scopes = grants.get("scoped")
    names = (repo, repo.partition("/")[0])
    return any(
        scope.get("entity", {}).get("name") in names and "repo.write" in scope.get("permissions", ())
        for scope in (scopes if isinstance(scopes, list) else ())
    )


def look_at_repo(target: Target, manifest: Manifest) -> State:
    """What is there. Raises PublishError if that is another model's, or public where private was asked for."""
    return _persist(target, lambda: _inspect(target, manifest))


def _inspect(target: Target, manifest: Manifest) -> State:
    state = _state(target)
    others = set(state.files) - {*LEFT_BY_THE_HUB, MANIFEST_NAME}
    if state.manifest is None and others:
        raise PublishError(
            f"{target.repo} holds files that qserve did not publish ({', '.join(sorted(others)[:3])}); nothing was "
            "changed there: give a new name with --to"
        )
    if state.manifest is not None and not same_variant(state.manifest, manifest):
        raise PublishError(
            f"{target.repo} holds another checkpoint ({state.manifest.variant} of {state.manifest.model}); nothing was "
            "changed there: give a new name with --to"
        )
    return state


def _state(target: Target) -> State:
    try:
        info = HfApi().model_info(target.repo, timeout=20)
    except RepositoryNotFoundError:
        return State(None, {}, None)
    if not info.private and not target.public:
        raise PublishError(f"{target.repo} is there already and is public; say --public, or give a new name with --to")
    if info.private and target.public:
        target.say(f"{target.repo} is private and stays so; its settings page can change that")
    files = {f.name: f for f in _list(target.repo, info.sha)}
    return State(info.sha, files, _manifest_there(target.repo, info.sha) if MANIFEST_NAME in files else None)


def _list(repo: str, revision: str | None) -> Iterable[RemoteFile]:
    try:
        for item in HfApi().list_repo_tree(repo, recursive=True, revision=revision):
            if isinstance(item, RepoFile):
                yield RemoteFile(item.path, item.size, item.lfs.sha256 if item.lfs else None, item.blob_id)
    except EntryNotFoundError:  # a repository without any file
        return


def _manifest_there(repo: str, revision: str | None) -> Manifest | None:
    with tempfile.TemporaryDirectory() as folder:
        return read_manifest(Path(hf_hub_download(repo, MANIFEST_NAME, revision=revision, local_dir=folder)))


# --- the upload ----------
def upload(target: Target, manifest: Manifest, files: tuple[Upload, ...]) -> str:
    """Bring the repository to hold exactly these files; returns its address.

    Raises:
        PublishError: refused, or not whole afterwards. What arrived is kept, and not sent again.
    """
    card = next(file for file in files if file.name == CARD)
    assert isinstance(card.content, bytes)
    text = card.content.decode()
    _persist(target, lambda: _check_card(text))
    _persist(target, lambda: HfApi().create_repo(target.repo, private=not target.public, exist_ok=True))
    _persist(target, lambda: _send(target, manifest, files))
    check_arrived(files, _persist(target, lambda: _state(target)).files, target.repo)
    target.say(f"{target.repo} holds all {len(files)} files: names, sizes and hashes are the manifest's")
    return target.url


def _check_card(text: str) -> None:
    """By the Hub's own rules, before anything large is sent. (ModelCard.validate of older clients asks another Hub.)"""
    asked = {"content": text, "repoType": "model"}
    hf_raise_for_status(get_session().post(f"{constants.ENDPOINT}/api/validate-yaml", json=asked))


def _send(target: Target, manifest: Manifest, files: tuple[Upload, ...]) -> None:
    """One try, from what the Hub holds now."""
    state = _inspect(target, manifest)
    todo = changes(files, state.files, state.manifest)
    if not todo.send and not todo.remove:
        target.say(f"{target.repo} holds every file already: nothing to send")
        return
    additions = [CommitOperationAdd(file.name, file.content) for file in sorted(todo.send, key=_large_first)]
    large = [one for one in additions if one.upload_info.size >= AHEAD_BYTES]
    for n, one in enumerate(large, 1):
        large_file = f"{one.path_in_repo} ({size(one.upload_info.size)})"
        target.say(f"{target.repo}: {large_file}, {n} of {len(large)} large files")
        HfApi().preupload_lfs_files(target.repo, additions=[one], free_memory=False)
    target.say(f"{target.repo}: {len(additions) - len(large)} small files, and the commit")
    _commit(target, additions, todo, state.head)


def _commit(target: Target, additions: list[CommitOperationAdd], todo: Changes, head: str | None) -> None:
    """All files appear at once, on top of the commit that was looked at: a change by somebody else is refused."""
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        *additions,
        *(CommitOperationDelete(name, is_folder=False) for name in todo.remove),
    ]
    HfApi().create_commit(target.repo, tuple(operations), commit_message="qserve publish", parent_commit=head)


def _large_first(file: Upload) -> tuple[bool, int, str]:
    """The card and the manifest last, the largest first."""
    return file.name in (CARD, MANIFEST_NAME), -file.size_bytes, file.name


# --- several ----------
def collect(targets: tuple[Target, ...], title: str) -> str:
    """A collection of the repositories, made or completed; returns its address."""
    first = targets[0]
    owner = first.repo.partition("/")[0]

    def gather() -> str:
        found = HfApi().create_collection(title, namespace=owner, private=not first.public, exists_ok=True)
        for target in targets:
            HfApi().add_collection_item(found.slug, target.repo, "model", exists_ok=True)
        return found.url

    return _persist(first, gather)


def _persist(target: Target, step: Callable[[], T]) -> T:
    """Do it, and again after a while if the Hub is busy. Raises PublishError."""
    for wait_s in WAITS_S:
        try:
            with told(target.repo):
                return step()
        except Busy as busy:
            target.say(f"{str(busy).partition(';')[0]}; trying again in {wait_s:.0f} s")
            time.sleep(wait_s)
    with told(target.repo):
        return step()
