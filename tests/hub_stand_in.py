"""A Hub on loopback that speaks the upload and download protocol of huggingface_hub, and fails where it is told to.

with hub_stand_in() as hub:       # HF_ENDPOINT=hub.url, HF_TOKEN=hub.token, HF_HUB_DISABLE_XET=1
    hub.fail("PUT /_lfs", status=500, times=2)
"""

import base64
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

LICENCES = ("apache-2.0", "mit", "llama3.1", "other")
LARGE_BYTES = 1_000_000


@dataclass(frozen=True)
class Blob:
    """One file of a commit. Large ones lie in the store, by sha256."""

    data: bytes
    large: bool

    def listed(self, path: str) -> dict[str, Any]:
        pointer = b"blob %d\0" % len(self.data) + (b"" if self.large else self.data)
        item: dict[str, Any] = {"type": "file", "path": path, "size": len(self.data)}
        item["oid"] = hashlib.sha1(pointer).hexdigest()
        if self.large:
            item["lfs"] = {"oid": sha256(self.data), "size": len(self.data), "pointerSize": 134}
        return item


@dataclass
class Repo:
    private: bool = True
    gated: bool = False
    commits: list[dict[str, Blob]] = field(default_factory=lambda: [{}])
    fixed_head: str | None = None

    @property
    def head(self) -> str:
        return self.fixed_head or f"{len(self.commits):040x}"

    @property
    def files(self) -> dict[str, Blob]:
        return self.commits[-1]


@dataclass
class Fault:
    """What to do with the requests that match, the next `times` of them."""

    where: str  # regular expression on "METHOD /path"
    status: int = 0  # 0: cut the connection
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 1_000
    after_bytes: int = 0  # of the body that are read first
    after_answer: bool = False  # do what is asked, and cut instead of answering
    wait_s: float = 0.0


