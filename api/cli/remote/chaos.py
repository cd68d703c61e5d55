"""`airmoe chaos`: kills experts of a running server under load, and reports what its users saw."""

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import typer
from rich.table import Table

from airmoe_ray.errors import UserError
from api.cli.common import JsonOption, print_json, stdout
from api.cli.remote.connection import HERE, KeyOption, UrlOption, call, call_json
from api.cli.reporters import reporting

_RETURN_S = 15.0  # a killed expert must be routed to again within this


def chaos(
    url: UrlOption = HERE,
    key: KeyOption = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long [s].")] = 120.0,
    every: Annotated[float, typer.Option(min=0.1, help="Pause between kills [s].")] = 3.0,
    rate: Annotated[float, typer.Option(min=0.1, help="Requests per second.")] = 2.0,
    seed: Annotated[int, typer.Option(help="Seed of the choice of victims.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Send images at a steady rate while a random expert is killed with -9 again and again.

    The server must run on this machine, as this user: its processes are killed by their number. Exit code 1 if a
    request was not answered well.
    """
    experts = call_json("GET", f"{url}/experts", key, has="experts")["experts"]
    if not all(expert["pid"] and _is_ours(expert["pid"]) for expert in experts):
        raise UserError(
            f"{url}: its processes are not on this machine, or not ours to kill; run this beside the server"
        )
    storm = Storm(url, key, every, random.Random(seed))
    with reporting() as report:
        move = report.progress(f"{rate:g} requests/s, a kill every {every:g} s")
        storm.run(seconds, rate, lambda: move(min(int(storm.elapsed), int(seconds)), int(seconds)))
    result = storm.report()
    if as_json:
        print_json(result)
    else:
        table = Table("figure", "value", "unit", "target", "")
        for name, row in result.items():
            verdict = {True: "[green]met[/green]", False: "[red]missed[/red]", None: ""}[row["pass"]]
            table.add_row(name, f"{row['value']:g}", row["unit"], row["target"] or "", verdict)
        stdout.print(table)
    if not all(row["pass"] in (True, None) for row in result.values()):
        raise typer.Exit(1)


class Storm:
    """Sends requests at a steady rate, kills experts meanwhile, and keeps what came of both."""

    def __init__(self, url: str, key: str | None, every: float, choice: random.Random) -> None:
        self.url, self.key, self.every, self.choice = url, key, every, choice
        samples = call_json("GET", f"{url}/samples", key, has="samples")["samples"]
        self.images = [call("GET", url + sample["url"], key).content for sample in samples]
        self.size = (512, 384)
        self.responses: list[tuple[float, float, dict[str, Any]]] = []  # when sent, when received, body
        self.failures: list[str] = []
        self.kills: list[tuple[float, int]] = []  # when, expert
        self.returned: dict[int, float] = {}  # by number of the kill: seconds until it took part again
        self.started = time.monotonic()
        self._lock = threading.Lock()

    @property
    def elapsed(self) -> float:
        """Seconds since the first request could be sent."""
        return time.monotonic() - self.started

    def run(self, seconds: float, rate: float, tick: Any) -> None:
        """Send requests on time, however long earlier ones take, and kill; then wait until all experts are back."""
        next_kill = self.every
        with ThreadPoolExecutor(64) as pool:
            for number in range(int(seconds * rate)):
                pause = number / rate - self.elapsed
                if pause > 0:
                    time.sleep(pause)
                if self.elapsed >= next_kill:
                    next_kill += self.every
                    pool.submit(self._kill)
                pool.submit(self._request, number)
                tick()
        give_up = time.monotonic() + _RETURN_S
        while len(self.returned) < len(self.kills) and time.monotonic() < give_up:
            self._request(-1)
            time.sleep(0.5)

    def _kill(self) -> None:
        try:
            experts = call_json("GET", f"{self.url}/experts", self.key, has="experts")["experts"]
            up = [expert for expert in experts if expert["state"] == "up"]
            victim = self.choice.choice(up)
            os.kill(victim["pid"], signal.SIGKILL)
        except (UserError, IndexError, ProcessLookupError):
            return  # nobody is left to kill, or it died a moment ago
        with self._lock:
            self.kills.append((time.monotonic(), victim["id"]))

    def _request(self, number: int) -> None:
        sent = time.monotonic()
        try:
            headers = {"Content-Type": "image/png"}
            image = self.images[number % len(self.images)]
            body = call_json("POST", f"{self.url}/segment", self.key, has="mask", content=image, headers=headers)
        except UserError as error:
            with self._lock:
                self.failures.append(str(error))
            return
        with self._lock:
            if number >= 0:
                self.responses.append((sent, time.monotonic(), body))
            # few images go to any one expert; that it answers the query, and so can be routed to, all show
            present = {expert["id"] for expert in body["routing"]["experts"] if expert["js"] is not None}
            for kill, (when, expert) in enumerate(self.kills):
                if kill not in self.returned and sent > when + 0.5 and expert in present:
                    self.returned[kill] = sent - when

    def report(self) -> dict[str, dict[str, Any]]:
        """The figures by name, each with its target."""
        total = len(self.responses) + len(self.failures)
        wrong_shape = sum((b["width"], b["height"]) != self.size for _, _, b in self.responses)
        wrong_flag = sum(b["routing"]["degraded"] != _is_degraded(b) for _, _, b in self.responses)
        latency = sorted(received - sent for sent, received, _ in self.responses) or [0.0]
        slowest = max(self.returned.values(), default=0.0)
        lost = len(self.kills) - len(self.returned)
        return {
            "requests": _figure(total, "requests"),
            "kills": _figure(len(self.kills), "kills"),
            "availability": _figure(len(self.responses) / max(total, 1), "ratio", ">= 1", len(self.responses) == total),
            "wrong_shape": _figure(wrong_shape, "answers", "<= 0", wrong_shape == 0),
            "wrong_degraded_flag": _figure(wrong_flag, "answers", "<= 0", wrong_flag == 0),
            "degraded_share": _figure(
                sum(b["routing"]["degraded"] for _, _, b in self.responses) / max(len(self.responses), 1), "ratio"
            ),
            "slowest_return": _figure(slowest, "s", f"<= {_RETURN_S:g}", slowest <= _RETURN_S),
            "never_returned": _figure(lost, "experts", "<= 0", lost == 0),
            "latency_p50": _figure(latency[len(latency) // 2], "s"),
            "latency_max": _figure(latency[-1], "s"),
        }


def _is_degraded(body: dict[str, Any]) -> bool:
    """Whether a response must be degraded: a client absent, lost on the way or at fault, or all of S in deep fade."""
    routing, channel = body["routing"], body["channel"]
    absent = any(expert["js"] is None for expert in routing["experts"])
    selected = {expert["id"] for expert in routing["experts"] if expert["selected"]}
    heard = {expert["id"] for expert in routing["experts"] if expert["weight"] > 0}
    lost = selected - heard - set(channel["truncated"])
    return bool(absent or lost or routing["faults"] or routing["all_faded"])


def _figure(value: float, unit: str, target: str | None = None, ok: bool | None = None) -> dict[str, Any]:
    return {"value": round(value, 4), "unit": unit, "target": target, "pass": ok}


def _is_ours(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
