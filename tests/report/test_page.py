"""The page and the figures: self-contained, light and dark, readable on a phone."""

import re
import shutil
import subprocess

import numpy as np
import pytest

from tests.report.test_measures import tool_chats
from xlength.cli import main
from xlength.report.drawing import COLOURS

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A page and PNG files of signed lengths with a giant and a zero."""
    folder = tmp_path_factory.mktemp("page")
    lengths = np.append(tool_chats(3000), [0, 30_000])
    lengths[::3] *= -1
    np.save(folder / "a <lengths>.npy", lengths)
    command = ["report", str(folder / "a <lengths>.npy"), "--world-size", "4", "--batch-size", "8"]
    outputs = ["--html", str(folder / "r.html"), "--png", str(folder / "png")]
    assert main([*command, *outputs]) == 0
    return folder


def test_the_page_needs_nothing_else(made):
    text = (made / "r.html").read_text()
    links = set(re.findall(r"https?://[\w./]+", text))
    assert all(link.startswith("http://www.w3.org/") for link in links)  # names of SVG
    assert "<script" not in text and "src=" not in text and "@import" not in text
    assert "a &lt;lengths&gt;.npy" in text and "a <lengths>" not in text
    assert len(text) < 600_000


def test_names_in_the_page_are_unique_and_resolved(made):
    text = (made / "r.html").read_text()
    names = re.findall(r'\bid="([^"]+)"', text)
    assert len(names) == len(set(names)) > 50
    used = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text)
    assert used and {a or b for a, b in used} <= set(names)


def test_every_colour_follows_the_readers_scheme(made):
    text = (made / "r.html").read_text()
    figures = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert figures.count("<svg") == 4
    assert not set(re.findall(r"#[0-9a-f]{6}\b", figures)) - {"#000000"}
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL).group(1)
    for name in COLOURS:
        assert style.count(f"--{name}:") == 2  # light, dark
    for name in ("ink", "muted", "grid", "surface", "c1", "c2", "c3"):
        assert f"var(--{name})" in figures
    assert "prefers-color-scheme: dark" in style


def test_the_page_shows_the_choice_the_warnings_and_every_strategy(made):
    text = (made / "r.html").read_text()
    for words in ("LengthGroupedSampler", "FixedBatch", "train_dataloader.update(", "prefers"):
        assert words in text
    assert "of length zero, first at row 3000" in text
    assert "alone decides how large a batch" in text
    assert "with images" in text  # the histogram's legend


def test_figures_are_written_as_png(made):
    files = sorted(file.name for file in (made / "png").iterdir())
    assert files == ["epoch.png", "lengths.png", "strategies.png", "window.png"]
    for file in (made / "png").iterdir():
        data = file.read_bytes()
        assert data.startswith(b"\x89PNG") and 5_000 < len(data) < 150_000


@pytest.mark.long
@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here")
@pytest.mark.parametrize("width", [380, 760, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_chromium_nothing_overflows_and_nothing_is_reported(made, width, scheme, tmp_path):
    # In a frame, since a window cannot be as narrow as a phone.
    page = tmp_path / "frame.html"
    page.write_text(
        f"<iframe src={(made / 'r.html').as_uri()!r} width={width} height=2000 frameborder=0>"
        "</iframe><script>addEventListener('load', () => {"
        "const w = frames[0], d = w.document.documentElement;"
        "const wide = [...d.querySelectorAll('body *')].filter(e =>"
        " !e.closest('pre, .scroll, svg') && e.getBoundingClientRect().right > w.innerWidth + 1);"
        "document.body.setAttribute('data-found', [w.innerWidth, d.scrollWidth, wide.length,"
        " w.getComputedStyle(w.document.body).backgroundColor].join('|'));"
        "});</script>"
    )
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            "--allow-file-access-from-files",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1400,2200",
            f"--blink-settings=preferredColorScheme={1 if scheme == 'light' else 0}",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r'data-found="([^"]*)"', done.stdout).group(1).split("|")
    inner, scroll, overflowing, background = int(found[0]), int(found[1]), int(found[2]), found[3]
    assert inner == width
    assert scroll <= inner and overflowing == 0
    assert background == ("rgb(245, 247, 250)" if scheme == "light" else "rgb(15, 18, 24)")
    assert "CONSOLE" not in done.stderr
