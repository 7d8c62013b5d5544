"""MlflowTracker on a real file store: what is logged, in which run, and that no server can disturb training."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from spark_hvd.checkpoint.format import write
from spark_hvd.estimators.fit.logged import log_checkpoints
from spark_hvd.estimators.torch.mlflow import pinned
from spark_hvd.estimators.training.checkpoint import of_epoch
from spark_hvd.estimators.training.history import History
from spark_hvd.runner.config import RunConfig
from spark_hvd.runner.watch import mlflow as mlflow_outbox
from spark_hvd.runner.watch import mlflow as mlflow_tracker
from spark_hvd.runner.watch.mlflow import MlflowTracker
from spark_hvd.runner.watch.summary import Share, Summary
from spark_hvd.runner.watch.tracking import Tracking, facts_of
from spark_hvd.store import Store
from spark_hvd.store.errors import StoreError
from tests.later import Later
from tests.unit.test_history import vitals

mlflow: Any = Later("mlflow")
FACTS = facts_of(RunConfig(num_proc=2), "train", spark="4.3.0", gpus=None)


@pytest.fixture(autouse=True)
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A store for this test only; nothing is written anywhere else."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setattr(mlflow_outbox, "_SEND_EVERY", 0.05)
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    mlflow.set_experiment("Default")
    yield str(mlflow.get_tracking_uri())
    mlflow.set_tracking_uri(before)


@pytest.fixture
def runs() -> Callable[[], list[Any]]:
    return lambda: list(mlflow.search_runs(output_format="list", search_all_experiments=True))


def points(run_id: str, name: str) -> list[tuple[int, float]]:
    return sorted((each.step, each.value) for each in mlflow.MlflowClient().get_metric_history(run_id, name))


def train(tracker: MlflowTracker, error: BaseException | None = None, summary: Summary | None = None) -> Any:
    """Make a run of three seconds on two ranks; return what MLflow recorded."""
    tracker.start(FACTS)
    for at in range(3):
        for rank in range(2):
            tracker.take(vitals(rank, at, epoch=at // 2, memory_bytes=5 * 10**8))
    tracker.end(error, summary)
    return mlflow.get_run(tracker.run_id)


def test_a_run(runs: Callable[[], list[Any]]) -> None:
    summary = Summary("train on 2 ranks", 3.0, 2, steps=20, data=Share(0.1, 0.2, 1), metrics={"loss": 0.3})
    tracker = MlflowTracker(run_name="mine")
    run = train(tracker, summary=summary)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "mine"
    assert run.data.params["spark_hvd.num_proc"] == "2"
    assert run.data.params["spark_hvd.function"] == "train"
    assert run.data.params["spark_hvd.spark"] == "4.3.0"
    assert "spark_hvd.gpus" not in run.data.params
    assert points(run.info.run_id, "loss") == [(0, 1.0), (10, 0.5), (20, 1 / 3)]
    assert points(run.info.run_id, "epoch") == [(0, 0), (10, 0), (20, 1)]
    for rank in range(2):
        assert run.data.metrics[f"system/rank_{rank}/samples_per_second"] == pytest.approx(320)
        assert run.data.metrics[f"system/rank_{rank}/memory_mb"] == 500
        assert run.data.metrics[f"system/rank_{rank}/share_data"] == pytest.approx(0.1)
    assert run.data.metrics["summary/steps"] == 20
    assert run.data.metrics["summary/data"] == 0.1
    assert run.data.tags["spark_hvd.status"] == "FINISHED"
    assert "mlflow.user" in run.data.tags
    assert len(runs()) == 1
    assert mlflow.active_run() is None
    assert not [thread for thread in threading.enumerate() if thread.name == "spark_hvd-mlflow"]


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("bad batch\nmore"), "FAILED"), (KeyboardInterrupt(), "KILLED")]
)
def test_a_run_that_ends_badly(error: BaseException, status: str) -> None:
    run = train(MlflowTracker(), error)
    assert run.info.status == status
    assert run.data.tags["spark_hvd.error"] == f"{type(error).__name__}: {error}".splitlines()[0]


def test_the_users_run_is_used_and_stays_open(runs: Callable[[], list[Any]]) -> None:
    with mlflow.start_run() as active:
        run = train(MlflowTracker(experiment="not for this", run_name="nor this"), ValueError("x"))
        assert run.info.run_id == active.info.run_id
        assert run.info.status == "RUNNING"
        assert mlflow.active_run().info.run_id == active.info.run_id
        assert "loss" in run.data.metrics
    assert len(runs()) == 1


def test_runs_below_the_users(runs: Callable[[], list[Any]]) -> None:
    """One tracker, one run after the other: each is a separate run."""
    tracker = MlflowTracker(nested=True)
    with mlflow.start_run(experiment_id=mlflow.create_experiment("theirs")) as active:
        first, second = train(tracker), train(tracker)
    assert first.info.run_id != second.info.run_id
    assert {run.data.tags["mlflow.parentRunId"] for run in (first, second)} == {active.info.run_id}
    assert {run.info.experiment_id for run in (first, second)} == {active.info.experiment_id}
    assert {run.info.status for run in runs()} == {"FINISHED"}
    assert points(second.info.run_id, "loss")[0] == (0, 1.0)  # counted from the start


def test_the_run_of_mlflows_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mlflow.MlflowClient().create_run("0")
    monkeypatch.setenv("MLFLOW_RUN_ID", made.info.run_id)
    assert train(MlflowTracker()).info.run_id == made.info.run_id


def test_an_experiment_is_made_once() -> None:
    first, second = train(MlflowTracker("new")), train(MlflowTracker("new"))
    assert first.info.experiment_id == second.info.experiment_id
    assert mlflow.get_experiment(first.info.experiment_id).name == "new"


def test_the_steps_go_on_after_a_restart_and_validation_has_names_of_its_own() -> None:
    tracker = MlflowTracker()
    tracker.start(FACTS)
    tracker.take(vitals(at=1))
    tracker.take(vitals(at=2))
    tracker.take(vitals(at=0, generation=1, process="new"))
    tracker.take(vitals(at=9, metrics={"loss": 9.0}))  # from the world that is over
    tracker.take(vitals(at=1, generation=1, process="new", stage="validation", metrics={"top 5 (%)": 0.9}))
    tracker.end(None, None)
    assert tracker.run_id is not None
    assert [step for step, _ in points(tracker.run_id, "loss")] == [10, 20, 20]
    assert points(tracker.run_id, "validation/top 5 ___") == [(30, 0.9)]


def test_a_fit_has_a_point_an_epoch_and_its_parameters() -> None:
    tracker = MlflowTracker()
    tracker.start({**FACTS, "fit.batch_size": 32, "fit.optimizer_name": "SGD", "fit.lr": 0.1})
    rows = [{"epoch": number, "loss": 1 / number, "val_loss": 2 / number} for number in range(1, 6)]
    tracker.take(vitals(at=1, metrics={"loss": 9.0}))
    for at, told in ((2, rows[:2]), (3, rows[:3]), (4, rows[2:])):
        tracker.take(vitals(at=at, stage="validation", epochs_done=told, metrics={"loss": 9.0}))
    again = {"epoch": 5, "loss": 7.0}  # trained again after a loss
    late = {"epoch": 3, "val_top_5": 0.5}  # it was validated while other epochs were trained
    tracker.take(vitals(at=0, generation=1, process="new", epochs_done=[again, late]))
    tracker.take(vitals(at=1, generation=1, process="new", epochs_done=[again, late]))
    tracker.end(None, None)
    run = mlflow.get_run(tracker.run_id)
    assert points(run.info.run_id, "val_top_5") == [(3, 0.5)]
    for name, first in (("loss", 1.0), ("val_loss", 2.0)):
        assert points(run.info.run_id, name) == [(number, first / number) for number in range(1, 6)]
    assert not [name for name in run.data.metrics if name.startswith("validation/")]
    assert {"batch_size": "32", "optimizer_name": "SGD", "lr": "0.1"}.items() <= run.data.params.items()
    assert run.data.params["spark_hvd.function"] == "train"


def test_what_has_not_changed_is_not_logged_again() -> None:
    tracker = MlflowTracker()
    tracker.start(FACTS)
    for _ in range(3):
        tracker.take(vitals(at=1))
    tracker.end(None, None)
    assert tracker.run_id is not None
    assert len(points(tracker.run_id, "loss")) == 1


def test_each_rank_is_logged_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr("spark_hvd.runner.watch.mlflow.time.time", lambda: 1e9 + next(clock))
    tracker = MlflowTracker()
    tracker.start(FACTS)
    for at in range(35):
        tracker.take(vitals(1, at))
    tracker.end(None, None)
    assert tracker.run_id is not None
    assert len(points(tracker.run_id, "system/rank_1/samples_per_second")) == 4


def test_another_value_of_a_parameter_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with mlflow.start_run():
        train(MlflowTracker())
        tracker = MlflowTracker()
        tracker.start({**FACTS, "num_proc": 4})
        tracker.take(vitals())
        tracker.end(None, None)
    assert len([record for record in caplog.records if "record of run" in record.message]) == 1
    assert "num_proc" in caplog.text


def test_no_password_is_logged_or_kept(caplog: pytest.LogCaptureFixture) -> None:
    """MLflow's own errors contain the server's address as it was passed."""

    def refuse(*_: Any, **__: Any) -> None:
        raise mlflow.MlflowException("API request to http://bob:TOP@SECRET@127.0.0.1:9/api/2.0/runs failed")

    tracker = MlflowTracker()
    run = train(tracker, mlflow.MlflowException("POST http://bob:TOP@SECRET@127.0.0.1:9/api failed"))
    assert run.data.tags["spark_hvd.error"] == "MlflowException: POST http://127.0.0.1:9/api failed"
    tracker.start(FACTS)
    assert tracker._outbox is not None
    tracker._outbox._client.log_batch = refuse
    tracker.take(vitals())
    tracker.end(None, None)
    tracking = Tracking(tracker)
    tracker.end = refuse  # type: ignore[method-assign]
    tracking.end(None, None)
    said = [record.getMessage() for record in caplog.records]
    assert [text.count("http://127.0.0.1:9/api/2.0/runs failed") for text in said] == [1, 1]
    assert "SECRET" not in caplog.text
    assert "bob" not in caplog.text


class Server(ThreadingHTTPServer):
    """A tracking server that creates runs, and answers nothing else until `stuck` is released."""

    daemon_threads = True

    def __init__(self, status: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = status
        self.free = threading.Event()
        self.reached = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        info = {"run_id": "1" * 32, "run_uuid": "1" * 32, "experiment_id": "0", "status": "RUNNING", "artifact_uri": ""}
        body, status = json.dumps({"run": {"info": info, "data": {}}}).encode(), 200
        if not self.path.endswith("runs/create"):
            self.server.reached.set()
            self.server.free.wait(60)
            status = self.server.status
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(request: pytest.FixtureRequest, uri: str) -> Iterator[Server]:
    with Server(request.param) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        mlflow.set_tracking_uri(f"http://me:secret@127.0.0.1:{found.server_port}")
        yield found
        found.free.set()
        found.shutdown()


@pytest.mark.parametrize("server", [200], indirect=True)
def test_a_server_that_does_not_answer_stops_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mlflow_tracker, "_PATIENCE", 0.2)
    monkeypatch.setattr(mlflow_outbox, "_MOST_WAITING", 300)
    tracker = MlflowTracker(experiment=None)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "0")
    tracker.start(FACTS)
    assert server.reached.wait(10)
    for at in range(500):  # meanwhile the server holds the parameters
        tracker.take(vitals(at=at))
    assert tracker._outbox is not None
    assert len(tracker._outbox._values) == 300
    tracker.end(None, None)
    assert "has not taken the last of run" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize("server", [400], indirect=True)
def test_a_server_that_refuses_is_one_warning(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.free.set()
    tracker = MlflowTracker()
    tracker.start(FACTS)
    for at in range(3):
        tracker.take(vitals(at=at))
    tracker.end(ValueError("x"), None)
    ours = [record for record in caplog.records if record.name.startswith("spark_hvd")]
    assert len(ours) == 1
    assert "secret" not in ours[0].getMessage()


def test_the_callback_logs_into_the_experiment_that_is_set() -> None:
    from types import SimpleNamespace

    from spark_hvd.estimators import MLflow

    mlflow.set_experiment("mine")
    callback: Any = MLflow()
    mlflow.set_experiment("Default")  # as in a rank, which does not know the driver's
    callback.on_train_begin(SimpleNamespace(rank=0, size=2, run_id="fit", history=[]))
    (run,) = mlflow.search_runs(experiment_names=["mine"], output_format="list")
    assert run.info.run_name == "fit"


def test_requirements_name_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0+cu130", "tensorflow-cpu": "2.21.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"tensorflow": ["tensorflow-cpu"]})
    assert pinned(("torch", "tensorflow")) == ["torch==2.13.0", "tensorflow-cpu==2.21.0"]


class Logged:
    """Handles a checkpoint; returns where it was logged."""

    def __init__(self, told: list[tuple[Any, ...]], error: Exception | None = None) -> None:
        self._told, self._error = told, error

    def log_to_mlflow(self, df: Any, name: str, *, registered_model_name: str | None, step: int) -> None:
        if self._error is not None:
            raise self._error
        self._told.append((mlflow.active_run().info.run_id, name, registered_model_name))


def kept(tmp_path: Path, monitor: str | None = None) -> Any:
    """A fit of two epochs whose checkpoints are in a store."""
    spec = SimpleNamespace(store=Store.create(tmp_path / "store"), run_id="fit", monitor=monitor, monitor_mode="min")
    for epoch in (1, 2):
        write(spec.store, spec.store.checkpoint_path("fit", of_epoch(epoch)), {"epoch": epoch})
    return spec


def checkpointed(experiment: str | None = None) -> MlflowTracker:
    """A tracker whose fit has ended."""
    tracker = MlflowTracker(experiment, checkpoints=True, registered_model_name="net")
    tracker.start({**FACTS, "fit.epochs": 2})
    tracker.end(None, None)
    return tracker


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Exclude warnings from trackers of other tests, whose threads may still be trying."""
    return [record.getMessage() for record in caplog.records if record.name == "spark_hvd.estimators.fit.logged"]


