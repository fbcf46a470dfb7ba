"""Model cards of made-up reports: metadata that the Hub can read, and no figure that was not measured."""

import math
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from sample_report import ALL, variant

from qserve.artifacts import (
    DataRecord,
    Estimate,
    FileEntry,
    Licence,
    Manifest,
    Report,
    TaskScore,
    VariantResult,
    Weights,
)
from qserve.eval.card import model_card
from qserve.eval.card_metadata import Subject
from qserve.eval.publishable import Measured, Regime, find_measured, objections

CALIBRATION = DataRecord(
    dataset="HuggingFaceH4/ultrachat_200k", part="calibration", rows_read=4000, dropped={"blank": 25}, records=32,
    tokens=8015, sha256="7b" * 32, seed=0,
)  # fmt: skip


def manifest(**changes: object) -> Manifest:
    weights = Weights(
        total_bytes=163_200_000, quantized_bytes=100_000_000, embedding_bytes=50_000_000, other_bytes=13_200_000,
        parameters=134_515_008, bits_per_parameter=9.7,
    )  # fmt: skip
    made = Manifest(
        variant="int8", digest="0123456789ab", settings={"method": "gptq", "bits": 8, "samples": None},
        label="GPTQ W8A8 int8", model="me/tiny", revision="4f" * 20, source_sha256="ab" * 32, source_note=None,
        calibration=CALIBRATION, runtime="llmcompressor-cpu", packages={"transformers": "5.17.0"},
        qserve_version="0.1.0", layers=210, layers_fallback=("a", "b"), weights=weights, wall_s=83.123456,
        peak_memory_bytes=None, threads=2, created="2026-11-30T12:00:00Z",
        files=(FileEntry(name="LICENSE", size_bytes=1, sha256="00" * 32),),
    )  # fmt: skip
    return made.model_copy(update=changes)


def subject(measured: Measured | None, **changes: object) -> Subject:
    fields = {"licence": Licence(id="apache-2.0"), "base_model": "me/tiny", "regime": Regime(), "chat": True,
              "quant_method": "compressed-tensors"}  # fmt: skip
    known = {"repo": "me/tiny-int8", "manifest": manifest(), "measured": measured}
    return Subject(**{**known, **fields, **changes})  # type: ignore[arg-type]


def measured_at(speeds: dict[int, tuple[float, float, float]]) -> Measured:
    report = ALL["one_variant"]()
    result = variant("int8", "GPTQ W8A8 int8", speeds, 0.0121, 163.2)
    return Measured(report.model_copy(update={"variants": (result,)}), result)


def rows() -> list[tuple[str, Report, VariantResult]]:
    return [(name, made, row) for name, make in ALL.items() for made in [make()] for row in made.variants]


def test_every_card_of_every_report_can_be_read_by_the_hub() -> None:
    seen = 0
    for name, report, row in rows():
        card = ModelCard(model_card(subject(Measured(report, row))))
        data = card.data.to_dict()
        assert (data["base_model"], data["base_model_relation"]) == ("me/tiny", "quantized")
        assert (data["license"], data["library_name"]) == ("apache-2.0", "transformers")
        results = data.get("model-index", [{"results": []}])[0]["results"]
        values = [metric["value"] for result in results for metric in result["metrics"]]
        assert all(math.isfinite(value) for value in values)
        assert bool(values) == (row.status == "measured" and row.quality is not None), name
        assert "None" not in card.content and "nan" not in card.text.lower().split(), name
        seen += 1
    assert seen >= 15


def test_figures_that_are_not_finite_are_left_out() -> None:
    found = measured_at({8: (1.43, 1.38, 1.49)})
    assert found.result.quality
    endless = found.result.quality.perplexity.model_copy(update={"value": math.inf})
    quality = found.result.quality.model_copy(update={"perplexity": endless})
    row = found.result.model_copy(update={"quality": quality})
    data = ModelCard(model_card(subject(Measured(found.report, row)))).data
    assert [r.metric_type for r in data.eval_results] == ["kl_divergence", "top1_agreement"]


