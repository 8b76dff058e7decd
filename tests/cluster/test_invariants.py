"""Invariants, ledger and recovery on hand-made journals: each sees what it is there for.

`story` is a run in which all is well; every test changes one thing in it and names the finding.
"""

import msgspec
import pytest

from kvconnect.testing.cluster.events import Call, State
from kvconnect.testing.cluster.faults import Planned
from kvconnect.testing.cluster.invariants import Run, judge
from kvconnect.testing.cluster.journal import Asked, Deed, Heard, Mark, Member, Phase, Verified
from kvconnect.testing.cluster.ledger import Ledger
from kvconnect.testing.cluster.recovery import trace
from kvconnect.testing.cluster.scenario import FaultSpec, Limits

MIB = 1 << 20
PAGES = tuple(range(8))


def member(name, group, roles, **fields):
    base = {"host": 0, "size": 2, "store": "s", "deadline": 2.0, "grace": 0.5}
    return Member(name=name, group=group, roles=roles, **base | fields)


MEMBERS = (
    member("w-0", "w", ("write",)),
    member("w-1", "w", ("write",)),
    member("r-0", "r", ("read",), size=1, host=1),
)
CUT = FaultSpec(kind="cut", at=5.0, seconds=3.0, hosts=(0,))
PLAN = (Planned(number=0, at=5.0, seconds=3.0, fault=CUT),)
LIMITS = Limits(calls=10, pages=10, recover=2.0, detect=1.5, files=2, threads=2, rss_mib=10)


def heard(at, worker, life=0, **fields):
    op = "load" if worker.startswith("r") else "store"
    base = {"op": op, "worker": worker, "number": 0, "started": 0.0, "seconds": 0.1,
            "deadline": 2.0, "asked": len(PAGES)}  # fmt: skip
    return Heard(at=at, worker=worker, life=life, event=Call(**base | fields))


def state(at, worker, life=0, fds=10, threads=5, rss=100 * MIB):
    event = State(worker=worker, at=at, fds=fds, threads=threads, rss=rss)
    return Heard(at=at, worker=worker, life=life, event=event)


def mark(at, worker, what, life=0, **fields):
    return Mark(at=at, worker=worker, life=life, what=what, **fields)


def story():
    """20 s: both writers and the reader call once a second; a cut from 5 to 8 makes them miss."""
    entries = [Phase(at=-1.0, name="warm"), Phase(at=0.0, name="load")]
    for one in MEMBERS:
        entries += [mark(-4.0, one.name, "born"), mark(0.0, one.name, "busy", seconds=2.5)]
        entries += [state(0.1, one.name), state(21.0, one.name)]
        for second in range(1, 20):
            got = {"hits": PAGES} if one.roles == ("read",) else {"acked": PAGES}
            cut = 6 <= second < 8
            result = {"misses": {"TIMEOUT": 8}} if cut else got
            entries.append(heard(second + 0.2, one.name, **result))
        entries.append(mark(19.9, one.name, "idle"))
    entries = [*entries, heard(-3.0, "r-0", hits=PAGES)]
    entries += [heard(-3.0, name, acked=PAGES) for name in ("w-0", "w-1")]
    entries += [
        Deed(at=5.01, began=5.0, fault=0, what="applied"),
        Deed(at=8.01, began=8.0, fault=0, what="lifted", dropped=9),
        Verified(at=20.5, group="w", ok=PAGES),
        Phase(at=22.0, name="end"),
    ]
    return entries


def judged(entries, *, limits=LIMITS, plan=PLAN, members=MEMBERS):
    entries = sorted(entries, key=lambda entry: entry.at)
    return judge(Run(members, limits, plan, entries))


def only(findings, invariant, *words):
    assert {one.invariant for one in findings} == {invariant}
    for word in words:
        assert any(word in one.words for one in findings), (word, findings)


