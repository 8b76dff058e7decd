"""A store's user in a process of its own: a command a line, an answer of JSON a line.

python mooncake_worker.py ADDRESS OPTIONS

put N VERSION      store N objects: {"ok": how many, "seconds": how long the call took}
get N TIMEOUT VERSION    load them: besides, "wrong" counts those that are OK with other bytes
exists N           {"there": how many} or {"error": class of the error}
quiet              {"held": transfers that still hold memory, "breakers": those that are open}
"""

import json
import sys
import time

from kvconnect.backend import Op
from kvconnect.errors import BackendError
from kvconnect.testing.memory import Objects
from kvconnect.testing.suite import keys
from kvconnect.testing.suite.base import content, filled
from kvconnect_mooncake import open_backend

SIZE = 64 << 10


class User:
    def __init__(self, store):
        self.store, self.held = store, []

    def _move(self, op, objects, names, timeout):
        registration = self.store.register([objects.region])
        begin = time.monotonic()
        transfer = self.store.submit(objects.batch(op, names))
        outcome = transfer.wait(timeout)
        self.held.append((transfer, registration, objects))
        return outcome, time.monotonic() - begin

    def put(self, count, version):
        names = keys(int(count))
        objects = filled([[SIZE]] * len(names), names, version)
        outcome, seconds = self._move(Op.STORE, objects, names, 5.0)
        return {"ok": int(outcome.ok.sum()), "seconds": seconds, "said": outcome.counts()}

    def get(self, count, timeout, version):
        names, wrong = keys(int(count)), 0
        objects = Objects([[SIZE]] * len(names))
        outcome, seconds = self._move(Op.LOAD, objects, names, float(timeout))
        for index, name in enumerate(names):
            wrong += outcome.ok[index] and objects.read(index) != content(name, SIZE, version)
        said = outcome.counts()
        return {"ok": int(outcome.ok.sum()), "seconds": seconds, "wrong": int(wrong), "said": said}

    def exists(self, count):
        names, begin = keys(int(count)), time.monotonic()
        try:
            answer = {"there": int(self.store.exists(names, [SIZE] * len(names)).sum())}
        except BackendError as error:
            answer = {"error": type(error).__name__}
        return answer | {"seconds": time.monotonic() - begin}

    def quiet(self):
        for one in [one for one in self.held if one[0].done()]:
            one[1].close()
            self.held.remove(one)
        return {"held": len(self.held), "breakers": self.store.stats()["breakers_open"]}


def main(address, options):
    with open_backend(address, json.loads(options)) as store:
        user = User(store)
        print("ready", flush=True)
        for line in sys.stdin:
            command, *arguments = line.split()
            print(json.dumps(getattr(user, command)(*arguments)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