def test_it_says_where_it_is_faster_and_where_it_is_not() -> None:
    text = model_card(subject(measured_at({1: (0.8, 0.75, 0.85), 4: (1.01, 0.9, 1.1), 8: (1.43, 1.38, 1.49)})))
    for line in (
        "- **Faster** than bf16 at concurrency 8: 1.43 [1.38, 1.49] times bf16's tokens/s.",
        "- **Slower** than bf16 at concurrency 1: 0.80 [0.75, 0.85] times bf16's tokens/s.",
        "- No difference resolved at concurrency 4: 1.01 [0.90, 1.10] times bf16's tokens/s.",
        "| 8 | 216 | 151 | **1.43 \\[1.38, 1.49\\] faster** |",
    ):
        assert line in text


def test_it_says_how_it_was_made() -> None:
    text = model_card(subject(None))
    assert "**It was not measured**" in text
    assert "## Measured" not in text
    assert (
        f"4,000 rows read, dropped: 25 blank; 32 samples of 8,015 tokens in all; sha256 of the token ids `{'7b' * 32}`"
        in text
    )
    assert "210 linear layers to GPTQ W8A8 int8; 2 of them fell back to round-to-nearest" in text
    assert "[LICENSE](LICENSE)" in text
    recipe = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert recipe == {"model": "me/tiny", "revision": "4f" * 20, "variants": {"int8": {"method": "gptq", "bits": 8}}}
    assert ModelCard(text).data.to_dict()["datasets"] == ["HuggingFaceH4/ultrachat_200k"]


def test_a_local_path_is_not_shown_and_no_base_model_is_made_up(tmp_path: Path) -> None:
    secret = manifest(model=str(tmp_path / "customer" / "tiny.gguf"), calibration=None)
    text = model_card(subject(None, manifest=secret, base_model=None, licence=None))
    assert str(tmp_path) not in text
    assert "tiny.gguf" in text
    assert "base_model" not in text
    assert "The terms of the source are not known" in text


def test_a_path_in_an_error_is_not_shown(tmp_path: Path) -> None:
    failed = (f"failed in run 1: it died; log: {tmp_path}/runs/server.log",)
    text = model_card(subject(None, overruled=failed))
    assert "it died; log: server.log" in text
    assert str(tmp_path) not in text


