"""The command line against a real server, against another one, and against none."""

import http.server
import json
import threading
from pathlib import Path

import pytest
from PIL import Image

from tests.api.http.images import photo, saved
from tests.api.http.server_requests import PHOTO
from tests.api.support import EXPERTS, airmoe

# the command line


def test_segment_writes_three_pictures_per_image(server, tmp_path):
    (tmp_path / "in" / "deeper").mkdir(parents=True)
    (tmp_path / "one.jpg").write_bytes(saved(photo(30, 50), "JPEG"))
    for name in ("a.png", "deeper/a.png", "notes.txt"):
        (tmp_path / "in" / name).write_bytes(PHOTO)
    arguments = (tmp_path / "one.jpg", tmp_path / "in", "--url", server.url, "--out", tmp_path / "out", "--seed", "1")
    result = airmoe("segment", *arguments, "--json")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [row["size"] for row in rows] == ["50x30", "80x48", "80x48"]
    written = [Path(place) for row in rows for place in row["written"]]
    assert sorted(path.name.rpartition("_")[2] for path in written) == sorted(
        ["mask.png", "color.png", "overlay.png"] * 3
    )
    assert len(set(written)) == 9
    assert {Image.open(path).size for path in written[:3]} == {(50, 30)}
    assert {Image.open(path).size for path in written[3:]} == {(80, 48)}


def test_status_lists_every_expert(server):
    result = airmoe("status", "--url", server.url, "--json")
    experts = json.loads(result.stdout)["experts"]
    assert [(expert["id"], expert["state"]) for expert in experts] == [(n, "up") for n in range(EXPERTS)]
    assert {"node", "gpu_ids", "load_ratio", "restarts", "replicas", "version"} <= experts[0].keys()
    assert "0 clear days, 1 rainy streets, 2 night drawings" in airmoe("status", "--url", server.url).stdout


def test_a_refusal_reaches_the_command_line_as_one_line(server, tmp_path):
    (tmp_path / "a.png").write_bytes(b"no picture")
    result = airmoe("segment", tmp_path / "a.png", "--url", server.url, "--out", tmp_path / "out")
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert "not an image" in result.stderr


def test_one_bad_image_of_a_folder_does_not_lose_the_others(server, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"no picture")
    (folder / "b.png").write_bytes(PHOTO)
    result = airmoe("segment", folder, "--url", server.url, "--out", tmp_path / "out")
    assert result.returncode == 2
    assert "a.png" in result.stderr
    assert "1 of 2 images were not segmented" in result.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"b_{k}.png" for k in ("mask", "color", "overlay")}


@pytest.mark.parametrize("command", [["status"], ["segment", "IMAGE"], ["scale", "--experts", "3"], ["chaos"]])
def test_another_web_server_is_told_apart_in_one_line(command, tmp_path):
    (tmp_path / "index.html").write_text("<p>hello")
    (tmp_path / "a.png").write_bytes(PHOTO)

    class Other(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def do_GET(self):
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.path = "/"
            super().do_GET()

        do_POST = do_GET

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        command = [str(tmp_path / "a.png") if word == "IMAGE" else word for word in command]
        url = f"http://127.0.0.1:{other.server_port}"
        result = airmoe(*command, "--url", url, AIRMOE_ADMIN_TOKEN="x")
        other.shutdown()
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert "not an AirMoE server" in result.stderr


def test_an_address_without_sense_is_one_line():
    result = airmoe("scale", "--experts", 3, "--url", "http://localhost:abc")
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
