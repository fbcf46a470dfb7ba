"""The page in a real browser: nothing wider than the window, a silent console. Needs chromium."""

import re
import shutil
import subprocess
from html import escape
from pathlib import Path

import pytest
import sample_report as sample

from qserve.eval.report import to_html

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --enable-logging=stderr "
    "--virtual-time-budget=3000 --window-size=1600,1200"
)
WIDTHS = (390, 1440)
KINDS = ("slow_fp8", "with_failures", "six_variants")
MEASURE = """<script>onload = () => { for (const frame of document.querySelectorAll("iframe")) {
  const inside = frame.contentDocument, style = frame.contentWindow.getComputedStyle(inside.body);
  const charts = [...inside.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect().width);
  frame.title = [inside.documentElement.scrollWidth, Math.min(...charts), style.backgroundColor].join("; ");
  frame.removeAttribute("srcdoc"); } }</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
@pytest.mark.parametrize(("scheme", "paper"), [("1", "rgb(255, 255, 255)"), ("0", "rgb(20, 23, 26)")])
def test_the_page_fits_its_window_and_the_console_is_silent(tmp_path: Path, scheme: str, paper: str) -> None:
    """Each page stands in a frame of the width to test, because a headless window has a least width of its own."""
    pages = [(width, to_html(sample.ALL[kind]())) for kind in KINDS for width in WIDTHS]
    frames = "".join(
        f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{escape(page)}"></iframe>'
        for width, page in pages
    )
    outer = tmp_path / "frames.html"
    outer.write_text(f"<!doctype html><meta charset=utf-8>{MEASURE}{frames}", encoding="utf-8")
    assert CHROMIUM
    command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", outer.as_uri()]
    command.insert(-1, f"--blink-settings=preferredColorScheme={scheme}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    seen = re.findall(r'title="(\d+); ([\d.]+); (rgb\([\d, ]+\))"', done.stdout)
    assert len(seen) == len(pages) == 6
    for (width, _), (across, narrowest_chart, background) in zip(pages, seen, strict=True):
        assert int(across) <= width
        assert float(narrowest_chart) > 300
        assert background == paper
    assert "CONSOLE" not in done.stderr, done.stderr
