"""A real server grows, shrinks and ends."""

import json
import re
import signal
import socket
import stat
from concurrent.futures import ThreadPoolExecutor

from tests.api.http.server_requests import PHOTO, assert_error, segment
from tests.api.support import airmoe, samples, wait_for


def test_scale_reads_the_token_from_a_file_of_the_owner_alone(server, client):
    token = server.run / "state" / f"server-{server.port}.json"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    options = ("--url", server.url, "--run", server.run, "--json")
    fewer = airmoe("scale", "--experts", 3, *options)
    assert len(json.loads(fewer.stdout)["experts"]) == 3, fewer.stderr
    assert len(segment(client, top_k=3).json()["routing"]["experts"]) == 3
    assert_error(segment(client, top_k=4), 422)
    more = airmoe("scale", "--experts", 4, "--replicas", "0=2", *options)
    assert len(json.loads(more.stdout)["experts"]) == 4, more.stderr

    def replicas() -> list[int]:
        return [expert["replicas"] for expert in client.get("/experts").json()["experts"]]

    assert wait_for(lambda: replicas() == [2, 1, 1, 1], timeout_s=60), replicas()
    assert not segment(client, top_k=4, channel="ideal").json()["routing"]["degraded"]
    assert samples(server.url)['airmoe_expert_replicas{expert="0"}'] == 2


def test_scaling_beyond_the_checkpoint_is_one_clear_line(server):
    result = airmoe("scale", "--experts", 9, "--url", server.url, "--run", server.run)
    assert result.returncode == 2
    assert result.stderr.strip().endswith("409, experts: the served checkpoint does not hold 9; serve one that does")


def test_scaling_with_the_token_of_another_run_is_refused(server, tmp_path):
    unknown = airmoe("scale", "--experts", 3, "--url", server.url, "--run", tmp_path)
    wrong = airmoe("scale", "--experts", 3, "--url", server.url, "--admin-token", "guess")
    assert (unknown.returncode, wrong.returncode) == (2, 2)
    assert "no server of this run" in unknown.stderr
    assert "401" in wrong.stderr


# the end; this stops the server


def test_sigterm_answers_what_is_in_flight_and_leaves_nothing(server):
    head = f"POST /segment HTTP/1.1\r\nHost: [::1]\r\nContent-Type: image/png\r\nContent-Length: {len(PHOTO)}\r\n\r\n"
    open_requests = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(6)]
    for connection in open_requests:
        connection.sendall(head.encode() + PHOTO[:50])
    assert wait_for(lambda: samples(server.url)["airmoe_requests_in_progress"] == 6)
    with ThreadPoolExecutor(1) as beside:
        ending = beside.submit(server.stop, signal.SIGTERM)
        assert wait_for(lambda: not server.is_listening())
        for connection in open_requests:
            connection.sendall(PHOTO[50:])
        answers = [connection.recv(12) for connection in open_requests]
        code, left = ending.result()
    assert answers == [b"HTTP/1.1 200"] * 6
    assert code == 0
    assert not left
    assert not server.is_listening()
    assert not list((server.run / "state").glob(f"server-{server.port}.json"))
    assert not re.search("Traceback|SIGTERM", server.log.read_text())