def changed(entries, at, worker, **fields):
    """Change the call that a worker told of at a time."""
    found = [e for e in entries if isinstance(e, Heard) and (e.at, e.worker) == (at, worker)]
    assert len(found) == 1
    event = msgspec.structs.replace(found[0].event, **fields)
    new = msgspec.structs.replace(found[0], event=event)
    return [new if entry is found[0] else entry for entry in entries]


def without(entries, worker, start, stop):
    return [
        e for e in entries
        if not (isinstance(e, Heard) and isinstance(e.event, Call) and e.worker == worker
                and start <= e.at < stop)
    ]  # fmt: skip


def test_a_run_in_which_all_is_well_has_no_finding():
    assert judged(story()) == []


def test_a_wrong_byte():
    only(judged(changed(story(), 3.2, "r-0", wrong=(5,))), "bytes", "r-0", "pages 5")
    assert judged(changed(story(), 3.2, "r-0", wrong=(5,)))[0].entry.at == 3.2


def test_a_wrong_byte_at_the_end():
    entries = story()
    entries[-2] = Verified(at=20.5, group="w", ok=PAGES[:-1], wrong=(7,))
    only(judged(entries), "bytes", "pages 7 of w")


def test_memory_that_changed_after_it_was_reused():
    only(judged(changed(story(), 3.2, "r-0", reused=(2, 3))), "reuse", "was 2, 3")


def test_a_call_that_took_longer_than_deadline_and_grace():
    assert judged(changed(story(), 3.2, "r-0", seconds=2.49)) == []
    only(judged(changed(story(), 3.2, "r-0", seconds=2.51)), "deadline", "took 2.51 s")


def test_silence_of_a_worker_that_lives():
    only(judged(without(story(), "r-0", 9, 14)), "deadline", "r-0 was silent for 6.0 s")


def test_silence_at_the_end_counts_too():
    entries = [e for e in without(story(), "r-0", 15, 99)
               if not (isinstance(e, Mark) and e.worker == "r-0" and e.what == "idle")]  # fmt: skip
    only(judged(entries), "deadline", "r-0 was silent for 7.8 s")


def test_a_stopped_worker_is_excused_for_as_long_as_it_was_and_no_longer():
    quiet = without(story(), "r-0", 9, 14)
    stopped = [mark(9.0, "r-0", "frozen"), mark(13.0, "r-0", "thawed")]
    assert judged(quiet + stopped) == []
    briefly = [mark(9.0, "r-0", "frozen"), mark(10.0, "r-0", "thawed")]
    only(judged(quiet + briefly), "deadline", "r-0 was silent")


def test_a_request_without_an_end():
    asked = Asked(at=10.0, worker="r-0", life=0, request="q", seconds=2.5)
    only(judged([*story(), asked]), "deadline", "q had no end")
    assert judged([*story(), asked, mark(10.1, "r-0", "refused", request="q")]) == []


def test_an_acknowledged_page_that_is_lost():
    entries = story()
    entries[-2] = Verified(at=20.5, group="w", ok=PAGES[1:], missing=(0,))
    only(judged(entries), "durable", "1 of 8 acknowledged pages of w are lost: 0")
    assert judged(entries, limits=msgspec.structs.replace(LIMITS, lost="any")) == []


def test_a_page_that_nobody_looked_at_is_not_taken_for_there():
    entries = story()
    entries[-2] = Verified(at=20.5, group="w", ok=PAGES[1:])
    only(judged(entries), "durable", "1 of 8 acknowledged pages of w were not looked at")


