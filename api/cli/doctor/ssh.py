"""Looks at one machine of a cluster file over ssh: one script, which leaves nothing behind there."""

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

from airmoe_ray.errors import UserError
from api.cli.doctor.results import CommandError
from api.cli.doctor.storage import PROBE, PROBE_S

_CONNECT_S = 10  # until the machine has answered
_ANSWER_S = 90  # until the script has ended; a busy machine takes a while to start Python, storage to say no
_OPTIONS = (
    "BatchMode=yes",  # never ask
    f"ConnectTimeout={_CONNECT_S}",
    "StrictHostKeyChecking=no",  # as `ray up` does
    "UserKnownHostsFile=/dev/null",
    "IdentitiesOnly=yes",
    "LogLevel=ERROR",
)

# Prints lines of a name and a value. Unquoted on purpose where a ~ has to be expanded.
_SCRIPT = r"""
bin={bin}
echo time $(date +%s)
echo cpus $(nproc)
echo user $(id -un)
echo gpus $(nvidia-smi -L 2>/dev/null | grep -c ^GPU)
echo driver $(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | sort -V | head -1)
echo cards $(for d in /sys/bus/pci/devices/*; do cat $d/vendor $d/class 2>/dev/null | tr '\n' ' '; echo; done |
  grep -c '^0x10de 0x03')
echo shm_kb $(df -k --output=avail /dev/shm 2>/dev/null | tail -1)
echo disk_kb $(df -k --output=avail ~ | tail -1)
for tool in python3 rsync pgrep setsid; do command -v $tool >/dev/null || echo missing $tool; done
echo system_python $(python3 -c 'import sys; print(*sys.version_info[:3], sep=".")' 2>/dev/null)
if [ -x $bin/python ]; then $bin/python - <<'PYTHON'
import importlib.metadata as metadata, importlib.util, pathlib, re, sys
print("python", ".".join(map(str, sys.version_info[:3])))
for name in ("ray", "torch", "airmoe-ray"):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        pass
torch = importlib.util.find_spec("torch")
if torch and torch.origin:
    about = pathlib.Path(torch.origin).with_name("version.py").read_text()
    print("cuda", *re.findall(r"^cuda.*'([0-9.]+)'", about, re.M))
PYTHON
for url in {urls}; do
  echo storage $(timeout {probe_s} $bin/python -c {probe} $url 2>/dev/null || echo no answer within {probe_s} s); done
fi
for image in {images}; do echo image $image $(docker manifest inspect $image 2>&1 >/dev/null | tail -1); done
found=$(bash --login -c -i 'source ~/.bashrc; command -v ray' 2>/dev/null)
echo path_ray $found
[ -n "$found" ] && [ "$found" != $bin/ray ] && echo path_ray_version $(timeout 60 $found --version 2>/dev/null)
token=~/.ray/auth_token
[ -e $token ] && echo token $(tr -d '[:space:]' < $token | sha256sum | cut -c1-64) $(stat -c %a $token)
pgrep -x raylet >/dev/null && echo running raylet
pgrep -x gcs_server >/dev/null && echo running gcs_server
pgrep -f 'airmoe serve' >/dev/null && echo running serve
sockets=$(cat /proc/net/tcp /proc/net/tcp6 2>/dev/null)
for port in $(echo "$sockets" | awk '$4 == "0A" {{ split($2, a, ":"); print a[2] }}' | sort -u); do
  echo listens $((16#$port)); done
number=-1
for folder in {folders}; do number=$((number + 1)); [ -d $folder ] || continue
  try=$(mktemp $folder/.airmoe-XXXXXX 2>/dev/null) && rm -f $try && may=w || may=r
  echo folder $number $may $(stat -c '%U:%G %a' $folder); done
for peer in {peers}; do timeout 5 bash -c "</dev/tcp/$peer/22" 2>/dev/null || echo unreachable $peer; done
echo end
"""


@dataclass(frozen=True)
class Login:
    """How a machine is entered: the same way as `ray up` does it."""

    user: str
    key: str | None = None
    proxy: str | None = None

    def command(self, address: str, script: str) -> list[str]:
        """The ssh command that runs a script there."""
        options = [*_OPTIONS, *([f"ProxyCommand={self.proxy}"] if self.proxy else [])]
        key = ["-i", self.key] if self.key else []
        flags = [part for option in options for part in ("-o", option)]
        return ["ssh", *key, *flags, f"{self.user}@{address}", f"bash -c {shlex.quote(script)}"]


