"""Quality, fidelity and ratios on numbers that can be checked by hand."""

import json
import math
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest

from qserve.artifacts import DataRecord
from qserve.eval import fidelity
from qserve.eval.compare import T_95, ratio
from qserve.eval.quality import Scored, compare_quality, describe_text, kl_divergence, perplexity, score
from qserve.eval.throughput import Prompts


def logs(**shares: float) -> dict[int, float]:
    return {ord(token): math.log(p) for token, p in shares.items()}


def scored(*positions: dict[int, float]) -> Scored:
    return Scored(np.array([next(iter(p.values())) for p in positions]), positions)


def test_kl_over_all_outcomes_is_the_textbook_value() -> None:
    p, q = logs(a=0.5, b=0.5), logs(a=0.75, b=0.25)
    assert kl_divergence(p, q) == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25), abs=1e-6)
    assert kl_divergence(p, p) == 0


def test_merging_the_tail_never_raises_the_divergence() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        p, q = (rng.dirichlet(np.full(50, 0.3)) + 1e-12 for _ in range(2))
        full = float(np.sum(p * np.log(p / q)))
        tops = [dict(enumerate(np.log(x))) for x in (p, q)]
        short = [{i: v for i, v in t.items() if i in sorted(t, key=t.__getitem__)[-10:]} for t in tops]
        assert 0 <= kl_divergence(*short) <= full + 1e-9


def test_perplexity_and_its_error() -> None:
    windows = [scored(logs(a=0.5), logs(a=0.5)), scored(logs(a=0.25), logs(a=0.25))]
    value = perplexity([w.logprobs for w in windows])
    assert value.value == pytest.approx(math.exp((math.log(2) + math.log(4)) / 2))
    assert value.se == pytest.approx(value.value * math.log(2) / 2)  # sd ln(2)/sqrt(2), over sqrt(2) windows
    assert perplexity([windows[0].logprobs]).se is None


def test_quality_is_paired_with_the_baseline() -> None:
    base = [scored(logs(a=0.5, b=0.4), logs(a=0.5, b=0.4)), scored(logs(a=0.25, b=0.7))]
    worse = [scored(logs(a=0.4, b=0.5), logs(a=0.5, b=0.4)), scored(logs(a=0.2, b=0.7))]
    data = DataRecord(
        dataset="d", part="quality", rows_read=1, dropped={}, records=1, tokens=5, sha256="0", seed=None
    )  # fmt: skip
    quality = compare_quality(worse, base, describe_text(data, 3, 2, 1))
    assert quality.perplexity_ratio is not None
    assert quality.perplexity_ratio.value == pytest.approx(1.25**0.75)  # mean of ln(1.25)/2 and ln(1.25)
    assert quality.top1 is not None
    assert quality.top1.value == pytest.approx(0.75)  # 1 of 2 in the first window, 1 of 1 in the second
    assert quality.tokens == 3
    assert "token 1 stands first" in quality.bos
    alone = compare_quality(base, None, describe_text(data, 3, 2, None))
    assert (alone.kl, alone.top1, alone.perplexity_ratio) == (None, None, None)


def test_the_gate_passes_rounding_and_stops_corruption() -> None:
    exact = fidelity.Reference(float32=((-1.0, -2.0),), bfloat16=((-1.02, -2.02),))
    served = [scored({1: -1.03}, {1: -1.97})]
    assert exact.floor() == pytest.approx(0.02)
    good = fidelity.check(served, exact, exact)
    assert good.faithful
    assert good.error == pytest.approx(0.03)
    assert good.limit == pytest.approx(0.06)
    assert good.reference_perplexity == pytest.approx(math.exp(1.5))
    assert not fidelity.check([scored({1: -1.1}, {1: -2.1})], exact, exact).faithful


def test_a_shifted_perplexity_is_stopped_even_if_rounding_is_rough() -> None:
    rough = fidelity.Reference(float32=((-1.0,) * 100,), bfloat16=((-1.2, -0.8) * 50,))
    noisy = fidelity.check([scored(*({1: -1.2}, {1: -0.8}) * 50)], rough, rough)
    assert noisy.faithful  # as rough as rounding, and shifted by nothing
    shifted = fidelity.check([scored(*[{1: -1.1}] * 100)], rough, rough)
    assert not shifted.faithful  # half as far, all one way
    assert fidelity.why_not(shifted).startswith("served perplexity is 3.004 instead of 2.718, a shift that rounding")


def test_what_is_not_faithful_says_which_limit_it_breaks() -> None:
    fine = fidelity.Reference(float32=((-1.0, -1.0),), bfloat16=((-1.0, -1.0),))
    far = fidelity.check([scored({1: -3.0}, {1: -3.0})], fine, fine)
    assert fidelity.why_not(far).startswith("served log-probabilities are 2.000 nats from the checkpoint's")


