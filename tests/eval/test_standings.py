"""A race's figures, table and page, from blocks with known figures."""

import re

from qserve.artifacts import Machine, Memory, ServerFacts
from qserve.eval.race import BLOCKS, Leg, Race, Starter, standings
from qserve.eval.race_report import headline, race_text, to_page
from qserve.eval.records import LoadRun, RequestRecord
from qserve.eval.throughput import Block

REQUESTS, TOKENS = 20, 32


def block(wall_s: float, failed: int = 0) -> Block:
    """All requests at once, done after `wall_s`; the last `failed` of them refused."""
    each = (wall_s / TOKENS,) * (TOKENS - 1)
    records = [
        RequestRecord(
            i, 0.0, wall_s / 2, wall_s, each, TOKENS, 128, TOKENS, "ok" if i < REQUESTS - failed else "http 503",
            asked_prompt_tokens=128, asked_output_tokens=TOKENS,
        )
        for i in range(REQUESTS)
    ]  # fmt: skip
    run = LoadRun(REQUESTS, tuple(records), wall_s, float(REQUESTS), 0.1, 0.001)
    return Block(run, None, None, None, None, 10**9)


def leg(blocks: dict[int, Block], startup_s: float = 3.0, peak: int = 10**9) -> Leg:
    facts = ServerFacts(
        engine="e", version="1.0", command=("x",), env={}, dtype="bfloat16", quantization=None,
        kernels=("torch Linear",), startup_s=startup_s, log="l",
    )  # fmt: skip
    memory = Memory(disk_bytes=1, loaded_bytes=None, kv_capacity_tokens=None, kv_bytes=None, peak_bytes=peak)
    return Leg(facts=facts, memory=memory, blocks=BLOCKS.dump_json(blocks).decode())


def race(legs: dict[str, list[Leg]]) -> Race:
    starters = [Starter(name=name, served="bf16 (bfloat16)") for name in legs]
    machine = Machine(flavour="cpu", cpu="c", cores=2, isa=(), memory_bytes=10**10)
    return Race(
        run="r", created="2026-01-01T00:00:00Z", qserve_version="0", recipe_file="q.yaml", model="<m>",
        source_note=None, machine=machine, requests=REQUESTS, concurrency=REQUESTS, rounds=4, prompt_tokens=128,
        output_tokens=TOKENS, round_limit_s=60, racers=standings(starters, legs), wall_s=1.0,
    )  # fmt: skip


NAIVE = [leg({0: block(20.0), 2: block(22.0)}), leg({1: block(21.0), 3: block(20.0)}, startup_s=5.0, peak=2 * 10**9)]
FAST = [leg({0: block(4.0), 2: block(4.4)}), leg({1: block(4.3), 3: block(4.0)})]


def test_ratio_is_by_rounds_with_the_same_prompts() -> None:
    naive, fast = race({"transformers": NAIVE, "vllm": FAST}).racers
    assert fast.throughput and fast.throughput.low and fast.throughput.high
    assert fast.throughput.pairs == 4
    assert 4.8 < fast.throughput.low < fast.throughput.value < fast.throughput.high < 5.1
    assert fast.throughput.verdict == "faster"
    assert naive.throughput is None
    assert naive.rounds_tokens_per_s == (640 / 20, 640 / 21, 640 / 22, 640 / 20)  # by round, not by pass
    assert naive.load and naive.load.output_tokens_per_s == 4 * 640 / 83
    assert naive.load.ttft_s.p95 is not None  # 80 values
    assert naive.startups_s == (3.0, 5.0)
    assert naive.memory and naive.memory.peak_bytes == 2 * 10**9


def test_without_the_naive_loop_there_is_no_ratio() -> None:
    (fast,) = race({"vllm": FAST}).racers
    assert fast.throughput is None
    assert "unknown" in race_text(race({"vllm": FAST}))


def test_what_failed_is_a_row_with_its_reason() -> None:
    told = race({"transformers": NAIVE, "vllm": [Leg(problem="vllm ended with code 1"), *FAST[1:]]})
    racer = told.racers[1]
    assert (racer.status, racer.problem) == ("failed", "vllm ended with code 1")
    text = race_text(told)
    assert "vllm: vllm ended with code 1" in text


def test_failed_requests_are_counted_and_make_it_invalid() -> None:
    bad = [leg({0: block(4.0, failed=5), 2: block(4.0)}), leg({1: block(4.0), 3: block(4.0)})]
    told = race({"transformers": NAIVE, "vllm": bad})
    assert told.racers[1].throughput is None
    row = next(line for line in race_text(told).splitlines() if line.startswith("vllm "))
    assert "not valid" in row and "75 of 80, 5 http 503" in row


def test_text_and_page_say_the_same() -> None:
    told = race({"transformers": NAIVE, "vllm": FAST})
    text, page = race_text(told), to_page(told)
    assert text.splitlines()[0] == headline(told)
    assert re.match(r"vllm serves bf16 \(bfloat16\) fastest: 4\.97 \[.*\] times the naive loop", headline(told))
    row = next(line for line in text.splitlines()[1:] if line.startswith("vllm"))
    figure = re.search(r"\d\.\d\d \[[^]]*\] faster", row)
    assert figure and figure[0].removesuffix(" faster") in page
    assert "<m>" not in page and "&lt;m&gt;" in page  # escaped
    assert page.count("<svg") == 1 and 'class="spread"' in page
    assert "<script" not in page
    assert Race.model_validate_json(told.model_dump_json()) == told


def test_a_lead_within_noise_is_not_called_the_fastest() -> None:
    told = race(
        {"transformers": NAIVE, "vllm": [leg({0: block(30.0), 2: block(3.0)}), leg({1: block(30.0), 3: block(3.0)})]}
    )
    assert told.racers[1].throughput and told.racers[1].throughput.verdict == "unresolved"
    assert headline(told).startswith("Unresolved: vllm serves") and "more --rounds" in headline(told)


def test_nothing_valid_is_said() -> None:
    told = race({"transformers": [Leg(problem="no"), Leg(problem="no")]})
    assert "No engine gave a valid figure" in headline(told)
    assert "<svg" not in to_page(told)
