"""A loopback server that speaks the Hub's HTTP protocol as huggingface_hub uses it: models and data
sets are downloaded from it, repositories made, large files uploaded, commits and branches made. It
has no xet: run clients with HF_HUB_DISABLE_XET=1.
"""

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml

COMMIT = "0123456789abcdef0123456789abcdef01234567"  # of repositories that are folders
# What a new repository's .gitattributes gives to LFS.
LARGE = (".safetensors", ".bin", ".png", ".gguf")
ATTRIBUTES = "".join(
    f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LARGE
).encode()


class Refused(Exception):
    """An answer other than 200: status, code and message as the Hub puts them into headers and
    body.
    """

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


@dataclass(frozen=True)
class User:
    """Whom a token stands for."""

    name: str
    role: str = "write"
    organizations: tuple[str, ...] = ()


@dataclass(frozen=True)
class Commit:
    """A state of all files."""

    oid: str
    title: str
    files: dict[str, bytes]


@dataclass
class Repository:
    """Branches, newest commit last, and the large files that were uploaded, committed or not."""

    name: str
    private: bool = False
    branches: dict[str, list[Commit]] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def at(self, revision: str) -> Commit:
        """The commit that a branch or an id names."""
        if revision in self.branches:
            return self.branches[revision][-1]
        for commits in self.branches.values():
            for commit in commits:
                if commit.oid == revision:
                    return commit
        raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def head(self, branch: str = "main") -> Commit:
        return self.branches[branch][-1]

    def commit(self, branch: str, header: dict[str, str], lines: list[dict[str, object]]) -> Commit:
        """Add a commit: files and deletions as the lines of the commit endpoint's body have
        them, decoded.
        """
        with self.lock:
            if branch not in self.branches:
                raise Refused(404, f"Invalid rev id: {branch}", "RevisionNotFound")
            last = self.head(branch)
            if header.get("parentCommit", last.oid) != last.oid:
                raise Refused(412, "A commit has happened since. Please refresh and try again.")
            files = dict(last.files)
            for line in lines:
                _apply(line["key"], line["value"], files, self.large)  # type: ignore[arg-type]
            oid = hashlib.sha1(
                f"{last.oid} {header['summary']} {len(self.branches[branch])}".encode()
            ).hexdigest()
            self.branches[branch].append(Commit(oid, header["summary"], files))
            return self.head(branch)


def _apply(
    key: str, value: dict[str, object], files: dict[str, bytes], large: dict[str, bytes]
) -> None:
    path = str(value["path"])
    if key == "file":
        files[path] = value["content"]  # type: ignore[assignment]
    elif key == "lfsFile":
        if value["oid"] not in large:
            raise Refused(400, f"LFS pointer of {path} points to an object that was never uploaded")
        files[path] = large[str(value["oid"])]
    elif key == "deletedFile":
        if path not in files:
            raise Refused(404, "A file with this name doesn't exist", "EntryNotFound")
        del files[path]
    else:
        raise Refused(400, f"unknown line {key!r}")


def repository_of(name: str, folder: Path) -> Repository:
    """A repository with the files of a folder, in one commit."""
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return Repository(name, branches={"main": [Commit(COMMIT, "files", files)]})


def new_repository(name: str, private: bool) -> Repository:
    """As the Hub makes one: with a .gitattributes."""
    first = Commit(
        hashlib.sha1(name.encode()).hexdigest(), "initial commit", {".gitattributes": ATTRIBUTES}
    )
    return Repository(name, private, {"main": [first]})


