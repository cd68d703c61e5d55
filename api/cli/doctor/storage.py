"""Whether a URL for runs (`s3://…`, `gs://…`) can be written to: from here, and from every host.

What is done there stands alone, so that it runs on a host that has Ray and nothing of ours: a small object is written
and deleted again. (An object store may keep an empty marker of the folder.)
"""

import re
import subprocess
import sys

from airmoe_ray.errors import UserError
from airmoe_ray.storage.bucket import meaning_of, shown

PROBE_S = 45  # for all attempts: an object store's client tries an address that is silent for a while

# prints `ok`, or what went wrong, in one line
PROBE = r"""
import sys, uuid
url = sys.argv[1]
try:
    from pyarrow import ArrowInvalid
    from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem
    try:
        files, path = FileSystem.from_uri(url)
    except ArrowInvalid as error:
        if "Unrecognized filesystem" not in str(error):
            raise
        import fsspec
        files, path = fsspec.core.url_to_fs(url)
        files = PyFileSystem(FSSpecHandler(files))
    name = path.rstrip("/") + "/.airmoe-" + uuid.uuid4().hex
    with files.open_output_stream(name) as stream:
        stream.write(b"airmoe")
    files.delete_file(name)
    print("ok")
except Exception as error:
    print(" ".join((type(error).__name__ + ": " + str(error)).split()))
"""


def writable_from_here(url: str) -> str:
    """Try it from this machine."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE, url], capture_output=True, text=True, check=False, timeout=PROBE_S
        )
        told = done.stdout.strip() or done.stderr.strip()[-200:]
    except subprocess.TimeoutExpired:
        told = f"no answer within {PROBE_S} s"
    return judge(url, told, "this machine")


def judge(url: str, told: str, who: str) -> str:
    """What the probe printed, as a finding or as an error of one line."""
    if told == "ok":
        return f"{shown(url)} can be written to from {who}"
    reason = re.search(r"AWS Error (\w+)|([^:]{1,120})$", told)
    said = next((group for group in reason.groups() if group), told[:120]).strip() if reason else told[:120]
    raise UserError(f"{shown(url)}: {meaning_of(told) or 'cannot be written to'} ({said}, from {who})")
