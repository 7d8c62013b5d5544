"""A Transformers Trainer with the callback of docs/transformers.md: an interrupted fit ends like an undisturbed one."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader

import spark_hvd.torch as hvd
from spark_hvd.runner import run_local
from spark_hvd.runner.config import PRELOAD
from tests.walk.pages import blocks
from tests.walk.stranger import ROOT

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.slow

ROWS, STEPS = 100, 7  # of an epoch, on two ranks
HEAVY = "transformers.trainer,transformers.models.bert.modeling_bert"
"""Modules that six ranks would import: four seconds of CPU each."""


def callback() -> str:
    """Return the page's code."""
    (found,) = [
        block["code"] for block in blocks(ROOT / "docs" / "transformers.md") if "on_save" in (block["code"] or "")
    ]
    return str(found)


def train(code: str, folder: str, killed_after: int | None) -> list[torch.Tensor]:
    """Train three epochs; rank 1 of the first start is killed after a step. Each rank records its rows."""
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

    hvd.init()
    there: dict[str, Any] = {"torch": torch}
    exec(code, there)

    class Kills(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if (hvd.generation(), hvd.rank(), state.global_step) == (0, 1, killed_after):
                os.kill(os.getpid(), signal.SIGKILL)

    class Notes(Trainer):
        def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any) -> Any:
            with open(f"{folder}/{hvd.generation()}-{hvd.rank()}", "a") as file:
                file.writelines(f"{self.state.global_step} {row}\n" for row in inputs["input_ids"][:, 0].tolist())
            return super().training_step(model, inputs, *rest)

    def collate(rows: pa.RecordBatch) -> dict[str, torch.Tensor]:
        numbers = torch.tensor(rows["n"].to_numpy())
        return {"input_ids": numbers[:, None].repeat(1, 3), "labels": numbers % 2}

    config = BertConfig(
        vocab_size=ROWS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2
    )
    loader = hvd.get_dataset_shard("train").torch_batches(8, shuffle=True, collate_fn=collate)
    arguments = TrainingArguments(
        tempfile.mkdtemp(dir=folder), num_train_epochs=3, learning_rate=1e-3, use_cpu=True, save_strategy="steps",
        save_steps=STEPS // 2, save_total_limit=1, disable_tqdm=True, report_to=[], ddp_find_unused_parameters=False,
    )  # fmt: skip
    torch.manual_seed(0)
    saves = there["Checkpoints"](f"{folder}/store", loader)
    trainer = Notes(BertForSequenceClassification(config), arguments, callbacks=[saves, Kills()])
    trainer.get_train_dataloader = lambda: DataLoader(loader, batch_size=None)
    trainer.train(resume_from_checkpoint=saves.last(arguments))
    return [each.detach() for each in trainer.model.parameters()]


@pytest.mark.timeout(300)
def test_it_goes_on_after_its_last_checkpoint(tmp_path: Path) -> None:
    def run(name: str, killed_after: int | None) -> list[torch.Tensor]:
        (tmp_path / name).mkdir()
        rows = {"train": pa.table({"n": range(ROWS)})}
        arguments = (callback(), str(tmp_path / name), killed_after)
        env = {PRELOAD: f"{os.environ[PRELOAD]},{HEAVY}"}
        first, second = run_local(train, arguments, num_proc=2, data=rows, max_restarts=1, env=env, verbose=0)
        assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
        return first

    def noted(start: str) -> list[list[str]]:
        files = [tmp_path / "cut" / f"{start}-{rank}" for rank in range(2)]
        return [file.read_text().splitlines() for file in files]

    whole, cut = run("whole", None), run("cut", STEPS + 4)
    assert all(torch.equal(one, two) for one, two in zip(whole, cut, strict=True))
    saved = (STEPS + 4) // 3 * 3
    before, after = noted("0"), noted("1")
    assert all(rank[0].split()[0] == str(saved) for rank in after)
    kept = [line for rank in before for line in rank if int(line.split()[0]) < saved]
    each = [line.split() for line in [*kept, *(line for rank in after for line in rank)]]
    for epoch in range(3):
        rows = [int(row) for step, row in each if int(step) // STEPS == epoch]
        assert sorted(rows) == list(range(ROWS)), epoch
