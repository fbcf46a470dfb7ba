"""The decision on reports whose truth is known: a clear winner, one in the noise, one in which nothing qualifies; that
no difference is taken for a win more often than it may be; and reports that hold less than one hopes."""

import math
from collections import Counter

import pytest
import sample_report as sample
from known_report import Truth, known, with_variant, without_bounds

from qserve.artifacts import Estimate
from qserve.decision import Decision, FormatStanding
from qserve.errors import UsageError
from qserve.eval.compare import T_95
from qserve.eval.decide import decide
from qserve.eval.decision_text import to_html, to_json, to_markdown, to_text
from qserve.eval.settle import settle
from qserve.eval.student import samples_needed, t_quantile
from qserve.wishes import Floor, Traffic, Wishes

AT_8 = Traffic(concurrency=8)


def row(decision: Decision, name: str) -> FormatStanding:
    return next(one for one in decision.formats if one.name == name)


def flips_by(decision: Decision, by: str) -> list[str]:
    return [flip.says for flip in decision.flips if flip.by == by]


# --- the three known answers ----------
def test_a_clear_winner_is_chosen() -> None:
    truths = [Truth("int8", 1.4), Truth("awq", 1.2, kl=(0.1, 0.004), disk_mb=110), Truth("fp8", 0.05)]
    wishes = Wishes(
        slo={"ttft_p95": 1.0}, floor=Floor(kl=0.2), price_per_hour=0.36, memory_gb=2,
        traffic=Traffic(concurrency=8, output_tokens_per_s=1000),
    )  # fmt: skip
    decision = decide(known(truths, (1, 8)), wishes)
    assert (decision.outcome, decision.choice, decision.concurrency) == ("chosen", "int8", 8)
    assert decision.runner_up == "awq" and decision.more is None and decision.provisional is None
    int8 = row(decision, "int8")
    assert int8.gain and int8.gain.low and 1.3 < int8.gain.low < 1.4 < (int8.gain.high or 0) < 1.5
    assert int8.cost and int8.cost.low and int8.cost.high and int8.output_tokens_per_s
    assert int8.cost.value == pytest.approx(0.36 / 3600 * 1e6 / int8.output_tokens_per_s.value)
    assert int8.cost.low < int8.cost.value < int8.cost.high
    assert int8.machines == math.ceil(1000 / int8.output_tokens_per_s.value)
    assert int8.machines_cautious and int8.machines_cautious >= int8.machines
    assert int8.faster_at == row(decision, "awq").faster_at == (1, 8)
    assert row(decision, "fp8").slower_at == (1, 8)
    assert decision.sentence.startswith("Deploy int8 (int8 label) at concurrency 8: 1.")
    assert f"{int8.machines} machines for the asked rate" in decision.sentence


def test_what_is_in_the_noise_is_unresolved_and_says_how_much_more() -> None:
    report = known([Truth("int8", 1.03, noise=0.12), Truth("fp8", 0.97, noise=0.12)], (1, 8))
    decision = decide(report, Wishes(traffic=AT_8))
    assert (decision.outcome, decision.choice, decision.provisional) == ("unresolved", None, "bf16")
    assert decision.more and decision.more.pairs and decision.more.pairs > 4
    assert decision.more.command == f"qserve bench known.yaml --pairs {decision.more.pairs} --concurrency 8"
    assert decision.more.loads_s and decision.more.loads_s > 0
    assert "within noise" in decision.sentence and decision.sentence.endswith("until then bf16 is safe.")
    assert not any(word in decision.sentence for word in ("Deploy", "Keep"))


def test_nothing_qualifies_and_what_would_is_said() -> None:
    report = known([Truth("int8", 1.4), Truth("awq", 1.2)], requests=40)
    decision = decide(report, Wishes(slo={"itl_p95": 0.001}, traffic=AT_8))
    assert (decision.outcome, decision.choice, decision.more) == ("nothing qualifies", None, None)
    assert all(one.standing == "excluded" for one in decision.formats)
    assert all(name in decision.sentence for name in ("bf16: itl_p95", "int8: itl_p95", "awq: itl_p95"))
    assert any(flip.by == "slo" and flip.to == "int8" and "with a limit on itl_p95 of" in flip.says
               for flip in decision.flips)  # fmt: skip


