"""What a run returns: a list in every respect, with plots of the run."""

from __future__ import annotations

import copy
import pickle
import sys
from collections import OrderedDict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from spark_hvd.runner.launch.result import RunResult
from spark_hvd.runner.watch.history import RunHistory
from tests.unit.test_history import history_of, vitals


def texts(figure: Any) -> str:
    """Return all text in a figure."""
    from matplotlib.text import Text

    figure.canvas.draw()
    return "\n".join(each.get_text() for each in figure.findobj(Text))


def run_of(ranks: int = 2, seconds: int = 4, lost: bool = False) -> RunResult[int]:
    """Return a run in which the last rank may be lost half-way."""
    told = []
    for second in range(seconds):
        generation = int(lost and 2 * second >= seconds)
        size = ranks - generation
        for rank in range(size):
            each = vitals(rank, second, epoch=second // 2, generation=generation, size=size)
            told.append((second, each))
    return RunResult(range(ranks), None, history_of(*told))


def test_it_is_a_list() -> None:
    result: RunResult[Any] = RunResult([1, "a"], None, None)
    assert result == [1, "a"]
    assert repr(result) == "[1, 'a']"
    assert type(result[:1]) is list
    assert isinstance(result, list)
    assert result.summary is None


def test_large_arrays_are_printed_as_their_shape() -> None:
    state = OrderedDict(w=torch.ones(100, 3), b=torch.zeros(2))
    result: RunResult[Any] = RunResult([(state, {"z": np.ones(9, "int16"), "a": "x" * 100})], None, None)
    assert str(result) == (
        "[(OrderedDict({'w': Tensor(shape=(100, 3), dtype=torch.float32), 'b': tensor([0., 0.])}), "
        f"{{'z': ndarray(shape=(9,), dtype=int16), 'a': '{'x' * 100}'}})]"
    )


def test_it_pickles_and_copies() -> None:
    for again in (pickle.loads(pickle.dumps(run_of())), copy.copy(run_of())):
        assert type(again) is RunResult
        assert again == [0, 1]
        assert again.history.ranks == [0, 1]


def test_plot_of_the_loss() -> None:
    axes = run_of(2).plot_loss().axes[0]
    (line,) = axes.lines
    assert line.get_xdata().tolist() == [0, 10, 20, 30]
    assert line.get_ydata().tolist() == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
    assert len(axes.collections) == 1  # the ranks' band
    assert axes.get_ylabel() == "loss"
    assert axes.get_title(loc="left") == "loss: mean and range of 2 ranks"


def test_validation_has_a_line_of_its_own() -> None:
    history = history_of(
        (0, vitals(at=0)),
        (1, vitals(at=1)),
        (2, vitals(at=2, stage="validation", metrics={"loss": 7.0})),
        (3, vitals(at=3, metrics={"loss": float("nan")})),
    )
    lines = RunResult([1], None, history).plot_loss().axes[0].lines
    assert [(line.get_label(), line.get_ydata().tolist()) for line in lines] == [
        ("train", [1.0, 0.5]),
        ("validation", [7.0]),
    ]


def test_plot_of_the_throughput() -> None:
    figure = run_of(3).plot_throughput()
    assert [line.get_label() for line in figure.axes[0].lines] == ["rank 0", "rank 1", "rank 2"]
    assert set(figure.axes[0].lines[0].get_ydata()) == {320.0}
    assert "on average 960 samples/s together" in texts(figure)


def test_speeds_are_not_those_of_single_steps() -> None:
    told = [(at / 20, vitals(at=at / 20, samples=32 * (at // 3))) for at in range(100)]
    (line,) = RunResult([0], None, history_of(*told)).plot_throughput().axes[0].lines
    assert line.get_ydata().tolist() == pytest.approx([32 * 20 / 3] * 5, rel=0.2)


def test_many_ranks_are_a_band_with_the_slowest() -> None:
    told = [(at, vitals(rank, at, samples=(100 - (rank == 7)) * at)) for at in range(4) for rank in range(12)]
    figure = RunResult([0], None, history_of(*told)).plot_throughput()
    assert [line.get_label() for line in figure.axes[0].lines] == ["mean of 12 ranks", "slowest: rank 7"]


def test_steps_are_shown_where_samples_are_not_counted() -> None:
    history = history_of(*((at, vitals(at=at, samples=0)) for at in range(3)))
    assert RunResult([0], None, history).plot_throughput().axes[0].get_ylabel() == "steps/s, each rank"


def test_plot_of_where_the_time_went() -> None:
    figure = run_of(3, 8, lost=True).timeline()
    said = texts(figure)
    assert "compute 60%" in said
    assert "communication 20%" in said
    assert "data 10%" in said
    assert "outside of hvd.progress 10%" in said
    assert "generation 1, 2 ranks" in said
    assert "where each rank's time went" in said
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]


def test_a_notebook_shows_plots_without_pyplot() -> None:
    for figure in (run_of().plot_loss(), run_of(3, 8).timeline()):
        picture: Any = figure
        assert picture._repr_png_().startswith(b"\x89PNG")


def test_generations_are_marked_in_every_plot() -> None:
    run = run_of(3, 8, lost=True)
    assert "generation 1, 2 ranks" in texts(run.plot_loss())
    assert "generation 1, 2 ranks" in texts(run.plot_throughput())


def test_names_of_generations_do_not_meet() -> None:
    told = [(at, vitals(at=at, generation=at // 3, size=1 + at // 3)) for at in range(12)]
    figure = RunResult([0], None, history_of(*told)).plot_throughput()
    notes = [note for note in figure.axes[0].texts if "generation" in note.get_text()]
    assert [note.get_text() for note in notes] == [f" generation {n}, {n + 1} ranks" for n in (1, 2, 3)]
    boxes = [note.get_window_extent() for note in notes]
    assert not any(a.overlaps(b) for a, b in pairwise(boxes))


def test_a_rank_that_is_a_little_late_does_not_bend_the_mean() -> None:
    told = [
        (at + rank / 10, vitals(rank, at + rank / 10, metrics={"loss": rank})) for at in range(30) for rank in (0, 1)
    ]
    (line,) = RunResult([0], None, history_of(*told)).plot_loss().axes[0].lines
    assert set(line.get_ydata()) == {0.5}


def test_hundreds_of_ranks_fit() -> None:
    figure = run_of(40, 3).timeline()
    assert figure.get_figheight() <= 12
    assert len(figure.axes[0].get_yticklabels()) <= 32


@pytest.mark.parametrize("plot", ["plot_loss", "plot_throughput", "timeline"])
def test_nothing_was_heard(plot: str) -> None:
    with pytest.raises(ValueError, match=r"hvd\.progress"):
        getattr(RunResult([1], None, RunHistory()), plot)()


def test_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match=r"metric='accuracy': the ranks reported 'loss'; .*bar\.report\(accuracy="):
        run_of().plot_loss("accuracy")
    silent = RunResult([1], None, history_of(*((at, vitals(stage="", clock=at, metrics={})) for at in range(3))))
    with pytest.raises(ValueError, match="reported no metrics"):
        silent.plot_loss()
    with pytest.raises(ValueError, match="no rank counted samples or steps"):
        silent.plot_throughput()
    with pytest.raises(ValueError, match="reported twice"):
        RunResult([1], None, history_of((0, vitals()))).timeline()


@pytest.mark.parametrize("plot", ["plot_loss", "plot_throughput", "timeline"])
def test_without_matplotlib(plot: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("plots", "figures"):
        monkeypatch.delitem(sys.modules, f"spark_hvd.runner.watch.display.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        getattr(run_of(), plot)()
