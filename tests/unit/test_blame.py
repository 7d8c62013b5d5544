from __future__ import annotations

from spark_hvd.runner.supervise.mpi.blame import Blame, Suspect


def test_a_killed_manager_counts_before_the_proxy_that_lost_it() -> None:
    suspect = Suspect()
    suspect.accuse("the proxy ended with code 7", Blame.FAILED, now=10.0)
    suspect.accuse("mpiexec was killed", Blame.CAUSE, now=10.1)
    assert (suspect.error, suspect.blame) == ("mpiexec was killed", Blame.CAUSE)


def test_of_two_alike_the_first_counts() -> None:
    suspect = Suspect()
    suspect.accuse("the shim was ended", Blame.FOLLOWED, now=10.0)
    suspect.accuse("the proxy left", Blame.FOLLOWED, now=10.1)
    assert suspect.error == "the shim was ended"


def test_the_likelier_a_cause_the_sooner_it_is_told() -> None:
    due = []
    for blame in Blame:
        suspect = Suspect()
        suspect.accuse("ended", blame, now=0.0)
        due.append(suspect.due)
    assert due == sorted(due, key=lambda moment: moment or 0.0)


def test_it_is_told_once_and_not_before_its_time() -> None:
    suspect = Suspect()
    assert not suspect.is_due(100.0)
    suspect.accuse("mpiexec was killed", Blame.CAUSE, now=10.0)
    assert not suspect.is_due(10.4)
    assert suspect.is_due(10.5)
    assert not suspect.is_due(11.0)
