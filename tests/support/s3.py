"""An S3 server on this machine, for tests of what reads and writes object stores."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

BUCKET = "regrow-tests"


@contextmanager
def s3_server() -> Iterator[str]:
    """A server with one empty bucket, which this process and those it starts are told of; yields `s3://bucket`."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }
    before = {key: os.environ.get(key) for key in settings}
    os.environ.update(settings)
    try:
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield f"s3://{BUCKET}"
    finally:
        for key, value in before.items():
            os.environ.pop(key)
            if value is not None:
                os.environ[key] = value
        server.stop()
