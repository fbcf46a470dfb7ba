"""Models on the Hub: a commit, its config first, then its files. Each failure is one sentence with a next step."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, ModelInfo, constants, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from qserve.artifacts import Licence
from qserve.errors import UsageError
from qserve.prep.licence import licence_of_metadata

# Weights as safetensors, and the small files that make a checkpoint whole. No pickles, no other framework's weights.
FILES = (
    "*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "LICEN[CS]E*", "NOTICE*",
    "COPYING*", "USE_POLICY*",
)  # fmt: skip
HTTP_LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2", "requests")


@dataclass(frozen=True)
class Commit:
    """One state of a repository. `weight_bytes`: of its safetensors files, None if the Hub was not asked."""

    repo: str
    revision: str
    config: Path
    weight_bytes: int | None
    licence: Licence | None = None  # None: the Hub was not asked, or names none


def find_commit(repo: str, revision: str | None) -> Commit:
    """The commit that `revision` (None: the main branch) names, by way of its config.json; offline, the one in the
    cache. A full commit id whose config is in the cache is not asked for again.
    """
    offline = constants.HF_HUB_OFFLINE
    with explained(repo, revision):
        if offline or (revision and isinstance(try_to_load_from_cache(repo, "config.json", revision=revision), str)):
            config = Path(hf_hub_download(repo, "config.json", revision=revision, local_files_only=True))
            if offline or config.parent.name == revision:
                return Commit(repo, config.parent.name, config, None)
        info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=20)  # fails at once, no retries
        config = Path(hf_hub_download(repo, "config.json", revision=revision))  # by name, so that the cache knows it
    sizes = [file.size for file in info.siblings or () if file.rfilename.endswith(".safetensors")]
    if not sizes:
        raise UsageError(f"{repo} has no safetensors weights; choose a model that has (or a local .gguf file)")
    weight_bytes = None if None in sizes else sum(size or 0 for size in sizes)
    return Commit(repo, config.parent.name, config, weight_bytes, licence_of(info))


def licence_of(info: ModelInfo) -> Licence | None:
    """As the model's card names it."""
    fields: dict[str, object] = info.card_data.to_dict() if info.card_data else {}  # type: ignore[no-untyped-call]
    return licence_of_metadata(fields)


def fetch_files(repo: str, revision: str) -> Path:
    """Every file that a checkpoint needs, in the Hub's cache."""
    with explained(repo, revision):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(FILES)))


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
        if isinstance(error.__cause__, HfHubHTTPError):  # not in the cache, after the Hub refused
            code = error.__cause__.response.status_code
            raise UsageError(f"the Hub answered {code} for {repo}{at}; {_what_to_do(code)}") from error
        if constants.HF_HUB_OFFLINE:
            raise UsageError(
                f"{repo}{at} is not complete in the Hub's cache, and HF_HUB_OFFLINE is set; "
                "unset it, or give a local folder"
            ) from error
        raise UsageError(f"the Hub cannot be reached for {repo}{at}; check the network") from error
    except HfHubHTTPError as error:
        code = error.response.status_code
        raise UsageError(f"the Hub answered {code} for {repo}{at}; {_what_to_do(code)}") from error
    except Exception as error:  # the client has changed its HTTP library from release to release
        library = type(error).__module__.partition(".")[0]
        if not isinstance(error, OSError) and library not in HTTP_LIBRARIES:
            raise
        raise UsageError(
            f"the Hub cannot be reached for {repo}{at} ({type(error).__name__}); "
            "check the network, or set HF_HUB_OFFLINE=1 to use what is in the cache"
        ) from error


def _what_to_do(code: int) -> str:
    match code:
        case 401 | 403:
            return "your token does not allow it: log in with one that does (`hf auth login`, or HF_TOKEN)"
        case 429:
            return "too many requests: wait a few minutes, or log in"
        case _:
            return "try again later"