@dataclass
class Hub:
    """`role`: of the token; `grants`: of a fine-grained one. `begun`, `sent`: every request, and the bytes of its body;
    `lose`: a file that commits drop.
    """

    token: str = "hf_secretsecretsecret"
    role: str = "write"
    grants: list[dict[str, Any]] = field(default_factory=list)
    orgs: dict[str, str] = field(default_factory=dict)  # name -> role
    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    store: dict[str, bytes] = field(default_factory=dict)
    collections: dict[str, dict[str, Any]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    sent: list[tuple[str, int]] = field(default_factory=list)
    lose: str | None = None

    def fail(self, where: str, status: int = 0, **rest: Any) -> None:
        self.faults.append(Fault(where, status, **rest))

    def heal(self) -> None:
        self.faults.clear()
        self.sent.clear()

    def add(self, name: str, files: dict[str, bytes], **rest: Any) -> Repo:
        self.repos[name] = Repo(commits=[{path: blob(path, data) for path, data in files.items()}], **rest)
        return self.repos[name]

    def asked(self, where: str) -> int:
        return sum(re.search(where, line) is not None for line, _ in self.sent)

    def env(self, home: Path) -> dict[str, str]:
        """For a program that is to use this Hub and nothing else."""
        own = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": self.token}
        return own | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def blob(path: str, data: bytes) -> Blob:
    return Blob(data, path.endswith(".safetensors") or len(data) > LARGE_BYTES)


@contextmanager
def hub_stand_in(**options: Any) -> Iterator[Hub]:
    hub = Hub(**options)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Answer,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class Refusal(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, body: dict[str, Any] | None = None, code: str = "") -> None:
        self.status, self.body, self.code = status, body or {"error": "refused"}, code


class Answer(BaseHTTPRequestHandler):
    hub: Hub
    cut = False

    def do_GET(self) -> None:
        self.respond()

    do_HEAD = do_POST = do_PUT = do_GET

    def respond(self) -> None:
        path = unquote(urlsplit(self.path).path)
        line = f"{self.command} {path}"
        self.hub.begun.append(line)
        fault = next((f for f in self.hub.faults if f.times and re.search(f.where, line)), None)
        if fault:
            fault.times -= 1
            self.read(fault.after_bytes) if fault.after_bytes else None
            time.sleep(fault.wait_s)
        body = b"" if fault and fault.after_bytes else self.read()
        self.hub.sent.append((line, len(body)))
        if fault and fault.after_answer:
            with suppress(Refusal, OSError):
                self.cut = True
                self.route(path, body)
            return self.drop()
        if fault and not fault.status:
            return self.drop()
        if fault:
            return self.send(fault.status, b'{"error": "refused"}', fault.headers)
        try:
            return self.route(path, body)
        except Refusal as refusal:
            return self.send(refusal.status, json.dumps(refusal.body).encode(), {"X-Error-Code": refusal.code})

    def route(self, path: str, body: bytes) -> None:
        """Which of the Hub's addresses it is."""
        known = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if path == "/api/whoami-v2":
            return self.json(self.account(known))
        if path.startswith("/_lfs/"):
            return self.take(path.removeprefix("/_lfs/"), body)
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.download(self.repo(match[1], known), match[3])
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/(revision|tree|preupload|commit)/[^/]+)?", path):
            return self.model(match[1], match[2], known, body)
        if path == "/api/validate-yaml":
            return self.validate(json.loads(body)["content"])
        if not known:
            raise Refusal(401)
        if match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self.json({"objects": [self.lfs(item) for item in json.loads(body)["objects"]]})
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path.startswith("/api/collections"):
            return self.collection(path.removeprefix("/api/collections"), json.loads(body or b"{}"))
        raise Refusal(404)

    # --- accounts and repositories ----------
    def account(self, known: bool) -> dict[str, Any]:
        if not known:
            raise Refusal(401)
        access = {"displayName": "test", "role": self.hub.role, "fineGrained": {"scoped": self.hub.grants}}
        orgs = [{"name": name, "roleInOrg": role} for name, role in self.hub.orgs.items()]
        return {"name": "me", "type": "user", "orgs": orgs, "auth": {"accessToken": access}}

    def repo(self, name: str, known: bool) -> Repo:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and not known):
            raise Refusal(404 if known else 401, code="RepoNotFound")
        return repo

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization'] or 'me'}/{asked['name']}"
        if name in self.hub.repos:
            raise Refusal(409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"})
        private = asked.get("visibility") == "private" or asked.get("private") is True
        self.hub.add(name, {".gitattributes": b"*.safetensors filter=lfs\n"}, private=private)
        self.json({"url": f"{self.hub.url}/{name}", "name": name})

    def model(self, name: str, what: str | None, known: bool, body: bytes) -> None:
        repo = self.repo(name, known)
        if what in (None, "revision"):
            return self.json(self.info(name, repo))
        if what == "tree":
            return self.json([one.listed(path) for path, one in sorted(repo.files.items())])
        if self.hub.role == "read" or not known:
            raise Refusal(403)
        return self.modes(repo, json.loads(body)) if what == "preupload" else self.commit(name, repo, body)

    def info(self, name: str, repo: Repo) -> dict[str, Any]:
        siblings = [{"rfilename": path, "size": len(one.data)} for path, one in sorted(repo.files.items())]
        readme = repo.files.get("README.md", Blob(b"", False)).data.decode()
        match = re.match(r"---\n(.*?)\n---", readme, re.S)
        card = {"cardData": yaml.safe_load(match[1])} if match else {}
        made = {"id": name, "modelId": name, "sha": repo.head, "siblings": siblings, "tags": [], **card}
        return {**made, "private": repo.private, "gated": "manual" if repo.gated else False}

    # --- upload ----------
    def modes(self, repo: Repo, asked: dict[str, Any]) -> None:
        def mode(item: dict[str, Any]) -> str:
            return "lfs" if item["path"].endswith(".safetensors") or item["size"] > LARGE_BYTES else "regular"

        oids = {path: one.listed(path)["oid"] for path, one in repo.files.items()}
        self.json({"files": [{"path": item["path"], "uploadMode": mode(item), "shouldIgnore": False,
                              "oid": oids.get(item["path"])} for item in asked["files"]]})  # fmt: skip

    def lfs(self, item: dict[str, Any]) -> dict[str, Any]:
        """Where to send a file; nowhere if it is in the store already."""
        if item["oid"] in self.hub.store:
            return item
        hrefs = {"upload": f"{self.hub.url}/_lfs/{item['oid']}", "verify": f"{self.hub.url}/_lfs/verify"}
        return {**item, "actions": {kind: {"href": href} for kind, href in hrefs.items()}}

    def take(self, oid: str, body: bytes) -> None:
        if oid == "verify":
            asked = json.loads(body)
            if len(self.hub.store.get(asked["oid"], b"")) != asked["size"]:
                raise Refusal(404)
        elif sha256(body) != oid:
            raise Refusal(400)
        else:
            self.hub.store[oid] = body
        self.json({})

    def commit(self, name: str, repo: Repo, body: bytes) -> None:
        files = dict(repo.files)
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            match item["key"]:
                case "header":
                    if value.get("parentCommit") not in (None, repo.head):
                        raise Refusal(412)
                case "file":
                    files[value["path"]] = Blob(base64.b64decode(value["content"]), False)
                case "lfsFile":
                    files[value["path"]] = Blob(self.hub.store[value["oid"]], True)
                case "deletedFile":
                    del files[value["path"]]
        files.pop(self.hub.lose or "", None)
        repo.commits.append(files)
        self.json({"commitUrl": f"{self.hub.url}/{name}/commit/{repo.head}", "commitOid": repo.head})

    def validate(self, content: str) -> None:
        fields = yaml.safe_load(content.split("---\n")[1])
        errors = []
        if fields.get("license", LICENCES[0]) not in LICENCES:
            errors.append({"message": f'"license" must be one of [{", ".join(LICENCES)}]'})
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", fields.get("base_model", "a/b")):
            errors.append({"message": '"base_model" is no id of a model'})
        self.send(400 if errors else 200, json.dumps({"errors": errors, "warnings": []}).encode(), {})

    def collection(self, rest: str, asked: dict[str, Any]) -> None:
        slug, _, items = rest.strip("/").removesuffix("/items"), None, rest.endswith("/items")
        if not slug:
            slug = f"{asked['namespace']}/{re.sub(r'[^a-z0-9]+', '-', asked['title'].lower())}-0123456789"
            if slug in self.hub.collections:
                raise Refusal(409, {"slug": slug})
            empty = {"slug": slug, "title": asked["title"], "owner": {"name": asked["namespace"]}, "items": []}
            more = {"lastUpdated": "2026-01-01T00:00:00.000Z", "position": 0, "theme": "blue", "upvotes": 0}
            self.hub.collections[slug] = {**empty, **more, "private": asked["private"]}
        found = self.hub.collections[slug]
        if items:
            if asked["item"]["id"] in [item["id"] for item in found["items"]]:
                raise Refusal(409)
            n = len(found["items"])
            found["items"].append({"_id": str(n), "position": n, **asked["item"]})
        self.json(found)

    # --- download ----------
    def download(self, repo: Repo, path: str) -> None:
        one = repo.files.get(path)
        if one is None:
            raise Refusal(404, code="EntryNotFound")
        etag = sha256(one.data) if one.large else one.listed(path)["oid"]
        self.send(200, one.data, {"ETag": f'"{etag}"', "X-Repo-Commit": repo.head})

    # --- HTTP ----------
    def drop(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def read(self, limit: int | None = None) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            return b"".join(self.chunks(limit))
        length = int(self.headers.get("Content-Length") or 0)
        return self.rfile.read(length if limit is None else min(limit, length))

    def chunks(self, limit: int | None) -> Iterator[bytes]:
        seen = 0
        while (size := int(self.rfile.readline(), 16)) and (limit is None or seen < limit):
            yield self.rfile.read(size)
            self.rfile.readline()
            seen += size
        if not size:
            self.rfile.readline()

    def json(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        if self.cut:
            return
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