def test_a_volatile_store_may_lose_what_was_acknowledged_before_the_fault_alone():
    volatile = msgspec.structs.replace(LIMITS, lost="volatile")
    entries = story()
    entries[-2] = Verified(at=20.5, group="w", ok=PAGES[1:], missing=(0,))
    # By the last acknowledgement, at 19.2, the page had been stored again.
    only(judged(entries, limits=volatile), "durable")
    early = [
        changed_ack(e, PAGES[1:]) if isinstance(e, Heard) and e.worker == "w-1" and e.at > 8 else e
        for e in entries
    ]
    only(judged(early, limits=volatile), "durable")  # the fault ended nothing that kept it
    ended = [msgspec.structs.replace(e, keeps=False) if isinstance(e, Deed) else e for e in early]
    warm = [changed_ack(e, PAGES[1:]) if isinstance(e, Heard) and e.at > 0 else e for e in ended]
    assert judged(warm, limits=volatile) == []  # acknowledged before the load alone
    assert judged(ended, limits=volatile) == []
    only(judged(ended), "durable")


@pytest.mark.parametrize(
    ("began", "seconds", "lost"),
    [(18.0, 0.1, True), (19.05, 0.1, False), (19.15, 0.1, False), (19.3, 0.1, False)],
)
@pytest.mark.parametrize("rank", ["w-0", "w-1"])
def test_a_word_of_a_call_that_a_fault_met_is_none_about_the_time_after_it(
    began, seconds, lost, rank
):
    """Page 0 is acknowledged to one rank by a call from 19.1 to 19.2, to the other much later."""
    volatile = msgspec.structs.replace(LIMITS, lost="volatile")
    other = {"w-0": "w-1", "w-1": "w-0"}[rank]
    entries = story()
    entries[-2] = Verified(at=20.5, group="w", ok=PAGES[1:], missing=(0,))
    entries.append(heard(19.8, other, acked=PAGES))
    entries.append(Deed(at=began + seconds, began=began, fault=0, what="failed", keeps=False))
    found = [f for f in judged(entries, limits=volatile) if f.invariant == "durable"]
    assert bool(found) == lost


def test_what_was_acknowledged_just_before_the_fault_may_be_unsettled():
    entries = story()
    entries[-2] = Verified(at=20.5, group="w", ok=PAGES[1:], missing=(0,))
    words = Ledger(MEMBERS, sorted(entries, key=lambda e: e.at)).acknowledged("w")[0]
    last = max(word.ended for word in words)

    def killed(began, unsettled):
        return [
            msgspec.structs.replace(e, began=began, at=began + 0.01, unsettled=unsettled)
            if isinstance(e, Deed) and e.what == "applied"
            else e
            for e in entries
        ]

    assert not [f for f in judged(killed(last + 0.5, 1.0)) if f.invariant == "durable"]
    assert [f for f in judged(killed(last + 1.5, 1.0)) if f.invariant == "durable"]
    assert [f for f in judged(killed(last + 0.5, 0.0)) if f.invariant == "durable"]


def changed_ack(entry, acked):
    if not isinstance(entry.event, Call) or not entry.event.acked:
        return entry
    event = msgspec.structs.replace(entry.event, acked=acked)
    return msgspec.structs.replace(entry, event=event)


def test_the_ledger_knows_a_page_once_every_rank_was_told():
    entries = [heard(1.0, "w-0", acked=(1, 2)), heard(2.0, "w-1", acked=(2, 3))]
    ledger = Ledger(MEMBERS, entries)
    assert ledger.acknowledged("w") == {2: ((0.9, 1.0), (1.9, 2.0))}
    entries += [heard(3.0, "w-0", acked=(2, 3)), heard(4.0, "r-0", hits=(1,))]
    both = ((2.9, 3.0), (1.9, 2.0))
    assert Ledger(MEMBERS, entries).acknowledged("w") == {2: both, 3: both[::-1]}
    assert Ledger(MEMBERS, entries).groups == ["w"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"fds": 13}, "13 open files, had 10, may have 2 more"),
        ({"threads": 8}, "8 threads, had 5"),
        ({"rss": 111 * MIB}, "111 MiB resident, had 100"),
    ],
)
def test_files_threads_or_memory_that_grew(fields, words):
    only(judged([*story(), state(21.5, "r-0", **fields)]), "resources", words)