# --- the rule keeps its promises ----------
@pytest.mark.parametrize("variants", [1, 4])
def test_no_difference_is_rarely_called_a_win(variants: int) -> None:
    """5 % in all may be false, however many formats are tried; 200 draws: three standard errors above are 9.6 %."""
    seen: Counter[str] = Counter()
    for seed in range(200):
        truths = [Truth(f"v{i}", 1.0, noise=0.05) for i in range(variants)]
        settled = settle(known(truths, seed=seed, requests=2), Wishes())
        seen["false" if settled.choice not in (None, "bf16") else settled.outcome] += 1
    assert sum(seen.values()) == 200
    assert seen["false"] <= 0.096 * 200, seen
    assert seen["unresolved"] > 100, seen  # and the noise is not taken for equality


def test_of_two_equal_formats_neither_is_called_the_better() -> None:
    said: Counter[str] = Counter()
    for seed in range(200):
        settled = settle(
            known([Truth("a", 1.5, noise=0.05), Truth("b", 1.5, noise=0.05)], seed=seed, requests=2), Wishes()
        )
        said["ahead" if "ahead of" in settled.because else settled.outcome] += 1
    assert said["ahead"] <= 0.096 * 200, said
    assert said["unresolved"] > 100, said


def test_a_real_difference_is_found_with_the_pairs_that_were_asked_for() -> None:
    """The number of pairs comes from a noisy guess of the spread, so most runs of that length decide, not all."""
    decided = 0
    for seed in range(40):
        truth = [Truth("int8", 1.08, noise=0.06)]
        first = decide(known(truth, seed=seed, requests=2), Wishes())
        pairs = first.more.pairs if first.more and first.more.pairs else 4
        again = settle(known(truth, seed=1000 + seed, requests=2, count=min(pairs, 60)), Wishes())
        assert again.choice in (None, "int8", "bf16")
        decided += again.choice == "int8"
    assert decided >= 20


def test_students_t_is_that_of_the_tables() -> None:
    for df, known_t in enumerate(T_95, 1):
        assert t_quantile(0.95, df) == pytest.approx(known_t, rel=1e-3)
    assert t_quantile(0.975, 3) == pytest.approx(4.177, rel=1e-3)
    n = samples_needed(0.1, 0.05, 0.95)
    assert (t_quantile(0.95, n - 1) + 0.842) * 0.1 / math.sqrt(n) <= 0.05
    assert (t_quantile(0.95, n - 2) + 0.842) * 0.1 / math.sqrt(n - 1) > 0.05


# --- what may never be chosen ----------
@pytest.mark.parametrize("status", ["failed", "not faithful", "not servable"])
def test_the_fastest_is_not_chosen_where_it_is_not_what_it_should_be(status: str) -> None:
    decision = decide(known([Truth("fast", 3.0, status=status), Truth("int8", 1.4)]), Wishes())
    assert (decision.choice, row(decision, "fast").standing) == ("int8", "excluded")
    assert f"fast is excluded: it is {status}" in " ".join(decision.reasons)


def test_a_failed_or_absent_fidelity_check_is_never_passed_over() -> None:
    failed = decide(known([Truth("fast", 3.0, faithful=False), Truth("int8", 1.4)]), Wishes())
    assert (failed.choice, row(failed, "fast").standing) == ("int8", "excluded")
    absent = decide(known([Truth("fast", 3.0, faithful=None), Truth("int8", 1.4)]), Wishes())
    assert (absent.outcome, absent.provisional) == ("unresolved", "int8")
    assert "fast: its fidelity was not checked" in absent.sentence


def test_a_smoke_run_decides_nothing() -> None:
    decision = decide(known([Truth("int8", 2.0)], quick=True), Wishes())
    assert (decision.outcome, decision.provisional, decision.flips) == ("unresolved", None, ())
    assert "smoke run" in decision.sentence
    assert decision.more and decision.more.command == "qserve bench known.yaml"


