"""The command line against a real server, against another one, and against none."""

import errno
import http.server
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from airmoe_ray.client import Segmentation
from api.cli.remote.segment import _Job, _jobs, _write_pictures
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
    (folder / "c.gif").write_bytes(PHOTO)
    (folder / "d.jpg").write_bytes(saved(photo(), "GIF"))
    result = airmoe("segment", folder, "--url", server.url, "--out", tmp_path / "out", "--json")
    assert result.returncode == 1
    assert "2 of 3 images were not segmented" in result.stderr
    first, second = result.stderr.strip().splitlines()[-2:]
    assert "a.png" in first
    assert "not an image" in first
    assert "d.jpg" in second
    assert "image/gif" in second
    assert ["error" in row for row in json.loads(result.stdout)] == [True, False, True]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"b_{k}.png" for k in ("mask", "color", "overlay")}


def test_a_folder_is_mirrored_gone_on_with_and_made_again_when_asked(server, tmp_path):
    folder = tmp_path / "photos"
    (folder / "day").mkdir(parents=True)
    for name in ("a.png", "day/a.png", "day/b.png", "day/b.jpg"):
        (folder / name).write_bytes(PHOTO)
    out = folder / "out"  # in the folder itself: what is written there is no image to segment
    stems = ["a", "day/a", "day/b.jpg", "day/b.png"]
    pictures = [out / f"{stem}_{kind}.png" for stem in stems for kind in ("mask", "color", "overlay")]

    def run(*options: str) -> tuple[list[str], set[Path]]:
        """Stems that were skipped, and pictures that were left alone."""
        before = {path: path.stat().st_mtime_ns for path in pictures if path.exists()}
        result = airmoe("segment", folder, "--url", server.url, "--out", out, "--json", *options)
        assert result.returncode == 0, result.stderr
        rows = json.loads(result.stdout)
        assert sorted(path for path in out.rglob("*") if path.is_file()) == sorted(pictures)
        assert [row["written"][0] for row in rows] == [f"{out / stem}_mask.png" for stem in stems]
        kept = {path for path, time_ns in before.items() if path.stat().st_mtime_ns == time_ns}
        return [stem for stem, row in zip(stems, rows, strict=True) if "skipped" in row], kept

    assert run() == ([], set())
    pictures[4].unlink()  # as if the command had been ended between two pictures
    assert run() == (["a", "day/b.jpg", "day/b.png"], set(pictures) - set(pictures[3:6]))
    assert run("--overwrite") == ([], set())


def test_a_picture_that_cannot_be_written_whole_is_not_left_behind(tmp_path, monkeypatch):
    def save(_: Image.Image, place: Path, *__: object) -> None:
        place.write_bytes(b"half of i")
        raise OSError(errno.ENOSPC, "No space left on device", str(place))

    monkeypatch.setattr(Image.Image, "save", save)
    ids = np.zeros((48, 80), np.uint8)
    answer = Segmentation(ids, ("road",), np.zeros((1, 3), np.uint8), (), {})
    with pytest.raises(OSError, match="No space left"):
        _write_pictures(PHOTO, answer, _Job(tmp_path / "a.png", tmp_path / "out" / "a"))
    assert not list((tmp_path / "out").iterdir())


def test_a_wrong_parameter_ends_the_command_before_every_image_fails(server, tmp_path):
    for n in range(20):
        (tmp_path / f"{n}.png").write_bytes(PHOTO)
    result = airmoe("segment", tmp_path, "--url", server.url, "--top-k", 99, "--out", tmp_path / "out")
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert "top_k: 99" in result.stderr


def test_images_of_several_folders_keep_their_folders(tmp_path, monkeypatch):
    for name in ("x/a.png", "y/a.png", "y/deep/b.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(PHOTO)
    monkeypatch.chdir(tmp_path)
    given = [Path("x"), Path("y"), Path("y/a.png")]
    assert [(str(job.image), str(job.stem)) for job in _jobs(given, Path("out"))] == [
        ("x/a.png", "out/x/a"),
        ("y/a.png", "out/y/a"),
        ("y/deep/b.png", "out/y/deep/b"),
    ]
    assert [str(job.stem) for job in _jobs([Path("y/deep/b.png")], Path("out"))] == ["out/b"]


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