def is_large(path: str, size: int) -> bool:
    """Whether the Hub wants a file by LFS."""
    return size > 0 and (path.endswith(LARGE) or size > 10_000_000)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def blob_id(content: bytes) -> str:
    """Git's name of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def entry(path: str, content: bytes) -> dict[str, object]:
    """A file as a tree lists it."""
    listed = {
        "type": "file",
        "path": path,
        "size": len(content),
        "oid": blob_id(content),
    }
    if is_large(path, len(content)):
        pointer = (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256(content)}\nsize "
            f"{len(content)}\n"
        ).encode()
        listed |= {
            "oid": blob_id(pointer),
            "lfs": {"oid": sha256(content), "size": len(content), "pointerSize": len(pointer)},
        }
    return listed


TOKEN = "hf_notarealtokennotarealtoken"
CUT = 0  # a status that is none: the connection is closed without an answer


@dataclass
class Fault:
    """An answer in place of the right one, for requests that match, so many times.

    Attributes:
        done: what was asked is done before it is answered so.
        reached: set when a request has come that far.
        hold: the answer waits until the server stops.
    """

    method: str
    pattern: str
    status: int = 503
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    done: bool = False
    hold: bool = False
    reached: threading.Event = field(default_factory=threading.Event)


@dataclass
class Hub:
    """What the server holds and what it was asked.

    Attributes:
        asked: paths, unquoted, without queries.
        put: SHA-256 of the large files whose bytes were received.
        seen: bodies of all requests but uploads of large files, and all headers but Authorization.
    """

    repositories: dict[str, Repository]
    users: dict[str, User]
    gated: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    endpoint: str = ""
    asked: list[str] = field(default_factory=list)
    put: list[str] = field(default_factory=list)
    seen: list[bytes] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def fail(self, method: str, pattern: str, status: int = 503, **more: Any) -> Fault:
        """Have the next matching request, or more of them, answered wrongly."""
        self.faults.append(Fault(method, pattern, status, **more))
        return self.faults[-1]

    def fault(self, method: str, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.times and fault.method == method and re.search(fault.pattern, path):
                fault.times -= 1
                return fault
        return None

    def reader(self, name: str, token: str | None) -> Repository:
        """A repository that a token may read."""
        user = self._user(token)
        if name in self.gated:
            raise Refused(403, "Access to model is restricted", "GatedRepo")
        repository = self.repositories.get(name)
        if repository is None or (repository.private and not _may(user, name)):
            raise Refused(404, "Repository not found", "RepoNotFound")
        return repository

    def writer(self, name: str, token: str | None) -> Repository:
        """A repository that a token may write."""
        self.permit(name, token)
        return self.reader(name, token)

    def permit(self, name: str, token: str | None) -> User:
        user = self._user(token)
        if user is None:
            raise Refused(401, "Invalid username or password.")
        if user.role == "read" or not _may(user, name):
            raise Refused(403, f"You don't have the rights to write to {name}.")
        return user

    def _user(self, token: str | None) -> User | None:
        if token is not None and token not in self.users:
            raise Refused(401, "Invalid credentials in Authorization header")
        return self.users.get(token or "")


def _may(user: User | None, name: str) -> bool:
    return user is not None and name.partition("/")[0] in (user.name, *user.organizations)


@contextmanager
def hub_server(
    repositories: dict[str, Path] | None = None,
    gated: tuple[str, ...] = (),
    users: dict[str, User] | None = None,
) -> Iterator[Hub]:
    """Serve folders as repositories, of models and of data sets alike, and what is pushed; for a
    while.
    """
    made = {name: repository_of(name, folder) for name, folder in (repositories or {}).items()}
    hub = Hub(made, {TOKEN: User("user")} if users is None else users, gated)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.stopped.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def _serve(self) -> None:
        address, _, self.query = self.path.partition("?")
        parts = [unquote(part) for part in address.strip("/").split("/")]
        path = "/" + "/".join(parts)
        self.hub.asked.append(path)
        self.body = self._read()
        headers = "\n".join(
            f"{key}: {value}"
            for key, value in self.headers.items()
            if key.lower() != "authorization"
        )
        self.hub.seen += [headers.encode(), b"" if self.command == "PUT" else self.body]
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        self.token = token if scheme == "Bearer" else None
        fault = self.hub.fault(self.command, path)
        if fault is None or fault.done:
            try:
                answer = self._route(parts)
            except Refused as error:
                answer = (
                    error.status,
                    {"error": error.message},
                    {"X-Error-Code": error.code, "X-Error-Message": error.message},
                )
        if fault is not None:
            fault.reached.set()
            if fault.hold:
                self.hub.stopped.wait()
            if fault.hold or fault.status == CUT:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            answer = fault.status, fault.body, fault.headers
        self._answer(*answer)

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            chunks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length", "0")))

    def _answer(self, status: int, content: object, headers: dict[str, str]) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(raw)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def _route(self, parts: list[str]) -> tuple[int, object, dict[str, str]]:
        if parts[0] == "datasets":  # files of data sets: the same addresses, one step deeper
            parts = parts[1:]
        if parts[:2] in (["api", "models"], ["api", "datasets"]) and len(parts) >= 4:
            return self._repository("/".join(parts[2:4]), parts[4:])
        if parts[0] == "api":
            return self._account("/".join(parts[1:]))
        if parts[2:] == ["info", "lfs", "objects", "batch"]:
            return 200, self._batch("/".join(parts[:2]).removesuffix(".git")), {}
        if parts[0] == "lfs":
            return self._large("/".join(parts[1:3]), parts[3], parts[4:])
        if len(parts) > 4 and parts[2] == "resolve":
            return self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        raise Refused(404, f"no such page: {self.path}")

    def _account(self, what: str) -> tuple[int, object, dict[str, str]]:
        if what == "whoami-v2":
            user = self.hub.users.get(self.token or "")
            if user is None:
                raise Refused(401, "Invalid username or password.")
            organizations = [{"name": name} for name in user.organizations]
            token = {"displayName": "test", "role": user.role}
            return (
                200,
                {
                    "type": "user",
                    "name": user.name,
                    "orgs": organizations,
                    "auth": {"accessToken": token},
                },
                {},
            )
        if what not in ("validate-yaml", "repos/create"):  # telemetry, for one
            raise Refused(404, f"no such page: {self.path}")
        asked = json.loads(self.body)
        if what == "validate-yaml":
            metadata = yaml.safe_load(asked["content"].split("---\n")[1])
            if not isinstance(metadata, dict):
                raise Refused(400, "metadata is not a mapping")
            return 200, {"errors": [], "warnings": []}, {}
        name = f"{asked['organization']}/{asked['name']}"
        self.hub.permit(name, self.token)
        about = {"url": f"{self.hub.endpoint}/{name}", "name": name}
        if name in self.hub.repositories:
            return 409, about | {"error": "You already created this model repo"}, {}
        # The client's older versions ask so.
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.repositories[name] = new_repository(name, private)
        return 200, about, {}

    def _repository(self, name: str, rest: list[str]) -> tuple[int, object, dict[str, str]]:
        if rest[:1] in (["preupload"], ["commit"], ["branch"]):
            return (
                200,
                self._write(self.hub.writer(name, self.token), rest[0], "/".join(rest[1:])),
                {},
            )
        repository = self.hub.reader(name, self.token)
        if rest[:1] == ["refs"]:
            refs = [
                {"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": commits[-1].oid}
                for branch, commits in repository.branches.items()
            ]
            return 200, {"branches": refs, "tags": [], "converts": []}, {}
        if rest and rest[0] not in ("revision", "tree", "paths-info"):  # xet, for one
            raise Refused(404, f"no such page: {self.path}")
        commit = repository.at(rest[1] if len(rest) > 1 else "main")
        if rest[:1] == ["tree"]:
            return 200, self._tree(commit, "/".join(rest[2:])), {}
        if rest[:1] == ["paths-info"]:
            return (
                200,
                [
                    entry(path, commit.files[path])
                    for path in json.loads(self.body)["paths"]
                    if path in commit.files
                ],
                {},
            )
        about = {
            "id": name,
            "sha": commit.oid,
            "private": repository.private,
            "tags": [],
            "downloads": 0,
            "likes": 0,
        }
        about["siblings"] = [{"rfilename": path} for path in sorted(commit.files)]
        card = commit.files.get("README.md", b"").decode().split("---\n")
        if len(card) > 2:
            about["cardData"] = yaml.safe_load(card[1])
        return 200, about, {}

    def _tree(self, commit: Commit, under: str) -> list[dict[str, object]]:
        prefix = f"{under}/" if under else ""
        inside = [path for path in sorted(commit.files) if path.startswith(prefix)]
        if not inside:
            raise Refused(404, f"{under} does not exist", "EntryNotFound")
        folders = {
            str(parent) for path in inside for parent in Path(path[len(prefix) :]).parents
        } - {"."}
        deep = "recursive=true" in self.query.lower()
        listed = [
            {"type": "directory", "path": prefix + folder, "oid": blob_id(folder.encode())}
            for folder in sorted(folders)
            if deep or "/" not in folder
        ]
        return listed + [
            entry(path, commit.files[path])
            for path in inside
            if deep or "/" not in path[len(prefix) :]
        ]

    def _write(self, repository: Repository, what: str, revision: str) -> object:
        if what == "branch":
            if revision in repository.branches:
                raise Refused(409, "Reference already exists")
            start = json.loads(self.body).get("startingPoint", "main")
            repository.branches[revision] = [repository.at(start)]
            return {}
        if what == "preupload":
            files = repository.at(revision).files
            return {
                "files": [
                    self._upload_mode(asked, files) for asked in json.loads(self.body)["files"]
                ]
            }
        lines = [json.loads(line) for line in self.body.splitlines()]
        for line in lines:
            if line["key"] == "file":
                line["value"]["content"] = base64.b64decode(line["value"]["content"])
        commit = repository.commit(revision, lines[0]["value"], lines[1:])
        return {
            "commitUrl": f"{self.hub.endpoint}/{repository.name}/commit/{commit.oid}",
            "commitOid": commit.oid,
        }

    def _upload_mode(self, asked: dict[str, Any], files: dict[str, bytes]) -> dict[str, object]:
        path = asked["path"]
        large = is_large(asked["path"], asked["size"])
        answer = {"path": path, "uploadMode": "lfs" if large else "regular"}
        if path in files:
            answer["oid"] = sha256(files[path]) if large else blob_id(files[path])
        return answer | {"shouldIgnore": path in self.hub.ignored}

    def _batch(self, name: str) -> object:
        repository = self.hub.writer(name, self.token)
        return {
            "transfer": "basic",
            "objects": [
                self._object(repository, each) for each in json.loads(self.body)["objects"]
            ],
        }

    def _object(self, repository: Repository, asked: dict[str, Any]) -> dict[str, object]:
        oid = asked["oid"]
        answer = {"oid": oid, "size": asked["size"]}
        if oid in repository.large:
            return answer
        # as for a store with signed addresses: who has the address may write
        address = f"{self.hub.endpoint}/lfs/{repository.name}/{oid}"
        upload = {"href": f"{address}?signature=secret"}
        return answer | {"actions": {"upload": upload, "verify": {"href": f"{address}/verify"}}}

    def _large(self, name: str, oid: str, rest: list[str]) -> tuple[int, object, dict[str, str]]:
        repository = self.hub.repositories[name]
        if rest == ["verify"]:
            if len(repository.large.get(oid, b"")) != json.loads(self.body)["size"]:
                raise Refused(404, "object does not exist")
        elif sha256(self.body) != oid:
            raise Refused(400, "content does not have this SHA-256")
        else:
            repository.large[oid] = self.body
            self.hub.put.append(oid)
        return 200, {}, {}

    def _file(self, name: str, revision: str, path: str) -> tuple[int, object, dict[str, str]]:
        commit = self.hub.reader(name, self.token).at(revision)
        if path not in commit.files:
            raise Refused(404, f"{path} does not exist", "EntryNotFound")
        content = commit.files[path]
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{blob_id(content)}"'}
        if is_large(path, len(content)):
            headers |= {"X-Linked-Etag": f'"{sha256(content)}"', "X-Linked-Size": str(len(content))}
        first, last = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")
        if "Range" not in self.headers:
            return 200, content, headers
        end = int(last) + 1 if last else len(content)
        headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(content)}"
        return 206, content[int(first) : end], headers