# --- quality ----------
def test_a_floor_passes_fails_or_is_within_noise() -> None:
    def standing(floor: Floor) -> tuple[str, str | None]:
        decision = decide(known([Truth("int8", 1.4, kl=(0.05, 0.004))]), Wishes(floor=floor))
        return row(decision, "int8").standing, decision.choice

    assert standing(Floor(kl=0.06)) == ("qualifies", "int8")
    assert standing(Floor(kl=0.04)) == ("excluded", "bf16")
    assert standing(Floor(kl=0.055)) == ("undecided", None)
    assert standing(Floor(top1=0.85)) == ("qualifies", "int8")
    assert standing(Floor(top1=0.95)) == ("excluded", "bf16")
    assert standing(Floor(perplexity_ratio=1.05)) == ("qualifies", "int8")


def test_a_floor_within_noise_asks_for_more_windows() -> None:
    decision = decide(known([Truth("int8", 1.4, kl=(0.05, 0.004))]), Wishes(floor=Floor(kl=0.055)))
    assert decision.more and decision.more.windows and decision.more.windows > 16
    assert decision.more.command == f"qserve bench known.yaml --windows {decision.more.windows}"
    assert decision.provisional == "bf16"


def test_a_slow_format_in_doubt_does_not_hold_up_the_decision() -> None:
    truths = [Truth("int8", 1.4, kl=(0.01, 0.001)), Truth("fp8", 0.1, kl=(0.05, 0.004))]
    decision = decide(known(truths), Wishes(floor=Floor(kl=0.055)))
    assert decision.choice == "int8" and row(decision, "fp8").standing == "undecided"
    assert "could not be better by 5 %" in " ".join(decision.reasons)


def test_unmeasured_quality_is_unknown_and_a_task_floor_is_refused() -> None:
    decision = decide(known([Truth("int8", 1.4, kl=None)]), Wishes(floor=Floor(kl=0.1)))
    assert decision.outcome == "unresolved" and "the KL to bf16 was not measured" in decision.sentence
    one_window = with_variant(known([Truth("int8", 1.4)]), "int8", quality=sample.quality(6.3, 0.02).model_copy(
        update={"windows": 1, "kl": Estimate(value=0.02, se=None)}))  # fmt: skip
    decision = decide(one_window, Wishes(floor=Floor(kl=0.1)))
    assert decision.outcome == "unresolved" and decision.more and decision.more.windows == 4
    with pytest.raises(
        UsageError, match=r"task score of mmlu.*no task scores; name it in the recipe \(quality: \{tasks: \[mmlu\]\}\)"
    ):
        decide(one_window, Wishes(floor=Floor(tasks={"mmlu": 0.5})))


# --- ties ----------
def test_a_tie_is_broken_by_quality_then_by_bytes_and_the_reason_is_said() -> None:
    def tied(**other: object) -> Decision:
        truths = [Truth("a", 1.5, noise=0.05), Truth("b", 1.5, noise=0.05, **other)]  # type: ignore[arg-type]
        return decide(known(truths, seed=3), Wishes())

    assert tied().outcome == "unresolved" and "which of" in tied().sentence
    closer = tied(kl=(0.01, 0.0005))
    assert closer.choice == "b" and "cannot be told apart by speed; it is the closest to bf16 in KL" in closer.sentence
    smaller = tied(disk_mb=100)
    assert smaller.choice == "b" and "fewest bytes" in smaller.sentence


def test_a_difference_that_cannot_matter_needs_no_more_runs() -> None:
    truths = [Truth("a", 1.5, noise=0.01), Truth("b", 1.5, noise=0.01)]
    decision = decide(known(truths, count=8), Wishes())
    assert decision.outcome == "chosen" and "they differ by less than 5 %" in decision.sentence
    equal = decide(known([Truth("a", 1.0, noise=0.01)], count=8), Wishes())
    assert equal.choice == "bf16" and "none can be by 5 % or more" in equal.sentence


# --- traffic and latency ----------
def test_without_traffic_each_format_runs_at_the_largest_concurrency_that_holds_the_slo() -> None:
    """bf16 holds 60 ms between tokens at 8 and not at 16; int8, 1.6 times as fast, at 16 too."""
    report = known([Truth("int8", 1.6)], (1, 8, 16), requests=64)
    decision = decide(report, Wishes(slo={"itl_p95": 0.068}))
    assert (row(decision, "bf16").concurrency, row(decision, "int8").concurrency) == (8, 16)
    assert (decision.choice, decision.concurrency) == ("int8", 16)


