"""What other lengths would change: an estimate, and its words say so.

e2e = TTFT x prompt / measured prompt + ITL x (output - 1), of the lead and bf16, or of bf16 and its rival: those alone
have pairs. A difference within noise counts as none.
"""

from collections.abc import Iterator

from qserve.artifacts import Point, Report
from qserve.decision import Flip, FormatStanding
from qserve.eval import figures
from qserve.eval.settle import Settled
from qserve.eval.standing import measured_lengths, point_at
from qserve.eval.table import everyone
from qserve.variants import BASELINE


def lengths(report: Report, settled: Settled, runner_up: FormatStanding | None) -> Iterator[Flip]:
    """One sentence; nothing where there is nobody to compare the lead with."""
    lead = settled.lead
    rival = runner_up if lead and lead.name == BASELINE else settled.standings[0]
    prompt, output = measured_lengths(report)
    if lead is None or rival is None or not prompt or not output:
        return
    gaps = _gaps_s(report, lead, rival)
    said, turns = _words(lead.name, rival.name, gaps, prompt) if gaps else ("", False)
    if said:
        measured = f"only {prompt} tokens in and {output} out were measured"
        yield Flip(by="lengths", says=f"{measured}; {said}", to=rival.name if turns else None)


def _words(lead: str, rival: str, gaps_s: tuple[float, float], prompt: int) -> tuple[str, bool]:
    """What is expected, and whether some lengths turn the order round."""
    first, following = gaps_s
    if first == 0 and following == 0:
        return f"neither first tokens nor the time between tokens tell {lead} from {rival} beyond noise", False
    if first <= 0 and following <= 0:
        return f"{lead} is slower than {rival} in neither first tokens nor the time between tokens, so other lengths " \
               "are not expected to change the answer (an estimate)", False  # fmt: skip
    if first >= 0 and following >= 0:
        return f"{rival} is ahead in first tokens or between tokens, and {lead} in neither", False
    tokens = figures.significant(1 + abs(first / following), 2)
    word = "shorter" if first > 0 else "longer"
    return f"for prompts of {prompt} tokens {rival} is expected to answer sooner where outputs are {word} than about " \
           f"{tokens} tokens, and in proportion for other prompts (an estimate)", True  # fmt: skip


def _gaps_s(report: Report, lead: FormatStanding, rival: FormatStanding) -> tuple[float, float] | None:
    """Seconds by which the lead is slower (above 0) to the first token, and between tokens; 0 within noise."""
    one, sign = (rival, -1.0) if lead.name == BASELINE else (lead, 1.0)
    variant = next(v for v in everyone(report) if v.name == one.name)
    point = point_at(variant, one.concurrency)
    if point is None:
        return None
    first, following = (sign * gap for gap in _beyond_noise_s(point))
    return first, following


def _beyond_noise_s(point: Point) -> tuple[float, float]:
    pairs = ((point.ttft, point.variant.ttft_s.mean, point.baseline.ttft_s.mean),
             (point.itl, point.variant.itl_s.mean, point.baseline.itl_s.mean))  # fmt: skip
    first, following = (
        own - base if ratio and ratio.verdict != "unresolved" and own is not None and base is not None else 0.0
        for ratio, own, base in pairs
    )
    return first, following