def test_growth_is_counted_from_when_a_worker_was_warm_and_in_each_life_by_itself():
    entries = story()
    assert judged([*entries, state(-0.5, "r-0", fds=1)]) == []
    other = [state(11.0, "r-0", life=1, fds=1), heard(11.1, "r-0", life=1, hits=PAGES)]
    assert judged([*entries, *other, state(14.0, "r-0", life=1, fds=90)]) == []
    more = [state(14.0, "r-0", life=1, fds=90), state(21.5, "r-0", life=1, fds=93)]
    only(judged([*entries, *other, *more]), "resources", "93 open files, had 90")


def test_a_checksum_that_disagrees_though_nothing_was_damaged():
    entries = changed(story(), 7.2, "r-0", misses={"CHECKSUM": 2, "TIMEOUT": 6})
    only(judged(entries), "damage", "missed 2 pages by CHECKSUM")
    assert judged(entries, limits=msgspec.structs.replace(LIMITS, damage=True)) == []


def test_a_worker_that_ends_by_itself_and_one_that_a_fault_ends():
    entries = without(story(), "r-0", 18, 99)
    gone = mark(18.0, "r-0", "ended", fault=-2, words="segfault")
    only(judged([*entries, gone]), "alive", "r-0 ended by itself: segfault")
    entries = without(story(), "r-0", 6, 99)
    killed = [mark(5.5, "r-0", "ended", fault=0), mark(9.0, "r-0", "born", life=1)]
    assert judged([*entries, *killed, heard(9.5, "r-0", life=1, hits=PAGES)]) == []


def test_a_call_that_raised_and_a_run_that_was_given_up():
    entries = changed(story(), 3.2, "r-0", error="ValueError: no")
    only(judged(entries), "alive", "load raised ValueError: no")
    entries = [*story(), Phase(at=9.0, name="failed", words="no hosts")]
    only(judged(entries), "alive", "given up: no hosts")
    failed = Deed(at=9.0, began=9.0, fault=0, what="failed", words="no tc")
    only(judged([*story(), failed]), "alive", "fault 0 went wrong: no tc")


def test_detection_and_recovery_are_measured_from_the_fault_and_from_its_end():
    found = trace(PLAN, sorted(story(), key=lambda e: e.at))[0]
    assert (found.hit, found.bad, found.waits) == (("r-0", "w-0", "w-1"), 6, ())
    assert found.detect == pytest.approx(6.2 - 5.0)
    # The call heard at 8.2 began at 8.1, after the link was open again.
    assert found.recover == pytest.approx(8.2 - 8.01)
    assert found.outage == pytest.approx(8.2 - 5.0)


def test_a_page_that_is_not_there_is_neither_a_good_nor_a_bad_call():
    entries = story()
    for second in (6, 7):
        entries = changed(entries, second + 0.2, "r-0", misses={"ABSENT": 8})
    for second in (8, 9):
        entries = changed(entries, second + 0.2, "w-0", acked=(), misses={"ABSENT": 8})
    found = trace(PLAN, sorted(entries, key=lambda e: e.at))[0]
    assert found.hit == ("w-0", "w-1")
    assert found.outage == pytest.approx(10.2 - 5.0)


def test_recovery_that_takes_too_long_or_never_comes():
    entries = story()
    for second in range(8, 11):
        entries = changed(entries, second + 0.2, "r-0", hits=(), misses={"BACKEND_ERROR": 8})
    only(judged(entries), "recovery", "well again 3.2 s after it was lifted, limit 2")
    for second in range(11, 20):
        entries = changed(entries, second + 0.2, "r-0", hits=(), misses={"BACKEND_ERROR": 8})
    only(judged(entries), "recovery", "r-0 made no good call after it was lifted")


