"""A client's memory on disk: whatever a kill leaves behind, the FRL comes back bit for bit."""

import errno
import os
import random
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.errors import ClusterError, Fault, TooLateError
from actors.processes.expert_host import ExpertHost
from actors.processes.frl_journal import Journal, Renewal, Snapshot, only_server, parse_snapshot
from actors.rounds.calls import fault_of
from actors.rounds.messages import Forward, HostSpec, Read, Renew, RenewalInput
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.storage.checkpoint import ModelCard, expert_file, read_file, save_checkpoint

PRINT = bytes(range(16))
HEADER = 24


def renewals(count: int, *, m: int = 3, d: int = 8, dtype: Any = np.float64) -> list[Renewal]:
    draw = np.random.default_rng(0)
    return [
        Renewal(v, draw.random((v % 3 + 1, m)).astype(dtype), draw.random((v % 3 + 1, d)).astype(dtype))
        for v in range(1, count + 1)
    ]


def written(folder: Path, records: list[Renewal]) -> Journal:
    journal = Journal(folder, 0, fingerprint=PRINT)
    journal.load()
    for record in records:
        journal.append(record)
    return journal


def found(folder: Path, fingerprint: bytes = PRINT) -> tuple[Snapshot | None, list[Renewal]]:
    return Journal(folder, 0, fingerprint=fingerprint).load()


