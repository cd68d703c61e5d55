"""A local stand-in for the Hugging Face hub: the four answers that a download needs, and a list of what was asked."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class StandIn(ThreadingHTTPServer):
    """Serves folders as repositories, by name."""

    daemon_threads = True

    def __init__(self, repositories: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.fetched: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        for name, folder in self.server.repositories.items():
            files = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
            if path == f"api/models/{name}/revision/main":
                return self._send(json.dumps({"id": name, "sha": COMMIT, "siblings": []}).encode())
            if path == f"api/models/{name}/tree/{COMMIT}":
                return self._send(json.dumps([_entry(name, file) for name, file in files.items()]).encode())
            wanted = path.removeprefix(f"{name}/resolve/{COMMIT}/")
            if wanted in files:
                if self.command == "GET":
                    self.server.fetched.append(wanted)
                return self._send(files[wanted].read_bytes())
        return self._send(b"{}", 404, **{"X-Error-Code": "RepoNotFound"})

    def _send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        facts = {"Content-Length": str(len(body)), "ETag": f'"{hashlib.sha1(body).hexdigest()}"'}
        for key, value in {**facts, "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _entry(name: str, file: Path) -> dict[str, object]:
    content = file.read_bytes()
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


@contextmanager
def hub(repositories: dict[str, Path]) -> Iterator[StandIn]:
    """The stand-in for the duration of a block."""
    with StandIn(repositories) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