def test_a_window_that_was_not_scored_offline_does_not_count() -> None:
    reference = fidelity.Reference(float32=((-1.0,),), bfloat16=((-1.0,),))
    assert fidelity.check([scored({1: -1.0}), scored({1: -9.0})], reference, reference).tokens == 1


def test_a_window_that_was_not_served_does_not_count() -> None:
    reference = fidelity.Reference(float32=((-1.0, -9.0), (-9.0,)), bfloat16=((-1.0, -9.0),))
    gate = fidelity.check([scored({1: -1.0})], reference, reference)  # the first token of the first window alone
    assert (gate.faithful, gate.tokens) == (True, 1)
    assert gate.reference_perplexity == gate.served_perplexity == pytest.approx(math.e)


class Slow(BaseHTTPRequestHandler):
    """Takes 10 ms for a token, and scores every token with the same probability."""

    def do_POST(self) -> None:
        tokens = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        time.sleep(0.01 * len(tokens))
        positions = [None, *({str(token): {"logprob": -1.0}} for token in tokens[1:])]
        body = json.dumps({"choices": [{"prompt_logprobs": positions}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.parametrize(("budget_s", "low", "high"), [(0.0, 16, 16), (1.0, 20, 25), (60.0, 64, 64)])
def test_a_slow_server_scores_the_beginnings(budget_s: float, low: int, high: int) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        at = SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}", model="m", scoring="prompt_logprobs")
        found = score(at, [tuple(range(64))] * 4, 1, budget_s)  # type: ignore[arg-type]
        server.shutdown()
    assert len(found) == 4
    assert all(low <= len(one.logprobs) + 1 <= high for one in found)


def test_a_beginning_is_paired_with_the_same_beginning() -> None:
    base = [scored(logs(a=0.5, b=0.4), logs(a=0.1, b=0.8))] * 2
    begun = [scored(logs(a=0.25, b=0.4))] * 2
    data = DataRecord(dataset="d", part="quality", rows_read=1, dropped={}, records=1, tokens=5, sha256="0", seed=None)
    quality = compare_quality(begun, base, describe_text(data, 2, 2, None))
    assert quality.perplexity_ratio is not None
    assert quality.perplexity_ratio.value == pytest.approx(2.0)
    assert quality.top1 is not None
    assert quality.top1.value == 0.0


def test_the_floor_is_of_the_windows_that_bfloat16_saw() -> None:
    reference = fidelity.Reference(float32=((-1.0,), (-5.0,)), bfloat16=((-1.5,),))
    assert reference.floor() == pytest.approx(0.5)
    assert reference.perplexity().value == pytest.approx(math.exp(3))


# --- ratios ----------
def test_ratio_of_equal_pairs_has_the_t_interval() -> None:
    found = ratio([(2.0, 1.0), (2.2, 1.0), (1.8, 1.0)], higher_is_faster=True)
    assert found is not None
    logs_ = np.log([2.0, 2.2, 1.8])
    half = T_95[1] * logs_.std(ddof=1) / math.sqrt(3)
    assert found.value == pytest.approx(math.exp(logs_.mean()))
    assert (found.low, found.high) == pytest.approx((math.exp(logs_.mean() - half), math.exp(logs_.mean() + half)))
    assert found.verdict == "faster"


@pytest.mark.parametrize(
    ("pairs", "higher", "verdict"),
    [
        ([(1.0, 2.0), (1.01, 2.0), (0.99, 2.0)], True, "slower"),
        ([(1.0, 2.0), (1.01, 2.0), (0.99, 2.0)], False, "faster"),  # a latency: half is good
        ([(1.0, 1.1), (1.1, 1.0), (1.0, 1.0)], True, "unresolved"),
        ([(5.0, 1.0)], True, "unresolved"),  # one pair has no interval
    ],
)
def test_verdicts(pairs: list[tuple[float | None, float | None]], higher: bool, verdict: str) -> None:
    found = ratio(pairs, higher_is_faster=higher)
    assert found is not None
    assert found.verdict == verdict


def test_no_pair_no_ratio() -> None:
    assert ratio([(None, 1.0), (1.0, None)], higher_is_faster=True) is None
    found = ratio([(None, 1.0), (1.0, 1.0)], higher_is_faster=True)
    assert found is not None
    assert (found.pairs, found.low, found.high) == (1, None, None)


def test_equal_arms_are_called_different_as_rarely_as_promised() -> None:
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(2000):
        noise = np.exp(rng.normal(0, 0.05, (4, 2)))
        found = ratio([(float(a), float(b)) for a, b in noise], higher_is_faster=True)
        wrong += found is not None and found.verdict != "unresolved"
    assert 0.03 < wrong / 2000 < 0.07


# --- prompts ----------
def test_no_prompt_is_sent_twice() -> None:
    prompts = Prompts(np.arange(1000, dtype=np.int32), bos=1)
    taken = prompts.take(60, 100)  # six times around the stream
    assert all(len(p) == 100 and p[0] == 1 for p in taken)
    assert len({p[:17] for p in taken}) == 60