def same(left: list[Renewal], right: list[Renewal]) -> bool:
    return [(r.version, r.alpha_AM.tobytes(), r.psi_Ad.tobytes()) for r in left] == [
        (r.version, r.alpha_AM.tobytes(), r.psi_Ad.tobytes()) for r in right
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_appended_is_found_again_bit_for_bit(dtype: Any, tmp_path: Path) -> None:
    records = renewals(5, dtype=dtype)
    written(tmp_path, records)
    snapshot, again = found(tmp_path)
    assert snapshot is None
    assert same(again, records)


def test_a_record_cut_at_any_byte_is_dropped_and_the_journal_goes_on(tmp_path: Path) -> None:
    records = renewals(4)
    path = written(tmp_path, records[:2]).path
    start = path.stat().st_size
    written(tmp_path, records[2:3])
    whole = path.read_bytes()
    for cut in range(start, len(whole)):
        path.write_bytes(whole[:cut])
        assert same(found(tmp_path)[1], records[:2])
        assert path.stat().st_size == start
    written(tmp_path, records[3:])
    assert same(found(tmp_path)[1], [*records[:2], records[3]])


@pytest.mark.parametrize("tail", [bytes(64), b"\xff" * 64], ids=["zeros", "ones"])
def test_garbage_after_the_last_record_is_cut_off(tail: bytes, tmp_path: Path) -> None:
    path = written(tmp_path, renewals(2)).path
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert same(found(tmp_path)[1], renewals(2))
    assert path.read_bytes() == whole


def test_a_full_disk_leaves_no_half_record_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, write = written(tmp_path, renewals(1)), os.write
    monkeypatch.setattr(os, "write", lambda file, content: write(file, content[:20]))
    with pytest.raises(OSError, match="No space") as failed:
        journal.append(renewals(2)[1])
    monkeypatch.undo()
    assert failed.value.errno == errno.ENOSPC
    journal.append(renewals(2)[1])
    assert same(found(tmp_path)[1], renewals(2))


def test_a_kill_between_snapshot_and_truncation_applies_nothing_twice(tmp_path: Path) -> None:
    journal = written(tmp_path, renewals(3))
    before = journal.path.read_bytes()
    journal.compact(Snapshot(2, np.ones((3, 8)), np.zeros(3)))
    journal.path.write_bytes(before)  # as it was when the snapshot was in place already
    snapshot, again = found(tmp_path)
    assert snapshot is not None
    assert snapshot.version == 2
    assert same(again, renewals(3)[2:])


def test_compaction_empties_the_journal_and_keeps_the_snapshot(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0, fingerprint=PRINT, compact_bytes=600)
    journal.load()
    for record in renewals(3):
        journal.append(record)
    assert journal.full
    journal.compact(Snapshot(3, np.full((3, 8), 0.1), np.full(3, 0.2)))
    assert journal.path.stat().st_size == HEADER
    snapshot, again = found(tmp_path)
    assert not again
    assert snapshot is not None
    assert np.array_equal(snapshot.prototypes_Md, np.full((3, 8), 0.1))


def test_the_journal_of_another_checkpoint_is_not_applied_and_keeps_its_place(tmp_path: Path) -> None:
    journal = written(tmp_path, renewals(2))
    journal.compact(Snapshot(2, np.ones((3, 8)), np.zeros(3)))
    journal.append(renewals(3)[2])
    other = Journal(tmp_path, 0, fingerprint=bytes(16))
    assert other.load() == (None, [])
    other.append(renewals(1)[0])
    snapshot, again = found(tmp_path)
    assert snapshot is not None
    assert snapshot.version == 2
    assert same(again, renewals(3)[2:])
    assert same(found(tmp_path, bytes(16))[1], renewals(1))


@pytest.mark.parametrize("damage", [b"", b"\xff" * 40, b"\x02" + bytes(7) + b"[]"], ids=["empty", "noise", "no object"])
def test_a_snapshot_that_cannot_be_read_is_set_aside_with_what_follows_upon_it(damage: bytes, tmp_path: Path) -> None:
    journal = written(tmp_path, renewals(2))
    journal.compact(Snapshot(2, np.ones((3, 8)), np.zeros(3)))
    journal.append(renewals(3)[2])
    records = journal.path.read_bytes()
    journal.snapshot_path.write_bytes(damage)
    assert found(tmp_path) == (None, [])
    assert {file.read_bytes() for file in tmp_path.glob("*.damaged")} == {damage, records}
    assert found(tmp_path) == (None, [])


def test_one_server_renews_a_checkpoint_at_a_time(tmp_path: Path) -> None:
    first = only_server(tmp_path, b"a")
    with pytest.raises(ClusterError, match="another server renews these FRLs"):
        only_server(tmp_path, b"a")
    only_server(tmp_path, b"b").close()
    first.close()
    only_server(tmp_path, b"a").close()


def test_a_record_is_a_few_hundred_bytes_at_the_papers_sizes(tmp_path: Path) -> None:
    record = Renewal(1, np.zeros((1, 16), np.float32), np.zeros((1, 64), np.float32))
    assert written(tmp_path, [record]).path.stat().st_size - HEADER < 400


def test_a_renamed_file_is_on_disk_under_its_new_name_before_anything_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    rename, fsync = Path.rename, os.fsync

    def renamed(self: Path, to: Path) -> Path:
        events.append(f"rename {to.suffix}")
        return rename(self, to)

    def synced(file: int) -> None:
        events.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")
        fsync(file)

    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(os, "fsync", synced)
    journal = written(tmp_path, renewals(1))
    journal.compact(Snapshot(1, np.ones((3, 8)), np.zeros(3)))
    start = ["file", "rename .journal", "folder"]
    assert events == [*start, "file", "rename .safetensors", "folder", *start]


def test_tickets_are_kept_with_records_and_snapshots_and_older_files_have_none(tmp_path: Path) -> None:
    plain, *_ = renewals(1)
    numbered = Renewal(2, plain.alpha_AM, plain.psi_Ad, tuple(2**63 + n for n in range(len(plain.alpha_AM))))
    journal = written(tmp_path, [plain, numbered])
    assert [record.tickets for record in found(tmp_path)[1]] == [(), numbered.tickets]
    assert same(found(tmp_path)[1], [plain, numbered])
    journal.compact(Snapshot(2, np.ones((3, 8)), np.zeros(3), numbered.tickets))
    snapshot, _ = found(tmp_path)
    assert snapshot is not None
    assert snapshot.tickets == numbered.tickets


WRITER = """
import sys
from pathlib import Path
import numpy as np
from actors.processes.frl_journal import Journal, Renewal, Snapshot

journal = Journal(Path(sys.argv[1]), 0, fingerprint=bytes(range(16)), compact_bytes=1500)
snapshot, records = journal.load()
version = records[-1].version if records else snapshot.version if snapshot else 0
print("start", version, flush=True)
while True:
    version += 1
    numbers = np.full((2, 3), version, float), np.full((2, 8), version, float)
    journal.append(Renewal(version, *numbers, (2 * version, 2 * version + 1)))
    print(version, flush=True)
    if journal.full:
        journal.compact(Snapshot(version, np.full((3, 8), version, float), np.zeros(3), (2 * version,)))
"""


@pytest.mark.parametrize("kills", [6, pytest.param(1000, marks=pytest.mark.slow)])
def test_whatever_moment_a_process_is_killed_the_journal_holds_what_it_acknowledged_and_at_most_one_more(
    kills: int, tmp_path: Path
) -> None:
    draw, acknowledged = random.Random(0), 0
    for _ in range(kills):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            start = int(process.stdout.readline().split()[1])
            assert acknowledged <= start <= acknowledged + 1
            time.sleep(draw.uniform(0, 0.05))
            process.kill()
            told = [int(line) for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
        acknowledged = max([start, *told])
    snapshot, records = found(tmp_path)
    base = snapshot.version if snapshot else 0
    assert [record.version for record in records] == list(range(base + 1, base + 1 + len(records)))  # none twice
    assert acknowledged <= base + len(records) <= acknowledged + 1
    assert acknowledged > 2 * kills


# the host that keeps it, as a plain class


@pytest.fixture
def make_host(make_model: Callable[..., AirMoE], tmp_path: Path) -> Callable[..., ExpertHost]:
    """Clients 1 and 3 of the tiny model in one host, with or without a journal."""

    def make(dtype: torch.dtype = torch.float64, *, journal: bool = True, replica: bool = False) -> ExpertHost:
        card = ModelCard(["a", "b", "c"], [[0, 0, 0]] * 3, 6, [1, 2, 3], "none", "none")
        model = make_model(frl={"prototypes": [2, 3, 4, 2], "eta": 0.3}).to(dtype)
        if not (tmp_path / "checkpoint").exists():
            save_checkpoint(tmp_path / "checkpoint", model, card)
        files = [read_file(expert_file(tmp_path / "checkpoint", client)) for client in (1, 3)]
        folder = str(tmp_path / "frl") if journal else None
        return ExpertHost(HostSpec((1, 3), model.config, card, folder, replica), files)

    return make


def play(host: ExpertHost, seed: int) -> None:
    """One round of three inputs in which both clients are activated, and renew."""
    draw = np.random.default_rng(seed)
    query, features = draw.dirichlet(np.ones(8), 3), draw.normal(size=(3, 6, 3, 4))
    kind = np.dtype(str(host.dtype).removeprefix("torch."))
    host.read(Read(f"r{seed}", (0, 1, 2), query.astype(kind), host.config.channel))
    sample, client = np.array([0, 2, 1]), np.array([1, 1, 3])
    host.forward(Forward(f"r{seed}", query.astype(kind), sample, client), features.astype(kind))
    host.renew(Renew(f"r{seed}", sample, client, tuple(range(10 * seed, 10 * seed + 3))))


def memory(host: ExpertHost) -> list[tuple[int, bytes, bytes]]:
    """Version, prototypes and importance of each client, as the bits they are."""
    files = host.snapshots((1, 3)).values()
    content = [parse_snapshot(c, f) for c, f in zip(files, host.frls.fingerprints, strict=True)]
    return [(s.version, s.prototypes_Md.tobytes(), s.importance_M.tobytes()) for s in content if s is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("compact_bytes", [1 << 20, 700], ids=["journal", "snapshot and journal"])
def test_a_host_started_again_has_the_live_frl_bit_for_bit(
    compact_bytes: int, dtype: torch.dtype, make_host: Callable[..., ExpertHost]
) -> None:
    live = make_host(dtype)
    for journal in live.frls.journals:
        journal.compact_bytes = compact_bytes
    fresh = memory(live)
    for seed in range(7):
        play(live, seed)
        assert memory(make_host(dtype)) == memory(live)
    assert live.frls.versions == [7, 7]
    assert all(now[1:] != then[1:] for now, then in zip(memory(live), fresh, strict=True))
    assert (max(live.frls.snapshot_versions) > 0) == (compact_bytes == 700)


def test_a_replica_adopts_newer_snapshots_only_and_writes_no_journal(make_host: Callable[..., ExpertHost]) -> None:
    owner, replica = make_host(), make_host(replica=True)
    start = owner.snapshots((1, 3))
    play(owner, 1)
    assert replica.adopt(owner.snapshots((1, 3))) == (1, 1)
    assert memory(replica) == memory(owner)
    assert replica.adopt(start) == (1, 1)
    assert not replica.frls.journals


def test_a_host_forgets_finished_rounds_and_old_ones_of_a_vanished_cloud(make_host: Callable[..., ExpertHost]) -> None:
    host = make_host(journal=False)
    query = np.full((1, 8), 0.125)
    for seed in range(70):
        host.read(Read(f"r{seed}", (0,), query, host.config.channel, ("r69",)))
    assert len(host.rounds.ids) == 64
    host.read(Read("last", (0,), query, host.config.channel, host.rounds.ids))
    assert host.rounds.ids == ("last",)


def test_a_request_that_is_tried_again_is_renewed_for_once_also_after_a_restart(
    make_host: Callable[..., ExpertHost],
) -> None:
    host = make_host()
    play(host, 1)
    once = memory(host)
    play(host, 1)
    assert memory(host) == once
    again = make_host()
    play(again, 1)
    assert memory(again) == once
    for journal in again.frls.journals:
        journal.compact_bytes = 0
    play(again, 2)  # into a snapshot, and the journal is empty
    twice = memory(again)
    assert twice != once
    last = make_host()
    play(last, 1)
    play(last, 2)
    assert memory(last) == twice


def test_of_a_batch_that_was_renewed_in_part_only_the_rest_is_renewed(make_host: Callable[..., ExpertHost]) -> None:
    whole, parts = make_host(journal=False), make_host(journal=False)
    draw = np.random.default_rng(0)
    alpha, psi = draw.dirichlet(np.ones(3), 4), draw.normal(size=(4, 8))
    whole.frls.renew({1: RenewalInput(alpha, psi, (1, 2, 3, 4))})
    parts.frls.renew({1: RenewalInput(alpha[:2], psi[:2], (1, 2))})
    parts.frls.renew({1: RenewalInput(alpha, psi, (1, 2, 3, 4))})
    prototypes = [host.clients.frl.prototypes_NMd.detach()[0] for host in (whole, parts)]
    torch.testing.assert_close(*prototypes, rtol=1e-9, atol=1e-12)


def test_a_renewal_that_nobody_waits_for_any_more_is_left_undone(make_host: Callable[..., ExpertHost]) -> None:
    host = make_host(journal=False)
    found = {1: RenewalInput(np.full((1, 3), 1 / 3), np.zeros((1, 8)), (1,))}
    with pytest.raises(TooLateError) as late:
        host.renew_from(found, time.monotonic() - 0.1)
    assert fault_of(late.value) is Fault.LATE  # the host is alive and well
    assert host.frls.versions == [0, 0]
    assert host.renew_from(found, time.monotonic() + 60) == (1, 0)


def test_a_renewal_counts_as_done_also_where_the_journal_cannot_be_compacted(
    make_host: Callable[..., ExpertHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, tried = make_host(), []

    def full_disk(snapshot: Snapshot, _: bytes) -> bytes:
        tried.append(snapshot.version)
        raise OSError(errno.ENOSPC, "No space left on device")

    for journal in host.frls.journals:
        journal.compact_bytes = 0
    monkeypatch.setattr(Snapshot, "to_bytes", full_disk)
    play(host, 1)
    assert host.frls.versions == [1, 1]
    assert tried == [1, 1]
    monkeypatch.undo()
    assert memory(make_host()) == memory(host)


def test_a_journal_that_cannot_be_compacted_grows_as_much_again_before_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: Any) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    journal, record = written(tmp_path, renewals(1)), renewals(1)[0]
    journal.compact_bytes = journal.path.stat().st_size - 1
    assert journal.full
    monkeypatch.setattr(Snapshot, "to_bytes", full_disk)
    with pytest.raises(OSError, match="space"):
        journal.compact(Snapshot(1, np.zeros((3, 8)), np.zeros(3)))
    assert not journal.full
    while not journal.full:
        journal.append(record)
    assert journal.path.stat().st_size >= 2 * journal.compact_bytes
