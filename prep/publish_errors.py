"""The Hub's refusals while something is published, each as one sentence with a next step. The token is in none of them.

PublishError    as it is: no access, another model's place, a card that is not valid
Busy            may pass: too many requests, a server in trouble, a connection that broke off
"""

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from qserve.errors import PublishError
from qserve.prep.hub import HTTP_LIBRARIES

AGAIN = "run the same command again: what arrived is not sent a second time"
LOG_IN = "log in with a token that may write (`hf auth login`, or HF_TOKEN)"
TRANSPORT = (*HTTP_LIBRARIES, "h11", "hf_xet")


class Busy(PublishError):
    """Worth another try in a moment."""


@contextmanager
def told(repo: str) -> Iterator[None]:
    """Turn what the Hub client raises into a PublishError. What is no fault of the Hub's goes through."""
    try:
        yield
    except PublishError:
        raise
    except Exception as error:
        found = _sentence(repo, error)
        if found is None:
            raise
        raise found from None  # the client's own errors hold URLs that are signed


def _sentence(repo: str, error: Exception) -> PublishError | None:
    chain = list(_chain(error))
    for link in chain:
        if isinstance(link, PublishError):
            return link
        if isinstance(link, LocalTokenNotFoundError):
            return PublishError(f"no token: {LOG_IN}")
        if isinstance(link, OfflineModeIsEnabled):
            return PublishError("HF_HUB_OFFLINE is set; unset it to publish, or use --dry-run FOLDER")
        if isinstance(link, HfHubHTTPError):
            return _of_status(repo, link)
    for link in chain:
        if type(link).__module__.partition(".")[0] in TRANSPORT or isinstance(link, OSError):
            return _of_transport(repo, link)
    if isinstance(error, ValueError | RuntimeError) and _of_client(error):  # an answer that it cannot use
        return PublishError(f"the Hub does not take it for {repo}: {_short(str(error))}")
    return None


def _of_client(error: Exception) -> bool:
    """Whether it was raised inside the Hub client, and not in qserve."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(str(frame.f_globals.get("__name__")).startswith("huggingface_hub") for frame in frames)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _of_status(repo: str, error: HfHubHTTPError) -> PublishError:
    code = error.response.status_code
    said = f" (it says: {_short(error.server_message)})" if error.server_message else ""
    if isinstance(error, GatedRepoError):
        return PublishError(
            f"{repo} is gated, and your account is not let in: accept its terms on its page, then {AGAIN}"
        )
    match code:
        case 400:
            return PublishError(
                f"the Hub does not accept it for {repo}{said}; --licence, --base-model and --to can help"
            )
        case 401 if not isinstance(error, RepositoryNotFoundError):
            return PublishError(f"the Hub does not know your token, it may have been revoked: {LOG_IN}")
        case 401 | 404:
            return PublishError(f"the Hub shows no {repo} to your token: check owner and name, or {LOG_IN}")
        case 403:
            return PublishError(f"your token may not write to {repo}{said}: {LOG_IN}, or choose another --to")
        case 409 | 412:
            return Busy(f"{repo} was changed by somebody else meanwhile; {AGAIN}")
        case 413:
            return PublishError(f"{repo} has no room for it{said}: free some space of its owner, then {AGAIN}")
        case 429:
            return Busy(f"the Hub answered 429, too many requests, for {repo}: wait a few minutes, then {AGAIN}")
        case _ if code >= 500 or code == 408:
            return Busy(f"the Hub answered {code} for {repo}: it is in trouble; {AGAIN}")
        case _:
            return PublishError(f"the Hub answered {code} for {repo}{said}; {AGAIN}")


def _of_transport(repo: str, error: BaseException) -> PublishError:
    kind = type(error).__name__
    if "Timeout" in kind:
        return Busy(f"the Hub did not answer in time for {repo} ({kind}); {AGAIN}")
    if "ConnectError" in kind or isinstance(error, ConnectionRefusedError):
        return Busy(f"the Hub cannot be reached for {repo} ({kind}); check the network, then {AGAIN}")
    return Busy(f"the connection to the Hub broke off for {repo} ({kind}); {AGAIN}")


def _short(text: str) -> str:
    """One line of what a server says, without what looks like a token or a signed address."""
    clean = re.sub(r"hf_\w+|https?://\S+", "…", " ".join(text.split()))
    return clean if len(clean) <= 200 else f"{clean[:199]}…"
