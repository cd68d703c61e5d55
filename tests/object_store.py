"""An S3 on loopback (moto), with users who may write, may only read, or are unknown."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import boto3
import httpx
from moto.server import ThreadedMotoServer

BUCKET = "runs"
_ROOT = {"region_name": "us-east-1", "aws_access_key_id": "root", "aws_secret_access_key": "root"}


@dataclass(frozen=True)
class ObjectStore:
    """A bucket, and how to reach it."""

    address: str  # host:port

    def url(self, path: str, *, user: tuple[str, str] | None = None, bucket: str = BUCKET) -> str:
        """A place in the bucket, as `--run` takes it."""
        who = f"{quote(user[0], safe='')}:{quote(user[1], safe='')}@" if user else ""
        return f"s3://{who}{bucket}/{path}?endpoint_override={self.address}&scheme=http&region=us-east-1"

    def client(self, service: str) -> Any:
        """Amazon's own client."""
        return boto3.client(service, endpoint_url=f"http://{self.address}", **_ROOT)

    def make_user(self, name: str, *actions: str) -> tuple[str, str]:
        """Key and secret of a new user who may do this and no more."""
        iam = self.client("iam")
        iam.create_user(UserName=name)
        allowed = {"Effect": "Allow", "Action": list(actions), "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
        iam.put_user_policy(UserName=name, PolicyName="all", PolicyDocument=policy)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        return key["AccessKeyId"], key["SecretAccessKey"]

    def check_keys(self, *, yes: bool) -> None:
        """Whether keys are looked at from now on."""
        count = b"0" if yes else b"inf"
        httpx.post(f"http://{self.address}/moto-api/reset-auth", content=count).raise_for_status()


@contextmanager
def empty_account(ip_address: str = "127.0.0.1") -> Iterator[str]:
    """Moto's server with nothing in its account, for the duration of a block; host:port.

    Moto's accounts belong to the process, not to the server: what another test made in it would still be there.
    """
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request otherwise
    server = ThreadedMotoServer(ip_address=ip_address, port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        httpx.post(f"http://{host}:{port}/moto-api/reset").raise_for_status()
        yield f"{host}:{port}"
    finally:
        server.stop()


@contextmanager
def object_store(ip_address: str = "127.0.0.1") -> Iterator[ObjectStore]:
    """A server with one empty bucket, for the duration of a block."""
    with empty_account(ip_address) as address:
        store = ObjectStore(address)
        store.client("s3").create_bucket(Bucket=BUCKET)
        try:
            yield store
        finally:
            store.check_keys(yes=False)
