"""Models on the Hub: a commit, its config first, then its files. Each failure is one sentence with a next step."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from qserve.errors import UsageError

# Weights as safetensors, and the small files that make a checkpoint whole. No pickles, no other framework's weights.
FILES = (
    "*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "LICEN[CS]E*", "NOTICE*",
    "COPYING*", "USE_POLICY*",
)  # fmt: skip


@dataclass(frozen=True)
class Commit:
    """One state of a repository. `weight_bytes`: of its safetensors files, None if the Hub was not asked."""

    repo: str
    revision: str
    weight_bytes: int | None


def find_commit(repo: str, revision: str | None) -> Commit:
    """The commit that `revision` (None: the main branch) names now; offline, the one in the cache."""
    if revision and re.fullmatch(r"[0-9a-f]{40}", revision) and _cached(repo, revision):
        return Commit(repo, revision, None)
    with explained(repo, revision):
        if constants.HF_HUB_OFFLINE:
            found = snapshot_download(repo, revision=revision, local_files_only=True)
            return Commit(repo, Path(found).name, None)
        info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=20)
    sizes = [file.size for file in info.siblings or () if file.rfilename.endswith(".safetensors")]
    known = sum(size for size in sizes if size is not None) if None not in sizes else None
    if not sizes:
        raise UsageError(f"{repo} has no safetensors weights; choose a model that has (or a local .gguf file)")
    return Commit(repo, info.sha or str(revision), known)


def fetch_config(commit: Commit) -> Path:
    """config.json alone: enough to see whether the variants can work."""
    with explained(commit.repo, commit.revision):
        return Path(hf_hub_download(commit.repo, "config.json", revision=commit.revision))


def fetch_files(commit: Commit) -> Path:
    """Every file that a checkpoint needs, in the Hub's cache."""
    with explained(commit.repo, commit.revision):
        return Path(snapshot_download(commit.repo, revision=commit.revision, allow_patterns=list(FILES)))


def _cached(repo: str, revision: str) -> bool:
    """Whether this commit's config is in the cache, so that nobody has to be asked what it is."""
    folder = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "snapshots" / revision
    return (folder / "config.json").is_file()


@contextmanager
def explained(repo: str, revision: str | None) -> Iterator[None]:
    """Turn the Hub client's errors into a UsageError that says what to do."""
    page = f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co')}/{repo}"
    at = f" at {revision}" if revision else ""
    try:
        yield
    except GatedRepoError as error:
        raise UsageError(
            f"{repo} is gated: accept its terms at {page}, then log in (`hf auth login`, or HF_TOKEN)"
        ) from error
    except RevisionNotFoundError as error:
        raise UsageError(
            f"{repo} has no revision {revision}; give a commit, a tag or a branch that is there"
        ) from error
    except RepositoryNotFoundError as error:
        raise UsageError(
            f"the Hub shows no {repo}: check the spelling, or, if it is private, log in (`hf auth login`, or HF_TOKEN)"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        if constants.HF_HUB_OFFLINE:
            raise UsageError(
                f"{repo}{at} is not complete in the Hub's cache, and HF_HUB_OFFLINE is set; "
                "unset it, or give a local folder"
            ) from error
        raise UsageError(
            f"the Hub cannot be reached for {repo}{at}; check the network, or give a local folder"
        ) from error
    except HfHubHTTPError as error:
        code = error.response.status_code
        raise UsageError(f"the Hub answered {code} for {repo}{at}; {_what_to_do(code)}") from error
    except (httpx.HTTPError, OSError) as error:
        raise UsageError(
            f"the Hub cannot be reached for {repo}{at} ({type(error).__name__}); check the network"
        ) from error


def _what_to_do(code: int) -> str:
    match code:
        case 401 | 403:
            return "your token does not allow it: log in with one that does (`hf auth login`, or HF_TOKEN)"
        case 429:
            return "too many requests: wait a few minutes, or log in"
        case _:
            return "try again later"
