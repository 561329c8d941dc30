"""Screenshots of a report page at 400, 1000 and 1600 pixels, light and dark, and a check of its
layout at each width.

    python scripts/screenshot_report.py REPORT [--output FOLDER] [--widths 400 1000 1600]
    [--no-pictures]

REPORT is the folder of a report or its report.html. The pictures are FOLDER/WIDTH-light.png and
FOLDER/WIDTH-dark.png. The check lays the page out in the browser and measures it: the page must not
be wider than the window, and each number of a table must be on one line. The exit code is 1 if it
fails, and 2 without a browser of the Chromium family.
"""

import argparse
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from emp_llm.common.errors import count_of

_BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "microsoft-edge",
    "brave-browser",
    "chrome",
)
_MOST_HEIGHT = 16_000  # pixels of a picture
_SECONDS = 120
# The report is laid out in a frame of the exact width, because a window has a least width. Its
# policy allows no scripts, so the script that measures it is outside. An element that is wider than
# the page inside of a scrolling box is no problem.
_WRAPPER = """<!DOCTYPE html><meta charset="utf-8"><body style="margin: 0">
<iframe id="page" style="border: 0; width: {width}px; height: 900px" srcdoc="{page}"></iframe>
<pre id="found"></pre>
<script>
const lines = (each) => {{
  const range = document.createRange(); range.selectNodeContents(each);
  return new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size;
}};
addEventListener("load", () => {{
  const page = document.getElementById("page").contentDocument, root = page.documentElement, problems = [];
  if (root.scrollWidth > {width}) {{
    const wide = [...page.body.querySelectorAll("*")].filter(
      (each) => !each.parentElement.closest(".wide") && each.getBoundingClientRect().right > {width} + 1);
    const names = wide.slice(0, 3).map((each) => each.tagName.toLowerCase()).join(", ");
    problems.push(`the page is ${{root.scrollWidth}} pixels wide (${{names || "unknown element"}})`);
  }}
  for (const cell of page.querySelectorAll("td:not(.text)"))
    if (lines(cell) > 1) problems.push(`broken across lines: "${{cell.textContent}}"`);
  document.getElementById("found").textContent = JSON.stringify({{height: root.scrollHeight, problems}});
}});
</script>
"""


@dataclass(frozen=True)
class Layout:
    """The height of the page at a width, and what is wrong with it there."""

    height: int
    problems: list[str]


class Browser:
    """A browser without a window.

    Args:
        program: its path.
    """

    def __init__(self, program: str) -> None:
        self._line = [
            program,
            "--headless=new",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
        ]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            # Its sandbox does not run as root; the page is our own.
            self._line.append("--no-sandbox")

    def layout(self, page: str, width: int) -> Layout:
        """Measure a page at a width."""
        text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
        with tempfile.TemporaryDirectory() as folder:
            wrapper = Path(folder) / "wrapper.html"
            wrapper.write_text(
                _WRAPPER.format(width=width, page=html.escape(text)), encoding="utf-8"
            )
            told = self._run(
                f"--window-size={max(width, 1200)},900", "--dump-dom", wrapper.as_uri()
            )
        found = re.search(r'<pre id="found">(.*?)</pre>', told, re.DOTALL)
        if found is None or not found.group(1):
            sys.exit("the browser did not lay out the page")
        values = json.loads(html.unescape(found.group(1)))
        return Layout(values["height"], values["problems"])

    def picture(self, page: Path, width: int, height: int, dark: bool, file: Path) -> None:
        """Save a screenshot."""
        scheme = [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
        size = f"--window-size={width},{min(height, _MOST_HEIGHT)}"
        self._run(size, *scheme, f"--screenshot={file}", page.resolve().as_uri())
        if not file.is_file():
            sys.exit(f"the browser wrote no {file}")

    def _run(self, *options: str) -> str:
        with tempfile.TemporaryDirectory() as profile:
            line = [*self._line, f"--user-data-dir={profile}", *options]
            return subprocess.run(
                line, capture_output=True, text=True, check=False, timeout=_SECONDS
            ).stdout


def find_browser() -> str | None:
    """The first browser of the Chromium family on PATH."""
    return next((found for name in _BROWSERS if (found := shutil.which(name))), None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path, help="folder of a report, or its report.html")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("screenshots"),
        help="folder for the pictures (default: screenshots)",
    )
    parser.add_argument(
        "--widths", type=int, nargs="+", default=[400, 1000, 1600], help="of the window, in pixels"
    )
    parser.add_argument("--no-pictures", action="store_true", help="only check the layout")
    options = parser.parse_args()
    page = options.report / "report.html" if options.report.is_dir() else options.report
    if not page.is_file():
        parser.error(f"{page}: no such file; give the folder of a report")
    program = find_browser()
    if program is None:
        parser.error(
            "there is no browser of the Chromium family on PATH; install one, for "
            "example: apt-get install chromium"
        )
    if not options.no_pictures:
        options.output.mkdir(parents=True, exist_ok=True)
    browser = Browser(program)
    text = page.read_text(encoding="utf-8")
    wrong = 0
    for width in options.widths:
        layout = browser.layout(text, width)
        for problem in layout.problems:
            print(f"{width} px: {problem}")
        wrong += len(layout.problems)
        for dark in () if options.no_pictures else (False, True):
            file = options.output / f"{width}-{'dark' if dark else 'light'}.png"
            browser.picture(page, width, layout.height, dark, file)
        print(f"{width} px: {layout.height} px high, {count_of(len(layout.problems), 'problem')}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
