"""A loopback server that speaks the part of the Hub's HTTP protocol that downloading models and data sets needs."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub_server(repositories: dict[str, Path], gated: tuple[str, ...] = ()) -> Iterator[tuple[str, list[str]]]:
    """Serve folders as repositories, of models and of data sets alike; yields the endpoint and the
    paths that were asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            """paths-info: which of the named files there are."""
            asked.append(path := unquote(self.path))
            parts = path.strip("/").split("/")
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            folder = repositories.get("/".join(parts[2:4]), Path("/nowhere"))
            self._json([_entry(folder, folder / name) for name in body["paths"] if (folder / name).exists()])

        def do_GET(self) -> None:
            path = unquote(self.path.partition("?")[0])
            asked.append(path)
            parts = path.strip("/").split("/")
            if parts[0] == "datasets":  # files of data sets: the same addresses, one step deeper
                parts = parts[1:]
            if parts[:2] in (["api", "models"], ["api", "datasets"]) and len(parts) >= 4:
                self._repository("/".join(parts[2:4]), parts[4:])
            elif len(parts) > 4 and parts[2] == "resolve":
                self._file("/".join(parts[:2]), Path(*parts[4:]))
            else:
                self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

        def _repository(self, name: str, rest: list[str]) -> None:
            if name in gated:
                return self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
            if name not in repositories:
                return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
            if rest[:1] == ["revision"] and rest[1:] not in (["main"], [COMMIT]):
                return self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            files = sorted(path for path in repositories[name].rglob("*") if path.is_file())
            names = [str(path.relative_to(repositories[name])) for path in files]
            if rest[:1] == ["tree"]:
                under = repositories[name].joinpath(*rest[2:])
                if not under.is_dir():
                    return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
                found = under.rglob("*") if "recursive=true" in self.path.lower() else under.iterdir()
                return self._json([_entry(repositories[name], path) for path in sorted(found)])
            about = {"id": name, "sha": COMMIT, "private": False, "tags": [], "downloads": 0, "likes": 0}
            about["siblings"] = [{"rfilename": n} for n in names]
            return self._json(about)

        def _json(self, value: object) -> None:
            self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _file(self, name: str, relative: Path) -> None:
            path = repositories.get(name, Path("/nowhere")) / relative
            if not path.is_file():
                return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            content = path.read_bytes()
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
            return self._answer(200, content, headers)

        def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def _entry(folder: Path, path: Path) -> dict[str, object]:
    name = str(path.relative_to(folder))
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": _sha(name)}
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": _sha(name)}


def _sha(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()