def test_perplexity_of_other_tokens_is_not_set_beside_it() -> None:
    """fp8 was so slow that the beginnings of the windows were scored: 442 is not 1.06 times 8.53."""
    found = measured_at({8: (1.43, 1.38, 1.49)})
    whole = found.report.baseline.quality
    assert whole and found.result.quality
    bf16 = f"{whole.perplexity.value:.2f}"
    assert row_of(model_card(subject(found)), "Perplexity")[1].startswith(bf16)
    short = found.result.quality.model_copy(update={"tokens": whole.tokens // 17})
    cut = found.result.model_copy(update={"quality": short, "problem": "too slow: the first 30 tokens were scored"})
    text = model_card(subject(Measured(found.report, cut)))
    assert row_of(text, "Perplexity")[1] == "–"
    assert "- Limits: too slow: the first 30 tokens were scored." in text


def row_of(card: str, name: str) -> list[str]:
    """The figures of one row: the variant's, bf16's, their ratio."""
    (line,) = [line for line in card.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_a_gguf_file_is_served_by_llama_cpp() -> None:
    files = (FileEntry(name="model.gguf", size_bytes=1, sha256="00" * 32),)
    text = model_card(subject(None, manifest=manifest(files=files), quant_method="gguf"))
    assert "llama-server --hf-repo me/tiny-int8 --hf-file model.gguf" in text
    assert ModelCard(text).data.library_name == "gguf"
    assert "vllm" not in text.lower()


def test_a_bitsandbytes_checkpoint_is_for_transformers() -> None:
    made = manifest(label="bitsandbytes NF4", settings={"method": "bitsandbytes", "type": "nf4"}, calibration=None)
    text = model_card(subject(None, manifest=made, quant_method="bitsandbytes"))
    assert "pip install torch transformers accelerate bitsandbytes\n" in text
    assert "vllm" not in text.lower()
    assert ModelCard(text).data.tags == ["qserve", "quantized", "bitsandbytes", "nf4"]


def test_without_a_chat_template_the_lines_complete_a_text() -> None:
    assert "apply_chat_template" in model_card(subject(None))
    assert "apply_chat_template" not in model_card(subject(None, chat=False))


# --- objections ----------
@pytest.mark.parametrize(
    ("speeds", "regime", "words"),
    [
        ({1: (1.2, 1.1, 1.3), 8: (0.7, 0.6, 0.8)}, Regime(), None),
        ({1: (1.0, 0.9, 1.1)}, Regime(), None),
        ({1: (0.7, 0.6, 0.8)}, Regime(), "is slower than bf16 at concurrency 1"),
        ({1: (1.2, 1.1, 1.3), 8: (0.7, 0.6, 0.8)}, Regime(concurrency=8), "is slower than bf16 at concurrency 8"),
        ({1: (1.2, 1.1, 1.3)}, Regime(concurrency=8), "was not compared with bf16 at concurrency 8, only at 1"),
        ({}, Regime(), "has no valid comparison of speed"),
        ({1: (0.7, 0.6, 0.8)}, Regime("memory"), None),
    ],
)
def test_what_speaks_against_it(
    speeds: dict[int, tuple[float, float, float]], regime: Regime, words: str | None
) -> None:
    found = objections(measured_at(speeds), regime)
    assert found == () if words is None else found[0].says.startswith(words)
    assert not any("--" in one.says for one in found)  # an option is a remedy, and no matter of the card's


def test_a_report_is_of_a_checkpoint_by_its_digest_and_older_ones_by_the_time_it_took() -> None:
    found = measured_at({8: (1.43, 1.38, 1.49)})

    def holding(**changes: object) -> Report:
        return found.report.model_copy(update={"variants": (found.result.model_copy(update=changes),)})

    assert find_measured(holding(digest="0123456789ab"), manifest())
    assert find_measured(holding(digest="ba9876543210"), manifest()) is None
    assert find_measured(holding(prep_s=83.123456), manifest())
    assert find_measured(holding(prep_s=83.123457), manifest()) is None
    assert find_measured(holding(digest="0123456789ab").model_copy(update={"quick": True}), manifest()) is None


def test_task_scores_stand_in_the_metadata_and_beside_bf16s() -> None:
    found = measured_at({8: (1.43, 1.38, 1.49)})
    base = found.report.baseline
    assert found.result.quality and base.quality
    own = TaskScore(
        metric="acc", score=Estimate(value=0.38, se=0.049), delta=Estimate(value=-0.02, se=0.0141), won=0, lost=2,
        paired=100, items=100, of_items=2376, few_shot=0, context_tokens=2048, bos="none", sha256="cd" * 32,
        dataset="allenai/ai2_arc",
    )  # fmt: skip
    unknown = own.model_copy(update={"score": None, "delta": None, "note": "a reason with /a/path in it"})
    # of the same repository; and two with data of their own, as the held-out text has
    others = {
        "arc_challenge": own.model_copy(update={"sha256": "ef" * 32}),
        "mine": own.model_copy(update={"dataset": None, "items": 7}), "yours": own.model_copy(update={"dataset": None}),
    }  # fmt: skip
    tasks = {"arc_easy": own, "lost": unknown, **others}
    quality = found.result.quality.model_copy(update={"tasks": tasks})
    theirs = {"arc_easy": own.model_copy(update={"score": Estimate(value=0.4, se=0.049), "delta": None})}
    row = found.result.model_copy(update={"quality": quality})
    bf16 = base.model_copy(update={"quality": base.quality.model_copy(update={"tasks": theirs})})
    card = ModelCard(model_card(subject(Measured(found.report.model_copy(update={"baseline": bf16}), row))))
    (result,) = [r for r in card.data.eval_results if r.dataset_name == "arc_easy"]
    assert (result.dataset_type, result.metric_type, result.metric_value) == ("allenai/ai2_arc", "acc", 0.38)
    assert result.metric_args == {"standard_error": 0.049} and result.dataset_args["items"] == 100
    entries = {r["dataset"]["name"]: r for r in card.data.to_dict()["model-index"][0]["results"]}
    assert set(entries) == {"held-out text", "arc_easy", *others}
    assert [len(entries[name]["metrics"]) for name in ("held-out text", *others)] == [3, 1, 1, 1]
    assert entries["arc_challenge"]["dataset"]["args"]["sha256"] == "ef" * 32
    assert entries["mine"]["dataset"]["args"]["items"] == 7
    assert (
        "| arc\\_easy, acc | 0.380 ± 0.049, −0.0200 ± 0.0141 on the same items, within noise | 0.400 ± 0.049 |"
        in card.text
    )
    assert "lost" not in card.content and "/a/path" not in card.content
