"""A client of the loopback Hub in a process of its own, because huggingface_hub reads the Hub's
address when it is imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from hub_server import Hub
from launch import words_of


def environment(endpoint: str, home: Path, token: str | None, **more: str) -> dict[str, str]:
    """The environment of a process that uses a loopback Hub and nothing of the user's."""
    clean = {
        key: value
        for key, value in os.environ.items()
        if key not in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_DATASETS_CACHE")
    }
    clean |= {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "COLUMNS": "200",
    }
    return clean | ({"HF_TOKEN": token} if token else {}) | more


class Client:
    """Functions of emp_llm, called by name in one process that lives as long as this object.

    Args:
        endpoint: address of the Hub.
        home: its cache.
        token: of the user.
        more: further environment variables.
    """

    def __init__(self, endpoint: str, home: Path, token: str, **more: str) -> None:
        self._token = token
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("hub_process.py"))],
            env=environment(endpoint, home, token, **more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def call(self, function: str, token: str | None = "", /, **arguments: Any) -> dict[str, Any]:
        """The "result" of a function, or the sentence of its UserError ("error"), and the
        messages that it logged ("log").
        """
        assert self._process.stdin is not None
        changes = {"HF_TOKEN": self._token if token == "" else token}
        print(
            json.dumps([function, arguments, changes], default=str),
            file=self._process.stdin,
            flush=True,
        )
        line = self._process.stdout.readline()
        for secret in (self._token, token):
            assert not secret or secret not in line, "a token was shown"
        answer = json.loads(line)
        assert "broken" not in answer, answer["broken"]
        return answer

    def command(self, folder: Path, *line: object) -> tuple[int, str, str]:
        """Exit code, output and messages of a command line that runs in a folder."""
        done = self.call("command", line=words_of(*line), folder=folder)["result"]
        return done["code"], done["out"], done["err"]

    def succeed(self, folder: Path, *line: object) -> str:
        """The output of a command line that ends well."""
        code, out, err = self.command(folder, *line)
        assert code == 0, err
        return out

    def close(self) -> None:
        self._process.communicate(timeout=30)  # closes both ends


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by its path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def held(hub: Hub, name: str, branch: str = "main") -> dict[str, bytes]:
    """Every file of a repository but the Hub's own."""
    files = dict(hub.repositories[name].head(branch).files)
    del files[".gitattributes"]
    return files


def card_of(hub: Hub, name: str) -> tuple[dict[str, Any], str]:
    """Metadata and text of a repository's model card."""
    _, metadata, body = hub.repositories[name].head().files["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(metadata), body


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))
