"""Print the argument of pip that takes torch's build for CPUs: on Linux without an NVIDIA card,
where no setting of pip says where packages come from, and torch's index for CPUs answers within
three seconds; else nothing.

    python scripts/torch_index.py

The Makefile hands it to pip. Which build it takes goes to standard error.
"""

import argparse
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

INDEX = "https://download.pytorch.org/whl/cpu"
# Of the driver; in WSL, only the last one is there.
CARD = ("/dev/nvidiactl", "/proc/driver/nvidia", "/usr/lib/wsl/lib/nvidia-smi")
SECONDS = 3


def main(line: list[str] | None = None) -> None:
    """Print the argument, or nothing."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(line)
    if sys.platform != "linux" or any(Path(path).exists() for path in CARD):
        return
    settings = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    if settings.returncode or re.search("index|find-links", settings.stdout):
        return
    with suppress(OSError), urlopen(f"{INDEX}/torch/", timeout=SECONDS):
        print(f"No NVIDIA card: taking torch for CPUs from {INDEX}.", file=sys.stderr)
        print(f"--extra-index-url {INDEX}")


if __name__ == "__main__":
    main()