def test_the_objective_may_be_a_latency() -> None:
    """int8 serves no more tokens, and the first one comes in half the time."""
    report = known([Truth("int8", 1.0, noise=0.01, ttft=0.5)])
    assert decide(report, Wishes(traffic=AT_8)).choice == "bf16"
    sooner = decide(report, Wishes(traffic=AT_8, objective="ttft"))
    assert sooner.choice == "int8" and "times the time to first token of bf16" in sooner.sentence
    assert decide(report, Wishes(traffic=AT_8, objective="itl")).choice == "bf16"


def test_a_percentile_that_is_not_known_is_not_taken_for_held() -> None:
    decision = decide(known([Truth("int8", 1.4)], requests=4), Wishes(slo={"ttft_p95": 100}, traffic=AT_8))
    assert decision.outcome == "unresolved" and "16 values are too few" in decision.sentence
    assert decision.more and decision.more.pairs == 4  # 59 requests: 8 at a time, twice a block
    near = known([Truth("int8", 1.4)], requests=20)
    limit_s = near.variants[0].points[0].variant.ttft_s.p95 or 0
    assert row(decide(near, Wishes(slo={"ttft_p95": limit_s}, traffic=AT_8)), "int8").standing == "undecided"


def test_cut_requests_and_old_reports_cannot_hold_an_slo() -> None:
    cut = decide(known([Truth("int8", 1.4, cut=0.3)], requests=40), Wishes(slo={"e2e_p50": 100}, traffic=AT_8))
    assert "did not get that far" in row(cut, "int8").checks[-1].says and row(cut, "int8").standing == "undecided"
    old = without_bounds(known([Truth("int8", 1.4)], requests=40))
    decision = decide(old, Wishes(slo={"ttft_p95": 100}, traffic=AT_8))
    assert decision.outcome == "unresolved" and "kept no bounds" in decision.sentence
    assert decide(old, Wishes()).choice == "int8" and row(decide(old, Wishes(price_per_hour=1)), "int8").cost


def test_what_was_not_measured_is_asked_for() -> None:
    report = known([Truth("int8", 1.4)])
    other = decide(report, Wishes(traffic=Traffic(concurrency=32)))
    assert other.more and other.more.command == "qserve bench known.yaml --concurrency 32"
    longer = decide(report, Wishes(traffic=Traffic(prompt_tokens=1024, output_tokens=256)))
    assert longer.more and longer.more.command == "qserve bench known.yaml --prompt-tokens 1024 --output-tokens 256"
    assert longer.flips == ()
    assert decide(report, Wishes(traffic=Traffic(prompt_tokens=128))).choice == "int8"


def test_a_memory_ceiling_holds_fails_or_is_unknown() -> None:
    report = known([Truth("int8", 1.0, noise=0.2, disk_mb=160)])
    decision = decide(report, Wishes(memory_gb=1.2))
    assert decision.choice == "int8" and row(decision, "bf16").standing == "excluded"
    assert "it alone qualifies" in decision.sentence and "within noise" in decision.sentence
    assert decide(report, Wishes(memory_gb=0.5)).outcome == "nothing qualifies"
    blind = with_variant(report, "int8", memory=None)
    assert "was not measured" in decide(blind, Wishes(memory_gb=1.2)).sentence


def test_the_command_names_the_engines_of_the_arms_in_question() -> None:
    report = known([Truth("int8", 1.03, noise=0.12), Truth("int8@llama-server", 1.03, noise=0.12), Truth("awq", 0.2)])
    report = report.model_copy(
        update={"baseline": report.baseline.model_copy(update={"server": sample.server("bf16")})}
    )
    decision = decide(report, Wishes(floor=Floor(kl=0.1)))
    assert decision.more and decision.more.command.endswith("--engine vllm --engine llama-server")
    failed = with_variant(report, "awq", status="failed", points=())
    assert "--only int8 --engine" in getattr(decide(failed, Wishes()).more, "command", "")


