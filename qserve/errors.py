"""The errors that a user can act on.

    QserveError                 exit code 1
      UsageError                2   bad input: a recipe, a flag, a path; raised before any long work
        DamagedFile             2   a file of the workspace that cannot be read
      PreflightError            3   the variant cannot work here (shapes, disk, memory), or should not be published
      RuntimeBuildError         4   an environment could not be built
      WorkerError               5   a worker process failed, hung or was killed
      ServerError               6   a server did not start, died or is not what was asked for
      LoadError                 7   the load could not be delivered: nothing to report
      PublishError              8   the Hub did not take it: no access, another model's place, or out of reach

Two more are answers of `qserve choose`, not errors: 9 unresolved, 10 nothing qualifies; 0 says that one is chosen.

Every message is one sentence with a next step. The command line catches QserveError and nothing else;
an interrupted run exits with 130.
"""

from pathlib import Path

UNRESOLVED = 9
NOTHING_QUALIFIES = 10


class QserveError(Exception):
    """Expected failure. `str(error)` is the sentence that the user sees."""

    exit_code = 1


class UsageError(QserveError):
    exit_code = 2


class DamagedFile(UsageError):
    """A file that qserve wrote and cannot read any more."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path} cannot be read: {problem}; remove it, and the same command makes it again")
        self.path, self.problem = path, problem


class PreflightError(QserveError):
    exit_code = 3


class RuntimeBuildError(QserveError):
    exit_code = 4


class WorkerError(QserveError):
    exit_code = 5


class ServerError(QserveError):
    exit_code = 6


class LoadError(QserveError):
    exit_code = 7


class PublishError(QserveError):
    exit_code = 8