def test_recovery_is_not_judged_where_the_next_fault_came_before_its_time_was_over():
    entries = story()
    for second in range(8, 20):
        entries = changed(entries, second + 0.2, "r-0", hits=(), misses={"BACKEND_ERROR": 8})
    for begin, excused in ((9.0, True), (11.0, False)):
        quiet = msgspec.structs.replace(CUT, effect="none", recover=99.0)
        plan = (*PLAN, Planned(number=1, at=begin, seconds=9.0, fault=quiet))
        second = [Deed(at=begin, began=begin, fault=1, what="applied"),
                  Deed(at=20.0, began=20.0, fault=1, what="lifted")]  # fmt: skip
        late = [heard(20.1, "r-0", hits=PAGES, seconds=0.05)]
        found = [one.words for one in judged([*entries, *second, *late], plan=plan)]
        assert found == [] if excused else "r-0 made no good call" in found[0]


def test_a_service_that_fails_over_is_well_again_while_the_fault_lasts():
    entries = changed(story(), 7.2, "r-0", hits=PAGES, misses={})
    entries = [e for e in entries if not (isinstance(e, Heard) and e.worker.startswith("w"))]
    found = trace(PLAN, sorted(entries, key=lambda e: e.at))[0]
    assert (found.recover, found.outage) == (0.0, pytest.approx(7.2 - 5.0))


def test_detection_that_takes_too_long():
    entries = story()
    for worker, got in (("r-0", "hits"), ("w-0", "acked"), ("w-1", "acked")):
        entries = changed(entries, 6.2, worker, misses={}, **{got: PAGES})
    only(judged(entries), "detect", "the first call failed after 2.2 s, limit 1.5")


@pytest.mark.parametrize("effect", ["miss", "slow", "dropped", "ended"])
def test_a_fault_that_did_not_bite(effect):
    fault = msgspec.structs.replace(CUT, effect=effect)
    plan = (Planned(number=0, at=5.0, seconds=3.0, fault=fault),)
    entries = story()
    for second in (6, 7):
        for worker, got in (("r-0", "hits"), ("w-0", "acked"), ("w-1", "acked")):
            entries = changed(entries, second + 0.2, worker, misses={}, **{got: PAGES})
    entries = [msgspec.structs.replace(e, dropped=0) if isinstance(e, Deed) else e for e in entries]
    only(judged(entries, plan=plan), "bites", f"its effect ({effect}) was not seen")
    shown = {
        "miss": changed(entries, 6.2, "r-0", hits=(), misses={"TIMEOUT": 8}),
        "slow": changed(changed(entries, 6.2, "r-0", seconds=0.9), 7.2, "r-0", seconds=0.9),
        "dropped": story(),
        "ended": [*entries, mark(7.5, "w-9", "ended", fault=0)],
    }[effect]
    assert [f for f in judged(shown, plan=plan) if f.invariant == "bites"] == []
    nothing = msgspec.structs.replace(CUT, effect="none")
    plan = (Planned(number=0, at=5.0, seconds=3.0, fault=nothing),)
    assert judged(entries, plan=plan) == []


def test_a_call_that_failed_in_a_run_without_faults():
    entries = [e for e in story() if not isinstance(e, Deed)]
    for second in (6, 7):
        for worker, got in (("r-0", "hits"), ("w-0", "acked"), ("w-1", "acked")):
            entries = changed(entries, second + 0.2, worker, misses={}, **{got: PAGES})
    assert judged(entries, plan=()) == []
    entries = changed(entries, 9.2, "w-1", acked=(), misses={"TIMEOUT": 8})
    only(judged(entries, plan=()), "calm", "w-1: store missed {'TIMEOUT': 8} without a fault")


def test_a_load_that_is_too_thin():
    entries = [e for e in story() if not (isinstance(e, Heard) and isinstance(e.event, Call))]
    entries = [e for e in entries if not isinstance(e, (Mark, Deed, Verified))]
    only(judged(entries), "load", "0 calls, at least 10", "0 pages read, at least 10")