# --- flips ----------
def test_what_flips_it_is_computed_from_the_same_rule() -> None:
    truths = [Truth("int8", {1: 1.4, 8: 1.4}, kl=(0.02, 0.001)), Truth("awq", {1: 2.0, 8: 0.9}, kl=(0.1, 0.004))]
    report = known(truths, (1, 8), requests=40)
    decision = decide(report, Wishes(traffic=AT_8, floor=Floor(kl=0.2), slo={"ttft_p95": 1.0}))
    assert decision.choice == "int8"
    assert flips_by(decision, "concurrency") == ["at concurrency 1 awq would be chosen"]
    assert decide(report, Wishes(traffic=Traffic(concurrency=1), floor=Floor(kl=0.2))).choice == "awq"
    assert any("rules int8 out; then bf16 would stay" in said for said in flips_by(decision, "floor"))
    assert any("rules int8 out at concurrency 8" in said for said in flips_by(decision, "slo"))
    assert any("only on a machine as fast as this one" in said for said in flips_by(decision, "price"))
    tight = decide(report, Wishes(traffic=Traffic(concurrency=1), floor=Floor(kl=0.05)))
    assert tight.choice == "int8" and any(
        f.to == "awq" and f.says.startswith("without the floor on kl awq would be chosen (the KL") for f in tight.flips
    )


def test_lengths_are_an_estimate_and_said_to_be_one() -> None:
    """int8 is quicker between tokens and slower to the first one: long prompts with short outputs would turn it."""
    decision = decide(known([Truth("int8", 1.4, ttft=3.0)]), Wishes(traffic=AT_8))
    (said,) = flips_by(decision, "lengths")
    assert "only 128 tokens in and 16 out were measured" in said and "(an estimate)" in said
    assert "bf16 is expected to answer sooner where outputs are shorter than about" in said


# --- reports that hold less than one hopes ----------
def test_every_variant_failed() -> None:
    decision = decide(known([Truth("a", status="failed"), Truth("b", status="not servable")]), Wishes())
    assert decision.choice == "bf16" and "no quantized format qualifies" in decision.sentence


def test_a_run_whose_variants_were_all_refused_is_not_asked_for_again() -> None:
    report = known([Truth("a", status="not faithful"), Truth("b", status="not servable")])
    bare = report.model_copy(update={"baseline": report.baseline.model_copy(update={"points": ()})})
    decision = decide(bare, Wishes(traffic=Traffic(concurrency=8)))
    assert decision.outcome == "unresolved" and decision.more is None
    assert "no variant could be compared with bf16 (a is not faithful, b is not servable)" in decision.sentence


def test_one_pair_has_no_interval_and_asks_for_pairs() -> None:
    decision = decide(known([Truth("int8", 3.0)], count=1), Wishes())
    assert decision.outcome == "unresolved" and decision.more and decision.more.pairs == 4


def test_no_noise_at_all() -> None:
    assert decide(known([Truth("int8", 1.4, noise=0.0)]), Wishes()).choice == "int8"
    assert decide(known([Truth("int8", 1.0, noise=0.0)]), Wishes()).choice == "bf16"
    two = decide(known([Truth("a", 1.4, noise=0.0), Truth("b", 1.2, noise=0.0)]), Wishes())
    assert two.choice == "a" and "ahead of b beyond noise" in two.sentence


@pytest.mark.parametrize("kind", sorted(sample.ALL))
@pytest.mark.parametrize("wishes", [
    Wishes(), Wishes(slo={"ttft_p99": 1, "e2e_p95": 9}, floor=Floor(kl=0.05, top1=0.9, perplexity_ratio=1.1),
                     memory_gb=2, price_per_hour=1, traffic=Traffic(requests_per_s=3)),
    Wishes(traffic=AT_8, objective="itl"),
])  # fmt: skip
def test_any_report_gives_a_decision_that_is_written_in_each_way(kind: str, wishes: Wishes) -> None:
    decision = decide(sample.ALL[kind](), wishes)
    assert (decision.choice is not None) == (decision.outcome == "chosen")
    assert (decision.more is not None) == (decision.outcome == "unresolved")
    assert Decision.model_validate_json(to_json(decision)) == decision
    assert decision.sentence in to_text(decision)
    assert "<table>" in to_html(decision) and to_markdown(decision).startswith("**")
    assert "nan" not in to_text(decision).split() and "None" not in to_text(decision)
