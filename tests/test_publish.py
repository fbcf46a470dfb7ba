"""`qserve publish` with the real huggingface_hub client against a Hub on loopback, which fails where it is told to."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_stand_in import Hub, hub_stand_in
from publish_project import Project, measured_well, write_project
from sample_report import point, report, variant

from qserve.artifacts import Manifest

SHARDS = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
TO = ("fp8", "--to", "me/tiny-fp8")
DOWNLOAD = "import sys, huggingface_hub as h; h.snapshot_download(sys.argv[1], local_dir=sys.argv[2])"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = write_project(tmp_path)
    made.measure(measured_well())
    return made


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_stand_in() as made:
        yield made


def shard(project: Project, n: int) -> str:
    """Where the Hub takes the bytes of a shard."""
    sha256 = hashlib.sha256((project.folder / SHARDS[n - 1]).read_bytes()).hexdigest()
    return f"PUT /_lfs/{sha256}"


# --- what arrives ----------
def test_what_arrived_is_the_checkpoint_and_its_card(project: Project, hub: Hub, tmp_path: Path) -> None:
    said = project.run(hub, *TO)
    assert f"fp8\t{hub.url}/me/tiny-fp8" in said
    assert "holds all 10 files: names, sizes and hashes are the manifest's" in said
    repo = hub.repos["me/tiny-fp8"]
    assert repo.private
    assert len(repo.commits) == 2  # the empty one, and one with everything
    env = {**os.environ, **hub.env(tmp_path / "other-home")}
    there = tmp_path / "downloaded"
    subprocess.run([sys.executable, "-c", DOWNLOAD, "me/tiny-fp8", str(there)], env=env, check=True, timeout=60)
    for entry in project.manifest.files:
        assert (there / entry.name).read_bytes() == (project.folder / entry.name).read_bytes(), entry.name
    assert Manifest.read(there / "qserve.json") == project.manifest
    card = (there / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "The card of the source" not in card
    assert str(tmp_path) not in card


def test_a_dry_run_writes_exactly_that_and_opens_no_socket(project: Project, hub: Hub, tmp_path: Path) -> None:
    project.run(hub, *TO)
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": ""}
    words = project.command(*TO, "--dry-run", "out", sockets=False)
    for _ in range(2):  # its own folder may be written again
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (0, "fp8\tout\n"), done.stderr
        written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
        files = {name: one.data for name, one in hub.repos["me/tiny-fp8"].files.items() if name != ".gitattributes"}
        assert written == files
    before = {path: path.read_bytes() for path in project.folder.iterdir()}
    said = project.run(hub, *TO, "--dry-run", str(project.folder), expect=2)
    assert "is among the checkpoints themselves" in said
    assert {path: path.read_bytes() for path in project.folder.iterdir()} == before
    assert "cannot write into /proc/out" in project.run(hub, *TO, "--dry-run", "/proc/out", expect=2)
    (tmp_path / "out" / "mine.txt").write_text("mine")
    wrong = {
        "out": "out holds other files; give a new folder", "qserve.yaml": "qserve.yaml is no folder; give a new one",
        "out/mine.txt/deeper": "out/mine.txt takes no files; give another folder",
    }  # fmt: skip
    for folder, sentence in wrong.items():
        said = project.run(hub, *TO, "--dry-run", folder, expect=2)
        assert sentence in said and "hashing" not in said
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"


def test_a_second_run_sends_nothing(project: Project, hub: Hub) -> None:
    project.run(hub, *TO)
    hub.heal()
    assert "holds every file already: nothing to send" in project.run(hub, *TO)
    assert hub.asked("PUT|/commit/") == 0


def test_an_interrupted_upload_goes_on_with_what_is_missing(project: Project, hub: Hub) -> None:
    hub.fail(shard(project, 2), status=500, wait_s=20)
    said = project.interrupt(hub, shard(project, 2), *TO)
    assert said.splitlines()[-1] == (
        "qserve: interrupted; what was finished is kept, the same command goes on from there"
    )
    assert set(hub.repos["me/tiny-fp8"].files) == {".gitattributes"}  # nobody sees half a checkpoint
    hub.heal()
    project.run(hub, *TO)
    assert (hub.asked(shard(project, 1)), hub.asked(shard(project, 2))) == (0, 1)


def test_only_what_changed_is_sent_and_what_is_left_over_goes(project: Project, hub: Hub) -> None:
    project.run(hub, *TO)
    earlier = hub.repos["me/tiny-fp8"].files
    old = json.loads(earlier["qserve.json"].data)
    old["files"].append({"name": "model-00003-of-00003.safetensors", "size_bytes": 3, "sha256": "0" * 64})
    files = {name: one.data for name, one in earlier.items()} | {"model-00003-of-00003.safetensors": b"old"}
    files |= {"qserve.json": json.dumps(old).encode(), "config.json": b"{}", "picture.png": b"of the owner"}
    hub.add("me/tiny-fp8", files)
    hub.heal()
    project.run(hub, *TO)
    assert hub.asked("PUT") == 0
    now = hub.repos["me/tiny-fp8"].files
    assert set(files) - set(now) == {"model-00003-of-00003.safetensors"}
    assert now["config.json"].data == (project.folder / "config.json").read_bytes()


# --- the Hub refuses ----------
@pytest.mark.parametrize(
    ("where", "fault", "code", "sentence"),
    [
        ("whoami", {"status": 401}, 8, "the Hub does not know your token, it may have been revoked"),
        ("whoami", {"status": 503}, 8, "the Hub answered 503 for me/tiny-fp8: it is in trouble; run the same command"),
        ("whoami", {"status": 429, "headers": {"Retry-After": "3600"}}, 8, "asks to wait 3,600 s"),
        ("repos/create", {"status": 403}, 8, "your token may not write to me/tiny-fp8"),
        ("preupload", {"status": 404, "headers": {"X-Error-Code": "RepoNotFound"}}, 8, "shows no me/tiny-fp8"),
        ("/commit/", {"status": 413}, 8, "has no room for it"),
        ("batch", {"status": 200, "headers": {"Content-Type": "text/html"}}, 8, "the Hub does not take it for"),
    ],
)
def test_each_refusal_is_one_sentence(
    project: Project, hub: Hub, where: str, fault: dict[str, object], code: int, sentence: str
) -> None:
    hub.fail(where, **fault)
    assert sentence in project.run(hub, *TO, expect=code)


@pytest.mark.parametrize(
    ("where", "fault"),
    [
        ("whoami", {"status": 500}),
        ("whoami", {"status": 429, "headers": {"Retry-After": "1"}}),
        ("PUT", {"status": 500, "headers": {"Retry-After": "0"}}),
        ("PUT", {"after_bytes": 1_000_000}),
        ("/commit/", {"status": 409}),
        ("/commit/", {}),
    ],
)
def test_trouble_that_passes_is_waited_for(project: Project, hub: Hub, where: str, fault: dict[str, object]) -> None:
    hub.fail(where, **fault, times=1)
    project.run(hub, *TO)
    assert hub.asked(where) >= 2
    assert len(hub.repos["me/tiny-fp8"].files) == 11


def test_a_commit_whose_answer_is_lost_is_not_made_again(project: Project, hub: Hub) -> None:
    hub.fail("/commit/", times=1, after_answer=True)
    project.run(hub, *TO)
    assert (hub.asked("/commit/"), len(hub.repos["me/tiny-fp8"].commits)) == (1, 2)


def test_silence_is_bounded(project: Project, hub: Hub) -> None:
    hub.fail("whoami", wait_s=1)
    assert "did not answer in time" in project.run(hub, *TO, expect=8, QSERVE_HUB_TIMEOUT_S="0.3")


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"HF_TOKEN": ""}, "no token: log in"),
        ({"HF_TOKEN": "hf_wrong"}, "the Hub does not know your token"),
        ({"HF_TOKEN": "hf_secret\x01secret"}, "the token holds characters that no token has"),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "the Hub cannot be reached"),
    ],
)
def test_a_wrong_setting_is_named(project: Project, hub: Hub, env: dict[str, str], sentence: str) -> None:
    assert sentence in project.run(hub, *TO, expect=8, **env)
    assert hub.repos == {}


@pytest.mark.parametrize(
    ("account", "sentence"),
    [
        ({"role": "read"}, "your token may only read"),
        ({"role": "fineGrained"}, "your fine-grained token may not write to me/tiny-fp8"),
        ({"orgs": {"lab": "read"}}, "your token may only read, not write to lab"),
    ],
)
def test_write_access_is_checked_before_the_work(project: Project, account: dict[str, object], sentence: str) -> None:
    with hub_stand_in(**account) as hub:
        to = "lab/tiny-fp8" if "orgs" in account else "me/tiny-fp8"
        said = project.run(hub, "fp8", "--to", to, expect=8)
        assert sentence in said
        assert "hashing" not in said
        assert "is no organisation of yours" in project.run(hub, "fp8", "--to", "other/tiny", expect=8)


def test_a_fine_grained_token_with_the_right_may(project: Project) -> None:
    grants = [{"entity": {"type": "user", "name": "me"}, "permissions": ["repo.content.read", "repo.write"]}]
    with hub_stand_in(role="fineGrained", grants=grants) as hub:
        project.run(hub, *TO)


# --- what is there already ----------
def test_another_model_is_never_overwritten(project: Project, hub: Hub) -> None:
    other = project.manifest.model_copy(update={"source_sha256": "f" * 64})
    for files in ({"model.safetensors": b"theirs"}, {"qserve.json": other.model_dump_json().encode(), "a.txt": b"a"}):
        repo = hub.add("me/tiny-fp8", {".gitattributes": b"", **files})
        said = project.run(hub, *TO, "--force", expect=8)
        assert "nothing was changed there: give a new name with --to" in said
        assert "hashing" not in said
        assert len(repo.commits) == 1


def test_what_is_public_is_written_to_only_with_public(project: Project, hub: Hub) -> None:
    hub.add("me/tiny-fp8", {}, private=False)
    assert "is public; say --public" in project.run(hub, *TO, expect=8)
    project.run(hub, *TO, "--public")


def test_published_is_said_only_of_what_is_there(project: Project, hub: Hub) -> None:
    hub.lose = "chat_template.jinja"
    said = project.run(hub, *TO, expect=8)
    assert "does not hold what was sent: chat_template.jinja" in said
    assert "tiny-fp8\n" not in said


# --- what does not deserve it ----------
def refused(project: Project, hub: Hub, reason: str, *words: str) -> None:
    """Refused with the reason; with --force it is published, and the card says so."""
    said = project.run(hub, *TO, *words, expect=3)
    assert f"fp8 is not published: fp8 {reason}" in said
    assert "hashing" not in said
    project.run(hub, *TO, *words, "--force")
    card = hub.repos["me/tiny-fp8"].files["README.md"].data.decode()
    assert "**Published in spite of this:**" in card


def test_what_was_not_measured_is_refused(project: Project, hub: Hub) -> None:
    project.measure(measured_well(), quick=True)
    refused(project, hub, "was not measured: no run holds this very checkpoint")
    assert "**It was not measured**" in hub.repos["me/tiny-fp8"].files["README.md"].data.decode()


def test_what_is_not_faithful_is_refused(project: Project, hub: Hub) -> None:
    bad = {"status": "not faithful", "problem": "2.1 nats away", "points": ()}
    project.measure(measured_well().model_copy(update=bad))
    refused(project, hub, "is not faithful in run 20261130-121500: 2.1 nats away")


def test_what_is_slower_is_refused_for_the_load_it_is_published_for(project: Project, hub: Hub) -> None:
    refused(project, hub, "is slower than bf16 at concurrency 8 (0.71 [0.68, 0.75] times its tokens)",
            "--concurrency", "8")  # fmt: skip
    project.run(hub, *TO, "--concurrency", "1")
    assert "was not compared with bf16 at concurrency 4" in project.run(hub, *TO, "--concurrency", "4", expect=3)
    slow = variant("fp8", "FP8 dynamic", {1: (0.9, 0.85, 0.95), 8: (0.71, 0.68, 0.75)}, 0.0121, 163.2)
    project.measure(slow)
    refused(project, hub, "is slower than bf16 at concurrency 1 (0.90 [0.85, 0.95] times its tokens) and 8")
    project.run(hub, *TO, "--for", "memory")
    assert "published for its size, not for its speed" in hub.repos["me/tiny-fp8"].files["README.md"].data.decode()
    assert point(8, (0.71, 0.68, 0.75)).throughput


def test_unknown_terms_are_refused_until_somebody_names_them(tmp_path: Path, hub: Hub) -> None:
    project = write_project(tmp_path, licence=None)
    project.measure(measured_well())
    refused(project, hub, "has no known licence terms")
    project.run(hub, *TO, "--licence", "mit")
    assert "license: mit" in hub.repos["me/tiny-fp8"].files["README.md"].data.decode()
    assert '"license" must be one of' in project.run(hub, *TO, "--licence", "no-such-licence", expect=8)


def test_files_of_others_are_refused_and_never_sent(project: Project, hub: Hub) -> None:
    (project.folder / "notes.txt").write_text("private")
    refused(project, hub, "has files in its folder that are not its own: notes.txt")
    assert "notes.txt" not in hub.repos["me/tiny-fp8"].files


def test_a_changed_file_is_refused_always(project: Project, hub: Hub) -> None:
    path = project.folder / SHARDS[0]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert "is not the file that was written" in project.run(hub, *TO, "--force", expect=2)
    assert hub.asked("PUT|/commit/") == 0


# --- the source ----------
def test_the_source_is_linked_and_a_gate_is_respected(project: Project, hub: Hub) -> None:
    card = b"---\nlicense: llama3.1\n---\n"
    hub.add("meta/tiny", {"README.md": card}, private=False)
    base = ("--base-model", "meta/tiny")
    project.run(hub, *TO, *base)
    text = hub.repos["me/tiny-fp8"].files["README.md"].data.decode()
    assert "base_model: meta/tiny\n" in text
    assert "base_model_relation: quantized\n" in text
    hub.repos["meta/tiny"].gated = True
    said = project.run(hub, "fp8", "--to", "me/open", *base, "--public", expect=3)
    assert "comes from meta/tiny, which is gated: a public copy goes past that gate" in said
    hub.fail("GET /api/models/meta/tiny", status=403, headers={"X-Error-Code": "GatedRepo"})
    assert "meta/tiny is gated, and your account is not let in" in project.run(hub, *TO, *base, expect=8)
    assert "the Hub shows no meta/tyni" in project.run(hub, *TO, "--base-model", "meta/tyni", expect=8)


# --- all of a recipe ----------
def test_all_variants_go_with_a_collection(project: Project, hub: Hub) -> None:
    for _ in range(2):
        said = project.run(hub, "--all", "--to", "me")
        assert f"fp8\t{hub.url}/me/Tiny-Llama-fp8" in said
        (found,) = hub.collections.values()
        assert [item["id"] for item in found["items"]] == ["me/Tiny-Llama-fp8"]
        assert found["private"]
    project.measure(measured_well(), quick=True)
    said = project.run(hub, "--all", "--to", "me", expect=3)
    assert "0 of 1 variants are published" in said


def test_without_a_name_it_is_what_choose_chooses(project: Project, hub: Hub, tmp_path: Path) -> None:
    """The report knows fp8 as clearly faster at one request, and clearly slower at eight."""
    project.measure(measured_well(), recipe={"choose": {"traffic": {"concurrency": 1}}})
    said = project.run(hub, "--concurrency", "1", "--dry-run", str(tmp_path / "out"))
    assert f"fp8\t{tmp_path}/out" in said
    assert "OWNER/Tiny-Llama-fp8" in (tmp_path / "out" / "README.md").read_text()
    sound = report([measured_well()], (1, 8)).baseline.model_copy(update={"fidelity": measured_well().fidelity})
    project.measure(measured_well(), recipe={"choose": {"traffic": {"concurrency": 8}}}, baseline=sound)
    assert "bf16 is the source itself" in project.run(hub, "--dry-run", str(tmp_path / "other"), expect=3)
    project.measure(measured_well(), quick=True)
    assert "`qserve choose` says more" in project.run(hub, "--dry-run", str(tmp_path / "other"), expect=3)
    assert not (tmp_path / "other").exists()
    assert hub.sent == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("fp8",), "give OWNER/NAME"),
        (("fp8", "--to", "tiny"), "give OWNER/NAME"),
        (("fp8", "--all", "--to", "me"), "name one variant, or give --all"),
        (("fp8", "--to", "me/tiny--fp8"), "give OWNER/NAME"),
        (("fp8", "--to", "me/tiny.git"), "give OWNER/NAME"),
        (("fp8", "--to", "me/tïny"), "give OWNER/NAME"),
        (("--all", "--to", "me/tiny"), "give the owner alone"),
        (("bf16", "--to", "me/tiny"), "bf16 is the source itself"),
        (("fp9", "--to", "me/tiny"), "no variant 'fp9'"),
        (("fp8@vllm", "--to", "me/tiny"), "the checkpoint fp8 served by vllm; a checkpoint goes by its variant's name"),
        ((*TO, "--licence", "Apache 2"), "give an id such as apache-2.0"),
        ((*TO, "--base-model", "me/tiny-fp8"), "the source is never overwritten"),
    ],
)
def test_bad_words_are_named_at_once(project: Project, hub: Hub, words: tuple[str, ...], sentence: str) -> None:
    assert sentence in project.run(hub, *words, expect=2)
    assert hub.sent == []