@dataclass(frozen=True)
class Folder:
    """A folder of a machine."""

    writable: bool  # for the user who logs in
    owner: str  # user:group
    mode: str


@dataclass(frozen=True)
class Machine:
    """What the script printed about a machine."""

    address: str
    facts: dict[str, str] = field(default_factory=dict)  # by name
    missing: tuple[str, ...] = ()  # tools
    running: tuple[str, ...] = ()  # processes of Ray and of ours
    listens: tuple[int, ...] = ()  # ports
    folders: dict[str, Folder] = field(default_factory=dict)  # of those asked for, which there are
    images: dict[str, str] = field(default_factory=dict)  # of those asked for; why it cannot be pulled, or nothing
    unreachable: tuple[str, ...] = ()  # peers
    clock_off_s: float = 0.0

    def number(self, name: str) -> float:
        """A fact as a number, 0 where the machine could not tell."""
        text = self.facts.get(name, "")
        return float(text) if text.replace(".", "", 1).isdigit() else 0.0


def enter(login: Login, address: str) -> str:
    """Check that ssh gets in."""
    run(login, address, "true")
    return f"{login.user}@{address} lets us in"


def look(
    login: Login,
    address: str,
    *,
    bin: str | None,
    folders: Sequence[str],
    peers: Sequence[str],
    now: float,
    images: Sequence[str] = (),
    urls: Sequence[str] = (),
) -> Machine:
    """Run the script on a machine and read what it prints."""
    script = _SCRIPT.format(
        bin=bin or "''",
        folders=" ".join(folders) or "''",
        peers=" ".join(peers) or "''",
        images=" ".join(map(shlex.quote, images)),
        urls=" ".join(map(shlex.quote, urls)),
        probe=shlex.quote(PROBE),
        probe_s=PROBE_S,
    )
    printed = run(login, address, script)
    lines = [line.split(" ", 1) for line in printed.splitlines() if line.strip()]
    many: dict[str, list[str]] = {}
    for name, *rest in lines:
        many.setdefault(name, []).append(rest[0].strip() if rest else "")
    if "end" not in many:
        raise UserError(f"{address}: the look at the host broke off after {len(lines)} lines; try again")
    facts = {name: values[-1] for name, values in many.items()}
    return Machine(
        address,
        facts,
        missing=tuple(many.get("missing", ())),
        running=tuple(many.get("running", ())),
        folders={folders[int(line.split()[0])]: _folder(line) for line in many.get("folder", ())},
        images={image: reason for image, _, reason in (line.partition(" ") for line in many.get("image", ()))},
        unreachable=tuple(peer for peer in many.get("unreachable", ()) if peer),
        listens=tuple(int(port) for port in many.get("listens", ())),
        clock_off_s=float(facts.get("time", now)) - now,
    )


def _folder(line: str) -> Folder:
    _, may, owner, mode = line.split()
    return Folder(may == "w", owner, mode)


def run(login: Login, address: str, script: str) -> str:
    """Run a script there; what it prints, or what its failure means."""
    command = login.command(address, script)
    shown = shlex.join(command if len(script) < 200 else [*command[:-1], "…"])
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_ANSWER_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise CommandError(f"no answer within {_ANSWER_S} s; the host hangs or is overloaded", shown, "") from None
    except FileNotFoundError:
        raise UserError("ssh is not installed here; install openssh-client") from None
    if done.returncode == 0:
        return done.stdout
    raise CommandError(_meaning(login, address, done.stderr), shown, done.stderr or done.stdout)


def _meaning(login: Login, address: str, stderr: str) -> str:
    """What an error of ssh means, and what to do about it."""
    if "Permission denied" in stderr:
        key = login.key or "your default key"
        return (
            f"the host refuses {key} for user {login.user}; add {key}.pub to its ~/.ssh/authorized_keys, or change auth"
        )
    if "refused" in stderr:
        return f"no sshd listens on port 22 of {address}; start it there"
    if any(word in stderr for word in ("timed out", "No route", "unreachable", "banner exchange")):
        return f"nothing answers at {address}; is the host up, and is this its address?"
    if "resolve" in stderr:
        return f"{address} is not known here; give an address, or a name that resolves"
    return "ssh fails"
