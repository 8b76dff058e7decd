"""A real S3 server (moto) in a process of its own, and a proxy that misbehaves before it."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import botocore.session
from botocore.config import Config

KEYS = {"access_key": "kvconnect", "secret_key": "a-secret-nobody-sees"}


class S3Server:
    """`moto_server` on a free port; `client` reaches behind the backend's back.

    `tls`: files of its certificate and key, where it is to speak https.
    """

    def __init__(self, folder, tls=None):
        self.tls = tls
        self.log = folder / "moto.log"
        self.port = free_port()
        self.start()

    @property
    def endpoint(self):
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    def start(self):
        secure = ["-s", "-c", str(self.tls[0]), "-k", str(self.tls[1])] if self.tls else []
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "moto.server",
                    "-H",
                    "127.0.0.1",
                    "-p",
                    str(self.port),
                    *secure,
                ],
                stdout=log,
                stderr=log,
            )
        wait_until(self._answers, 30, f"moto_server, see {self.log}")
        self.client = client(self.endpoint, self.tls and str(self.tls[0]))

    def _answers(self):
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def bucket(self):
        """Make a bucket of a fresh name."""
        name = f"kv-{uuid.uuid4().hex[:12]}"
        self.client.create_bucket(Bucket=name)
        return name

    def options(self, **more):
        return {"endpoint": self.endpoint, **KEYS, "bounce": "32MiB", **more}

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def stop(self):
        self.client.close()
        self.kill()


def client(endpoint, trusted=None):
    """Return an S3 client that is not the backend's."""
    return botocore.session.get_session().create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url=endpoint,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        verify=trusted,
        config=Config(retries={"total_max_attempts": 2}, s3={"addressing_style": "path"}),
    )


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_until(happened, seconds, what):
    """Wait for something that has no event, with a deadline."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.005)


class Timed:
    """Fails a block that takes longer than `seconds`."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __enter__(self):
        self.began = time.monotonic()

    def __exit__(self, kind, *_):
        took = time.monotonic() - self.began
        assert kind is not None or took < self.seconds, f"{took:.2f} s, at most {self.seconds} s"


def open_fds():
    return len(list(Path("/proc/self/fd").iterdir()))


@dataclass
class Plan:
    """What the proxy does to one connection.

    `hold` or `cut`: "down" (answers) or "up" (requests), after `after` bytes of it; `answer`:
    (status line, body) to give instead of asking the server; `lose`: pass no answer on.
    """

    hold: str = ""
    cut: str = ""
    after: int = 0
    answer: tuple = ()
    lose: bool = False


class Proxy:
    """A TCP proxy to `port` that misbehaves as told: the next connections by `plans`, in turn,
    then all by `always`. A connection is one request: moto closes it after its answer.

    `held` is set once something is held; what is held goes on at `release`.
    """

    def __init__(self, port):
        self._port = port
        self.plans, self.always = [], Plan()
        self.held, self._go = threading.Event(), threading.Event()
        self.requests = self.now = self.peak = 0
        self._lock = threading.Lock()
        self._closing = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._sockets = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def release(self):
        """Let what is held go on, and hold nothing more."""
        self.plans, self.always = [], Plan()
        go, self._go = self._go, threading.Event()
        self.held.clear()
        go.set()

    def _accept(self):
        while not self._closing:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            plan = self.plans.pop(0) if self.plans else self.always
            arguments = (near, plan, self._go)
            thread = threading.Thread(target=self._serve, args=arguments, daemon=True)
            self._threads.append(thread)
            self._sockets.append(near)
            thread.start()

    def _serve(self, near, plan, go):
        with self._lock:
            self.requests += 1
            self.now += 1
            self.peak = max(self.peak, self.now)
        try:
            with near, contextlib.suppress(OSError):
                if plan.answer:
                    read_request(near)
                    near.sendall(response(*plan.answer))
                else:
                    self._pass_on(near, plan, go)
        finally:
            with self._lock:
                self.now -= 1

    def _pass_on(self, near, plan, go):
        with socket.create_connection(("127.0.0.1", self._port), 10) as far:
            self._sockets.append(far)
            arguments = (near, far, "up", plan, go)
            up = threading.Thread(target=self._pump, args=arguments, daemon=True)
            up.start()
            self._pump(far, near, "down", plan, go)
            up.join()

    def _pump(self, source, target, way, plan, go):
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if plan.lose and way == "down":
                    continue
                if way in {plan.hold, plan.cut} and passed + len(data) > plan.after:
                    room = max(plan.after - passed, 0)
                    target.sendall(data[:room])
                    if way == plan.cut:
                        break
                    self.held.set()
                    assert go.wait(60), "never released"
                    data = data[room:]
                    plan = Plan()
                target.sendall(data)
                passed += len(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._closing = True
        self.release()
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(10)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def read_request(near):
    """Read one HTTP request to its end."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += near.recv(1 << 16)
    head, _, body = data.partition(b"\r\n\r\n")
    wanted = 0
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            wanted = int(value)
    if b"100-continue" in head.lower() and len(body) < wanted:
        near.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    got = len(body)
    while got < wanted:
        got += len(near.recv(1 << 16))


def response(status, body):
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    return f"{head}Content-Type: application/xml\r\n\r\n{body}".encode()


def error_body(code):
    return f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code></Error>'
