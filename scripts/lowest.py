"""The lowest versions that pyproject.toml allows, one `name==version` a line: constraints for
`make test-oldest`.

    python scripts/lowest.py [--extra dev]

Tools that only check or build (ruff, mypy, hatchling, pytest) are not constrained.
"""

import argparse
import re
import tomllib
from pathlib import Path

TOOLS = ("ruff", "mypy", "hatchling", "pytest", "pytest-xdist", "hypothesis")


def lowest(extra: str) -> list[str]:
    """The constraints of the dependencies and of one extra."""
    project = tomllib.loads(
        (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    )["project"]
    found = [
        re.match(r"([\w.-]+)>=([\w.]+)", line)
        for line in project["dependencies"] + project["optional-dependencies"][extra]
    ]
    return [
        f"{match[1]}=={match[2]}" for match in found if match is not None and match[1] not in TOOLS
    ]


def main() -> None:
    """Print the constraints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--extra", default="dev", help="the extra; default: dev")
    print("\n".join(lowest(parser.parse_args().extra)))


if __name__ == "__main__":
    main()
