"""How a store is reached: https, the bucket in the host name, credentials from the environment."""

import datetime as dt
import ipaddress
import os
import socket

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kvconnect.errors import ClosedError, UnavailableError
from kvconnect.testing.suite.base import get, key, keys, put, stored
from kvconnect_nixl.s3 import open_backend
from tests.backends.s3_server import KEYS, S3Server, Timed, wait_until

AWS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = S3Server(tmp_path_factory.mktemp("moto"))
    yield server
    server.stop()


def certificate(folder):
    """Make a certificate for 127.0.0.1 that nobody else trusts; return its files."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = dt.datetime.now(dt.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private, hashes.SHA256())
    )
    files = folder / "cert.pem", folder / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    files[1].write_bytes(private.private_bytes(pem, form, serialization.NoEncryption()))
    return files


def test_https_with_a_certificate_of_ones_own(tmp_path):
    tls = certificate(tmp_path)
    server = S3Server(tmp_path, tls)
    try:
        bucket = server.bucket()
        with open_backend(bucket, server.options(ca_bundle=str(tls[0]))) as store:
            put(store, keys(3), [70_000] * 3)
            stored(store, keys(3), [70_000] * 3)
            assert store.exists(keys(4), [70_000] * 4).sum() == 3
        with pytest.raises(UnavailableError, match="SSL"):
            open_backend(bucket, server.options())
    finally:
        server.stop()


def test_the_bucket_in_the_host_name(server, monkeypatch):
    # The client inside NIXL takes every name under .localhost for this machine, Python does not.
    real = socket.getaddrinfo

    def resolve(host, *rest, **more):
        here = str(host).endswith(".localhost")
        return real("127.0.0.1" if here else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    bucket = server.bucket()
    options = server.options(addressing="virtual", endpoint=f"http://localhost:{server.port}")
    with open_backend(f"{bucket}/x", options) as store:
        put(store, keys(2), [2304] * 2)
        stored(store, keys(2), [2304] * 2)
    listed = server.client.list_objects_v2(Bucket=bucket)["Contents"]
    assert sorted(one["Key"] for one in listed) == sorted(
        f"x/objects/{name[:16]}/{name[16:]}" for name in keys(2)
    )


def test_credentials_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS["access_key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS["secret_key"])
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "7")
    monkeypatch.delenv("AWS_RETRY_MODE", raising=False)
    before = dict(os.environ)
    options = {"endpoint": server.endpoint, "bounce": "1MiB"}
    with open_backend(server.bucket(), options) as store:
        # What NIXL reads when it is made is put back; its log level stays.
        assert {**before, "NIXL_LOG_LEVEL": ""} == {**os.environ, "NIXL_LOG_LEVEL": ""}
        put(store, keys(2), [2304] * 2)
        stored(store, keys(2), [2304] * 2)
        assert KEYS["secret_key"] not in repr(store) + repr(store.options)


def test_no_credentials(server, monkeypatch, tmp_path):
    for name in AWS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    with pytest.raises(UnavailableError, match="no credentials; set AWS_ACCESS_KEY_ID"):
        open_backend(server.bucket(), {"endpoint": server.endpoint})


def test_an_object_larger_than_the_buffers(server):
    with open_backend(server.bucket(), server.options(bounce="64KiB")) as store:
        outcome = put(store, [key("large"), key("small")], [70_000, 60_000])
        assert outcome.counts() == {"OK": 1, "NO_SPACE": 1}
        assert "bounce=65536 B; raise it" in outcome.causes[0]
        stored(store, [key("small")], [60_000])


def test_a_forked_process_cannot_use_it(server, monkeypatch):
    with open_backend(server.bucket(), server.options()) as store:
        with monkeypatch.context() as forked:
            forked.setattr(os, "getpid", lambda: -1)
            with pytest.raises(ClosedError, match="forked"):
                store.exists(keys(1), [8])
            store.close()
        assert not store.exists(keys(1), [8]).any(), "the child's close is not the parent's"


def test_no_bucket_at_open(server):
    with Timed(5), pytest.raises(UnavailableError, match="NoSuchBucket; create the bucket"):
        open_backend("no-such-bucket", server.options())


def test_a_bucket_that_was_deleted(server):
    bucket = server.bucket()
    with open_backend(bucket, server.options(cooldown=0.1)) as store:
        server.client.delete_bucket(Bucket=bucket)
        for outcome in (put(store, keys(3), [8] * 3), get(store, keys(3), [8] * 3)[0]):
            assert outcome.counts() == {"BACKEND_ERROR": 3}
            assert all("NoSuchBucket" in word for word in outcome.causes.values())
        with pytest.raises(UnavailableError, match="NoSuchBucket"):
            store.exists(keys(1), [8])
        server.client.create_bucket(Bucket=bucket)
        wait_until(lambda: not store.stats()["circuit_open"], 5, "the circuit closes")
        assert put(store, keys(1), [8]).prefix == 1
