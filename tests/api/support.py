"""A real `airmoe serve` as a process, and what it is asked with."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

AIRMOE = Path(sys.executable).with_name("airmoe")
ROOT = Path(__file__).parents[2]
EXPERTS, TOP_K = 4, 2
ADMIN_TOKEN = "token-of-the-tests-own-servers"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], Any], *, timeout_s: float = 30.0) -> Any:
    """The first true value of `condition`, or its last one when the time is up; the caller asserts."""
    end = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.2)
    return value


def airmoe(*arguments: object, timeout_s: float = 120.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, as people run it."""
    environment = {**os.environ, "COLUMNS": "400", **environment}
    command = [str(AIRMOE), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)


def samples(url: str) -> dict[str, float]:
    """What a scraper reads: `name{label="value"}` -> value."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


class Server:
    """`airmoe serve` on a free port of loopback; whatever it starts is a descendant of its process."""

    def __init__(self, run: Path, *options: str) -> None:
        self.run, self.port = run, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = run / f"log-{self.port}"
        with self.log.open("wb") as log:
            command = [AIRMOE, "serve", "--run", run, "--port", str(self.port), *options]
            environment = {**os.environ, "AIRMOE_ADMIN_TOKEN": ADMIN_TOKEN}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
        self.ended: tuple[int, list[psutil.Process]] | None = None

    def wait_until_ready(self, *, timeout_s: float = 150.0) -> None:
        def settled() -> bool:
            try:
                return self.process.poll() is not None or httpx.get(f"{self.url}/readyz", timeout=15).is_success
            except httpx.TransportError:
                return False

        ready = wait_for(settled, timeout_s=timeout_s) and self.process.poll() is None
        assert ready, self.log.read_text()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> tuple[int, list[psutil.Process]]:
        """Exit code after a signal, and processes that outlived it; asked again, the same answer."""
        if self.ended is None:
            family = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
            self.process.send_signal(how)
            try:
                code = self.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                code = self.process.wait()
            _, left = psutil.wait_procs(family, timeout=15)
            for process in left:
                process.kill()
            self.ended = (code, left)
        return self.ended

    def is_listening(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0
