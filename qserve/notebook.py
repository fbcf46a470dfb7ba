"""From Python: `qserve.load_report(path).choose(slo={"ttft_p95": 0.5})`. In a notebook both show themselves; printed,
they say what `qserve report` and `qserve choose` say."""

from html import escape
from pathlib import Path

from qserve.artifacts import Report
from qserve.choose import floor_of, merge, section
from qserve.decision import Decision
from qserve.eval.decide import decide
from qserve.eval.decision_text import to_html as decision_html
from qserve.eval.decision_text import to_text as decision_text
from qserve.eval.report import read_report
from qserve.eval.report import to_html as report_html
from qserve.eval.report import to_markdown as report_markdown
from qserve.wishes import Objective
from qserve.workspace import open_workspace


class ShownDecision(Decision):
    """A Decision that a notebook shows as a table, and `print` as `qserve choose` does."""

    def __str__(self) -> str:
        return decision_text(self)

    def _repr_html_(self) -> str:
        return decision_html(self)


class LoadedReport(Report):
    """A Report that a notebook shows with its tables and plots, and that decides."""

    def choose(
        self,
        *,
        slo: dict[str, float] | None = None,
        floor: dict[str, float] | None = None,
        traffic: dict[str, float] | None = None,
        memory_gb: float | None = None,
        price_per_hour: float | None = None,
        objective: Objective | None = None,
    ) -> ShownDecision:
        """Decide, as `qserve choose` does. What is left out is taken from the recipe that was run.

        Args:
            slo: latency percentile -> seconds at most, as {"ttft_p95": 0.5}.
            floor: kl and perplexity_ratio at most, top1 and task:NAME at least.
            traffic: concurrency, requests_per_s or output_tokens_per_s, prompt_tokens, output_tokens.
            memory_gb: 10^9 bytes of peak memory, at most.

        Raises:
            UsageError: a name or value that cannot be.
        """
        given = {
            "slo": slo or {}, "floor": floor_of(floor or {}), "traffic": traffic or {}, "memory_gb": memory_gb,
            "price_per_hour": price_per_hour, "objective": objective,
        }  # fmt: skip
        return ShownDecision.model_validate(decide(self, merge(section(self, None), given)).model_dump())

    def __str__(self) -> str:
        return report_markdown(self)

    def _repr_html_(self) -> str:
        """The report's page in a frame of its own, so that its style stays its own."""
        style = "width:100%;height:720px;border:0"
        return f'<iframe srcdoc="{escape(report_html(self))}" style="{style}" title="qserve report"></iframe>'


def load_report(path: str | Path | None = None) -> LoadedReport:
    """The report of a run folder, or of its measurements.json; None: of the newest run in the workspace.

    Raises:
        UsageError: there is none, or this version cannot read it.
    """
    where = Path(path) if path is not None else open_workspace(None).latest_run()
    return LoadedReport.model_validate(read_report(where).model_dump())