HISTORY = History([{"epoch": 1, "loss": 1.0}, {"epoch": 2, "loss": 2.0}])


def test_checkpoints_go_into_a_run_of_another_experiment(tmp_path: Path) -> None:
    mlflow.set_experiment("mine")
    tracker, told = checkpointed("theirs"), list[tuple[Any, ...]]()
    log_checkpoints(tracker, kept(tmp_path), None, HISTORY, lambda state: Logged(told))  # type: ignore[arg-type]
    assert told == [(tracker.run_id, "checkpoint-1", "net"), (tracker.run_id, "checkpoint-2", None)]
    with mlflow.start_run() as next_one:
        assert mlflow.get_experiment(next_one.info.experiment_id).name == "mine"


@pytest.mark.parametrize(
    ("monitor", "history"), [("f1", HISTORY), (None, History([{"epoch": 1, "f1": 1.0}, {"epoch": 2, "f1": 2.0}]))]
)
def test_without_a_best_checkpoint_none_is_registered(
    monitor: str | None, history: History, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker, told = checkpointed(), list[tuple[Any, ...]]()
    log_checkpoints(tracker, kept(tmp_path, monitor), None, history, lambda state: Logged(told))  # type: ignore[arg-type]
    assert [each[1:] for each in told] == [("checkpoint-1", None), ("checkpoint-2", None)]
    (said,) = warnings_of(caplog)
    assert "no checkpoint is registered as 'net' in MLflow, because the best one is unknown" in said


def test_checkpoints_that_cannot_be_logged_do_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tracker, spec = checkpointed(), kept(tmp_path)
    log_checkpoints(tracker, spec, None, HISTORY, lambda state: Logged([], OSError("no space")))  # type: ignore[arg-type]
    assert mlflow.get_run(tracker.run_id).info.status == "FINISHED"
    monkeypatch.setattr(type(spec.store), "exists", Mock(side_effect=StoreError("the store is gone")))
    log_checkpoints(tracker, spec, None, HISTORY, lambda state: Logged([]))  # type: ignore[arg-type]
    assert [said.partition(": ")[2] for said in warnings_of(caplog)] == [
        "OSError: no space. model.log_to_mlflow(df) logs it",
        "StoreError: the store is gone. model.log_to_mlflow(df) logs it",
    ]
